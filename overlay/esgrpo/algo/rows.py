"""Rows that a run writes under RUN_DIR/esgrpo, one class a kind: what stands in them, and how a line is read back.

A row reads as a mapping, too: `row["tokens"]`, `{**row}`. Lines of older releases lack fields that have a default here;
lines of newer ones may have more, which are left out. Times are seconds since the epoch, token counts those of
responses. A *draw* is the position of a prompt in the stream of the data loader, from 1, over all starts of a run; a
*step* the number of the first checkpoint that holds what the row is about. Pure; standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field

SCHEMA = 2  # of all kinds; rows without the key are of 1, in which only some fields were missing


def _unset():
    """A field that is not written while it is None."""
    return field(default=None, metadata={"unset": True})


@dataclass(frozen=True, kw_only=True, eq=False)
class Row(Mapping):
    """What every row says. `time` to `pid` are the writer's where they are not set; a response keeps those of the
    process that generated it."""

    kind: typing.ClassVar[str]

    time: float | None = _unset()
    run: str | None = _unset()
    restart: int | None = _unset()
    node: str | None = _unset()
    pid: int | None = _unset()
    schema: int = SCHEMA

    def __getitem__(self, name: str):
        if name not in _types(type(self)):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self):
        return iter(_types(type(self)))

    def __len__(self) -> int:
        return len(_types(type(self)))

    def row(self) -> dict:
        """As it is written."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)
                if not (each.metadata.get("unset") and getattr(self, each.name) is None)}

    @classmethod
    def of(cls, row: Mapping):
        """Raises ValueError where a field is missing that every release has written, or is of another type."""
        known = {name: row[name] for name in _types(cls) if name in row}
        for name, value in known.items():
            if not _fits(value, _types(cls)[name]) or name == "time" and not math.isfinite(value):
                raise ValueError(f"{cls.kind}: {name} is {value!r}")
        try:
            return cls(**{"schema": 1, **known})
        except TypeError as error:
            raise ValueError(f"{cls.kind}: {error}") from None


@functools.cache
def _types(cls: type[Row]) -> dict[str, tuple[type, ...]]:
    """The types that each field may have."""
    hints = typing.get_type_hints(cls)
    return {each.name: tuple(typing.get_origin(part) or part for part in (
        typing.get_args(hints[each.name]) if isinstance(hints[each.name], types.UnionType) else (hints[each.name],)))
            for each in dataclasses.fields(cls)}


def _fits(value, allowed: tuple[type, ...]) -> bool:
    if type(value) in allowed:  # nearly all of them; a report reads tens of thousands of rows
        return True
    if isinstance(value, bool):
        return False
    number = (int in allowed and isinstance(value, numbers.Integral)) or (
        float in allowed and isinstance(value, numbers.Real))  # also those of numpy
    return number or isinstance(value, allowed)


@dataclass(frozen=True, kw_only=True, eq=False)
class Start(Row):
    """A start of a run, also the first; what it goes on from."""

    kind = "start"
    resumed_step: int  # 0: from scratch
    drawn: int | None = 0  # draws that the loaded state of the data loader has given out
    prompts_per_epoch: int | None = None
    gives_back: list = field(default_factory=list)  # draws that were in flight and come first


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint(Row):
    kind = "checkpoint"
    step: int
    drawn: int = 0  # so far, over all starts


@dataclass(frozen=True, kw_only=True, eq=False)
class Submitted(Row):
    """A prompt was drawn."""

    kind = "submitted"
    group: str
    prompt: str | None = None  # key of its content
    draw: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Reissued(Row):
    """A prompt of an earlier start is issued again, as a group that starts anew."""

    kind = "reissued"
    group: str
    prompt: str | None = None
    draw: int | None = None  # None: that of the group `was`
    was: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Restored(Row):
    """Groups that came back with their responses."""

    kind = "restored"
    groups: list


