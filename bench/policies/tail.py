"""Long groups apart from the others, decoded again from nothing: RollPacker's tail batching, TailSieve's tail pool.

Both launch more groups than a step needs, take the first that are whole and put the others' prompts aside. A group that
was put aside is decoded anew: other samples of the same prompt stand for the new attempt. Both run only under sync.
"""

from __future__ import annotations

import math
from collections import deque

from bench.common.workload import Group, Sample
from bench.policies import SYNC, Abort, Action, EndStep, Load, Policy, Restart, Submit
from bench.policies.pool import Pool


class Sieving(Policy):
    """Launching a group on some of its samples, stopping and emptying it, and remembering it for another attempt."""

    scenarios = (SYNC,)
    carries = True  # prompts, though no tokens: the long groups are trained after the run's end, or never

    def __init__(self, limits, rng):
        super().__init__(limits, rng)
        self.flying: dict[int, dict[int, Sample]] = {}  # group -> its running samples by key
        self.groups: dict[int, Group] = {}
        self.aside: deque[Group] = deque()  # long groups, oldest first
        self.running = False

    def launch(self, group: Group, pool: Pool, samples: list[Sample]) -> list[Action]:
        self.missing[group.index] = self.limits.members
        self.groups[group.index] = group
        flying = self.flying[group.index] = {}
        actions: list[Action] = []
        for sample in samples:
            flying[sample.key] = sample
            replica = pool.least()
            pool.add(replica, 1)
            actions.append(Submit(sample, replica))
        return actions

    def left(self, replica: int) -> None:
        self.pool_of(replica).add(replica, -1)

    def pool_of(self, replica: int) -> Pool:
        return self.pool

    def finished(self, sample, replica, now):
        self.flying[sample.group].pop(sample.key)
        self.left(replica)
        if sample.group in self.missing:  # else a spare one that ended in the same moment
            self.ended(sample)

    def aborted(self, sample, replica, tokens, now):
        self.flying[sample.group].pop(sample.key)
        self.left(replica)

    def drop(self, group: int) -> list[Action]:
        return [Abort(sample, False) for sample in self.flying[group].values()]

    def put_aside(self) -> list[Action]:
        """All groups that are not whole: stopped, emptied, and kept for a later attempt."""
        actions: list[Action] = []
        for index in list(self.missing):
            actions += [*self.drop(index), Restart(index)]
            self.aside.append(self.groups[index])
            del self.missing[index]
        return actions


class RollPacker(Sieving):
    """RollPacker (arXiv 2509.21009): short rounds launch 1.25 times the groups and 1.25 times the samples, the first
    that end count; long groups collect until they fill a round of their own, without spare ones.

    Simplified: no elastic tensor parallelism, no streaming trainer. A prompt that loses goes to a long round.
    """

    name = "rollpacker"
    ETA = 1.25
    spare = 1.25  # a quarter for the short round, and a whole group for the long one

    @property
    def short_round(self) -> int:
        return math.ceil(self.ETA * self.limits.groups)

    def demand(self) -> int:
        long_round = not self.running and len(self.aside) >= self.limits.groups
        return 0 if self.running or long_round else self.short_round - len(self.waiting)

    def place(self, now: float, load: Load) -> list[Action]:
        members, first = self.limits.members, math.ceil(self.ETA * self.limits.members)
        actions: list[Action] = []
        if not self.running:
            self.running = True
            if len(self.aside) >= self.limits.groups:
                for group in [self.aside.popleft() for _ in range(self.limits.groups)]:
                    actions += self.launch(group, self.pool, group.samples[first:first + members])
                return actions
            while self.waiting:
                group = self.waiting.popleft()
                actions += self.launch(group, self.pool, group.samples[:first])
        return actions

    def next(self, now: float, load: Load) -> list[Action]:
        actions = self.place(now, load)
        for index in self.whole:  # its spare samples are not needed any more
            actions += self.drop(index)
        if len(self.whole) < self.limits.groups:
            return actions
        trained = [self.whole.popleft() for _ in range(self.limits.groups)]
        actions += self.put_aside()
        for index in self.whole:  # whole in the same moment, but not needed
            actions.append(Restart(index))
            self.aside.append(self.groups[index])
        self.whole.clear()
        self.running = False
        return [*actions, EndStep(trained)]


