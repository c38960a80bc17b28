"""verl 0.7.0: saves the prompts in flight with every checkpoint of the recipe."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.prompts.in_flight_checkpoint import around as around
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER
from esgrpo.hooks.verl.v0_7_0.in_flight import ROLLOUTER

HOOK = Hook(
    slug="partial-prompts-in-flight-are-saved",
    target=f"{ROLLOUTER}.save_checkpoint",
    process=("rollouter",),
    kind="wrap",
    why="as prompts-in-flight-are-saved; samples that a weight sync has interrupted are among them",
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    relies_on=("recipe.fully_async_policy.fully_async_trainer:FullyAsyncTrainer._save_checkpoint",
               "recipe.fully_async_policy.param_sync:ParameterSynchronizer.rollouter_save_checkpoint"),
    without=((LATER, ELSEWHERE),),
)
