"""Whole groups, nothing cut, nothing thrown away: only the order differs. verl's own order, and longest first."""

from __future__ import annotations

import heapq

from bench.common.workload import Sample
from bench.policies import ASYNC, Action, Load, Policy


class Verl(Policy):
    """verl 0.9.1: groups in the order of the data, every request to the replica with the fewest in flight.

    Source: verl.workers.rollout.router.GlobalRequestLoadBalancer and, for async, FullyAsyncRollouter. Under sync all
    requests of a step go to the engines at once, which queue them. Under async at most
    concurrent_samples_per_replica groups per replica are open; instead of the default of 16, so many that stragglers do
    not keep places empty (OVERSUBSCRIBED). A weight sync aborts running requests, which resume with their tokens
    (partial_rollout=True, verl's better setting).
    """

    name = "verl"

    def place(self, now: float, load: Load) -> list[Action]:
        actions: list[Action] = []
        room = self.room(load)
        if self.limits.scenario == ASYNC:
            room = min(room, self.limits.concurrent - len(self.missing))
        for _ in range(room):
            group = self.waiting.popleft()
            self.begin(group)
            actions.extend(self.submit(sample, self.pool.least()) for sample in group.samples[:self.limits.members])
        return actions


class Oracle(Policy):
    """Longest first with the true lengths, sample by sample, to the replica with the fewest requests in flight.

    No system can do this; it bounds what order alone can reach (LPT; StreamRL's dispatch, arXiv 2504.15930, with a
    perfect ranker). A request waits here until a place is free, not in an engine. Under async groups begin in the order
    of the data and samples are ordered among those.
    """

    name = "oracle"

    def __init__(self, limits, rng):
        super().__init__(limits, rng)
        self.longest: list[tuple[int, int, Sample]] = []
        self.in_flight = 0

    def place(self, now: float, load: Load) -> list[Action]:
        for _ in range(self.room(load)):
            group = self.waiting.popleft()
            self.begin(group)
            for sample in group.samples[:self.limits.members]:
                heapq.heappush(self.longest, (-sample.tokens, sample.key, sample))
        actions: list[Action] = []
        while self.longest and self.in_flight < self.limits.slots:
            self.in_flight += 1
            actions.append(self.submit(heapq.heappop(self.longest)[2], self.pool.least()))
        return actions

    def finished(self, sample, replica, now):
        self.in_flight -= 1
        super().finished(sample, replica, now)


POLICIES = (Verl, Oracle)
