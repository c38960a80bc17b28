"""Seer (arXiv 2511.14617): probes, longest group first, and requests cut into chunks that may move between replicas."""

from __future__ import annotations

import heapq

from bench.common.workload import Group, Sample
from bench.policies import Action, Continue, Load, Policy, Yield

PROBE, REST = 0, 1


class Seer(Policy):
    """One probe per group goes first; a group is as long as its longest finished member (the cap until one finishes),
    and the others go longest group first. Every chunk is placed anew: where the response's KV cache is, unless the
    requests per replica differ by more than 32, and only where the chunk fits into memory: nothing is preempted.

    Simplified: without grouped speculative decoding; no pool that holds KV caches for all replicas, so a move prefills
    again; the chunk of 512 tokens is an assumption; no turn for starved groups.
    """

    name = "seer"
    CHUNK, SPREAD = 512, 32

    def __init__(self, limits, rng):
        super().__init__(limits, rng)
        self.buffer: list[tuple[int, int, int, Sample, int, int | None]] = []
        self.estimate: dict[int, int] = {}  # group -> tokens
        self.reserved = [0] * limits.replicas  # KV tokens of what is in flight, its chunk included
        self.held: dict[int, int] = {}  # sample key -> its reservation
        self.in_flight = 0

    def push(self, sample: Sample, done: int, replica: int | None) -> None:
        """Probes first, the one with the fewest tokens before others; then the longest group first."""
        kind = PROBE if sample.member == 0 else REST
        rank = done if kind == PROBE else -self.estimate[sample.group]
        heapq.heappush(self.buffer, (kind, rank, sample.key, sample, done, replica))

    def begin(self, group: Group) -> None:
        super().begin(group)
        self.estimate[group.index] = self.limits.cap
        for sample in group.samples[:self.limits.members]:
            self.push(sample, 0, None)

    def place(self, now: float, load: Load) -> list[Action]:
        for _ in range(self.room(load)):
            self.begin(self.waiting.popleft())
        actions: list[Action] = []
        while self.buffer and self.in_flight < self.limits.slots:
            kind, rank, _, sample, done, before = self.buffer[0]
            now_rank = rank if kind == PROBE else -self.estimate[sample.group]
            if now_rank != rank:  # the group has become shorter or longer since
                heapq.heapreplace(self.buffer, (kind, now_rank, sample.key, sample, done, before))
                continue
            replica = self.choose(before)
            need = sample.prompt_tokens + done + self.CHUNK
            if self.pool.in_flight[replica] >= self.limits.sequences or (
                    self.reserved[replica] and self.reserved[replica] + need > self.limits.kv_tokens):
                break
            heapq.heappop(self.buffer)
            self.reserve(sample, replica, need)
            actions.append(self.submit(sample, replica, self.CHUNK, done))
        return actions

    def choose(self, before: int | None) -> int:
        least = self.pool.least()
        counts = self.pool.in_flight
        return before if before is not None and counts[before] - counts[least] <= self.SPREAD else least

    def reserve(self, sample: Sample, replica: int, need: int) -> None:
        self.in_flight += 1
        self.held[sample.key] = need
        self.reserved[replica] += need

    def release(self, sample: Sample, replica: int) -> None:
        self.in_flight -= 1
        self.reserved[replica] -= self.held.pop(sample.key)

    def boundary(self, sample: Sample, replica: int, tokens: int) -> Continue | Yield:
        """The next chunk stays here while nobody waits, it fits and the replicas are balanced."""
        if not self.buffer and self.choose(replica) == replica and (
                self.reserved[replica] + self.CHUNK <= self.limits.kv_tokens):
            self.held[sample.key] += self.CHUNK
            self.reserved[replica] += self.CHUNK
            return Continue(self.CHUNK)
        self.release(sample, replica)
        self.left(replica)
        self.push(sample, tokens, replica)
        return Yield()

    def finished(self, sample, replica, now):
        self.release(sample, replica)
        known = self.estimate[sample.group]
        self.estimate[sample.group] = sample.tokens if known == self.limits.cap else max(known, sample.tokens)
        super().finished(sample, replica, now)
        if sample.group not in self.missing:
            del self.estimate[sample.group]


POLICIES = (Seer,)
