"""Looks at the running responses of one engine: taken where tokens are made, kept until somebody asks for them. Pure.

What a look costs does not grow with the response: two means and a few tokens. What it says is found out elsewhere
(`verdict_features`), in a process that makes no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

from esgrpo.algo.verdict_features import READ_TOKENS

LOOKS_IN_BUDGET = 16  # of a response that runs to its budget, where no distance is set
DISTANCE_WITHOUT_BUDGET = 64  # tokens
ASK_EVERY_S = 0.25  # seconds: a cut that comes so much later has cost a few tokens more
NOTHING = (0, 0.0, 0)


def next_multiple(done: int, length: int) -> int:
    """The first multiple of `length` above `done`, in tokens of the whole response."""
    return (done // length + 1) * length


def distance(check_interval: int, budget: int) -> int:
    """Tokens between two looks, of a setting in which 0 means a share of the `budget` (tokens; 0: not known)."""
    return check_interval or max(1, budget // LOOKS_IN_BUDGET) if budget else check_interval or DISTANCE_WITHOUT_BUDGET


class Looks:
    """Surprisals are means over what the present attempt has log-probs of: earlier attempts were elsewhere."""

    def __init__(self):
        self._last: dict[Hashable, tuple[int, float, int]] = {}  # attempt -> tokens, log-prob sum, rows, then
        self._kept: dict[str, dict[int, list[list]]] = {}  # group -> member -> glances, oldest first

    def look(self, key: Hashable, group: str, member: int, total: int, tokens: Sequence[int],
             logprobs: tuple[float, int]) -> None:
        """An attempt that has made `tokens` so far, of a response of `total`; `logprobs`: their sum (nats), and of how
        many."""
        last = self._last
        before, sum_before, rows_before = last.get(key, NOTHING)
        count, (summed, rows) = len(tokens), logprobs
        last[key] = count, summed, rows
        recent, oldest = rows - rows_before, count - READ_TOKENS
        glance = [total, tokens[before if before > oldest else oldest:], -summed / rows if rows else math.nan,
                  (sum_before - summed) / recent if recent else math.nan]  # the fields of a Glance
        kept = self._kept.get(group)
        if kept is None:
            kept = self._kept[group] = {}
        if member in kept:
            kept[member].append(glance)
        else:
            kept[member] = [glance]

    def ended(self, key: Hashable, group: str, was_last: bool) -> None:
        """An attempt ended; `was_last` of its group in this engine: nobody will ask for its looks."""
        self._last.pop(key, None)
        if was_last:
            self._kept.pop(group, None)

    def take(self, groups: Iterable[str]) -> dict[str, dict[int, list[list]]]:
        """New glances at members of these groups, each once; msgpack-plain."""
        return {group: self._kept.pop(group) for group in groups if group in self._kept}
