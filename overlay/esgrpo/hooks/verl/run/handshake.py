"""Before the first weight sync, the task runner asks every process for its hook states and refuses if one differs."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="worker-handshake",
    target="verl.experimental.fully_async_policy.fully_async_main:FullyAsyncTaskRunner._create_rollouter",
    process=("task-runner",),
    kind="wrap",
    why="a hook can reach the driver and be lost in a Ray worker or in the spawned EngineCore without an error; this "
        "is where the last of them has come up. verl's first weight sync comes before its training loop, and already "
        "calls into the engine",
    remove_when="never: it checks the overlay itself",
    relies_on=("verl.experimental.fully_async_policy.fully_async_main:FullyAsyncTaskRunner.run",
               "verl.experimental.fully_async_policy.fully_async_main:FullyAsyncTaskRunner._initialize_components"),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


def around(call):
    from esgrpo.hooks.verl.run import reports

    runner = call.owner
    result = call()
    reports.collect_and_check(runner)
    loop = runner._run_training_loop

    def _run_training_loop():
        loop()
        reports.flush_records(runner)

    runner._run_training_loop = _run_training_loop  # shadows the method on this one instance
    return result
