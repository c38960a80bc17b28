"""How long the next segment of a group's responses is, and who moves to the tail class. Pure; lengths in tokens.

Where the length comes from. A look at a response costs c (in tokens: what the engine could have decoded meanwhile). A
decision that has become possible is carried out at the next look, so on average half a segment is decoded in vain. If
decisions become possible at a rate of v per decoded token, a segment of length L costs per token

    c / L  +  v * L / 2        with the minimum at        L = sqrt(2 c / v)

(the reasoning of Young's checkpoint interval, Comm. ACM 17(9), 1974). v grows with what the finished siblings tell:
with nobody finished there is nothing to decide, with all but one finished the outcome is as good as known; and the
decision falls somewhere in the predicted remainder r, once: v = (1 - unfinished) / r. By `min_length` the user says
which segment is the shortest that pays: the one for a group that is all but finished (unfinished -> 0) with as little
as r = min_length to go. So c = min_length / 2 and

    L = sqrt(min_length * r / (1 - unfinished)), clamped to [min_length, max_length].

While the whole group runs the length is max_length. It rises with both arguments. r enters under a root: forecasts of
the remainder are rough, and one that is off by a factor of four moves L by two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from esgrpo.config import Elastic


@dataclass(frozen=True)
class Segments:
    """What a group's unfinished responses are told."""

    length: int  # tokens between two boundaries
    tail: bool  # they belong to the tail class from now on


def ideal_length(settings: Elastic, unfinished: float, remaining: float) -> int:
    """The length of the module's formula, without memory.

    `unfinished` is the share of the group that still runs, `remaining` the predicted tokens of such a response.
    Invariants: within [min_length, max_length]; never falls when either argument rises.
    """
    low, high = settings.min_length, settings.max_length
    finished = 1.0 - min(max(unfinished, 0.0), 1.0)
    if finished >= settings.tail_fraction and finished > 0.0:
        return low
    if finished <= 0.0:
        return high
    return round(min(max(math.sqrt(low * max(remaining, 0.0) / finished), low), high))


def next_segments(settings: Elastic, now: Segments, unfinished: float, remaining: float) -> Segments:
    """What the group is told now, given what it was told before.

    Invariants: the length stays while the ideal is within the relative `hysteresis` of it, so that inputs which wander
    inside that band never cause a message; the tail class is never left; a length outside the bounds does not stay.
    """
    ideal = ideal_length(settings, unfinished, remaining)
    finished = 1.0 - unfinished
    tail = now.tail or (finished >= settings.tail_fraction and finished > 0.0)
    if tail:
        return Segments(settings.min_length, True)
    inside = settings.min_length <= now.length <= settings.max_length
    if inside and abs(ideal - now.length) <= settings.hysteresis * now.length:
        return now
    return Segments(ideal, False)


def remaining_tokens(tokens: int, forecast: Mapping | None, finished: Sequence[int], budget: int) -> int:
    """Tokens that a response with `tokens` so far is predicted to make still; between 1 and what the budget leaves.

    The forecast is used up to its expectation, then up to its upper quantile. A response beyond both, or one without a
    forecast beyond its finished siblings' longest, is predicted to double: the mean residual life of a Pareto tail with
    exponent 2. Without forecast and sibling nothing is known but the budget.
    """
    left = max(budget - tokens, 1)
    if forecast is not None:
        expected = (forecast["tokens"], forecast["high"])
    else:
        expected = (max(finished, default=budget),)
    for total in expected:
        if tokens < total:
            return int(min(max(total - tokens, 1), left))
    return min(max(tokens, 1), left)