class TailSieve(Sieving):
    """TailSieve (arXiv 2608.22788): 1.1 times the groups are launched, those that are not whole in time are decoded
    again in the next step on a tail pool of few replicas, at low concurrency, beside the fresh ones.

    A batch is all q tail groups and the first others. q follows their inner rule, N r_tail / (r_tail + r_bulk) with
    running rates of whole groups. Simplified: the size of the tail pool is fixed at an eighth of the replicas (theirs
    searches for it within +-2), and there is none with one replica: candidates run among the others then. Its paper has
    REPLICAS of them, 64 groups x 8 and responses to 16,384 tokens; with fewer a tail pool is more than an eighth, and
    its numbers are not the paper's.
    """

    name = "tailsieve"
    OVER, POOL, MEMORY = 0.1, 1 / 8, 0.5
    REPLICAS = 8
    spare = 1.0

    def __init__(self, limits, rng):
        super().__init__(limits, rng)
        tail = 0 if limits.replicas < 2 else max(1, round(limits.replicas * self.POOL))
        self.bulk_pool = Pool(range(tail, limits.replicas), rng)
        self.tail_pool = Pool(range(tail), rng) if tail else self.bulk_pool
        self.tail_count = tail
        self.tail_groups: set[int] = set()
        self.share: float | None = None  # of a batch that the tail pool can decode
        self.began = 0.0
        self.ends: dict[bool, float] = {}
        self.quota = self.next_quota()

    @property
    def note(self) -> str:
        replicas = self.limits.replicas
        return "" if replicas >= self.REPLICAS else (
            f"{self.name}: not at its paper's size: {self.tail_count} of {replicas} replicas "
            f"{'is' if self.tail_count == 1 else 'are'} its tail pool, 1 of {self.REPLICAS} in the paper")

    def next_quota(self) -> int:
        if not self.aside:
            return 0
        share = self.POOL if self.share is None else self.share
        return min(len(self.aside), max(1, round(self.limits.groups * share)))

    def pool_of(self, replica):
        return self.tail_pool if replica < self.tail_count else self.bulk_pool

    def demand(self) -> int:
        if self.running:
            return 0
        return math.ceil((1 + self.OVER) * (self.limits.groups - self.quota)) - len(self.waiting)

    def place(self, now: float, load: Load) -> list[Action]:
        if self.running:
            return []
        self.running, self.began = True, now
        self.ends = {}
        members = self.limits.members
        actions: list[Action] = []
        for group in [self.aside.popleft() for _ in range(self.quota)]:
            self.tail_groups.add(group.index)
            actions += self.launch(group, self.tail_pool, group.samples[members:2 * members])
        while self.waiting:
            group = self.waiting.popleft()
            actions += self.launch(group, self.bulk_pool, group.samples[:members])
        return actions

    def next(self, now: float, load: Load) -> list[Action]:
        actions = self.place(now, load)
        tail = [index for index in self.whole if index in self.tail_groups]
        bulk = [index for index in self.whole if index not in self.tail_groups]
        needed = self.limits.groups - self.quota
        if self.quota and len(tail) == self.quota:
            self.ends.setdefault(True, now)
        if len(bulk) >= needed:
            self.ends.setdefault(False, now)
        if len(tail) < self.quota or len(bulk) < needed:
            return actions
        self.learn(needed)
        self.whole.clear()
        actions += self.put_aside()
        for index in bulk[needed:]:
            actions.append(Restart(index))
            self.aside.append(self.groups[index])
        self.tail_groups.clear()
        self.running = False
        self.quota = self.next_quota()
        return [*actions, EndStep(tail + bulk[:needed])]

    def learn(self, bulk: int) -> None:
        """Rates of the two pools in whole groups per second of this step."""
        if True not in self.ends:
            return
        tail_rate = self.quota / max(self.ends[True] - self.began, 1e-9)
        bulk_rate = bulk / max(self.ends[False] - self.began, 1e-9)
        share = tail_rate / (tail_rate + bulk_rate)
        self.share = share if self.share is None else self.MEMORY * share + (1 - self.MEMORY) * self.share


POLICIES = (RollPacker, TailSieve)
