"""Whole groups, nothing cut, nothing thrown away: only the order differs. verl's own order, and longest first."""

from __future__ import annotations

import heapq

from bench.policies import SYNC, Action, Load, Policy
from bench.workload import Sample


class Verl(Policy):
    """verl 0.9.1: groups in the order of the data, every request to the replica with the fewest in flight.

    Source: verl.workers.rollout.router.GlobalRequestLoadBalancer and, for async, FullyAsyncRollouter. Under sync all
    requests of a step go to the engines at once, which queue them. Under async verl runs at most
    concurrent_samples_per_replica groups per replica; here that is tuned to what fills max_num_seqs (the default of 16
    groups of 8 is 128 requests). A weight sync aborts running requests, which resume with their tokens
    (partial_rollout=True, verl's better setting).
    """

    name = "verl"

    def place(self, now: float, load: Load) -> list[Action]:
        if not self.waiting:
            return []
        actions: list[Action] = []
        room = len(self.waiting) if self.limits.scenario == SYNC else min(
            load.allowance, self.limits.concurrent - len(self.missing))
        for _ in range(min(room, len(self.waiting))):
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
        room = len(self.waiting) if self.limits.scenario == SYNC else load.allowance
        while self.waiting and room and len(self.longest) <= self.limits.slots:
            group = self.waiting.popleft()
            self.begin(group)
            room -= 1
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
