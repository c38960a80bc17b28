"""The experience buffer of a fully asynchronous run: every sample is in one status from its draw to its end. Pure.

A sample is a prompt with its group of responses. `ExperienceBuffer` follows its status, also over restarts; `Backlog`
is the order in which finished samples wait for the trainer. Standard library only.
"""

from __future__ import annotations

import bisect
from collections import deque


class VersionedSample(bytes):
    """A sample as it is sent, with the weight version of its first token, which its receiver need not decode."""

    version: int | None = None

    @classmethod
    def of(cls, sample: bytes, version: int | None) -> VersionedSample:
        made = cls(sample)
        made.version = version
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
