"""What hooks keep on objects of verl: one attribute, `esgrpo`, in which each purpose has one typed part. No hook.

`of(rollouter, Experience)` is made on first use and lives as long as its owner. Everything is declared here; no
other attribute of ours is set on an object of verl. In vLLM, where a token is looked at, `first_and_last_output` has a
flag of its own on a request, and the scheduler is a subclass of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from esgrpo.algo.calibration import Calibration
from esgrpo.algo.experience import ExperienceBuffer, Overflow, SentSample
from esgrpo.algo.failures import FailedPrompts, FailureStreak
from esgrpo.algo.null_groups import LeftOutShare, NullFilter

if TYPE_CHECKING:
    from esgrpo.algo.carry_over import CarryOver
    from esgrpo.algo.history import PromptHistory
    from esgrpo.algo.overlap import Change, Controller
    from esgrpo.algo.overlap_law import Setting
    from esgrpo.algo.rows import LoopEvent
    from esgrpo.hooks.verl.groups.rollout_driver import Driver
    from esgrpo.hooks.verl.prompts.prompt_order import PromptOrder

Part = TypeVar("Part")


def of(owner, part: type[Part]) -> Part:
    """This part of what we keep on `owner`."""
    parts = owner.__dict__.setdefault("esgrpo", {})
    if part not in parts:
        parts[part] = part()
    return parts[part]


def take(owner, part: type[Part]) -> Part:
    """The same, to be begun anew."""
    taken = of(owner, part)
    del owner.__dict__["esgrpo"][part]
    return taken


@dataclass
class Prompts:
    """Of the rollouter, or of v1's trainer: what is known of prompts, and which one comes next."""

    history: PromptHistory | None = None  # None until it is asked for: the file of an earlier run is read then
    order: PromptOrder | None = None  # None without the sampler
    calibration: Calibration = field(default_factory=Calibration)  # of the forecasts that were given out


@dataclass
class Experience:
    """Of the rollouter."""

    buffer: ExperienceBuffer = field(default_factory=ExperienceBuffer)
    whole: list[SentSample] = field(default_factory=list)  # of the checkpoint, to be put into the queue
    names: frozenset[str] = frozenset()  # of these: no other sample of this start is called so


@dataclass
class Queue:
    """Of the fully-async message queue."""

    overflow: Overflow = field(default_factory=Overflow)


@dataclass
class Restarted:
    """Of the rollouter, or of v1's trainer."""

    lost: dict[str, int] = field(default_factory=dict)  # fields of rows.Restart; empty again once it was reported


@dataclass
class Failures:
    """Of the rollouter, or of v1's replay buffer."""

    bound: FailedPrompts | None = None  # of one weight version; None until a prompt failed
    version: int = 0  # weight versions so far, where the owner does not know them
    streak: FailureStreak = field(default_factory=FailureStreak)  # v1: groups that failed in a row


@dataclass
class Pruned:
    """Of the rollouter, or of v1's replay buffer: groups since the last weight version."""

    groups: int = 0
    rows: list[dict] = field(default_factory=list)  # rows.Response.row() of their members
    replaced: int = 0  # of these groups: those that another prompt took the place of
    tokens: int = 0  # of the replaced, in responses that ran to their end


@dataclass
class NullGroups:
    """Of the rollouter: finished groups without a gradient."""

    filter: NullFilter = field(default_factory=NullFilter)


@dataclass
class TrainedPrompts:
    """Of the fully-async trainer."""

    untold: list[str] = field(default_factory=list)  # uids of the batch in hand
    under_way: list = field(default_factory=list)  # ObjectRefs of calls that tell the rollouter


@dataclass
class Steps:
    """Of the fully-async trainer, or of v1's."""

    ended: float | None = None  # when its last step ended
    of_version: list[LoopEvent] = field(default_factory=list)  # since the last weight version


@dataclass
class Overlap:
    """Of the fully-async trainer, or of v1's."""

    controller: Controller | None = None  # None before the first weight version
    applied: Setting | None = None  # what is in force
    change: Change | None = None  # decided last
    validated_s: float = 0.0  # seconds of validation after the last weight sync


@dataclass
class Ahead:
    """Of v1's trainer."""

    owed: int = 0  # prompts to begin beyond the next batch, or to leave out of it
    in_process: int | None = None  # groups wanted between two steps, less those that the filter will leave out
    share: LeftOutShare = field(default_factory=LeftOutShare)  # of the latter
    threshold: int | None = None  # the replay buffer's own, before it was moved


@dataclass
class RolloutSignals:
    """Of the rollouter, or of v1's trainer: what was measured of the last weight version."""

    event: LoopEvent | None = None
    windows: list[Mapping] = field(default_factory=list)  # of the engines
    left_out_tokens: int = 0  # of finished groups whose place was given to others because nobody trains such groups
    judged: int = 0  # finished groups that the group filter looked at
    nulls: int = 0  # of them those without a gradient


@dataclass
class Drawn:
    """Of v1's trainer."""

    draws: int = 0  # over all starts
    open: set[str] = field(default_factory=set)  # groups of this step that are neither trained nor gone (`sync`)


@dataclass
class Carried:
    """Of v1's trainer."""

    pool: CarryOver | None = None  # None with a sampler of the user's own
    known: bool = False  # whether there is a pool has been looked at
    said: set[str] = field(default_factory=set)  # kinds of oddities that were said
    batches: list[dict[str, int]] = field(default_factory=list)  # counts of those of this weight version


@dataclass
class Ending:
    """Of v1's trainer."""

    error: Exception | None = None  # what the next step raises, after a request to stop


@dataclass
class Groups:
    """Of v1's replay buffer: groups by uid."""

    evicted: dict[str, str] = field(default_factory=dict)  # since the trainer asked: reason, algo.carry_over.ENDINGS
    judged: dict[str, bool] = field(default_factory=dict)  # finished: was it replaced?
    passed: set[str] = field(default_factory=set)  # verl's filter, and we have looked at them
    filtered: int = 0  # groups that verl's filter left out, since a step began
    evicted_tokens: int = 0  # since the overlap controller asked: responses that nobody will train
    observed: frozenset[str] = frozenset()  # finished, and the history knows their outcomes


@dataclass
class Server:
    """Of a vLLM server."""

    windows: list[dict] = field(default_factory=list)  # rows.EngineWindow of those closed and not yet asked for


@dataclass
class Texts:
    """Of a vLLM server: responses since the last weight version."""

    responses: int = 0  # without text
    with_text: int = 0


@dataclass
class Worker:
    """Of an agent-loop worker."""

    driver: Driver | None = None  # None until its first member
