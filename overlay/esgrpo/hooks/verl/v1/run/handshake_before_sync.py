"""v1: servers, engines and actors answer for their hooks before the trainer's first weight sync."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-handshake-before-sync",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer.init",
    process=("v1-task-runner",),
    kind="wrap",
    why="on_init_end syncs weights, which already calls into the engine; v1-handshake comes after it, because the "
        "agent loop workers do",
    remove_when="never: it checks the overlay itself",
    without=(("==0.7.0", "no v1 trainers"),),
)


def around(call):
    from esgrpo.hooks.verl.run import reports

    trainer = call.owner
    synced = trainer.on_init_end

    def on_init_end(*args, **kwargs):
        reports.check_v1_trainer(trainer)
        return synced(*args, **kwargs)

    trainer.on_init_end = on_init_end  # shadows the method on this one instance
    try:
        return call()
    finally:
        del trainer.on_init_end
