"""Length statistics of all responses: a bounded log-histogram, moments within and between prompts, and what a response
that was cut off still says.

Logarithms of lengths are taken as normal (papers: the reasoning-length distribution is log-normal in body and tail);
all functions take natural logarithms of tokens. Pure, standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BINS_PER_OCTAVE = 8  # a quantile is off by at most half a bin, 4.4 %
BINS = 24 * BINS_PER_OCTAVE  # up to 2**24 tokens
WINDOW = 20_000  # responses: an older one counts less than 1/e
RESCALE = 1e6  # weights are divided by this before they lose precision
PROMPT_SHARE = 0.65  # of the variance of log-lengths that the prompt explains: TailSieve, app. B
FIRST_VARIANCE = 1.0  # of log-lengths before two groups were seen
LEAST_VARIANCE = 1e-3  # equal lengths are no proof that the next one is equal, too
PRIOR_VISITS = (0.05, 20.0)  # bounds of the weight of the global mean, in responses
ENOUGH_DEGREES = 16.0  # degrees of freedom from which the measured share replaces PROMPT_SHARE
MOST_LOG = (BINS / BINS_PER_OCTAVE + 2) * math.log(2)  # of tokens: the last bin, and a cut response may count fourfold
MOST_VARIANCE = MOST_LOG**2
MOST_WEIGHT = 2.0 * WINDOW  # of all responses, in units of the newest
SLACK = 1e-2  # what rounding of a saved state may add
LEAST_GAP = 1e-9  # between the hazard and its argument, against rounding
FAR_TAIL = 1e-12  # probability below which the hazard is its asymptote


def _normal_density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def normal_above(x: float) -> float:
    """P(Z > x) of a standard normal, exact far out in the tail."""
    return 0.5 * math.erfc(x / math.sqrt(2))


def hazard(x: float) -> float:
    """E[Z | Z > x] of a standard normal: the inverse Mills ratio."""
    above = normal_above(x)
    return _normal_density(x) / above if above > FAR_TAIL else x + 1 / x


def censored(bound: float, mean: float, deviation: float) -> tuple[float, float, float]:
    """What "at least `bound`" says about the mean: (pseudo-observation, its weight in [0, 1], its square deviation).

    Fisher scoring of the Tobit likelihood: a bound far below the mean says nothing (weight 0), one far above it is
    as good as an observation (weight 1). The third value is E[(x - mean)**2 | x >= bound].
    """
    x = (bound - mean) / deviation
    rate = hazard(x)
    gap = max(rate - x, LEAST_GAP)
    weight = min(1.0, max(0.0, rate * gap))
    return mean + deviation / gap, weight, deviation**2 * max(0.0, 1 + x * rate)


def expected_beyond(bound: float, mean: float, deviation: float) -> float:
    """E[x | x >= bound]."""
    return mean + deviation * hazard((bound - mean) / deviation)


def student(normal: float, degrees: float) -> float:
    """Quantile of Student's t that belongs to the standard normal quantile `normal` (Cornish-Fisher, degrees >= 3)."""
    z = normal
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2


def expected_tokens(mean: float, variance: float, budget: float) -> float:
    """E[min(exp(x), budget)] for x ~ N(mean, variance), in tokens; a budget of 0 is none."""
    if not budget:
        return math.exp(min(mean + variance / 2, MOST_LOG))
    deviation, top = math.sqrt(variance), math.log(budget)
    below = math.exp(min(mean + variance / 2, 2 * top + 1)) * (1 - normal_above((top - mean - variance) / deviation))
    return min(budget, below + budget * normal_above((top - mean) / deviation))


def _plausible(variance: float) -> float:
    return min(MOST_VARIANCE, max(LEAST_VARIANCE, variance))


@dataclass
class Moments:
    """Weight, mean and summed square deviation; two of them can be joined (Chan's update)."""

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def plausible(self) -> bool:
        """Log-lengths of responses can have these moments; false for nan, too."""
        return (0 <= self.weight and 0 <= self.mean <= MOST_LOG
                and 0 <= self.squares <= self.weight * MOST_VARIANCE + SLACK)

    def scaled(self, factor: float) -> Moments:
        return Moments(self.weight * factor, self.mean, self.squares * factor)

    def joined(self, other: Moments) -> Moments:
        weight = self.weight + other.weight
        if weight <= 0:
            return Moments()
        gap = other.mean - self.mean
        return Moments(weight, self.mean + gap * other.weight / weight,
                       self.squares + other.squares + gap * gap * self.weight * other.weight / weight)


