"""One replica: continuous batching on a virtual clock, from event to event and never token by token.

All running requests advance together: `done` counts decode steps since the replica was last empty. While the batch
does not change a step takes the same time (plus what the growing KV cache costs), so the step at which the next request
stops, or at which the cache is full, is known in advance.

Simplified: a request joins between two steps; prefill stops decoding for its tokens / prefill rate (chunked prefill
shares the steps instead); no prompt is shared between members of a group; a KV block is half empty on average.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import deque
from collections.abc import Callable

from bench.common.workload import Sample
from bench.sim.device import ABORT_WAIT_S, BLOCK, Device
from esgrpo.algo.accounting import Occupancy, Pace
from esgrpo.algo.admission import held_back

NEVER = math.inf
ROUNDING = 1e-6  # tokens: `done` is a sum of floats


@functools.lru_cache(maxsize=64)
def step_times(device: Device, sequences: int, company: float) -> list[float]:
    """Seconds of a decode step by the number of running requests, from 0."""
    return [0.0, *(device.step(b, company) for b in range(1, sequences + 1))]


class Run:
    """One submission of a response: `base` tokens existed, `left` more are decoded until it stops."""

    __slots__ = ("sample", "base", "left", "cached", "joined", "stop", "gone")

    def __init__(self, sample: Sample, base: int, segment: int | None, cached: bool):
        self.sample, self.base, self.cached = sample, base, cached
        self.left = sample.tokens - base if segment is None else min(segment, sample.tokens - base)
        self.joined = self.stop = -1.0  # in decode steps of the replica; -1: waits
        self.gone = False

    @property
    def at_end(self) -> bool:
        return self.base >= self.sample.tokens


class Replica:
    """Invariants: `decoded` is what all requests got here; running + waiting requests are those not yet taken; the KV
    cache is never over-committed; a preempted request loses no token."""

    def __init__(self, device: Device, sequences: int, capacity: int, clock: Callable[[], float],
                 headroom: float = 0.0):
        self.device, self.sequences, self.headroom = device, sequences, headroom * device.kv_tokens
        self.company = 1.0
        self.times = step_times(device, sequences, self.company)
        self.occupancy = Occupancy(capacity, clock)
        self.pace = Pace()
        self.running: dict[int, Run] = {}  # by sample key, in order of admission
        self.waiting: deque[Run] = deque()
        self.waits = 0  # entries of `waiting` that are not gone
        self.done, self.last, self.stall = 0.0, 0.0, 0.0
        self._stops: list[tuple[float, int, Run]] = []
        self._order = 0
        self._kv = 0.0  # KV tokens of running requests, less one per request and decode step
        self.decoded = self.prefilled = self.recomputed = self.preemptions = 0

    def share(self, company: float) -> None:
        """From now on this share of the others on its device is at work. `advance` first."""
        self.company = company
        self.times = step_times(self.device, self.sequences, company)

    @property
    def kv_used(self) -> float:
        return self._kv + len(self.running) * self.done

    def advance(self, now: float) -> None:
        """Decode until `now`."""
        if now <= self.last:
            return
        start = self.stall if self.stall > self.last else self.last
        running = len(self.running)
        if running and now > start:
            step, span, slope = self.times[running], now - start, self.device.per_kv_token
            if slope:
                step += slope * self.kv_used
                span = 2 * span / (1 + math.sqrt(1 + 2 * slope * running * span / (step * step)))
            self.done += span / step
            self.pace.add(running, (now - start) * step / span, span / step)
        self.last = now

    def next_event(self) -> float:
        """When somebody stops or the KV cache is full; NEVER with nobody running."""
        running = len(self.running)
        if not running:
            return NEVER
        stops = self._stops
        while stops[0][2].stop != stops[0][0]:
            heapq.heappop(stops)
        stop, full = stops[0][0], (self.device.kv_tokens - self._kv) / running
        steps = (stop if stop < full else full) - self.done
        if steps < 0:
            steps = 0.0
        seconds, slope = steps * self.times[running], self.device.per_kv_token
        if slope:
            seconds += slope * steps * (self.kv_used + running * steps / 2)
        return (self.stall if self.stall > self.last else self.last) + seconds

    def submit(self, run: Run) -> None:
        self.waiting.append(run)
        self.waits += 1

    def admit(self, now: float) -> None:
        """Let waiting requests in while there is room; the clock stands at `now`."""
        while self.waits and len(self.running) < self.sequences:
            run = self.waiting[0]
            if run.gone:
                self.waiting.popleft()
                continue
            need = run.sample.prompt_tokens + run.base + BLOCK / 2
            free = self.device.kv_tokens - self.kv_used - len(self.running) - 1  # and a step's tokens
            if need > free or (self.running and held_back(free, need, self.headroom)):
                break
            self.waiting.popleft()
            self.waits -= 1
            if not self.running:
                self.done, self._kv, self._stops = 0.0, 0.0, []
            self._join(run, need)
            if not run.cached:
                self._prefill(now, run.sample.prompt_tokens, run.base)
        self.occupancy.observe(len(self.running), self.waits)

    def _prefill(self, now: float, prompt: int, response: int) -> None:
        self.prefilled += prompt + response
        self.recomputed += response
        self.stall = max(self.stall, now) + (prompt + response) / self.device.prefill_rate

    def _join(self, run: Run, need: float) -> None:
        self.running[run.sample.key] = run
        self._kv += need - self.done
        run.joined = self.done
        self._stop_after(run)

    def _stop_after(self, run: Run) -> None:
        run.stop = run.joined + run.left
        self._order += 1
        heapq.heappush(self._stops, (run.stop, self._order, run))

    def tokens_of(self, run: Run) -> int:
        """Tokens of the response so far; `advance` first."""
        return run.base + self._made(run)

    def _made(self, run: Run) -> int:
        if run.stop < 0:
            return 0
        made = int(self.done - run.joined + ROUNDING)
        return made if made < run.left else run.left - 1  # the last one is made when it stops

    def _settle(self, run: Run, made: int) -> None:
        """Take over tokens that a running request has made."""
        run.base, run.left, run.joined = run.base + made, run.left - made, run.joined + made
        self.decoded += made

    def drop(self, run: Run) -> None:
        """A running request leaves."""
        del self.running[run.sample.key]
        self._kv -= run.sample.prompt_tokens + run.base + BLOCK / 2 - run.joined
        run.joined = run.stop = -1.0

    def take(self, run: Run) -> int:
        """Remove a request that runs or waits; returns the tokens of its response. `advance` first."""
        if run.stop >= 0:
            self._settle(run, self._made(run))
            self.drop(run)
        else:
            run.gone = True
            self.waits -= 1
        return run.base

    def tell(self, run: Run, segment: int) -> None:
        """It stops after `segment` more tokens, if that is earlier. `advance` first."""
        left = self._made(run) + max(1, segment)
        if left < run.left:
            run.left = left
            if run.stop >= 0:
                self._stop_after(run)

    def go_on(self, run: Run, segment: int | None) -> None:
        """A request that stopped at a boundary decodes on."""
        run.left = run.sample.tokens - run.base
        if segment is not None:
            run.left = min(run.left, max(1, segment))
        self._stop_after(run)

    def fire(self) -> list[Run]:
        """What happens at the time of `next_event`: requests stop, or (empty answer) one is preempted.

        Whoever stops still runs: `drop` or `go_on` is for the caller to say.
        """
        running = len(self.running)
        full = (self.device.kv_tokens - self._kv) / running
        if full < self._stops[0][0]:
            self.done = max(self.done, full)
            self._preempt()
            return []
        stopped = []
        self.done = max(self.done, self._stops[0][0])
        while self._stops and self._stops[0][0] <= self.done + ROUNDING:
            stop, _, run = heapq.heappop(self._stops)
            if run.stop == stop:
                self._settle(run, run.left)
                run.joined, run.stop = self.done, -1.0  # after a preemption an old entry may name the same step
                stopped.append(run)
        return stopped

    def _preempt(self) -> None:
        """The request that came last gives its cache up and is computed again when somebody has left."""
        run = self.running[next(reversed(self.running))]
        self._settle(run, self._made(run))
        self.drop(run)
        run.cached = False
        self.waiting.appendleft(run)
        self.waits += 1
        self.preemptions += 1
        self.occupancy.observe(len(self.running), self.waits)

    def pause(self, now: float, seconds: float, keep: bool, sleeps: bool = True) -> None:
        """A weight sync: nothing decodes for `seconds`; unless requests are kept they are prefilled again, after their
        clients' sleep."""
        self.stall = max(self.stall, now) + seconds
        if not keep and (self.running or self.waits):
            self.stall += ABORT_WAIT_S * sleeps
            for run in self.running.values():
                self._prefill(now, run.sample.prompt_tokens, self.tokens_of(run))
