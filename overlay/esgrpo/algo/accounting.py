"""Where the time of a replica and the tokens of a run went. Pure; the clock is injected."""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from esgrpo.algo.rows import LoopEvent
from esgrpo.algo.terms import Outcome

ABORTED_KEPT = 4096  # more than run at once; most come back within seconds
LEAST_STEPS, LEAST_SPREAD = 16, 0.1  # of a line: steps; deviation of their batch, of its mean
LEAST_S = 1e-3  # of a replica's time, for a rate: one that the trainer had all the time has what rounding leaves
TIMELINE_PERIOD_S = 0.25  # the occupancy curve keeps one point per period, enough for a plot


@dataclass
class Pace:
    """Sums over steps that only decode, of which the line of a step's seconds over its batch is made."""

    steps: float = 0.0
    batch: float = 0.0  # requests
    seconds: float = 0.0
    squares: float = 0.0  # batch * batch
    products: float = 0.0  # batch * seconds

    def add(self, batch: float, seconds: float, steps: float = 1.0) -> None:
        """`steps` steps alike, of `seconds` each."""
        self.steps += steps
        self.batch += steps * batch
        self.seconds += steps * seconds
        self.squares += steps * batch * batch
        self.products += steps * batch * seconds


def pace_of(paces: Iterable[Mapping[str, float]]) -> tuple[float | None, float | None]:
    """Seconds of a step, mean; and the share of it, within 0 and 1, that does not depend on the step's batch, by least
    squares. None while steps are few, the share also while their batches are alike. `paces`: fields of Pace."""
    sums = Counter()
    for pace in paces:
        sums.update(pace)
    steps = sums["steps"]
    if steps < LEAST_STEPS or sums["seconds"] <= 0:
        return None, None
    batch, seconds = sums["batch"] / steps, sums["seconds"] / steps
    spread = sums["squares"] / steps - batch * batch
    if spread < (LEAST_SPREAD * batch) ** 2:
        return seconds, None
    slope = (sums["products"] / steps - batch * seconds) / spread
    return seconds, min(1.0, max(0.0, 1 - slope * batch / seconds))


@dataclass
class Window:
    """Occupancy between two weight versions. Request-seconds; used + sync + idle + tail == capacity * seconds."""

    start: float
    seconds: float = 0.0
    capacity: int = 0
    used: float = 0.0
    sync: float = 0.0  # paused for a weight sync
    idle: float = 0.0  # nothing to run: the rollouter is paused or starved
    tail: float = 0.0  # fewer requests than capacity, and nobody waiting
    away: float = 0.0  # request-seconds from an abort until the request came back; in idle and tail, too
    steps: int = 0
    pace: Pace = field(default_factory=Pace)
    tokens: int = 0
    surprisal: float = 0.0  # nats, -log p of the sampled tokens of attempts that ended in it
    surprisal_tokens: int = 0  # how many these are
    timeline: list[tuple[float, int]] = field(default_factory=list)  # (time, running requests)


class Occupancy:
    """Integrates min(running, capacity) over time, with the cause of what is missing."""

    def __init__(self, capacity: int, clock: Callable[[], float]):
        self.capacity = capacity
        self._clock = clock
        self._running, self._waiting, self._paused = 0, 0, False
        self._last = clock()
        self._stepped: float | None = None  # when the last step ended, if the next one follows it at once
        self._left: OrderedDict[Hashable, float] = OrderedDict()  # aborted requests, and when
        self.window = Window(self._last, capacity=capacity)

    def _integrate(self) -> float:
        now = self._clock()
        span, self._last = now - self._last, now
        window, capacity = self.window, self.capacity
        window.seconds += span
        used = min(self._running, capacity)
        if self._waiting and self._running:
            used = capacity  # requests wait for memory, not the other way round: the replica is full
        if self._paused:
            used = 0
        window.used += used * span
        missing = (capacity - used) * span
        if self._paused:
            window.sync += missing
        elif self._running == 0:
            window.idle += missing
        else:
            window.tail += missing
        return now

    def observe(self, running: int, waiting: int) -> None:
        """From now on `running` requests decode and `waiting` ones queue."""
        if not running:
            self._stepped = None
        if running == self._running and waiting == self._waiting:  # as at most steps: the next change integrates it
            return
        now = self._integrate()
        timeline = self.window.timeline
        if running != self._running and (not timeline or now - timeline[-1][0] >= TIMELINE_PERIOD_S or running == 0):
            timeline.append((now, running))
        self._running, self._waiting = running, waiting

    def pause(self, paused: bool) -> None:
        self._integrate()
        self._paused, self._stepped = paused, None

    def stepped(self, batch: int, decodes: bool) -> None:
        """A step of so many requests ended; `decodes`: none of them was prefilled."""
        now = self._clock()
        if decodes and self._stepped is not None:
            self.window.pace.add(batch, now - self._stepped)
        self.window.steps += 1
        self._stepped = now

    def aborted(self, key: Hashable) -> None:
        self._left[key] = self._clock()
        while len(self._left) > ABORTED_KEPT:
            self._left.popitem(last=False)

    def came(self, key: Hashable) -> None:
        """A request, which may be one that was aborted."""
        left = self._left.pop(key, None)
        if left is not None:
            self.window.away += self._clock() - left

    def ended(self, logprob_sum: float, tokens: int) -> None:
        """An attempt ended, of which so many sampled tokens have a log-prob."""
        if math.isfinite(logprob_sum):
            self.window.surprisal -= logprob_sum
            self.window.surprisal_tokens += tokens

    def close(self) -> Window:
        """End the window and start the next one."""
        now = self._integrate()
        window, self.window = self.window, Window(now, capacity=self.capacity)
        return window


