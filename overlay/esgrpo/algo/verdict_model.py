"""An on-line logistic regression whose lessons are sums: whoever saw the outcomes, in whatever order, they add up.

Between two updates the weights stand still, and each outcome adds its gradient and its curvature at these weights.
An update, at a weight sync, takes the sums of all workers and makes one step,

    weights <- weights + (H + B)^-1 sum of r (y - p) x,    H <- H + sum of r p (1 - p) x x',

where H is the precision of the recursive Laplace approximation of the posterior (Spiegelhalter and Lauritzen, 1990),
with a ridge as its prior. B sums r (p - 1/2) / logit(p) x x', the curvature of a parabola that lies below the
log-likelihood of these outcomes everywhere (Jaakkola and Jordan, 2000): the step cannot make what is known less likely.
With p (1 - p), which vanishes where the model is certain and wrong, steps grew beyond all measure. An outcome that was
seen by a coin of probability 1/r counts r; y may be a probability. Pure; standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add, itemgetter, mul

RIDGE = 1.0  # prior precision of a weight, in log-odds
LARGEST_LOGIT = 12.0  # beyond it a probability is as good as 0 or 1


def sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(logit, -LARGEST_LOGIT), LARGEST_LOGIT)))


def log_loss(probability: float, outcome: bool) -> float:
    """Nats; finite, because `sigmoid` never gives 0 or 1."""
    return -math.log(probability if outcome else 1.0 - probability)


def cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Lower triangle L, row by row, with L L' = matrix, which is symmetric and positive definite."""
    lower: list[list[float]] = []
    for i, row in enumerate(matrix):
        mine: list[float] = []
        for j in range(i):
            mine.append((row[j] - sum(map(mul, mine, lower[j]))) / lower[j][j])
        lower.append([*mine, math.sqrt(row[i] - sum(map(mul, mine, mine)))])
    return lower


def forward(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x of L x = right."""
    found: list[float] = []
    for row, value in zip(lower, right, strict=True):
        found.append((value - sum(map(mul, row, found))) / row[-1])
    return found


def backward(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x of L' x = right."""
    rest = list(right)
    for i in reversed(range(len(rest))):
        rest[i] /= lower[i][i]
        for j in range(i):
            rest[j] -= lower[i][j] * rest[i]
    return rest


def bound(probability: float) -> float:
    """Of the curvature of a log-likelihood in its logit, anywhere: that of the parabola that touches it here."""
    logit = math.log(probability / (1.0 - probability))
    return (probability - 0.5) / logit if logit else 0.25


@dataclass
class Sums:
    """What outcomes add up to at the weights of one update. Matrices are lower triangles, row by row."""

    gradient: list[float]
    curvature: list[float]
    bound: list[float]

    @classmethod
    def empty(cls, size: int) -> Sums:
        entries = size * (size + 1) // 2
        return cls([0.0] * size, [0.0] * entries, [0.0] * entries)

    def add(self, other: Sums) -> None:
        self.gradient = list(map(add, self.gradient, other.gradient))
        self.curvature = list(map(add, self.curvature, other.curvature))
        self.bound = list(map(add, self.bound, other.bound))

    def learn(self, x: Sequence[float], probability: float, outcome: float, weight: float) -> None:
        self.correct(x, weight * (outcome - probability))
        bend, most = weight * probability * (1.0 - probability), weight * bound(probability)
        curvature, bounds, at = self.curvature, self.bound, 0
        for i, value in enumerate(x):
            bent, bounded = bend * value, most * value
            for other in x[:i + 1]:
                curvature[at] += bent * other
                bounds[at] += bounded * other
                at += 1

    def correct(self, x: Sequence[float], residual: float) -> None:
        """What was learned of x was off by `residual`, weight included; its curvature is in the sums."""
        for i, value in enumerate(x):
            self.gradient[i] += residual * value


@dataclass
class Logistic:
    """P(correct) of a response by some of its features."""

    columns: tuple[int, ...]
    weights: list[float] = field(default_factory=list)
    curvature: list[float] = field(default_factory=list)  # lower triangle, without the ridge
    sums: Sums = field(init=False)  # since the last update

    def __post_init__(self):
        size = len(self.columns)
        self.weights = self.weights or [0.0] * size
        self.curvature = self.curvature or Sums.empty(size).curvature
        self.sums = Sums.empty(size)
        self._of = itemgetter(*self.columns) if size > 1 else lambda x: (x[self.columns[0]],)
        self._precision = cholesky(self._matrix(self.curvature))

    def probability(self, x: Sequence[float]) -> float:
        return sigmoid(sum(map(mul, self.weights, self._of(x))))

    def moderated(self, x: Sequence[float]) -> float:
        """The same, over all weights that the outcomes leave possible: nearer to 1/2 where little is known of such an x
        (MacKay's approximation, 1992)."""
        mine = self._of(x)
        off = forward(self._precision, mine)
        return sigmoid(sum(map(mul, self.weights, mine)) / math.sqrt(1.0 + math.pi / 8.0 * sum(map(mul, off, off))))

    def learn(self, x: Sequence[float], outcome: float, weight: float = 1.0) -> None:
        """One outcome, or the probability of one, at the present weights."""
        self.sums.learn(self._of(x), self.probability(x), outcome, weight)

    def correct(self, x: Sequence[float], residual: float) -> None:
        self.sums.correct(self._of(x), residual)

    def take(self) -> Sums:
        """What was learned since the last call, for `update` of every copy, the own one included."""
        taken, self.sums = self.sums, Sums.empty(len(self.columns))
        return taken

    def _matrix(self, *triangles: Sequence[float]) -> list[list[float]]:
        """Lower triangle of the sum and of the ridge, as rows."""
        rows, at = [], 0
        for i in range(len(self.columns)):
            row = [sum(values) for values in zip(*(triangle[at:at + i + 1] for triangle in triangles), strict=True)]
            row[i] += RIDGE
            rows.append(row)
            at += i + 1
        return rows

    def update(self, sums: Sums) -> None:
        """One step by what all workers learned at these weights."""
        lower = cholesky(self._matrix(self.curvature, sums.bound))
        self.weights = list(map(add, self.weights, backward(lower, forward(lower, sums.gradient))))
        self.curvature = list(map(add, self.curvature, sums.curvature))
        self._precision = cholesky(self._matrix(self.curvature))

    def to_state(self) -> list[list[float]]:
        return [list(self.weights), list(self.curvature)]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Raises ValueError when it is damaged, or of other features."""
        try:
            weights, curvature = ([float(value) for value in part] for part in state)
        except TypeError as error:
            raise ValueError(str(error)) from None
        if len(weights) != len(self.columns) or len(curvature) != len(self.sums.curvature):
            raise ValueError(f"{len(weights)} weights of {len(self.columns)}")
        diagonal = [curvature[i * (i + 3) // 2] for i in range(len(weights))]
        if not all(map(math.isfinite, weights + curvature)) or min(diagonal) < 0:
            raise ValueError("weights that no outcomes give")
        try:
            precision = cholesky(self._matrix(curvature))
        except ValueError:
            raise ValueError("curvature that no outcomes give") from None
        self.weights, self.curvature, self.sums = weights, curvature, Sums.empty(len(weights))
        self._precision = precision
