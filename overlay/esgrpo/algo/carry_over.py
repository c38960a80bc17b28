"""The pool of prompt groups between submission and training: static carry-over as in UloRL.

A trainer samples whole groups; what is unfinished or was not taken waits for a later step. verl's v1 replay buffer
keeps that pool in the TransferQueue and decides by itself; this machine is told once per sampled batch what was
trained and what waits, and holds it to the rules. Pure; versions are weight versions (verl's global_steps).

Invariant: a group is trained at most once, also across a checkpoint; a group that is trained a second time, or rows of
a group that nobody submitted, are errors. Everything else that a step shows is counted, because a trainer may have its
own reasons: a group that ended without being trained has the reason that the trainer gave (`ENDINGS`), and what has
none, breaks the order or is older than the bound is an oddity with the group's id (`Step.oddities`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENDED_KEPT = 4096  # ended groups remembered to notice one that comes back; far more than ever wait together
IDS_SHOWN = 3  # group ids named in one line
AT_THE_END, LARGEST = ("carried", "unfinished", "carried_age_max"), ("age_max",)  # of several batches; others add up
STALE, FILTERED, FAILED, EMPTY = ENDINGS = ("dropped", "filtered", "failed", "empty")  # names of counts in `Step`


class CarryOverError(Exception):
    """A group was trained twice, or without a submission; the message says which one."""


@dataclass(frozen=True)
class Waiting:
    """A group that was not trained in this step: the version it was submitted in, and whether it is complete."""

    born: int
    done: bool


@dataclass(frozen=True)
class Step:
    """What one sampled batch meant for the pool. Counts are groups, ages are versions (1: submitted in this one)."""

    trained: int
    trained_carried: int  # of these: groups that were carried into this weight version
    carried: int
    unfinished: int  # of these: groups with members still to be generated
    dropped: int  # ended as too old
    filtered: int  # ended because their rewards were equal
    failed: int  # ended because a member failed
    empty: int  # ended without a row to train
    gone: int  # carried until the last batch, now neither there nor ended for a reason
    early: int  # trained although an older complete group waits
    overdue: int  # trained at a greater age than the trainer promised
    age_max: int  # of the trained groups
    carried_age_max: int


def of_version(batches: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Counts of all batches of a weight version, one at least, from those of each (`Step`, and what else adds up)."""
    found = {name: sum(batch[name] for batch in batches) for name in batches[-1]}
    found |= {name: batches[-1][name] for name in AT_THE_END}
    return found | {name: max(batch[name] for batch in batches) for name in LARGEST}


def remember(known: dict, groups: Mapping) -> None:
    """Add `groups` and forget the oldest beyond ENDED_KEPT."""
    known.update(groups)
    for group in list(known)[:max(0, len(known) - ENDED_KEPT)]:
        del known[group]


class CarryOver:
    """`threshold`: versions a trained group may span (None: any). `drops`: older groups are dropped, not awaited."""

    def __init__(self, threshold: int | None, drops: bool):
        self.threshold, self.drops = threshold, drops
        self.carried: dict[str, int] = {}  # group -> version it was submitted in
        self.trained: dict[str, None] = {}  # the last groups that were trained, oldest first
        self.ended: dict[str, None] = {}  # the last groups that ended otherwise, so that each is counted once
        self.oddities: dict[str, list[str]] = {}  # of the last settle: count of `Step` -> groups
        self._into: tuple[int | None, frozenset[str]] = None, frozenset()  # a version, and what was carried into it

    def settle(self, version: int, trained: Mapping[str, int | None], waiting: Mapping[str, Waiting],
               ended: Mapping[str, str] | None = None) -> Step:
        """Account for one batch sampled under `version`; raises CarryOverError for a group trained twice or unknown.

        `trained` maps the groups of the batch to the versions they were submitted in (None: nobody knows of it);
        `ended` maps groups that ended without being trained to one of ENDINGS. A group may be named again and again.
        """
        unknown = [group for group, born in trained.items() if born is None]
        if unknown:
            raise CarryOverError(f"group {unknown[0]} was trained and nobody submitted it")
        again = [group for group in trained if group in self.trained]
        if again:
            raise CarryOverError(f"group {again[0]} was trained twice")
        ended = {group: why for group, why in (ended or {}).items() if group not in trained}
        fresh = [why for group, why in ended.items() if group not in self.ended]
        oldest = min((entry.born for entry in waiting.values() if entry.done), default=version)
        self.oddities = {
            "gone": sorted(self.carried.keys() - trained.keys() - waiting.keys() - ended.keys() - self.ended.keys()),
            "early": sorted(group for group, born in trained.items() if born > oldest),
            "overdue": sorted(group for group, born in trained.items() if self._is_overdue(version - born + 1))}
        if version != self._into[0]:
            self._into = version, frozenset(self.carried)
        waited = sum(group in self._into[1] for group in trained)
        remember(self.trained, dict.fromkeys(trained))
        remember(self.ended, dict.fromkeys([*ended, *self.oddities["gone"]]))
        self.carried = {group: entry.born for group, entry in waiting.items() if group not in ended}
        return Step(trained=len(trained), trained_carried=waited, carried=len(self.carried),
                    unfinished=sum(not waiting[group].done for group in self.carried),
                    **{why: fresh.count(why) for why in ENDINGS},
                    **{kind: len(groups) for kind, groups in self.oddities.items()},
                    age_max=max((version - born + 1 for born in trained.values()), default=0),
                    carried_age_max=max((version - born + 1 for born in self.carried.values()), default=0))

    def _is_overdue(self, age: int) -> bool:
        return self.drops and self.threshold is not None and age > self.threshold

    def to_state(self) -> dict:
        """Plain data for a checkpoint."""
        return {"carried": dict(self.carried), "trained": list(self.trained), "ended": list(self.ended)}

    @classmethod
    def from_state(cls, state: Mapping, threshold: int | None, drops: bool) -> CarryOver:
        """The pool as it was; the rules may be others than at the checkpoint. Raises ValueError for a damaged state."""
        pool = cls(threshold, drops)
        try:
            pool.carried = {str(group): int(born) for group, born in state["carried"].items()}
            # older checkpoints mixed them with those that ended
            pool.trained = dict.fromkeys(map(str, state.get("trained", ())))
            pool.ended = dict.fromkeys(map(str, state["ended"]))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        return pool
