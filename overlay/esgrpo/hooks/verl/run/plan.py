"""What the rules of a run plan: settings of verl, files and lines, and the refusal of what cannot be right."""

from __future__ import annotations

from dataclasses import dataclass, field

from esgrpo.config import Segment
from esgrpo.errors import ConfigError

STOPS = "the run does not start"
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Setting:
    """A key of verl, its new value, and why."""

    key: str
    value: object
    why: str


@dataclass
class Plan:
    """What the driver has to do before Ray starts. `files` maps paths to their text, `lines` is what it says."""

    segment: Segment  # with what was decided here
    settings: dict[str, object] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def refuse(key: str, found, wanted: str, todo: str):
    raise ConfigError(key, f"{found!r}", wanted, STOPS, todo)