@dataclass(frozen=True, kw_only=True, eq=False)
class Restart(Row):
    """v1: what a restart lost. `groups` started anew; of their members, `finished` were and `running` were not."""

    kind = "restart"
    groups: int
    finished: int
    tokens: int  # of the finished
    running: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch(Row):
    """Groups that a trainer takes for an update."""

    kind = "batch"
    step: int
    groups: list


@dataclass(frozen=True, kw_only=True, eq=False)
class Response(Row):
    """A response that ended; what the trainer hears of it with its row."""

    kind = "responses"
    group: str
    member: int
    prompt: str | None = None  # key of its content
    outcome: str = ""
    rule: str = ""
    tokens: int = 0
    logprob_sum: float | None = None  # of its tokens, nats; of those that have a log-prob
    attempts: int = 1
    reprefill: int = 0  # prompt and response tokens that were computed again after an interruption
    boundaries: int = 0
    spans: list = field(default_factory=list)  # [weight version, tokens], oldest first; they sum to tokens
    places: list = field(default_factory=list)  # [replica, from, until, tokens] of every attempt
    started: float = 0.0
    ended: float = 0.0
    candidate: bool = False
    exempted: bool = False
    keep_probability: float = 1.0
    pivot: float | None = None
    treatment: str = ""  # of a response that was cut, or whose weight makes up for one that was
    coin: float | None = None  # probability that its coin spared it, with a weight for it or without; None: not known
    predicted: float | None = None  # of a candidate: probability that it is right, before its coin
    predicted_reward: float | None = None
    candidate_rule: str = ""
    decided_by: str = ""
    tokens_at_decision: int | None = None
    for_gate: dict | None = None  # what the gate of the learned verdicts heard of it (verdict_gate.Outcome)
    audit: dict | None = _unset()  # what the audit knows of the rule of a candidate
    score: float | None = None
    records_dropped: int = 0  # rows that its worker has lost so far
    decisions: dict = field(default_factory=dict)  # "module/what" -> times, of its worker so far


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained(Response):
    """A response in an update. `run` to `pid` are those of the process that generated it."""

    kind = "trained"
    correct: bool | None = None
    trained: bool = True
    pruned: bool = False
    rejected: bool = False  # left out by verl: algorithm.rollout_correction.rollout_rs, or nothing of it is trained
    gradient: bool = False
    cut_weight: float = 1.0  # factor of its advantage: algo.treatment.CutWeights
    trained_in: int | None = None  # the start that trained it; None: the one that generated it
    step: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Replaced(Row):
    """A group that was not trained: its outcome was known, and it had no gradient."""

    kind = "replaced"
    group: str
    rows: list  # Response.row() of each of its members
    sample_id: str | None = _unset()

    @classmethod
    def of(cls, row: Mapping):
        rows = row.get("rows")
        if "group" not in row and rows:  # of older releases
            row = {**row, "group": rows[0]["group"]}
        return super().of(row)


@dataclass(frozen=True, kw_only=True, eq=False)
class Failed(Row):
    """A prompt was given up."""

    kind = "failed"
    group: str
    prompt: str | None = None
    draw: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evicted(Row):
    """v1: a group left the replay buffer untrained."""

    kind = "evicted"
    group: str
    reason: str = ""  # algo.carry_over.ENDINGS, or "surplus"


