"""How often prompts are answered correctly before anything is known of them: a Beta prior, fitted to first visits.

Data sets for reinforcement learning are full of prompts that are always or never answered correctly. Under Beta(1, 1) a
prompt with 0 of 8 correct responses still looks as if a tenth of them could be; under the prior of such a data set it
does not. The two parameters follow from the first two moments of P(correct) over prompts, both unbiased for any number
of responses: E[k / n] and E[k (k - 1) / (n (n - 1))]. First visits only: later ones are of prompts somebody chose.
Pure; standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLANK_VISITS = 16.0  # visits that Beta(1, 1), where it starts, is worth
BLANK_MEAN, BLANK_SQUARE = 1 / 2, 1 / 3  # moments of Beta(1, 1)
WINDOW = 1000.0  # visits after which an old one counts 1/e: the policy improves
LEAST_CORRELATION, MOST_CORRELATION = 0.02, 0.9  # of two responses to one prompt: Beta sums of 49 and 0.11
LEAST_PARAMETER = 0.05


def pairs(right: float, judged: int, doubt: float) -> float:
    """Mean of p_i p_j over the pairs of `judged` responses of which `right` are the sum of p, and `doubt` of p (1 - p).
    """
    return (right * (right - 1) + doubt) / (judged * (judged - 1))


@dataclass
class CorrectnessPrior:
    """Sums over first visits, decayed: their number, of k / n, of k (k - 1) / (n (n - 1))."""

    visits: float = 0.0
    mean: float = 0.0
    square: float = 0.0

    def add(self, right: float, judged: int, doubt: float = 0.0) -> None:
        """One prompt's first visit: `right` of `judged` responses were correct, some of them as predicted; `doubt` is
        the variance of these. A single response has no pairs."""
        if judged < 2:
            return
        kept = 1.0 - 1.0 / WINDOW
        self.visits = kept * self.visits + 1.0
        self.mean = kept * self.mean + right / judged
        self.square = kept * self.square + pairs(right, judged, doubt)

    def parameters(self) -> tuple[float, float]:
        """(alpha, beta) of a prompt never seen."""
        visits = BLANK_VISITS + self.visits
        mean = (BLANK_VISITS * BLANK_MEAN + self.mean) / visits
        square = (BLANK_VISITS * BLANK_SQUARE + self.square) / visits
        correlation = (square - mean * mean) / (mean * (1.0 - mean))
        total = 1.0 / min(MOST_CORRELATION, max(LEAST_CORRELATION, correlation)) - 1.0
        return max(LEAST_PARAMETER, mean * total), max(LEAST_PARAMETER, (1.0 - mean) * total)

    def to_state(self) -> list[float]:
        return [self.visits, self.mean, self.square]

    @classmethod
    def from_state(cls, state: Sequence[float]) -> CorrectnessPrior:
        """Raises ValueError for sums that no visits have."""
        prior = cls(*map(float, state))
        if not 0 <= prior.square <= prior.mean <= prior.visits <= 2 * WINDOW:  # nan fails, too
            raise ValueError(f"correctness {list(state)}")
        return prior
