"""Before a fully-async checkpoint is written, the rollouter hears of all prompts that its weights were trained on."""

from __future__ import annotations

from esgrpo.engine import Hook

_TRAINER = "verl.experimental.fully_async_policy.fully_async_trainer:FullyAsyncTrainer"

HOOK = Hook(
    slug="trained-prompts-before-checkpoint",
    target=f"{_TRAINER}._save_checkpoint",
    process=("trainer",),
    kind="wrap",
    why="the batch of the step that ends has been trained, and its prompts would be issued again after a restart",
    remove_when="verl's rollouter saves its samples in flight with its data loader",
    features=("observe",),
    relies_on=(f"{_TRAINER}._fit_save_checkpoint", f"{_TRAINER}.fit_step", f"{_TRAINER}.fit"),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


def around(call):
    from esgrpo import records
    from esgrpo.hooks.verl.prompts import trained_prompts

    trainer = call.owner
    records.flush()  # what the checkpoint holds is in the books before it counts
    trained_prompts.tell(trainer)
    trained_prompts.wait(trainer)  # the original makes the rollouter save
    return call()
