"""How far rollout and training overlap: concurrency, staleness bound and trigger, from measured rates. Pure.

The loop. At most c groups are in flight on the replicas. The trainer takes B groups at once (the trigger), K times a
weight version: a version is N = K B groups. Rollout may begin N (1 + sigma) groups a version, those counted that were
in process at the last sync (verl's staleness_threshold); by Little's law W = sigma N are in process at a sync. A
mini-batch has m groups, each is one optimiser step.

The law. Of the settings (c, sigma, B) within reach it takes the one with the most *fresh* groups a second,

    J = N u / V * exp(-A / (lambda * trust))
    V = max(R, T) + (1 - o) min(R, T)        seconds of a version: rollout R and training T, overlapped by o
    R = N g (a / f + b) + p                  seconds of rollout by itself
    T = K (d + e g B) + s                    seconds of training by itself
    f = 1 / (c**-4 + w**-4) ** (1/4)         groups in flight, mean: about the smaller one of the limit, and of what
    w = W + 0.4 (N - q)                      the staleness bound leaves
    q = h B min(1, T / R)                    groups that come in while it trains
    o = min(1, W / (f' + q)) ** (2/3)        the overlap ratio; f' is as much of f as rollout needs to keep up
    A = (P + (N - m) / 2) / m                optimiser steps between making a token and training on it
    P = min(W, f + q + T / (2 (R - T)))      in process: what waits by chance is Kingman's; W where R <= T
    u = 1 + min(1, (W - 1.5 f'') / B) (k - 1)    groups with a gradient, times those of a version that leaves out none
    k = min(T / R, 1 / (1 - nu))             what rollout has to spare; f'' is f' at k times the speed

u is 1 but where `null_groups=spare` leaves out the share nu of groups that have no gradient while a batch waits: then
what rollout makes too much of is worth something, and a batch that waits, too.
g (tokens of a group), a and b (f / (tokens/s) = a + b f), d and e (a trigger's train time = d + e tokens), s and p (a
weight sync, for the trainer and for the replicas) are measured in every version: that is the feed-forward, and nothing
is searched for on the running system. Without the exponential the largest staleness would always win; lambda is the age
that costs a token 1 - 1/e of its worth, in optimiser steps, and the user's to say. The form of o was fitted to
simulated settings; A is right up to a constant, which J's maximum does not depend on.

Standard library only; what is measured and when a setting moves is algo/overlap.py's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

STEP = 1.5  # factor by which concurrency and what is in process move in one version at most
SHARES = (-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0)  # of such a move, tried in every version
ONSET = 2 / 3  # a little in process hides much of the training; of six forms of o tried on 300 simulated settings
FILLED = 0.4  # of what is begun in a version and is not in process at its start, the part in flight on the mean; fitted
EDGE = 4  # how sharp the limit of concurrency is on the mean: the in-flight count is below it for a part of a version
FIRST_STOCK = 0.8  # fitted, too
IN_HAND = 1.5  # of what is in flight that fills what rollout has to spare; beyond it groups wait; one of three tried
TINY = 1e-9


@dataclass(frozen=True)
class Setting:
    concurrency: int  # groups in flight at most, c
    staleness: float  # verl's staleness_threshold, sigma
    trigger: int  # groups that the trainer takes at once, B


@dataclass(frozen=True)
class Limits:
    """Bounds, both ends included, in groups; a trigger is a multiple of the mini-batch, whose rows verl lets
    no start divide unevenly over the data-parallel ranks."""

    concurrency: tuple[int, int]
    staleness: tuple[float, float]
    trigger: tuple[int, int]
    mini_batch: int = 1
    triggers_per_version: int = 1  # verl's trigger_parameter_sync_step, K

    def groups(self, setting: Setting) -> int:
        """Of a version, N."""
        return setting.trigger * self.triggers_per_version

    def in_process(self, setting: Setting) -> float:
        return setting.staleness * self.groups(setting)

    def within(self, concurrency: float, in_process: float, trigger: float) -> Setting:
        """The nearest setting: whole groups, the trigger a multiple of the unit, all within bounds."""
        unit = self.mini_batch
        low, high = -(-self.trigger[0] // unit) * unit, self.trigger[1] // unit * unit
        batch = min(max(round(trigger / unit) * unit, low, unit), max(high, unit))
        version = batch * self.triggers_per_version
        staleness = min(max(math.ceil(in_process - TINY) / version, self.staleness[0]), self.staleness[1])
        return Setting(min(max(round(concurrency), self.concurrency[0]), self.concurrency[1]), staleness, batch)


@dataclass(frozen=True)
class Rates:
    """The coefficients of the law."""

    group_tokens: float
    decode: tuple[float, float]  # a, b: f / (tokens/s) = a + b f
    train: tuple[float, float]  # d, e: seconds of a trigger = d + e tokens
    sync: float = 0.0  # s
    pause: float = 0.0  # p
    stock: float = FIRST_STOCK  # h
    null_share: float = 0.0  # nu, of `null_groups=spare`


@dataclass(frozen=True)
class Forecast:
    seconds: float  # of a version
    age: float
    fresh: float  # J
    overlap: float
    useful: float = 1.0  # u


def at_most(limit: float, wanted: float) -> float:
    """The smaller one of two positive numbers, rounded off where they meet."""
    low, high = sorted((limit, wanted))
    return low / (1 + (low / high) ** EDGE) ** (1 / EDGE)


def flow(setting: Setting, rates: Rates, limits: Limits) -> tuple[float, float, float, float]:
    """R, T, f and q: the one point at which f's and q's lines of the law hold at once, with w for f in the R of q."""
    batch, count = setting.trigger, limits.groups(setting)
    train = limits.triggers_per_version * (rates.train[0] + rates.train[1] * rates.group_tokens * batch) + rates.sync
    alone = count * rates.group_tokens * rates.decode[0]  # R = alone / f + always
    always = count * rates.group_tokens * rates.decode[1] + rates.pause
    most, stock = limits.in_process(setting) + FILLED * count, FILLED * rates.stock * batch
    # w = most - stock min(1, T / R) falls where R falls, so it is the larger one of both branches' solutions
    middle = alone - most * always + stock * train
    wide = abs(middle) + math.sqrt(middle * middle + 4 * always * most * alone)
    root = 2 * most * alone / max(wide, TINY) if middle > 0 else wide / (2 * max(always, TINY))
    begun = count + limits.in_process(setting)
    inflight = at_most(min(setting.concurrency, begun), max(1.0, most - stock, root))
    rollout = alone / inflight + always
    return rollout, train, inflight, stock / FILLED * min(1.0, train / max(rollout, TINY))


def forecast(setting: Setting, rates: Rates, limits: Limits, age_scale: float) -> Forecast:
    """The law of the module's docstring for one setting; `age_scale` is lambda * trust, in optimiser steps."""
    rollout, train, inflight, waits = flow(setting, rates, limits)
    count, bound = limits.groups(setting), limits.in_process(setting)
    spare = train - rates.pause - count * rates.group_tokens * rates.decode[1]
    needed = count * rates.group_tokens * rates.decode[0] / spare if spare > 0 else math.inf
    overlap = min(1.0, bound / max(min(inflight, needed) + waits, TINY)) ** ONSET
    seconds = max(rollout, train) + (1 - overlap) * min(rollout, train)
    chance = train / (2 * (rollout - train)) if rollout > train else math.inf
    process = min(bound, inflight + waits + chance)
    age = (process + (count - limits.mini_batch) / 2) / limits.mini_batch
    more = min(max(1.0, train / max(rollout, TINY)), 1 / max(1 - rates.null_share, TINY))
    waiting = (bound - IN_HAND * min(inflight, more * needed)) / setting.trigger
    useful = 1 + min(1.0, max(0.0, waiting)) * (more - 1)
    return Forecast(seconds, age, count * useful / max(seconds, TINY) * math.exp(-age / age_scale), overlap, useful)


def reachable(now: Setting, limits: Limits) -> Iterator[Setting]:
    """Settings that one move leads to; `now` is the first."""
    yield now
    process = limits.in_process(now)
    move = max(process * (STEP - 1), limits.groups(now) / 2)
    one = limits.mini_batch
    for batch in (now.trigger, now.trigger * 2, now.trigger / 2, now.trigger + one, now.trigger - one):
        for load in SHARES:
            for held in SHARES:
                yield limits.within(now.concurrency * STEP**load, max(0.0, process + held * move), batch)


def best(now: Setting, rates: Rates, limits: Limits, age_scale: float) -> Setting:
    """The reachable setting with the largest J; of equals `now`, then the first."""
    return max(reachable(now, limits), key=lambda each: forecast(each, rates, limits, age_scale).fresh)
