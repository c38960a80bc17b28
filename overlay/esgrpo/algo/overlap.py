"""Moves concurrency, staleness bound and trigger from version to version, by measured rates. Pure.

The law, and what its letters mean, is algo/overlap_law.py's; here stands what feeds it and when a setting moves.

Feed-forward. b / a is that of the engines' own steps over their batch, which fills and drains in every version: no move
is needed to learn what more in flight costs. a is the time of such a step, of which QUICK is taken over at once, times
the steps that a token of a group in flight takes, whose mean moves by SMOOTH. Train time is a line over the last
MEMORY versions; two in a row that are JUMP off it mean another speed, and rescale it. What it has beside tokens is a
trigger's own, d, only as far as believed, until triggers of two sizes were seen.

Feedback. h starts at FIRST_STOCK; while training is the slower side it falls by LESS in a version in which the trainer
hardly waited for groups, and rises by MORE in one in which it did. `trust` falls by TIGHTEN when entropy falls or loss,
KL or gradient norm rises, twice running beyond what is usual; it comes back by WIDEN a version after CALM quiet ones.
In one version concurrency moves by at most STEP, what is in process by STEP or half a version, the trigger by 2 or one
unit, and all only for a gain above DEAD_BAND, which doubles each time a setting, or a trigger, comes back within RETURN
versions and is itself again after a move of another cause than rates. When the measured J stays below what the start
setting would bring at present rates, the start setting comes back, each time for twice as long. The replicas' roles are
not moved here: they stay with verl's policy.

Signals may be missing, late, constant or NaN: what is not measured keeps its last estimate, a version that was seen is
ignored, and after LOST versions without rates the start setting comes back. Standard library only.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from esgrpo.algo.overlap_law import FIRST_STOCK, TINY, Forecast, Limits, Rates, Setting, best, flow, forecast

DEAD_BAND = 0.02  # relative gain in J below which nothing moves
RETURN = 4  # versions within which a setting that comes back was left for nothing
FORGET = 0.8  # weight of a version against the next one, in the lines
MEMORY = 12  # versions in a line
PRIOR = 0.1  # weight of what is believed of a line's level before it was measured, in versions
TRAIN_LEVEL, DECODE_LEVEL = 0.1, 0.5  # that belief: the share of the time that does not depend on the load
LEAST_LEVEL = 0.1  # of it, that engines may say
SETTLED = 3  # batches of a size before one can be off
JUMP = 1.25  # factor by which a measurement is off its line
SMOOTH, QUICK, USUAL = 0.4, 0.7, 0.1  # of a new value in a running mean; of one that many steps make; of what is usual
BASE = 2  # versions at the start setting by which it is known
LOST = 6
STOCK, LESS, MORE, NO_WAIT, WAITED = (0.5, 1.5), 0.03, 0.06, 0.01, 0.04  # bounds, steps of h; shares of a version
TIGHTEN, WIDEN, CALM, LEAST_TRUST = 0.7, 1.15, 3, 0.2
ALARM, LEAST_DEVIATION, DRIFT, WATCHED = 3.0, 0.05, 0.5, 5  # deviations; of mean; of first level; versions
LOSS, PATIENCE, HOLD = 0.05, 4, 8  # relative to the start setting; versions; versions
MOST = 1e12  # what is measured lies between it and TINY


class Cause(str, enum.Enum):
    """Why a setting changed."""

    RATES = "rates"
    TIGHTENED = "tightened"  # an alarm of entropy, loss, KL or gradient norm
    WIDENED = "widened"
    NO_GAIN = "no gain"  # back to the start setting
    LOST = "signals lost"  # the same
    END = "end of data"  # no larger trigger would be filled

    __str__ = str.__str__


@dataclass(frozen=True)
class Window:
    """What was measured between two weight versions; None or NaN: it was not."""

    version: int
    seconds: float | None = None
    tokens: float | None = None  # decoded by all replicas, less those of groups that were left out for others
    in_flight: float | None = None  # groups, mean over `seconds`
    group_tokens: float | None = None  # of a finished group, mean: all its responses
    trained_tokens: float | None = None
    train_s: float | None = None  # the trainer at work, all of the version
    sync_s: float | None = None  # of the trainer: for the weight sync, and for what else a version costs it once
    step_s: float | None = None  # of an engine's step that only decodes, mean
    decode_level: float | None = None  # share of a decode step's time that does not depend on its batch, on the mean
    pause_s: float | None = None  # a replica decodes nothing because of it, aborts and prefills included
    wait_s: float | None = None  # of the trainer, for groups
    age: float | None = None  # optimiser steps between making a token and training on it, mean of trained tokens
    entropy: float | None = None  # or the mean surprisal of sampled tokens
    loss: float | None = None
    kl: float | None = None
    grad_norm: float | None = None
    null_share: float | None = None  # of finished groups those without a gradient, where `null_groups` is `spare`


@dataclass(frozen=True)
class Change:
    """One event: a setting moved."""

    time: float
    version: int
    cause: Cause
    before: Setting
    after: Setting
    trust: float
    forecast: Forecast | None = None  # of `after`


def number(value: float | None, least: float = -MOST) -> float | None:
    """None unless it is a number within [least, MOST]."""
    return float(value) if isinstance(value, int | float) and least <= value <= MOST else None


def line(points: Sequence[tuple[float, float]], share: float) -> tuple[float, float]:
    """Level and slope of y = level + slope x, none below 0, by least squares over points, the newest last, x above 0.
    `share`: of y, which is taken to be level while all x are alike."""
    rows = [(FORGET**ago, *point) for ago, point in enumerate(reversed(points))]
    total = sum(w for w, _, _ in rows)
    x, y = sum(w * px for w, px, _ in rows) / total, sum(w * py for w, _, py in rows) / total
    across = sum(w * (px - x) ** 2 for w, px, _ in rows) + PRIOR * x * x
    along = sum(w * (px - x) * (py - y) for w, px, py in rows) + PRIOR * x * y * (1 - share)
    slope = min(max(along / across, 0.0), y / x)
    return max(0.0, y - slope * x), slope


@dataclass
class Training:
    """The law's d + e tokens, of a trigger, over the last ones. What their time does not owe to tokens is again a line,
    over their groups (rows, micro-batches, optimiser steps): only batches of another size tell what a larger one would
    save."""

    batches: deque = field(default_factory=lambda: deque(maxlen=MEMORY))  # groups, tokens, seconds
    doubted: tuple[int, float, float, float] | None = None  # one that is off, and by which factor

    def add(self, groups: int, tokens: float, seconds: float) -> None:
        """One that is off by JUMP waits for the next: off to the same side, the speed has changed and all before is
        rescaled; off to the other side, both are noise; if that one is not off, the first is forgotten."""
        factor = self._factor(groups, tokens, seconds)
        off = not 1 / JUMP < factor < JUMP
        before, self.doubted = self.doubted, None
        if off and before is None:
            self.doubted = groups, tokens, seconds, factor
            return
        if off:
            if (factor > 1) == (before[-1] > 1):
                scale = math.sqrt(factor * before[-1])
                self.batches = deque(((*batch, took * scale) for *batch, took in self.batches), maxlen=MEMORY)
            self.batches.append(before[:-1])
        self.batches.append((groups, tokens, seconds))

    def _factor(self, groups: int, tokens: float, seconds: float) -> float:
        """Over what its tokens say or over the mean of its size, whichever is nearer."""
        alike = [took for size, _, took in self.batches if size == groups]
        if len(alike) < SETTLED:
            return 1.0
        level, by_group, by_token = self._parts()
        expected = level + by_group * groups + by_token * tokens, sum(alike) / len(alike)
        return min((seconds / max(each, TINY) for each in expected), key=lambda factor: abs(math.log(factor)))

    def _parts(self) -> tuple[float, float, float]:
        """Seconds of a trigger, of a group beside its tokens, of a token; at least one batch."""
        _, by_token = line([(tokens, seconds) for _, tokens, seconds in self.batches], TRAIN_LEVEL)
        rest = [(groups, max(seconds - by_token * tokens, TINY)) for groups, tokens, seconds in self.batches]
        believed = TRAIN_LEVEL * sum(seconds for *_, seconds in self.batches) / sum(seconds for _, seconds in rest)
        return *line(rest, min(believed, 1.0)), by_token

    def fit(self, group_tokens: float) -> tuple[float, float]:
        level, by_group, by_token = self._parts()
        return level, by_token + by_group / group_tokens


@dataclass
class Decoding:
    """The law's a + b f. It grows with f as the steps of the engines do with their batch; their speed is followed at
    once, and slowly how many of them a token of a group in flight takes."""

    level: float | None = None  # a
    growth: float | None = None  # b / a
    steps: float | None = None  # of an engine, a token and a group in flight

    def add(self, inflight: float, cost: float, step_s: float | None, share: float | None) -> None:
        """`cost`: f / (tokens/s); `share`: of a step's time that does not depend on its batch."""
        if share is not None or self.growth is None:
            share = DECODE_LEVEL if share is None else min(max(share, LEAST_LEVEL), 1.0)
            self.growth = _smooth(self.growth, (1 / share - 1) / inflight)
        if step_s is not None:
            self.steps = _smooth(self.steps, cost / step_s)
            cost = self.steps * step_s
        self.level = _smooth(self.level, cost / (1 + self.growth * inflight), SMOOTH if step_s is None else QUICK)

    def fit(self) -> tuple[float, float]:
        return self.level, self.level * self.growth


