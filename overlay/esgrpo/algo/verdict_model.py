"""An on-line logistic regression whose lessons are sums: whoever saw the outcomes, in whatever order, they add up.

Between two updates the weights stand still, and each outcome adds its gradient and its curvature at these weights.
An update, at a weight sync, takes the sums of all workers and makes one Newton step,

    H <- H + sum of r p (1 - p) x x',    weights <- weights + H^-1 sum of r (y - p) x,

the recursive Laplace approximation of the posterior (Spiegelhalter and Lauritzen, 1990) with a ridge as its prior. An
outcome that was seen by a coin of probability 1/r counts r. Pure; standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

RIDGE = 1.0  # prior precision of a weight, in log-odds
LARGEST_LOGIT = 12.0  # beyond it a probability is as good as 0 or 1
LARGEST_STEP = 2.0  # of a weight in one update: the first ones are far from where curvature was measured
FORGETTING = 1.0  # of curvature, per update; below 1 it adapts faster, and measured worse


def sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(logit, -LARGEST_LOGIT), LARGEST_LOGIT)))


def log_loss(probability: float, outcome: bool) -> float:
    """Nats; finite, because `sigmoid` never gives 0 or 1."""
    return -math.log(probability if outcome else 1.0 - probability)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x of matrix x = right, for a symmetric positive definite matrix, by Cholesky's factorisation."""
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(a * b for a, b in zip(lower[i][:j], lower[j][:j], strict=True))
            lower[i][j] = math.sqrt(rest) if i == j else rest / lower[j][j]
    half: list[float] = []
    for i in range(size):
        half.append((right[i] - sum(a * b for a, b in zip(lower[i][:i], half, strict=True))) / lower[i][i])
    result = [0.0] * size
    for i in reversed(range(size)):
        result[i] = (half[i] - sum(lower[j][i] * result[j] for j in range(i + 1, size))) / lower[i][i]
    return result


@dataclass
class Sums:
    """What outcomes add up to at the weights of one update. Curvature is the lower triangle, row by row."""

    gradient: list[float]
    curvature: list[float]

    @classmethod
    def empty(cls, size: int) -> Sums:
        return cls([0.0] * size, [0.0] * (size * (size + 1) // 2))

    def add(self, other: Sums) -> None:
        self.gradient = [a + b for a, b in zip(self.gradient, other.gradient, strict=True)]
        self.curvature = [a + b for a, b in zip(self.curvature, other.curvature, strict=True)]

    def learn(self, x: Sequence[float], residual: float, weight: float) -> None:
        """`residual`: y - p, so that p (1 - p) follows from it for y in {0, 1}."""
        bend = weight * abs(residual) * (1.0 - abs(residual))
        at = 0
        for i, value in enumerate(x):
            self.gradient[i] += weight * residual * value
            scaled = bend * value
            for other in x[:i + 1]:
                self.curvature[at] += scaled * other
                at += 1


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

    def probability(self, x: Sequence[float]) -> float:
        return sigmoid(sum(weight * x[column] for weight, column in zip(self.weights, self.columns, strict=True)))

    def learn(self, x: Sequence[float], correct: bool, weight: float = 1.0) -> None:
        """One outcome, at the present weights."""
        self.sums.learn([x[column] for column in self.columns], correct - self.probability(x), weight)

    def take(self) -> Sums:
        """What was learned since the last call, for `update` of every copy, the own one included."""
        taken, self.sums = self.sums, Sums.empty(len(self.columns))
        return taken

    def update(self, sums: Sums) -> None:
        """One Newton step by what all workers learned at these weights."""
        self.curvature = [FORGETTING * a + b for a, b in zip(self.curvature, sums.curvature, strict=True)]
        size, rows, at = len(self.columns), [], 0
        for i in range(size):
            rows.append(self.curvature[at:at + i + 1])
            at += i + 1
        matrix = [[rows[max(i, j)][min(i, j)] + (RIDGE if i == j else 0.0) for j in range(size)] for i in range(size)]
        step = solve(matrix, sums.gradient)
        self.weights = [weight + min(max(change, -LARGEST_STEP), LARGEST_STEP)
                        for weight, change in zip(self.weights, step, strict=True)]

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
        self.weights, self.curvature, self.sums = weights, curvature, Sums.empty(len(weights))
