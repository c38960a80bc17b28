"""verl 0.7.0: remembers which prompts are in the batch that the recipe's trainer has taken."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER

TRAINER = "recipe.fully_async_policy.fully_async_trainer:FullyAsyncTrainer"

HOOK = Hook(
    slug="partial-taken-prompts",
    target=f"{TRAINER}._get_samples_from_queue",
    process=("trainer",),
    kind="wrap",
    why="as trained-prompts; the recipe's method is no coroutine, and its trainer tells the rollouter later",
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    relies_on=(f"{TRAINER}.fit", "recipe.fully_async_policy.detach_utils:assemble_batch_from_rollout_samples"),
    without=((LATER, ELSEWHERE),),
)


def around(call):
    from esgrpo.hooks.verl.prompts import trained_prompts

    trainer = call.owner
    result = call()
    _epoch, batch = result
    trained_prompts.taken(trainer, batch)
    return result