@dataclass(frozen=True, kw_only=True, eq=False)
class Carry(Row):
    """v1: what one sampled batch meant for the pool of groups that wait; counts as in `algo.carry_over.Step`."""

    kind = "carry"
    step: int  # the weight version
    groups: dict  # trained: group -> the version that it was submitted in
    waiting: dict  # the same of those that wait
    partial: int = 0  # trained groups that lack members
    odd: dict = field(default_factory=dict)  # kind of oddity -> groups
    trained: int = 0
    trained_carried: int = 0
    carried: int = 0
    unfinished: int = 0
    dropped: int = 0
    filtered: int = 0
    failed: int = 0
    empty: int = 0
    gone: int = 0
    early: int = 0
    overdue: int = 0
    age_max: int = 0
    carried_age_max: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineWindow(Row):
    """One engine between two weight versions: `algo.accounting.Window`, and what it did to requests."""

    kind = "windows"
    version: int
    start: float
    seconds: float
    capacity: int
    used: float
    sync: float
    idle: float
    tail: float
    lent: float = 0.0  # paused while the trainer had its devices: used + sync + idle + tail + lent == all
    away: float = 0.0
    steps: int = 0
    pace: dict = field(default_factory=dict)  # algo.accounting.Pace
    tokens: int = 0
    timeline: list = field(default_factory=list)
    replica: str = ""
    outcomes: dict = field(default_factory=dict)
    in_flight: int = 0
    kept: int = 0
    held: int = 0  # requests that waited for kv_headroom
    kv_ages: list = field(default_factory=list)  # [weight versions, responses]
    surprisal: float = 0.0  # nats, -log p of the sampled tokens of attempts that ended in it
    surprisal_tokens: int = 0  # how many these are
    token_outputs: dict | None = _unset()
    rollouter_paused: float = 0.0  # of this version, the same in the window of every replica
    devices: dict = field(default_factory=dict)  # accelerator of its node -> [busy, memory in use], shares of 1
    no_devices: str = ""  # why there are none


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopEvent(Row):
    """One side of the asynchronous loop: rollout between two weight versions, training between two batches. What was
    not measured is None; `spent` sums to `seconds`."""

    kind = "events"
    side: str  # "rollout" or "train"
    version: int  # of the weights when it ended
    start: float
    seconds: float
    spent: dict  # what the time went to -> seconds: busy, idle; wait, train, sync, checkpoint, validation, other
    groups: int | None = None  # finished, or trained
    in_flight: float | None = None  # groups, mean
    limit: int | None = None  # of groups in flight
    queue: int | None = None  # groups in the buffer at the end
    queue_limit: int | None = None
    tokens: int | None = None  # trained
    age: float | None = None  # weight versions between making a token and training on it, mean of trained tokens
    queued_s: float | None = None  # between a response's end and its training, mean of trained responses
    loss: float | None = None
    grad_norm: float | None = None
    entropy: float | None = None
    kl: float | None = None
    devices: dict = field(default_factory=dict)  # as in EngineWindow, all of the writer's node
    no_devices: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Move(Row):
    """The overlap controller moved a setting: `algo.overlap.Change`."""

    kind = "moves"
    version: int
    cause: str  # algo.overlap.Cause
    before: dict  # algo.overlap_law.Setting: name -> value
    after: dict
    also: dict = field(default_factory=dict)  # bounds of verl's that had to follow: name -> [before, after]
    trust: float | None = None
    forecast: dict | None = None  # of `after`


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions(Row):
    """What a process has decided so far; of the driver: what the run was told to do."""

    kind = "decisions"
    process: str
    counts: dict = field(default_factory=dict)  # "module/what" -> times
    audit: dict = field(default_factory=dict)  # rule -> report
    settings: dict | None = _unset()
    facts: dict | None = _unset()

    @classmethod
    def of(cls, row: Mapping):
        counts = row.get("counts") or {}
        if not all(isinstance(times, int) for times in (counts.values() if isinstance(counts, dict) else ())):
            raise ValueError(f"{cls.kind}: counts are {counts!r}")
        return super().of(row)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dropped(Row):
    """Rows that this process could not write before."""

    kind = "dropped"
    rows: int


KINDS: dict[str, type[Row]] = {cls.kind: cls for cls in (
    Start, Checkpoint, Submitted, Reissued, Restored, Restart, Batch, Response, Trained, Replaced, Failed, Evicted,
    Carry, EngineWindow, LoopEvent, Move, Decisions, Dropped)}
