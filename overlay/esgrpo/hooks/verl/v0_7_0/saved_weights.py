"""verl 0.7.0: the saved weights of decoupled PPO are a copy, in the recipe's own function."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.fixes.saved_weights import around as around
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER

HOOK = Hook(
    slug="partial-saved-weights-are-a-copy",
    target="recipe.fully_async_policy.fsdp2_utils:fsdp2_sharded_save_to_cpu",
    process=("actor-worker",),
    kind="wrap",
    why="as saved-weights-are-a-copy, with async_training.compute_prox_log_prob=True; the function is the recipe's",
    remove_when="verl 0.7.0 is no longer supported",
    rebinds=("recipe.fully_async_policy.fsdp_workers:fsdp2_sharded_save_to_cpu",),
    without=((LATER, ELSEWHERE),),
)
