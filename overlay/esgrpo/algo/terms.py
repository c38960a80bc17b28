"""Words that cross process boundaries and stand in records: each once, as an enumeration of what is written."""

from __future__ import annotations

import enum


class _Word(str, enum.Enum):
    """A string with a closed set of values; prints and serialises as its value (enum.StrEnum, which 3.10 lacks)."""

    __str__ = str.__str__
    __format__ = str.__format__


class Outcome(_Word):
    """How an attempt of a response ended, or the response itself."""

    FINISH = "finish"  # by itself, or at the budget
    PRUNE = "prune"
    YIELD = "yield"  # handed back at a boundary: an attempt only
    ABORT = "abort"  # by a weight sync or a rebalance: its client submits it again
    FAIL = "fail"  # no reward came of it
    CARRY = "carry"  # interrupted and handed back: it goes on later, perhaps under another worker


class LengthClass(_Word):
    SHORT = "short"
    BODY = "body"
    TAIL = "tail"
