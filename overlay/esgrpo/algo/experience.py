"""The experience buffer of a fully asynchronous run: every sample is in one status from its draw to its end. Pure.

A sample is a prompt with its group of responses. `ExperienceBuffer` follows its status, also over restarts; `Backlog`
is the order in which finished samples wait for the trainer. Standard library only.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from esgrpo.algo.terms import Status

FINISHED = (Status.FINISHED, Status.CARRIED)
ENDS = (Status.TRAINED, Status.PRUNED, Status.DROPPED)


@dataclass(frozen=True)
class Drawn:
    """A sample from its draw to its end. `draw`: position in the stream of the data loader, from 1, over the whole run.

    `prompt`: whatever its owner needs to issue it again. `responses` and `tokens` are what was generated for it.
    """

    draw: int
    epoch: int
    prompt: object
    was: str = ""  # name under which an earlier start had issued it
    responses: int = 0
    tokens: int = 0
    status: str = Status.RUNNING


class ExperienceBuffer:
    """Every sample that the data loader has given out, in one status each; what a checkpoint holds and gives back.

    A checkpoint of verl's has the data loader's position and, without this, none of the samples that are neither
    trained nor given up. Invariants: each draw up to `drawn` is exactly one of waiting, open (running, finished,
    carried) or ended (trained, pruned, dropped), so that counts() and `unknown` sum to `drawn`; over a chain of
    restarts each draw ends once in what the checkpoints kept.
    """

    def __init__(self, drawn: int = 0, waiting: Iterable[Drawn] = (), ended: Mapping[str, int] | None = None):
        """`ended`: how many earlier starts ended, by status; None where the checkpoint does not say."""
        self.drawn = self.restored = drawn
        self.waiting = deque(replace(entry, status=Status.WAITING) for entry in waiting)
        self.open: dict[str, Drawn] = {}
        self.ends = Counter({Status(status): number for status, number in (ended or {}).items()})
        self.strays = 0  # ends of samples that were not open: they had ended before, or were never issued
        self.unknown = drawn - len(self.waiting) - self.ends.total()  # ended before, nobody knows how

    def again(self, name: str) -> Drawn | None:
        """The next sample to issue again, from now on running as `name`; None when none waits."""
        if not self.waiting:
            return None
        self.open[name] = replace(self.waiting.popleft(), status=Status.RUNNING, responses=0, tokens=0)
        return self.open[name]

    def back(self, names: Iterable[str]) -> list[Drawn]:
        """Those that wait and were issued under these names come back whole, under them, made by older weights."""
        names = set(names)
        found = [entry for entry in self.waiting if entry.was in names]
        self.waiting = deque(entry for entry in self.waiting if entry.was not in names)
        self.open.update({entry.was: replace(entry, status=Status.CARRIED) for entry in found})
        return found

    def took(self, name: str, epoch: int, prompt) -> None:
        """The data loader has given out a prompt, which will be issued as `name`."""
        self.drawn += 1
        self.open[name] = Drawn(self.drawn, epoch, prompt)

    def generated(self, name: str, responses: int, tokens: int) -> None:
        """All responses of a running sample have ended."""
        entry = self.open.get(name)
        if entry is not None and entry.status == Status.RUNNING:
            self.open[name] = replace(entry, responses=responses, tokens=tokens, status=Status.FINISHED)

    def synced(self) -> None:
        """The weights have changed: what is finished waits for the trainer of a newer version."""
        for name, entry in self.open.items():
            if entry.status == Status.FINISHED:
                self.open[name] = replace(entry, status=Status.CARRIED)

    def ended(self, names: Iterable[str], status: Status = Status.TRAINED) -> None:
        """These samples are trained, or left without; a name counts once, and one that is not open is a stray."""
        for name in set(names):
            if self.open.pop(name, None) is None:
                self.strays += 1
            else:
                self.ends[status] += 1

    def counts(self) -> dict[Status, int]:
        """Samples by status, over all starts."""
        held = Counter(entry.status for entry in self.open.values())
        return {Status.WAITING: len(self.waiting), **{status: held[status] for status in (Status.RUNNING, *FINISHED)},
                **{status: self.ends[status] for status in ENDS}}

    def to_give_back(self) -> list[Drawn]:
        """What a checkpoint has to hold, in order of the draws."""
        entries = [replace(entry, was=name) for name, entry in self.open.items()]
        return sorted([*self.waiting, *entries], key=lambda entry: entry.draw)


class SentSample(bytearray):
    """A sample as it is sent, with what its receivers need of it without decoding it.

    Not of type bytes: Ray sends these raw, whatever their class.
    """

    name: str = ""
    version: int | None = None  # weight version of its first token, where its order is to follow it

    @classmethod
    def of(cls, sample: bytes, name: str, version: int | None) -> SentSample:
        made = cls(sample)
        made.name, made.version = name, version
        return made


def age_key(sample) -> float:
    """Smaller is older. The end of the data (None) is behind everything, what has no version in front of it."""
    if sample is None:
        return float("inf")
    version = getattr(sample, "version", None)
    return float("-inf") if version is None else version


class Backlog(deque):
    """Finished samples that wait: the one of the oldest weights first, in order of arrival among equals; no bound."""

    def append(self, sample) -> None:
        bisect.insort_right(self, sample, key=age_key)


class Overflow:
    """What waits beyond the bound of a queue that drops nothing: upstream would have dropped as many of the oldest."""

    def __init__(self, limit: float = float("inf")):
        self.limit = limit
        self.kept = 0  # samples that found the queue full
        self.most = 0  # beyond the limit at once

    def put(self, waiting: int) -> bool:
        """A sample joins `waiting` others. True when it is the first that finds the queue full."""
        if waiting < self.limit:
            return False
        self.kept += 1
        self.most = max(self.most, int(waiting + 1 - self.limit))
        return self.kept == 1
