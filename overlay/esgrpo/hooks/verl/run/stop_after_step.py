"""A fully-async trainer that is told to stop saves a checkpoint at the next weight version and ends.

The end of a step is also where loop_events writes down what its time went to."""

from __future__ import annotations

from esgrpo.engine import Hook

_TRAINER = "verl.experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer"

HOOK = Hook(
    slug="stop-after-step",
    target=f"{_TRAINER}._fit_postprocess_step",
    process=("trainer",),
    kind="wrap",
    why="the last thing of a step: its metrics are logged, its rows are recorded, and a checkpoint of it is whole; "
        "verl saves before a known end of its machine (ESI) and does not know SIGTERM",
    remove_when="verl's trainer saves on SIGTERM",
    relies_on=(f"{_TRAINER}.fit_step", f"{_TRAINER}._fit_save_checkpoint", f"{_TRAINER}._save_checkpoint"),
    without=(("==0.7.0", "the recipe has another trainer: a SIGTERM ends it without a checkpoint"),),
)


def around(call):
    from esgrpo import engine
    from esgrpo.hooks.verl.metrics import loop_events
    from esgrpo.hooks.verl.run import stop_request

    trainer = call.owner
    result = call()
    if "observe" in engine.active_features():
        loop_events.of_trainer(trainer)
    # within a weight version the weights are ahead of the number that a checkpoint would carry
    if trainer.local_trigger_step == 1 and stop_request.asked():
        trainer._fit_save_checkpoint(force=True)
        settings = trainer.config.trainer
        raise stop_request.saved(trainer.current_param_version, settings.default_local_dir, settings.save_freq)
    return result
