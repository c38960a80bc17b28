"""verl 0.7.0: keeps account of every prompt that the recipe's rollouter takes from its data loader."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.prompts.in_flight import around as around
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER

ROLLOUTER = "recipe.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"

HOOK = Hook(
    slug="partial-prompts-in-flight",
    target=f"{ROLLOUTER}._create_continuous_iterator",
    process=("rollouter",),
    kind="wrap",
    why="as prompts-in-flight; the recipe's rollouter has the same feed, and the same TODO in its checkpoint",
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    relies_on=(f"{ROLLOUTER}._feed_samples", f"{ROLLOUTER}._process_single_sample_streaming"),
    without=((LATER, ELSEWHERE),),
)
