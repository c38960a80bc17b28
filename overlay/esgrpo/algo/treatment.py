"""What becomes of a response that is cut before its own end: of its row, its reward, and the weights of the others.

One setting, `prune.treatment`, for every rule. R is the reward of the complete response, m the reward that was
predicted for it before its coin was tossed, w = kept / pi, and b the mean of the other members' rewards as the
treatment has them.

    failed         trained as it is, with the score that the reward function gives to what there is: that of a failure.
                   GRPO over these rewards, without weights (but `CutWeights`). Off by the gradient of what is lost
                   with a false cut
    value          trained as it is, with the reward m. Off by the gradient of the tail only, which is small where m is
                   near an end of the scale
    doubly_robust  the tokens up to the decision get m + w (R - m) - b, those after it w (R - b): no bias, whatever m
                   is, and the less variance the better m is
    masked         left out; those that were spared get w (R - b), measured from a pivot: no bias

A coin is tossed for all of them under an audit, to see how often a cut is wrong; only the last two need it to estimate.
Pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from esgrpo.algo.audit import SAMPLED
from esgrpo.algo.terms import Outcome, Rule, Treatment

ASSUMED = 10  # candidates of the whole budget, that count beside those whose length was seen
NEWEST = 200  # of each rule that are remembered: the policy changes


@dataclass
class Mean:
    """Running mean; exactly the value where all values are equal."""

    count: int = 0
    value: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / self.count


class Rewards:
    """What right and wrong responses got so far: the scale that a predicted probability of success is put on."""

    def __init__(self):
        self._means = {True: Mean(), False: Mean()}

    def learn(self, correct: bool, score: float) -> None:
        self._means[correct].add(score)

    def predicted(self, success: float) -> float | None:
        """Expected reward of a response that is right with this probability; None while the scale is not known."""
        shares = [(success, self._means[True]), (1 - success, self._means[False])]
        if any(share > 0 and not mean.count for share, mean in shares):
            return None
        return sum(share * mean.value for share, mean in shares if share > 0)


class CutWeights:
    """What the advantage of a cut row that is trained as it is (`failed`) is multiplied by, where a loss divides each
    row by its own tokens (verl's `loss_agg_mode=seq-mean-token-mean`).

    There a token of a complete response of L tokens weighs 1 / L, and one of the same response cut at c tokens 1 / c:
    what a failure begins with would be pushed down L / c times as hard, and short answers would be taught. `of` takes
    that back: c E(1 / L), at most 1. E(1 / L) is that of the candidates of the same rule that were let run, whom a coin
    or a warm-up chose; before there are many, of responses of the whole budget.
    """

    def __init__(self, budget: int):
        self._budget = budget
        self._seen: Mapping[str, deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))

    def learn(self, row: Mapping) -> bool:
        """Is something known now that was not before?"""
        told = (row["outcome"] == Outcome.FINISH and row.get("exempted") and row.get("decided_by") in SAMPLED
                and row["tokens"] > 0)
        if told:
            self._seen[row["candidate_rule"]].append(1 / row["tokens"])
        return bool(told)

    def state(self) -> dict[str, list[float]]:
        """What a restart goes on from: 1 / tokens of the newest candidates that were let run, by rule."""
        return {rule: list(seen) for rule, seen in self._seen.items()}

    def restore(self, state: Mapping) -> None:
        """Raises ValueError for a damaged state, which changes nothing."""
        try:
            seen = {str(rule): [float(value) for value in values] for rule, values in state.items()}
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        if not all(0 < value <= 1 for values in seen.values() for value in values):
            raise ValueError("1 / tokens outside of (0, 1]")
        for rule, values in seen.items():
            self._seen[rule].extend(values)

    def of(self, row: Mapping) -> float:
        """In (0, 1]: 1 for a row that was not cut."""
        if not is_cut(row) or not row["tokens"]:
            return 1.0
        seen = self._seen.get(row["rule"], ())
        inverse = (sum(seen) + ASSUMED / self._budget) / (len(seen) + ASSUMED)
        return min(1.0, row["tokens"] * inverse)


def is_cut(row: Mapping) -> bool:
    return row["outcome"] == Outcome.PRUNE


def may_be_masked(row: Mapping) -> bool:
    """A cut row whose treatment is to leave it out; `masked` says of which groups it does."""
    return is_cut(row) and row.get("treatment") == Treatment.MASKED


def masked(summaries: Sequence[dict | None]) -> list[bool]:
    """Which rows no loss and no group statistic may see, by `masked`. None: not a row of ours.

    A group whose members were all cut stays as it is: there is no sibling whose statistics it would disturb, and
    masking it whole could empty a mini-batch (division by zero tokens). Mostly its rewards are equal and give no
    gradient; where they differ, the shortened responses are trained like any others. Not so where a coin was tossed:
    a row that it fell against must not be trained, and the coin leaves two members of a group alone.
    """
    groups: dict[str, list[int]] = {}
    for index, summary in enumerate(summaries):
        if summary is not None:
            groups.setdefault(summary["group"], []).append(index)
    result = [False] * len(summaries)
    for members in groups.values():
        cut = [index for index in members if may_be_masked(summaries[index])]
        whole = len(cut) == len(members)
        for index in cut:
            result[index] = not whole or summaries[index].get("keep_probability", 1) < 1
    return result


def is_resolved_null(rows: Sequence[dict], kept: Sequence[bool]) -> bool:
    """A group that the resolved rule ended and that has no gradient, so that another one may take its place.

    `rows` are the summaries of all members, `kept` says which of them would be trained. Where coins carry weights,
    every kept reward must be the group's pivot; else all must be equal. Its advantages are then exactly 0, so that
    leaving it out changes no expectation but the number of groups.
    """
    return any(is_cut(row) and row["rule"] == Rule.RESOLVED for row in rows) and is_null(rows, kept)


def is_null(rows: Sequence[dict], kept: Sequence[bool], values: Sequence[float] | None = None) -> bool:
    """A group without a gradient, whatever ended it; arguments as above. `values`: another measure of every member
    that the user judges groups by, where no coin was tossed: advantages with weights are measured from the pivot."""
    if any(row.get("treatment") in (Treatment.VALUE, Treatment.DOUBLY_ROBUST) for row in rows):
        return False  # what was predicted is no reward that a sibling got
    pivots = [row["pivot"] for row in rows if row.get("keep_probability", 1) < 1]
    judged = [row["score"] for row in rows] if values is None or pivots else values
    return without_gradient((value for value, trained in zip(judged, kept, strict=True) if trained), pivots)


def without_gradient(scores: Iterable[float], pivots: Iterable[float]) -> bool:
    """Every advantage of a group's trained rows is 0, given their scores.

    `pivots` are those of the group's tossed members: advantages are measured from it where a coin was tossed, and from
    the other scores where none was.
    """
    scores, pivots = set(scores), set(pivots)
    return scores == pivots if pivots else len(scores) == 1
