"""verl 0.7.0: after a restart of the recipe, prompts that were in flight at the checkpoint come first."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.in_flight_reissued import build as build
from esgrpo.hooks.verl.partial_group import ELSEWHERE, LATER
from esgrpo.hooks.verl.partial_in_flight import ROLLOUTER

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
