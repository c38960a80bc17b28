"""The handshake of verl's v1 trainers: as in the fully-async run, but one process is task runner and trainer."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-handshake",
    target="verl.trainer.main_ppo:TaskRunnerV1.init_agent_loop_manager",
    process=("v1-task-runner",),
    kind="wrap",
    why="the last thing before PPOTrainer.fit: trainer, servers and agent loop workers all exist, and no prompt was "
        "submitted yet. PPOTrainer.fit itself is unknown to the driver, which could not tell that it is covered",
    remove_when="never: it checks the overlay itself",
    relies_on=("verl.trainer.main_ppo:TaskRunnerV1.run",),
    without=(("==0.7.0", "no v1 trainers"),),
)


def around(call):
    from esgrpo.hooks.verl.run import reports

    runner = call.owner
    result = call()
    reports.collect_and_check_v1(runner)
    return result
