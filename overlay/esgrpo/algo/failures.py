"""When failed prompt groups mean that nothing works any more. Pure."""

from __future__ import annotations

from collections.abc import Collection

MOST_IN_A_ROW = 32  # failed groups without one that ended well: a dead engine or a reward function that always raises


class FailureStreak:
    """Counts groups that failed since the last one that ended well.

    Invariant: `in_a_row` is the number of distinct groups named as failed after the latest new name among the good.
    """

    def __init__(self, limit: int = MOST_IN_A_ROW):
        self.limit, self.in_a_row = limit, 0
        self._good: frozenset[str] = frozenset()

    def observe(self, failed: Collection[str], good: Collection[str]) -> bool:
        """Takes the groups that failed since the last call and all that wait complete; True when it is enough."""
        new = frozenset(good) - self._good
        self._good = frozenset(good)
        self.in_a_row = len(failed) if new else self.in_a_row + len(failed)
        return self.in_a_row >= self.limit
