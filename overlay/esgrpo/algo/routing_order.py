"""In which order the prompts of one batch are submitted when all of them are needed before the next step.

Longest first, in every step: the classic rule for a barrier (LPT scheduling, Graham 1969). Shortest first in every
other step was slower: what runs last there are the longest, one after the other and each nearly alone.
"""

from __future__ import annotations

from collections.abc import Sequence


def longest_first(items: Sequence, predicted: Sequence[float]) -> list:
    """The items by predicted length in tokens, the longest first; equal ones keep their order."""
    order = sorted(range(len(items)), key=lambda at: -predicted[at])  # sorted() is stable
    return [items[at] for at in order]


def inversions(order: Sequence[int]) -> int:
    """Places at which another item stands than the oldest of those that are left; items are numbered by age."""
    oldest, count = float("inf"), 0
    for item in reversed(order):
        oldest = min(oldest, item)
        count += item != oldest
    return count


def deal(order: Sequence, hands: int) -> list:
    """The same items, so that cutting them into `hands` equal pieces gives each piece every hands-th item.

    Workers submit their pieces side by side: dealt out, the pieces together follow `order`; cut as they are, one worker
    would submit all the long ones. Items that cannot be cut evenly stay as they are.
    """
    if hands < 2 or len(order) % hands:
        return list(order)
    return [item for hand in range(hands) for item in order[hand::hands]]
