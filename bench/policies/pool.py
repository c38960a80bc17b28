"""Placement in a simulation: what the router decides, for a fixed set of replicas and without walking over them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable

from esgrpo.algo.routing import choose_between


class Pool:
    """`choose_replica` of esgrpo.algo.routing for a fixed set of replicas in O(log n): counts change one at a time.

    Invariants: counts are never below zero; a choice is one that `choose_replica` could make; among equals the choice
    is random.
    """

    STALE = 4  # outdated entries per replica before the heaps are made anew

    def __init__(self, names: Iterable, rng: random.Random):
        self.in_flight = dict.fromkeys(sorted(names), 0)
        if not self.in_flight:
            raise ValueError("no replica")
        self._names, self._rng = list(self.in_flight), rng
        self.set_tail(0)

    def set_tail(self, count: int) -> None:
        """The first `count` replicas by name serve the tail from now on, as in `tail_set`."""
        self.tail = frozenset(self._names[:count])
        self._rebuild()

    def _rebuild(self) -> None:
        self._heaps: tuple[list, list] = ([], [])  # (requests, random number, replica): others, tail
        for name, count in self.in_flight.items():
            self._heaps[name in self.tail].append((count, self._rng.random(), name))
        for heap in self._heaps:
            heapq.heapify(heap)

    def add(self, name, change: int) -> None:
        """One request more (1) or fewer (-1) on this replica."""
        count = self.in_flight[name] = max(0, self.in_flight[name] + change)
        heap = self._heaps[name in self.tail]
        heapq.heappush(heap, (count, self._rng.random(), name))
        if len(heap) > (self.STALE + 1) * len(self._names):
            self._rebuild()

    def least(self, tail: bool = False):
        """The least loaded of the tail replicas or of the others; None when there is none."""
        heap = self._heaps[tail]
        while heap and self.in_flight[heap[0][2]] != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def choose(self, length: str, sticky=None):
        return choose_between(length, self.in_flight, self.least(True), self.least(False), sticky, sticky in self.tail)
