"""What the text of a prompt says of how often it will be answered correctly, before anybody has tried it.

In the first epoch no prompt has a history, and a sampler that knows all prompts alike chooses by accident. Data sets
mix sources, topics and sizes of numbers, and policies fail on some of them more than on others: that can be learned
while the epoch runs. A logistic regression on hashed indicators (source, length, how many and how large the numbers
are, words and pairs of words) moves the mean of the prior away from that of all prompts (correctness_prior.py); the
strength of the prior follows from how far outcomes lie from the predicted means.

It is used only while it has shown that it tells prompts apart: each first visit is predicted before it is learned
from, and sums of log-likelihood ratios, old visits counting less, must be above log(OPENS_AT): against the prior of all
prompts, and against the same model with indicators that all prompts have. The former follows slowly, so that whatever
learns how often prompts are answered correctly at all would soon win; the latter follows fast, and errs where there is
nothing to follow.
Pure; standard library only.
"""

from __future__ import annotations

import math
import re
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from esgrpo.algo.correctness_prior import (
    LEAST_CORRELATION,
    LEAST_PARAMETER,
    MOST_CORRELATION,
    CorrectnessPrior,
    pairs,
)

BUCKETS = 4096  # of hashed features; an index fits into two bytes
MOST_WORDS = 24  # words and pairs of words of one prompt: those with the smallest hashes, alike in every prompt
RATE = 0.2  # of AdaGrad, log-odds
WINDOW = 500.0  # first visits after which an old ratio counts 1/e
KEPT = 1.0 - 1.0 / WINDOW
OPENS_AT = 100.0  # likelihood ratio
BLANK_VISITS = 16.0  # visits that the strength of the prior of all prompts is worth
PIECES = re.compile(r"[A-Za-z]+|\d+|[^\sA-Za-z\d]")
DECIMALS = 5  # of the saved state


def _bucket(name: str) -> int:
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % BUCKETS


def features_of(text: str, source: str = "") -> array:
    """Indices of the indicators that a prompt has, without repetition; a number counts by its digits alone."""
    pieces = [f"#{len(piece)}" if piece.isdigit() else piece.lower() for piece in PIECES.findall(text)]
    numbers = [piece for piece in pieces if piece[0] == "#" and piece != "#"]
    named = [f"source {source}", f"length {round(2 * math.log2(1 + len(text)))}",
             f"numbers {min(len(numbers), MOST_WORDS)}", f"largest {max(numbers, key=len, default='')}",
             f"digits {sum(int(number[1:]) for number in numbers) // 2}"]
    words = sorted({_bucket(word) for word in [*pieces, *map(" ".join, zip(pieces, pieces[1:], strict=False))]})
    return array("H", dict.fromkeys([*map(_bucket, named), *words[:MOST_WORDS]]))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def log_likelihood(right: float, judged: int, alpha: float, beta: float) -> float:
    """Of `right` among `judged` responses in a given order when P(correct) ~ Beta(alpha, beta), nats."""
    return _log_beta(alpha + right, beta + judged - right) - _log_beta(alpha, beta)