@dataclass
class Watch:
    """One signal of training; `rises`: what is alarming."""

    rises: bool
    drifts: bool = False  # also alarming: a fall below DRIFT of the level it began with
    mean: float = 0.0
    deviation: float = 0.0
    seen: int = 0
    level: float = 0.0
    doubted: float | None = None  # how far the value before this one was off, where that was too far

    def alarms(self, value: float | None) -> bool:
        """A rise must last: of a batch's loss or gradient norm one version in thirty is that far off by chance."""
        value = number(value)
        if value is None:
            return False
        self.seen += 1
        gain = max(1 / self.seen, USUAL)
        off = value - self.mean if self.seen > 1 else 0.0
        beyond = self.seen > WATCHED and (off if self.rises else -off) > ALARM * max(
            self.deviation, LEAST_DEVIATION * abs(self.mean))
        alarm = beyond and self.doubted is not None
        if not beyond:
            for each in (self.doubted, off):
                self.deviation += gain * (abs(each) - self.deviation) if each is not None else 0.0
        self.doubted = off if beyond else None
        self.mean = value if self.seen == 1 else self.mean + gain * off
        if self.seen == WATCHED:
            self.level = self.mean
        if self.drifts and self.seen > WATCHED and self.level > 0 and self.mean < DRIFT * self.level:
            self.level, alarm = self.mean, True
        return alarm


