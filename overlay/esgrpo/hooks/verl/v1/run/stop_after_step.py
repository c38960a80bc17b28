"""A v1 trainer that is told to stop saves a checkpoint of the running step and ends."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-stop-after-step",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer.step",
    process=("v1-task-runner",),
    kind="wrap",
    why="verl saves right after this method, in a state that each mode has prepared for it, when save_freq says "
        "so; the step after the one that was saved never begins",
    remove_when="verl's trainer saves on SIGTERM",
    relies_on=("verl.trainer.ppo.v1.trainer_base:PPOTrainer.fit",
               "verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint"),
    without=(("==0.7.0", "no v1 trainers"),),
)


def around(call):
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.run import stop_request

    trainer = call.owner
    ending = owned.of(trainer, owned.Ending).error
    if ending is not None:
        raise ending
    result = call()
    if stop_request.asked():
        save_now(trainer)
    return result


def save_now(trainer) -> None:
    """Let verl save after this step, and remember what to raise when the next one begins."""
    from omegaconf import open_dict

    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.run import stop_request

    settings = trainer.config.trainer
    owned.of(trainer, owned.Ending).error = stop_request.saved(trainer.global_steps, settings.default_local_dir,
                                                               settings.save_freq)
    if settings.save_freq > 0:
        with open_dict(settings):
            settings.save_freq = 1
