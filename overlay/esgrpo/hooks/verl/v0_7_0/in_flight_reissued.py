"""verl 0.7.0: after a restart of the recipe, prompts that were in flight at the checkpoint come first."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.prompts.in_flight_reissued import around as around
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER
from esgrpo.hooks.verl.v0_7_0.in_flight import ROLLOUTER

HOOK = Hook(
    slug="partial-prompts-in-flight-are-reissued",
    target=f"{ROLLOUTER}.load_checkpoint",
    process=("rollouter",),
    kind="wrap",
    why="as prompts-in-flight-are-reissued",
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    relies_on=(f"{ROLLOUTER}._feed_samples",),
    without=((LATER, ELSEWHERE),),
)