def lent_back(window: Mapping) -> dict:
    """The window of a replica on the trainer's own devices: while it is paused the trainer has them (or its weights are
    on their way in), which is no bubble of rollout."""
    return {**window, "sync": 0.0, "lent": window["sync"]}


def bubble(windows: Iterable[dict], rollouter_paused_s: float = 0.0) -> dict[str, float]:
    """Bubble rate of a set of windows and its causes, which sum to it; of the time that the replicas are rollout's.

    `rollouter_paused_s`: seconds in which the rollouter held back prompts (staleness limit); that much of the idle
    time is "paused", the rest is "starved".
    """
    windows = list(windows)
    total = sum(w["capacity"] * w["seconds"] - w.get("lent", 0.0) for w in windows)
    if total <= 0:
        return {"bubble_rate": 0.0, "paused": 0.0, "starved": 0.0, "tail": 0.0, "sync": 0.0}
    idle = sum(w["idle"] for w in windows)
    # The windows of one replica follow each other: over the wall time, this is the capacity of all replicas together.
    capacity = total / (max(w["start"] + w["seconds"] for w in windows) - min(w["start"] for w in windows))
    paused = min(idle, rollouter_paused_s * capacity)
    causes = {"paused": paused, "starved": idle - paused, "tail": sum(w["tail"] for w in windows),
              "sync": sum(w["sync"] for w in windows)}
    rates = {cause: value / total for cause, value in causes.items()}
    return {"bubble_rate": sum(rates.values()), **rates}


def replica_rates(windows: Iterable[dict]) -> dict[str, float]:
    """Tokens/s of the slowest, the mean and the fastest replica while they are rollout's, and their mean surprisal,
    nats a token (of attempts that ended in these windows); what was not measured is left out."""
    time, tokens = Counter(), Counter()
    windows = list(windows)
    for window in windows:
        lent = window.get("lent", 0.0)
        time[window["replica"]] += window["seconds"] - (lent / window["capacity"] if lent else 0.0)
        tokens[window["replica"]] += window["tokens"]
    rates = [tokens[replica] / seconds for replica, seconds in time.items() if seconds > LEAST_S]
    found = {"tokens_per_s_min": min(rates), "tokens_per_s_mean": sum(rates) / len(rates),
             "tokens_per_s_max": max(rates)} if rates else {}
    counted = sum(window["surprisal_tokens"] for window in windows)
    return found | ({"surprisal": sum(window["surprisal"] for window in windows) / counted} if counted else {})


def sync_counts(windows: Iterable[dict]) -> dict[str, float]:
    """What the weight syncs that ended these windows did to running requests.

    `kept`, `aborted`: responses. `kv_age`: weight versions between the oldest KV that a kept response reads and the
    weights that came, largest and mean over kept responses; 0 where KV was rebuilt.
    """
    windows = list(windows)
    ages = [(age, count) for window in windows for age, count in window["kv_ages"]]
    kept = sum(count for _, count in ages)
    return {"kept": kept, "aborted": sum(window["outcomes"].get(Outcome.ABORT, 0) for window in windows),
            "kv_age": max((age for age, _ in ages), default=0),
            "kv_age_mean": sum(age * count for age, count in ages) / kept if kept else 0.0}


def is_left_out(row: Mapping) -> bool:
    """No loss sees a row of an update: it was cut and masked, or verl rejected it."""
    return row["pruned"] or bool(row.get("rejected"))


def tokens_of(rows: Iterable[Mapping]) -> int:
    """Tokens of an update that a loss sees."""
    return sum(row["tokens"] for row in rows if not is_left_out(row))