class Controller:
    """Moves a setting from version to version. Invariants: it stays within the limits; one `observe` changes it by one
    step at most, or to the start setting; a trigger is a multiple of the mini-batch."""

    def __init__(self, start: Setting, limits: Limits, age_scale: float, clock: Callable[[], float]):
        self.limits, self.age_scale, self.clock = limits, age_scale, clock
        self.start = self.setting = limits.within(start.concurrency, limits.in_process(start), start.trigger)
        self.trust = 1.0
        self.watches = {"entropy": Watch(False, True), "loss": Watch(True), "kl": Watch(True), "grad_norm": Watch(True)}
        self._decode, self._train = Decoding(), Training()
        self._group_tokens: float | None = None
        self._sync = self._pause = 0.0
        self._stock, self._null_share = FIRST_STOCK, 0.0
        self._version = -1
        self._calm = self._blind = 0
        self._base: list[float] = []  # measured J of the start setting over its forecast
        self._fresh: float | None = None
        self._poor = self._held = 0
        self._hold = HOLD
        self._band = DEAD_BAND
        self._left: deque[tuple[int, Setting]] = deque(maxlen=RETURN)

    @property
    def rates(self) -> Rates | None:
        """None before all that the law needs was measured once."""
        if self._group_tokens is None or self._decode.level is None or not self._train.batches:
            return None
        train = self._train.fit(self._group_tokens)
        return Rates(self._group_tokens, self._decode.fit(), train, self._sync, self._pause, self._stock,
                     self._null_share)

    def observe(self, window: Window) -> Change | None:
        """Take in a version and move; None where nothing moves. A version that is not newer is ignored."""
        if window.version <= self._version:
            return None
        self._version = window.version
        trusted, self.trust = self.trust, self._trusts(window)
        known = self._measure(window)
        self._blind = 0 if known else self._blind + 1
        if self._blind >= LOST:
            return self._back(Cause.LOST)
        rates = self.rates
        if rates is None or not known and self.trust >= trusted:
            return None
        scale = self.age_scale * self.trust
        if not self._gains(window, rates, scale):
            return self._back(Cause.NO_GAIN)
        if self._held > 0:
            self._held -= 1
            return None
        if len(self._base) < BASE:
            return None
        after = best(self.setting, rates, self.limits, scale)
        now, then = (forecast(each, rates, self.limits, scale) for each in (self.setting, after))
        if then.fresh <= now.fresh * (1 + self._band):
            return None
        cause = Cause.TIGHTENED if self.trust < trusted else Cause.WIDENED if self.trust > trusted else Cause.RATES
        return self._move(after, cause, then)

    def _trusts(self, window: Window) -> float:
        alarms = [watch.alarms(getattr(window, name)) for name, watch in self.watches.items()]
        self._calm = 0 if any(alarms) else self._calm + 1
        if any(alarms):
            return max(LEAST_TRUST, self.trust * TIGHTEN)
        return min(1.0, self.trust * WIDEN) if self._calm > CALM else self.trust

    def _measure(self, window: Window) -> bool:
        """Whether the rates of rollout and training were in it."""
        seconds, tokens = number(window.seconds, TINY), number(window.tokens, TINY)
        inflight, group_tokens = number(window.in_flight, TINY), number(window.group_tokens, TINY)
        trained, train = number(window.trained_tokens, TINY), number(window.train_s, TINY)
        sync, pause = number(window.sync_s, 0.0), number(window.pause_s, 0.0)
        self._sync = self._sync if sync is None else _smooth(self._sync or None, sync)
        self._pause = self._pause if pause is None else _smooth(self._pause or None, pause)
        nulls = number(window.null_share, 0.0)
        if nulls is not None:
            self._null_share = _smooth(self._null_share or None, min(nulls, 1.0))
        if group_tokens:
            self._group_tokens = _smooth(self._group_tokens, group_tokens)
        if seconds and tokens and inflight:
            self._decode.add(inflight, inflight * max(seconds - self._pause, seconds / 2) / tokens,
                             number(window.step_s, TINY), number(window.decode_level, 0.0))
        if trained and train:
            triggers = self.limits.triggers_per_version
            self._train.add(self.setting.trigger, trained / triggers, train / triggers)
        known = bool(seconds and tokens and inflight and trained and train)
        wait = number(window.wait_s, 0.0)
        if known and wait is not None and self.rates is not None:
            self._correct(wait / seconds)
        return known

    def _correct(self, waited: float) -> None:
        """The stock, by the share of the version that the trainer waited, where training is the slower side."""
        rollout, train, _, _ = flow(self.setting, self.rates, self.limits)
        if rollout < train and not NO_WAIT <= waited <= WAITED:
            change = -LESS if waited < NO_WAIT else MORE
            self._stock = min(max(self._stock + change, STOCK[0]), STOCK[1])

    def _gains(self, window: Window, rates: Rates, scale: float) -> bool:
        """False when the measured J stays below what the start setting would bring now."""
        seconds, trained = number(window.seconds, TINY), number(window.trained_tokens, 0.0)
        if seconds is None or trained is None:
            return True
        age, now = number(window.age, 0.0), forecast(self.setting, rates, self.limits, scale)
        learns = self.setting == self.start and len(self._base) < BASE
        # a run's first tokens are younger than its setting makes them: by their own age a staleness of 8 looked five
        # times as good as it is, and what left it was taken back
        age = now.age if age is None else max(age, now.age) if learns else age
        fresh = trained / seconds * now.useful * math.exp(-age / scale)
        expected = rates.group_tokens * forecast(self.start, rates, self.limits, scale).fresh
        if learns:
            self._base.append(fresh / max(expected, TINY))
            return True
        self._fresh = _smooth(self._fresh, fresh)
        if self.setting == self.start or self._held:
            return True
        base = expected * min(self._base, default=0.0)
        self._poor = self._poor + 1 if self._fresh < base * (1 - LOSS) else 0
        return self._poor < PATIENCE

    def _back(self, cause: Cause) -> Change | None:
        self._poor, self._fresh = 0, None
        if cause == Cause.NO_GAIN:
            self._held, self._hold = self._hold, 2 * self._hold
        return self._move(self.start, cause, None)

    def _move(self, after: Setting, cause: Cause, then: Forecast | None) -> Change | None:
        before, self.setting = self.setting, after
        if before == after:
            return None
        if cause != Cause.RATES:
            self._band = DEAD_BAND
        elif any(left == after or left.trigger == after.trigger != before.trigger
                 for version, left in self._left if self._version - version <= RETURN):
            self._band *= 2
        self._left.append((self._version, before))
        return Change(self.clock(), self._version, cause, before, after, self.trust, then)


def _smooth(old: float | None, new: float, gain: float = SMOOTH) -> float:
    return new if old is None else old + gain * (new - old)
