"""Which prompt goes next and which replica decodes it, from forecasts. Pure; the clock and the RNG are injected.

Longest first is StreamRL's and LPT's rule (arXiv 2504.15930: 4/3-approximation); the split of the replicas follows
TailSieve (2608.22788): the few longest responses on replicas of low concurrency.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from esgrpo.algo.terms import LengthClass

SHORT, BODY, TAIL = map(str, LengthClass)
CLASSES = (SHORT, BODY, TAIL)
FEW = 64  # prompts of a queue for which no order is made anew
PERIOD_S = 5.0  # between two adjustments of the tail share
MEMORY = 0.3  # weight of the newest period in the running rates
DEAD_BAND = 0.1  # replicas: the tail share moves once it is off by more
SPILL = 0.25  # a tail replica takes other requests while it has less than this share of the lightest other's


def length_class(tokens: float, limits: tuple[float, float]) -> str:
    """Class of a forecast: `limits` are the tokens of the short and of the tail quantile of all lengths."""
    short, tail = limits
    if tokens < short:
        return SHORT
    return TAIL if tokens > tail else BODY


class PromptQueue:
    """Order of the prompts that wait: longest forecast first, none overtaken more than `ageing` times.

    Invariants: every pushed item is popped exactly once; a prompt is overtaken (an item that came later goes first) at
    most `ageing` times: whoever reached the limit goes next, the oldest of them first, and popping the oldest
    overtakes nobody older; equal forecasts leave in the order they came; without `by_length` it is FIFO.

    The oldest was overtaken most: whoever overtakes a younger one overtakes it, too. All that came before it are gone,
    so of the pops so far, those beyond its arrival number overtook it: nothing is counted item by item.
    """

    def __init__(self, ageing: int, by_length: bool = True):
        self.ageing, self.by_length = ageing, by_length
        self._items: dict[int, Any] = {}  # by arrival number
        self._order: list[int] = []  # arrival numbers that wait, oldest first
        self._longest: list[tuple[float, int]] = []  # heap of (-tokens, arrival), some of them gone
        self._arrivals = self._popped = 0
        # choices: pops with more than one item to choose from; inversions: pops of an item that was not the oldest
        self.pops = self.choices = self.inversions = self.overtakes = 0

    def __len__(self) -> int:
        return len(self._order)

    def push(self, item, tokens: float) -> None:
        arrival, self._arrivals = self._arrivals, self._arrivals + 1
        self._items[arrival] = item
        self._order.append(arrival)
        if self.by_length:
            heapq.heappush(self._longest, (-tokens, arrival))
            if len(self._longest) > 2 * len(self._order) + FEW:  # short ones that left by age lie deep in it
                self._longest = [entry for entry in self._longest if entry[1] in self._items]
                heapq.heapify(self._longest)

    def pop(self):
        """The next item. Raises IndexError when none waits."""
        arrival = self._order[0]
        if self.by_length and self._popped - arrival < self.ageing:
            while self._longest[0][1] not in self._items:
                heapq.heappop(self._longest)
            arrival = heapq.heappop(self._longest)[1]
        place = bisect.bisect_left(self._order, arrival)
        del self._order[place]
        self._popped += 1
        self.pops += 1
        self.choices += len(self._order) > 0
        self.overtakes += place
        self.inversions += place > 0
        return self._items.pop(arrival)

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        counts = {"pops": self.pops, "choices": self.choices, "inversions": self.inversions,
                  "overtakes": self.overtakes}
        self.pops = self.choices = self.inversions = self.overtakes = 0
        return counts


@dataclass
class TailShare:
    """How many of R replicas serve the tail class.

    TailSieve's inner rule gives the tail pool q* = N r_tail / (r_tail + r_bulk) of the work. Here N is the number of
    replicas and r the running mean of the requests in flight per class (arrivals times duration, by Little's law), so
    that q* replicas would carry as many requests each as the others; rounded up, a tail replica is never fuller than
    the others. Damped: one replica per period at most, with a dead band.

    Invariants: 0 with fewer than two replicas or without a tail; never all; at most `largest` of them, but one where
    that would round to none (0.0 switches it off); moves by at most one per period unless replicas left.
    """

    largest: float
    clock: Callable[[], float]
    period: float = PERIOD_S
    replicas: int = 0  # current answer
    _since: float | None = None
    _started: float = 0.0
    _integral: dict[str, float] = field(default_factory=lambda: {TAIL: 0.0, BODY: 0.0})
    _rates: dict[str, float] | None = None
    _level: tuple[int, int] = (0, 0)

    def observe(self, pool: int, tail: int, bulk: int) -> int:
        """`pool` replicas with so many requests in flight from now on; returns how many of them serve the tail."""
        now = self.clock()
        if self._since is None:
            self._since = self._started = now
            self._level = (tail, bulk)
        span, self._since = max(0.0, now - self._since), now
        self._integral[TAIL] += span * self._level[0]
        self._integral[BODY] += span * self._level[1]
        self._level = (tail, bulk)
        if now - self._started >= self.period:
            self._adjust(pool, now - self._started)
            self._started = now
        self.replicas = max(0, min(self.replicas, self._ceiling(pool)))
        return self.replicas

    def _adjust(self, pool: int, seconds: float) -> None:
        means = {name: value / seconds for name, value in self._integral.items()}
        self._integral = dict.fromkeys(self._integral, 0.0)
        old = self._rates or means
        self._rates = {name: MEMORY * means[name] + (1 - MEMORY) * old[name] for name in means}
        total = sum(self._rates.values())
        wanted = pool * self._rates[TAIL] / total if total > 0 else 0.0
        if wanted > self.replicas + DEAD_BAND:
            self.replicas += 1
        elif wanted < self.replicas - 1 - DEAD_BAND or (self.replicas == 1 and wanted < DEAD_BAND / 2):
            self.replicas -= 1

    def _ceiling(self, pool: int) -> int:
        if pool < 2 or self.largest <= 0:
            return 0
        return min(pool - 1, max(1, math.floor(pool * self.largest)))


class ClassLoad:
    """Requests in flight per class, their mean over time, and what routing did with them.

    Invariants: a class is never below zero; a request counts once however often its start is told; an end without a
    start changes nothing.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._running: dict[str, str] = {}
        self.in_flight = dict.fromkeys(CLASSES, 0)
        self._integral = dict.fromkeys(CLASSES, 0.0)
        self._started = self._since = clock()
        self.moves = self.spills = 0

    def _integrate(self) -> None:
        now = self._clock()
        for name, count in self.in_flight.items():
            self._integral[name] += count * (now - self._since)
        self._since = now

    def start(self, request: str, length: str, on_tail: bool, moved: bool) -> None:
        """`on_tail`: it runs on a tail replica; `moved`: it left the replica of its earlier tokens."""
        self.end(request)  # its client died without a release
        self._running[request] = length
        self.in_flight[length] += 1
        self.moves += moved
        self.spills += on_tail and length != TAIL

    def end(self, request: str) -> None:
        self._integrate()
        length = self._running.pop(request, None)
        if length is not None:
            self.in_flight[length] -= 1

    def tail_and_rest(self) -> tuple[int, int]:
        return self.in_flight[TAIL], sum(self.in_flight.values()) - self.in_flight[TAIL]

    def take_metrics(self) -> dict[str, float]:
        """Mean requests in flight per class, moves and spills since the last call."""
        self._integrate()
        seconds = self._since - self._started
        found = {f"in_flight/{name}": value / seconds if seconds > 0 else 0.0
                 for name, value in self._integral.items()}
        found.update(moves=self.moves, spills=self.spills)
        self._integral, self._started = dict.fromkeys(CLASSES, 0.0), self._since
        self.moves = self.spills = 0
        return found


def tail_set(pool: Iterable[str], count: int) -> frozenset[str]:
    """The replicas that serve the tail: the first `count` by name, so that a change moves as few as possible."""
    return frozenset(sorted(pool)[:count])


def choose_replica(length: str, in_flight: Mapping[str, int], tail: frozenset[str], rng: random.Random,
                   sticky: str | None = None) -> str:
    """The replica for a request of class `length`.

    `in_flight` maps every replica to its requests; `sticky` is where earlier tokens of this response have their KV
    cache. Without tail replicas: sticky, else the least loaded (verl's own rule). A tail request leaves its sticky
    replica for a tail replica that has fewer requests; a new one goes to the least loaded tail replica, or elsewhere
    when all tail replicas are fuller than the rest. Others use tail replicas only while these are nearly idle (SPILL).
    Raises ValueError when there is no replica.
    """
    if not in_flight:
        raise ValueError("no replica")
    tail = tail & in_flight.keys()
    rest = [name for name in in_flight if name not in tail]
    inside = _least(tail, in_flight, rng) if tail else None
    outside = _least(rest, in_flight, rng) if rest else None
    return choose_between(length, in_flight, inside, outside, sticky, sticky in tail)


def choose_between(length: str, in_flight: Mapping, inside, outside, sticky, sticky_on_tail: bool):
    """The rule of `choose_replica`, given the least loaded tail replica and the least loaded other one (None: none)."""
    sticky = sticky if sticky in in_flight else None
    if inside is None or outside is None:
        return sticky if sticky is not None else outside if inside is None else inside
    if length == TAIL:
        if sticky is not None:  # its own request has been released: counts are those of the others
            return inside if not sticky_on_tail and in_flight[inside] < in_flight[sticky] else sticky
        return inside if in_flight[inside] <= in_flight[outside] else outside
    if sticky is not None:
        return sticky
    return inside if in_flight[inside] < SPILL * in_flight[outside] else outside


def _least(names: Iterable[str], in_flight: Mapping[str, int], rng: random.Random) -> str:
    ordered = sorted(names)
    fewest = min(in_flight[name] for name in ordered)
    equal: Sequence[str] = [name for name in ordered if in_flight[name] == fewest]
    return equal[0] if len(equal) == 1 else rng.choice(equal)


def surplus(in_flight: Mapping[str, int]) -> dict[str, int]:
    """Requests that each replica has above its share, without those that have none: as few as possible move.

    Shares differ by one at most; the fullest replicas have the larger ones.
    """
    ordered = sorted(in_flight, key=lambda name: (-in_flight[name], name))
    share, larger = divmod(sum(in_flight.values()), max(1, len(ordered)))
    above = {name: in_flight[name] - share - (place < larger) for place, name in enumerate(ordered)}
    return {name: count for name, count in above.items() if count > 0}


def cheapest_to_move(tokens: Mapping[str, int], count: int) -> list[str]:
    """`count` requests, or all, of the fewest tokens (prompt and response), which the next replica prefills again."""
    return sorted(tokens, key=lambda request: (tokens[request], request))[:max(0, count)]
