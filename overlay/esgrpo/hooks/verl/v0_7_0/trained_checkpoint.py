"""verl 0.7.0: before a checkpoint of the recipe, its rollouter has heard of all prompts that are in the weights."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.prompts.trained_checkpoint import around as around
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER
from esgrpo.hooks.verl.v0_7_0.taken_prompts import TRAINER

HOOK = Hook(
    slug="partial-trained-prompts-before-checkpoint",
    target=f"{TRAINER}._save_checkpoint",
    process=("trainer",),
    kind="wrap",
    why="as trained-prompts-before-checkpoint",
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    relies_on=(f"{TRAINER}._check_save_checkpoint", f"{TRAINER}._trigger_parameter_sync_after_step"),
    without=((LATER, ELSEWHERE),),
)