class LengthStatistics:
    """Running distribution of the response lengths of all prompts, exponentially forgotten over WINDOW responses.

    Invariants: quantile(q) does not decrease in q; memory is constant; the state round-trips.
    """

    def __init__(self):
        self._bins = [0.0] * BINS
        self._unit = 1.0  # weight of the next response: older ones stay as they are, newer ones weigh more
        self.all = Moments()  # of log-lengths
        self.within = 0.0  # summed square deviations from the mean of a prompt's visit
        self.degrees = 0.0

    def add(self, group: Moments, values: Sequence[float]) -> None:
        """One visit of a prompt: its moments, and one (possibly imputed) log-length per response."""
        for value in values:
            index = min(BINS - 1, max(0, int(value / math.log(2) * BINS_PER_OCTAVE)))
            self._bins[index] += self._unit
            self._unit *= 1 + 1 / WINDOW
        self.all = self.all.joined(group.scaled(self._unit))
        if group.weight > 1:
            self.within += group.squares * self._unit
            self.degrees += (group.weight - 1) * self._unit
        if self._unit > RESCALE:
            self._rescale()

    def _rescale(self) -> None:
        factor = 1 / self._unit
        self._bins = [weight * factor for weight in self._bins]
        self.all = self.all.scaled(factor)
        self.within, self.degrees, self._unit = self.within * factor, self.degrees * factor, 1.0

    @property
    def empty(self) -> bool:
        return self.all.weight <= 0

    def variances(self) -> tuple[float, float]:
        """(within a prompt, between prompts) of log-lengths."""
        known = self.degrees / self._unit
        total = FIRST_VARIANCE
        if self.all.weight / self._unit > 1:
            total = _plausible(self.all.squares / (self.all.weight - self._unit))
        if known < 1:
            return (1 - PROMPT_SHARE) * total, PROMPT_SHARE * total
        trust = min(1.0, known / ENOUGH_DEGREES)  # a few groups cannot tell the two parts apart
        within = trust * _plausible(self.within / self.degrees) + (1 - trust) * (1 - PROMPT_SHARE) * total
        return within, max(total - within, within / PRIOR_VISITS[1])

    def prior(self) -> tuple[float, float, float]:
        """(mean, weight in responses, variance within a prompt) that a prompt without history starts from."""
        within, between = self.variances()
        low, high = PRIOR_VISITS
        return self.all.mean, min(high, max(low, within / between)), within

    def quantile(self, q: float) -> float:
        """Tokens below which a share q of the responses lies; 0 when none was seen."""
        total = sum(self._bins)
        if total <= 0:
            return 0.0
        left, last = q * total, 0
        for index, weight in enumerate(self._bins):
            if weight:
                if left <= weight:
                    return 2 ** ((index + max(0.0, left) / weight) / BINS_PER_OCTAVE)
                left, last = left - weight, index
        return 2 ** ((last + 1) / BINS_PER_OCTAVE)

    def mean_tokens(self, budget: float) -> float:
        """Mean length in tokens, each cut at the budget (0: none)."""
        total = weighted = 0.0
        for index, weight in enumerate(self._bins):
            tokens = 2 ** ((index + 0.5) / BINS_PER_OCTAVE)
            total += weight
            weighted += weight * (min(tokens, budget) if budget else tokens)
        return weighted / total if total else 0.0

    def to_state(self) -> dict:
        """Plain JSON, in units of the newest response; changes nothing."""
        every = self.all.scaled(1 / self._unit)
        used = {str(index): weight / self._unit for index, weight in enumerate(self._bins) if weight}
        return {"bins": used, "all": [every.weight, every.mean, every.squares], "within": self.within / self._unit,
                "degrees": self.degrees / self._unit}

    @classmethod
    def from_state(cls, state: dict) -> LengthStatistics:
        """Raises KeyError, TypeError, ValueError or IndexError when `state` is not one of `to_state`."""
        statistics = cls()
        for index, weight in state["bins"].items():
            if not 0 <= int(index) < BINS:
                raise ValueError(f"bin {index}")
            statistics._bins[int(index)] = float(weight)
        weight, mean, squares = map(float, state["all"])
        statistics.all = Moments(weight, mean, squares)
        statistics.within, statistics.degrees = float(state["within"]), float(state["degrees"])
        every = statistics.all
        possible = (every.plausible and every.weight <= MOST_WEIGHT and 0 <= statistics.degrees <= MOST_WEIGHT
                    and 0 <= statistics.within <= every.weight * MOST_VARIANCE + SLACK
                    and all(0 <= weight <= MOST_WEIGHT for weight in statistics._bins)
                    and sum(statistics._bins) <= MOST_WEIGHT and (sum(statistics._bins) > 0 or every.weight <= 0))
        if not possible:
            raise ValueError("no responses have these length statistics")
        return statistics