def token_balance(rows: Iterable[dict]) -> dict[str, int]:
    """Tokens of finished responses by fate: spent = trained + the wastes, exactly.

    A row has `tokens` (decoded), `reprefill` (response tokens computed again after an interruption), `pruned`,
    `trained` (entered an update) and `gradient` (non-zero advantage); `rejected` when verl left it out of its update;
    `replaced` when its group was foreseen to have no gradient and gave its place to another: that is zero variance, no
    saving; `rolled_back` when a restart threw its update away.
    """
    balance = dict.fromkeys(("trained", "pruned", "rejected", "zero_variance", "stale", "rolled_back", "reprefill"), 0)
    for row in rows:
        balance["reprefill"] += row["reprefill"]
        if row.get("rolled_back"):
            balance["rolled_back"] += row["tokens"]
        elif row["pruned"]:
            balance["pruned"] += row["tokens"]
        elif row.get("rejected"):
            balance["rejected"] += row["tokens"]
        elif not row["trained"]:
            balance["zero_variance" if row.get("replaced") else "stale"] += row["tokens"]
        else:
            balance["trained" if row["gradient"] else "zero_variance"] += row["tokens"]
    balance["spent"] = sum(balance.values())
    return balance


def quantile(values: Iterable[float], q: float) -> float:
    """Linearly interpolated quantile (numpy's default method) of at least one value, 0 <= q <= 1."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


TAIL, MEDIAN, SHORTEST_TIME_S = 0.99, 0.5, 1e-9


def tail_ratio(times: Iterable[float]) -> float:
    """P99 / P50 of completion times in seconds."""
    times = list(times)
    return quantile(times, TAIL) / max(quantile(times, MEDIAN), SHORTEST_TIME_S)


def spent_on(seconds: float, parts: Mapping[str, float | None], rest: str) -> dict[str, float]:
    """Where `seconds` went: the parts as measured, none below 0, and what is left under `rest`; they sum to `seconds`.

    Parts that together exceed it, as timers inside one another do, are cut in their order. None: not measured.
    """
    found, left = {}, max(0.0, seconds)
    for name, part in parts.items():
        found[name] = min(max(part or 0.0, 0.0), left)
        left -= found[name]
    return {**found, rest: left}


def in_flight(history: Sequence[tuple[float, int, int]], until: float) -> tuple[float, float]:
    """(seconds with nothing in flight, mean in flight) of a step function: (time, count from then on, ...)."""
    idle = area = seconds = 0.0
    for (start, count, *_), (end, *_) in itertools.pairwise([*history, (until,)]):
        span = max(0.0, end - start)
        seconds += span
        idle += span * (count <= 0)
        area += span * max(0, count)
    return idle, area / seconds if seconds > 0 else 0.0


def mean_age(rows: Iterable[Mapping], version: int) -> float | None:
    """Weight versions between the making of a token and its training under `version`, mean of the trained tokens whose
    version is known."""
    spans = [span for row in rows if not is_left_out(row) for span in row["spans"] if span[0] >= 0]
    tokens = sum(count for _, count in spans)
    return sum((version - made) * count for made, count in spans) / tokens if tokens else None


def of_version(events: Sequence[LoopEvent]) -> LoopEvent:
    """The batches of one weight version, one at least, as one event: `spent` and `seconds` of all."""
    def mean(name: str, weight: str) -> float | None:
        known = [(getattr(e, name), getattr(e, weight) or 0) for e in events if getattr(e, name) is not None]
        total = sum(share for _, share in known)
        return sum(value * share for value, share in known) / total if total else None

    parts = dict.fromkeys(part for event in events for part in event.spent)
    return replace(events[-1], start=events[0].start, seconds=sum(event.seconds for event in events),
                   spent={part: sum(event.spent.get(part, 0.0) for event in events) for part in parts},
                   age=mean("age", "tokens"), queued_s=mean("queued_s", "groups"))


def mean_wait(rows: Iterable[Mapping], until: float) -> float | None:
    """Seconds from the end of a response until then, mean of the trained; at least 0, as clocks of nodes differ."""
    waits = [max(0.0, until - row["ended"]) for row in rows if not is_left_out(row)]
    return sum(waits) / len(waits) if waits else None


def batch_metrics(rows: Sequence[dict]) -> dict[str, float]:
    """What became of the rows of one training batch, at least one row. Waste is in tokens."""
    balance = token_balance(rows)
    spans = [len(row["spans"]) for row in rows]
    times = [row["ended"] - row["started"] for row in rows]
    weights = [row["cut_weight"] for row in rows if row.get("cut_weight", 1.0) < 1]
    return {
        **({"prune/cut_weight": sum(weights) / len(weights)} if weights else {}),
        "prune/rate": sum(row["pruned"] for row in rows) / len(rows),
        "prune/cut_rate": sum(row["outcome"] == Outcome.PRUNE for row in rows) / len(rows),
        "waste/pruned": balance["pruned"],
        "waste/rejected": balance["rejected"],
        "waste/zero_variance": balance["zero_variance"],
        "waste/reprefill": balance["reprefill"],
        "tail_ratio": tail_ratio(times),
        "version_span/mean": sum(spans) / len(spans),
        "version_span/max": max(spans),
        "partial_rate": sum(row["attempts"] > 1 for row in rows) / len(rows),
        "boundaries/mean": sum(row["boundaries"] for row in rows) / len(rows),
    }
