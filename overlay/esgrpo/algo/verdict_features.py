"""What a look at a running response sees, and what it makes of that beside the response's siblings. Pure.

An engine takes a `Glance`, which costs it the same however long the response is; `Sketches` makes a `Look` of it where
the whole group is known, and keeps what it has seen of 4-grams. `vector` puts a look beside the group: what siblings
are like, who has finished, and how. All features are bounded; what is not a number counts as 0, which says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

FEATURES = ("constant", "log tokens", "mean surprisal", "recent surprisal", "surprisal minus the group's",
            "distinct 4-grams", "novel 4-grams", "4-grams shared with siblings", "newest of them shared",
            "finished share", "siblings' logit", "doublings over the median finished length", "loop",
            "log tokens x 4-grams shared", "recent surprisal squared")
# "newest of them shared" times each other one: what a new text means depends on whether siblings write it, too
LATEST = FEATURES.index("newest of them shared")
CROSSED = tuple(range(1, FEATURES.index("loop") + 1))
FEATURES += tuple(f"newest shared x {FEATURES[column]}" for column in CROSSED)
LENGTH_FEATURES = (0, 1, 11)  # what a score by length alone may see
SIBLING_FEATURES = (0, 9, 10)
READ_TOKENS = 24  # newest tokens that a look reads; older ones since the last look stay unread
LARGEST = 4.0  # of a feature: one outlier must not decide
TYPICAL_TOKENS = 256.0  # features are measured from here: log tokens is 0
TYPICAL_SURPRISAL = 0.1  # nats per token, likewise
LEAST_SURPRISAL = 1e-3  # below it a model is certain; logarithms need an end
PRIOR_ANSWERS = 0.5  # right and wrong siblings that are added before their logit is taken


class Glance(NamedTuple):
    """What an engine sees of a response since it looked last. Surprisals are means in nats per token; NaN: of none."""

    tokens: int
    newest: Sequence[int]  # at most READ_TOKENS of those since the last look
    surprisal: float  # of all tokens of this attempt that have a log-prob
    recent: float  # since the last look


class Look(NamedTuple):
    """One look, in plain numbers. Surprisals as in Glance, the others are shares."""

    tokens: int
    surprisal: float
    recent: float
    distinct: float
    novel: float  # of those read at this look
    shared: float  # of all new ones until the last look
    recently: float  # of those of the last look


@dataclass(slots=True)
class Sketch:
    """4-grams of one response, as far as they were read."""

    bit: int  # of its own among the owners of a 4-gram
    last: list = field(default_factory=list)  # those that were new at the last look
    read: int = 0
    distinct: int = 0
    shared: int = 0  # of all new ones but the last


class Sketches:
    """All responses of one group. A 4-gram is shared when a sibling had it, too."""

    def __init__(self):
        self._owners: dict[tuple[int, ...], int] = {}  # 4-gram -> bits of the members that had it
        self._sketches: dict[object, Sketch] = {}

    def look(self, key: object, glance: Glance) -> Look:
        """Whether siblings share a 4-gram is asked one look later: by then they had time to come as far.
        """
        sketch = self._sketches.get(key)
        if sketch is None:
            sketch = self._sketches[key] = Sketch(1 << len(self._sketches))
        newest = glance.newest
        owners, bit, last, new = self._owners, sketch.bit, sketch.last, []
        again = len(last) - list(map(owners.__getitem__, last)).count(bit)
        for gram in zip(newest, newest[1:], newest[2:], newest[3:], strict=False):
            held = owners.get(gram, 0)
            if not held & bit:
                owners[gram] = held | bit
                new.append(gram)
        read, earlier = max(0, len(newest) - 3), sketch.distinct
        sketch.read += read
        sketch.distinct += len(new)
        sketch.shared += again
        sketch.last = new
        return Look(glance.tokens, glance.surprisal, glance.recent,
                    sketch.distinct / sketch.read if sketch.read else 1.0, len(new) / read if read else 1.0,
                    sketch.shared / earlier if earlier else 0.0, again / len(last) if last else 0.0)


@dataclass(frozen=True)
class Siblings:
    """The rest of a group at a look."""

    size: int
    surprisals: Sequence[float]  # of members that have been looked at or have ended
    lengths: Sequence[int]  # of finished members
    right: int  # of the finished ones


def _bounded(value: float) -> float:
    return min(max(value, -LARGEST), LARGEST) if value == value else 0.0  # NaN differs from itself


def _log_surprisal(nats: float) -> float:
    """0 where a response is as surprising as usual; for a negative number or NaN that of a certain model."""
    return math.log(max(nats, LEAST_SURPRISAL) / TYPICAL_SURPRISAL) if nats == nats and nats < math.inf else 0.0


def vector(look: Look, siblings: Siblings) -> tuple[float, ...]:
    """FEATURES of a response, all finite and within LARGEST."""
    mean, recent = _log_surprisal(look.surprisal), _log_surprisal(look.recent)
    length = math.log2(max(look.tokens, 1) / TYPICAL_TOKENS)
    others = [_log_surprisal(value) for value in siblings.surprisals]
    finished = len(siblings.lengths)
    wrong = finished - siblings.right
    doublings = math.log2(max(look.tokens, 1) / max(median(siblings.lengths), 1)) if finished else 0.0
    row = tuple(map(_bounded, (
        1.0, length, mean, recent,
        mean - sum(others) / len(others) if others else 0.0, look.distinct, look.novel, look.shared,
        look.recently, finished / max(siblings.size, 1),
        math.log((siblings.right + PRIOR_ANSWERS) / (wrong + PRIOR_ANSWERS)),
        max(doublings, 0.0), float(look.novel <= 0.0),
        length * look.shared, recent * recent / LARGEST)))
    return row + tuple([_bounded(row[LATEST] * row[column]) for column in CROSSED])
