"""The pool of prompt groups between submission and training: static carry-over as in UloRL.

A trainer samples whole groups; what is unfinished or was not taken waits for a later step. verl's v1 replay buffer
keeps that pool in the TransferQueue and decides by itself; this machine is told once per sampled batch what was
trained and what waits, and holds it to the rules. Pure; versions are weight versions (verl's global_steps).

Invariants, after every `settle`:
- a group ends exactly once: trained, dropped as stale, or excused (failed or filtered by the trainer's own rule);
  what has not ended is carried. A group that vanishes without one of these reasons is lost, and that is an error.
- carried first: no group is trained while an older one that is complete waits.
- bounded staleness: where stale groups are dropped, nothing older than `threshold` versions is trained. Where the
  trainer waits for them instead, the bound is `threshold` plus the steps that complete older groups queue for.
- the state survives a checkpoint: after `from_state`, everything carried at the checkpoint must wait or be trained.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

ENDED_KEPT = 4096  # ended groups remembered to notice one that comes back; far more than ever wait together
IDS_SHOWN = 3  # group ids named in an error


class CarryOverError(Exception):
    """A rule of the pool is broken; the message says which group and which rule."""


@dataclass(frozen=True)
class Waiting:
    """A group that was not trained in this step: the version it was submitted in, and whether it is complete."""

    born: int
    done: bool


@dataclass(frozen=True)
class Step:
    """What one sampled batch meant for the pool. Counts are groups, ages are versions (1: submitted in this one)."""

    trained: int
    trained_carried: int  # of these: groups that had waited for at least one step
    carried: int
    unfinished: int  # of these: groups with members still to be generated
    dropped: int
    excused: int
    age_max: int  # of the trained groups
    carried_age_max: int


class CarryOver:
    """`threshold`: versions a trained group may span (None: any). `drops`: older groups are dropped, not awaited."""

    def __init__(self, threshold: int | None, drops: bool):
        self.threshold, self.drops = threshold, drops
        self.carried: dict[str, int] = {}  # group -> version it was submitted in
        self.ended: dict[str, None] = {}  # the last groups that ended, oldest first

    def settle(self, version: int, trained: Mapping[str, int], waiting: Mapping[str, Waiting],
               excused: int = 0) -> Step:
        """Account for one batch sampled under `version`; raises CarryOverError when a rule is broken.

        `trained` maps the groups of the batch to the versions they were submitted in; `excused` is how many groups
        the trainer says that it took out since the last call because they failed or were filtered.
        """
        self._check_once(trained, waiting)
        self._check_order(trained, waiting)
        ages = [version - born + 1 for born in trained.values()]
        if self.drops and self.threshold is not None and max(ages, default=0) > self.threshold:
            raise CarryOverError(f"a group spans {max(ages)} weight versions, at most {self.threshold} are allowed")
        gone = {group: born for group, born in self.carried.items() if group not in trained and group not in waiting}
        stale = [group for group, born in gone.items() if self._is_stale(version - born + 1)]
        unexplained = len(gone) - len(stale)
        if unexplained > excused:
            missing = sorted(gone.keys() - set(stale))
            raise CarryOverError(f"{unexplained - excused} carried groups are gone, neither trained nor dropped "
                                 f"({', '.join(missing[:IDS_SHOWN])})")
        waited = sum(group in self.carried for group in trained)
        self._remember([*trained, *gone])
        self.carried = {group: entry.born for group, entry in waiting.items()}
        return Step(trained=len(trained), trained_carried=waited, carried=len(waiting),
                    unfinished=sum(not entry.done for entry in waiting.values()), dropped=len(stale),
                    excused=unexplained, age_max=max(ages, default=0),
                    carried_age_max=max((version - entry.born + 1 for entry in waiting.values()), default=0))

    def _is_stale(self, age: int) -> bool:
        return self.drops and self.threshold is not None and age > self.threshold

    def _check_once(self, trained: Collection[str], waiting: Mapping[str, Waiting]) -> None:
        again = [group for group in (*trained, *waiting) if group in self.ended]
        both = [group for group in trained if group in waiting]
        if again or both:
            raise CarryOverError(f"group {(again or both)[0]} ended and is there again: it would be trained twice")

    @staticmethod
    def _check_order(trained: Mapping[str, int], waiting: Mapping[str, Waiting]) -> None:
        complete = [entry.born for entry in waiting.values() if entry.done]
        if trained and complete and max(trained.values()) > min(complete):
            raise CarryOverError(f"a group of version {max(trained.values())} was trained while a complete one of "
                                 f"version {min(complete)} waits: carried groups come first")

    def _remember(self, groups: list[str]) -> None:
        self.ended.update(dict.fromkeys(groups))
        for group in list(self.ended)[:max(0, len(self.ended) - ENDED_KEPT)]:
            del self.ended[group]

    def to_state(self) -> dict:
        """Plain data for a checkpoint."""
        return {"carried": dict(self.carried), "ended": list(self.ended)}

    @classmethod
    def from_state(cls, state: Mapping, threshold: int | None, drops: bool) -> CarryOver:
        """The pool as it was; the rules may be others than at the checkpoint."""
        pool = cls(threshold, drops)
        pool.carried = dict(state["carried"])
        pool.ended = dict.fromkeys(state["ended"])
        return pool

