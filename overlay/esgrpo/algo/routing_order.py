"""In which order the prompts of one batch are submitted when all of them are needed before the next step.

Complementary order, in the spirit of RhymeRL's HistoPipe: longest first in even steps, shortest first in odd ones, so
that what one step leaves idle at its end is what the next one starts with. That RhymeRL alternates is unverified (it
was not found in the readable parts of the paper); longest-first is the classic rule for a barrier (LPT scheduling).
"""

from __future__ import annotations

from collections.abc import Sequence


def alternate(step: int, items: Sequence, predicted: Sequence[float]) -> list:
    """The items by predicted length, descending in even steps and ascending in odd ones; equal ones keep their order.

    Always a permutation of `items`. Lengths are tokens; `step` counts training steps.
    """
    sign = -1.0 if step % 2 == 0 else 1.0
    order = sorted(range(len(items)), key=lambda at: sign * predicted[at])  # sorted() is stable
    return [items[at] for at in order]


def deal(order: Sequence, hands: int) -> list:
    """The same items, so that cutting them into `hands` equal pieces gives each piece every hands-th item.

    Workers submit their pieces side by side: dealt out, the pieces together follow `order`; cut as they are, one worker
    would submit all the long ones. Items that cannot be cut evenly stay as they are.
    """
    if hands < 2 or len(order) % hands:
        return list(order)
    return [item for hand in range(hands) for item in order[hand::hands]]


def inverse(order: Sequence[int]) -> list[int]:
    """Where each item went: taking these places from what was ordered by `order` gives the original sequence."""
    places = [0] * len(order)
    for place, item in enumerate(order):
        places[item] = place
    return places


def by_group(groups: Sequence, step: int, predicted: Sequence[float]) -> list[int]:
    """Row numbers in complementary order; rows of one group stay together and in their own order.

    `groups` and `predicted` have one entry per row; a group is as long as its longest prediction.
    """
    rows: dict = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    names = list(rows)
    lengths = [max(predicted[row] for row in rows[name]) for name in names]
    return [row for name in alternate(step, names, lengths) for row in rows[name]]
