"""Pruning rules as pure functions. Each says how far a case uses up what the rule allows: a score, None for no case.

A score lies in [0, 1]; `esgrpo.algo.audit` decides which scores are acted on. "False prune", per rule:

    resolved    the response differs in correctness from the members that had finished when it became a candidate
    enough      the response is correct (a late bloomer)
    repetition  the response is correct: one that ends by itself and is wrong loses nothing by being cut
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST_FINISHED = 2  # one finished member agrees with itself
BOTH_SIGNS = 2  # right and wrong answers: what a group needs for a gradient
UNINFORMED = (1.0, 1.0)  # Beta prior of a prompt without history: uniform

# Start of the length calibration, before any outcome: odds of differing doubled, and doubled again with every doubling
# of the length over the median finished sibling. Long answers differ more often; how much is learned.
START_INTERCEPT, START_SLOPE = math.log(2), math.log(2)
LEARNING_RATE = 0.05  # of the logistic regression, per outcome
LARGEST_WEIGHT = 10.0  # of an outcome in the calibration: one rare exemption must not throw it over
SMALLEST_PROBABILITY = 1e-9


def is_correct(score: float, acc, success_threshold: float) -> bool:
    """Correctness of one sample: a boolean `acc` decides, a number (else the score) is held against the threshold.

    The rule of `esgrpo.losses.correct_rows`, which tests hold this against.
    """
    verdict = acc.item() if hasattr(acc, "item") else acc
    if verdict is None or verdict != verdict:  # NaN differs from itself
        verdict = score
    return verdict if isinstance(verdict, bool) else verdict >= success_threshold


def enough(correct: Sequence[bool], size: int, finish_after: int) -> float | None:
    """Optional stopping: the finished members of `size` have what an update needs. The more have, the lower the score.

    Needed are `finish_after` (> 0) of them, among which at least one right and one wrong answer: a group without both
    signs has no gradient, however many of it have finished. Stopping by what was seen favours short answers, so this
    rule stands under the audit only: its rows carry weights.
    """
    finished = len(correct)
    if not 0 < finish_after <= finished or len(set(correct)) < BOTH_SIGNS:
        return None
    return (size - finished) / (size - finish_after) if finished > finish_after else 1.0


def differs(forecast: dict | None, finished: Sequence[bool]) -> float:
    """P(the next member differs), from the prompt's Beta posterior updated by finished members that all agree."""
    alpha, beta = UNINFORMED if not forecast else (forecast["alpha"], forecast["beta"])
    other = beta if finished[0] else alpha
    return other / (alpha + beta + len(finished))


class LengthCalibration:
    """Odds of differing, given that a response is longer than its tokens so far: a logistic regression kept on line.

    logit P = logit(P of `differs`) + intercept + slope * doublings, doublings = log2(tokens / median finished length),
    at least 0. Starts conservative. The slope never falls below 0: no data may claim that long answers differ less.
    """

    def __init__(self):
        self.intercept, self.slope = START_INTERCEPT, START_SLOPE

    @staticmethod
    def doublings(tokens: int, finished_tokens: Sequence[int]) -> float:
        ordered = sorted(finished_tokens)
        median = max(1, ordered[len(ordered) // 2])
        return max(0.0, math.log2(max(1, tokens) / median))

    def probability(self, prior: float, doublings: float) -> float:
        prior = min(max(prior, SMALLEST_PROBABILITY), 1 - SMALLEST_PROBABILITY)
        logit = math.log(prior / (1 - prior)) + self.intercept + self.slope * doublings
        return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))

    def learn(self, prior: float, doublings: float, differed: bool, weight: float) -> None:
        """One outcome; `weight` is 1 / keep probability, since pruned candidates have none."""
        error = float(differed) - self.probability(prior, doublings)
        step = LEARNING_RATE * min(weight, LARGEST_WEIGHT) * error
        self.intercept += step
        self.slope = max(0.0, self.slope + step * doublings)

    def restore(self, intercept: float, slope: float) -> None:
        """What an earlier run has learned. Raises ValueError when it cannot be that."""
        if not (math.isfinite(intercept) and math.isfinite(slope) and slope >= 0):
            raise ValueError(f"calibration {intercept}, {slope}")
        self.intercept, self.slope = float(intercept), float(slope)


def any_differs(probabilities: Sequence[float]) -> float:
    """P(at least one differs), as if they were independent.

    Members of a prompt share its unknown p, so they are positively associated, and this is an upper bound.
    """
    none = 1.0
    for probability in probabilities:
        none *= 1 - probability
    return 1 - none


def resolved(probabilities: Sequence[float], null_prob: float) -> float | None:
    """Nobody of the unfinished members is likely to differ from finished ones that agree."""
    if not probabilities:
        return None
    any_ = any_differs(probabilities)
    return any_ / null_prob if any_ < null_prob else None