@dataclass
class Model:
    """Weights in log-odds, their sums of squared gradients, and what the strength of the prior follows from.

    visits, spread, room: decayed sums over first visits of 1, of the unbiased estimate of (p - mean)^2, and of
    mean (1 - mean).
    """

    weights: dict[int, float] = field(default_factory=dict)
    squares: dict[int, float] = field(default_factory=dict)
    visits: float = 0.0
    spread: float = 0.0
    room: float = 0.0

    def mean(self, features: Sequence[int], base: float) -> float:
        """Predicted P(correct); `base` is that of all prompts, strictly between 0 and 1."""
        moved = sum(self.weights.get(index, 0.0) for index in features) / math.sqrt(max(1, len(features)))
        return 1.0 / (1.0 + math.exp(-(math.log(base / (1.0 - base)) + moved)))

    def parameters(self, features: Sequence[int], base: CorrectnessPrior) -> tuple[float, float]:
        """(alpha, beta) of a prompt with these features."""
        alpha, beta = base.parameters()
        mean = self.mean(features, alpha / (alpha + beta))
        correlation = 1.0 / (1.0 + alpha + beta)
        blank = BLANK_VISITS * mean * (1.0 - mean)
        correlation = (blank * correlation + self.spread) / (blank + self.room) if blank + self.room else correlation
        total = 1.0 / min(MOST_CORRELATION, max(LEAST_CORRELATION, correlation)) - 1.0
        return max(LEAST_PARAMETER, mean * total), max(LEAST_PARAMETER, (1.0 - mean) * total)

    def learn(self, features: Sequence[int], right: float, judged: int, base: CorrectnessPrior, doubt: float) -> None:
        alpha, beta = base.parameters()
        mean, share = self.mean(features, alpha / (alpha + beta)), right / judged
        self.visits = KEPT * self.visits + 1.0
        self.spread = max(0.0, KEPT * self.spread + pairs(right, judged, doubt) - 2.0 * mean * share + mean * mean)
        self.room = KEPT * self.room + mean * (1.0 - mean)
        scale = 1.0 / math.sqrt(len(features))
        for index in features:
            weight = self.weights.get(index, 0.0)
            slope = (mean - share) * scale
            square = self.squares[index] = self.squares.get(index, 0.0) + slope * slope
            self.weights[index] = weight - RATE * slope / math.sqrt(square) if square else weight

    def to_state(self) -> dict:
        """May run in another thread than `learn`."""
        weights = {str(index): [round(weight, DECIMALS), round(self.squares[index], DECIMALS)]
                   for index, weight in list(self.weights.items())}
        return {"weights": weights, "sums": [self.visits, self.spread, self.room]}

    @classmethod
    def from_state(cls, state: dict) -> Model:
        """Raises ValueError for numbers that no visits have."""
        rows = {int(index): tuple(map(float, row)) for index, row in state["weights"].items()}
        visits, spread, room = sums = tuple(map(float, state["sums"][:3]))  # older states have the evidence behind them
        fits = all(0 <= index < BUCKETS and math.isfinite(weight) and square >= 0 and math.isfinite(square)
                   for index, (weight, square) in rows.items())
        if not (fits and all(0 <= value <= 2 * WINDOW for value in sums)):
            raise ValueError(f"prior of prompts' texts: {state['sums']}")
        return cls({i: row[0] for i, row in rows.items()}, {i: row[1] for i, row in rows.items()}, visits, spread, room)


@dataclass
class PromptPrior:
    """What prompts' texts say, beside the same model with as many indicators that all prompts have, so that it learns
    as fast how often any prompt is answered correctly now. ratios: decayed sums of log-likelihood ratios, nats, against
    the prior of all prompts and against that model."""

    texts: Model = field(default_factory=Model)
    level: Model = field(default_factory=Model)
    ratios: tuple[float, float] = (0.0, 0.0)

    @property
    def evidence(self) -> float:
        """Nats, that the text says more than that prompts are prompts."""
        return min(self.ratios)

    @property
    def open(self) -> bool:
        return self.evidence > math.log(OPENS_AT)

    @property
    def visits(self) -> float:
        return self.texts.visits

    def parameters(self, features: Sequence[int], base: CorrectnessPrior) -> tuple[float, float]:
        """(alpha, beta) of a prompt with these features, whether the text may be trusted or not."""
        return self.texts.parameters(features, base)

    def learn(self, features: Sequence[int], right: float, judged: int, base: CorrectnessPrior,
              doubt: float = 0.0) -> None:
        """One prompt's first visit (as of `CorrectnessPrior.add`), to be called before `base` learns of it: predict,
        compare, then learn."""
        if judged < 2 or not features:
            return
        alike = range(len(features))
        ours = log_likelihood(right, judged, *self.texts.parameters(features, base))
        theirs = base.parameters(), self.level.parameters(alike, base)
        self.ratios = tuple(KEPT * ratio + ours - log_likelihood(right, judged, *parameters)
                            for ratio, parameters in zip(self.ratios, theirs, strict=True))
        self.texts.learn(features, right, judged, base, doubt)
        self.level.learn(alike, right, judged, base, doubt)

    def to_state(self) -> dict:
        return {**self.texts.to_state(), "level": self.level.to_state(), "ratios": list(self.ratios)}

    @classmethod
    def from_state(cls, state: dict) -> PromptPrior:
        """Raises ValueError for numbers that no visits have. Older states compared with the prior of all prompts alone:
        what they learned stays, and whether it may be trusted is asked anew."""
        prior = cls(Model.from_state(state))
        if "level" in state:
            against_all, against_level = map(float, state["ratios"])
            prior.level, prior.ratios = Model.from_state(state["level"]), (against_all, against_level)
        if not all(map(math.isfinite, prior.ratios)):
            raise ValueError(f"prior of prompts' texts: ratios {prior.ratios}")
        return prior
