"""Looks at the running responses of one engine: taken where tokens are made, kept until somebody asks for them. Pure.

What a look costs does not grow with the response. Of a response that was looked at again before anybody asked, the
newer look is what counts: whoever decides wants to know how it is now.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from esgrpo.algo.verdict_features import READ_TOKENS, Look, Sketches

LOOKS_IN_BUDGET = 16  # of a response that runs to its budget, where no distance is set
DISTANCE_WITHOUT_BUDGET = 64  # tokens
ASK_EVERY_S = 0.25  # seconds: a cut that comes so much later has cost a few tokens more
NOTHING = (0, 0.0, 0)


def distance(check_interval: int, budget: int) -> int:
    """Tokens between two looks, of a setting in which 0 means a share of the `budget` (tokens; 0: not known)."""
    return check_interval or max(1, budget // LOOKS_IN_BUDGET) if budget else check_interval or DISTANCE_WITHOUT_BUDGET


class Looks:
    """Surprisals are means over what the present attempt has log-probs of: earlier attempts were elsewhere."""

    def __init__(self):
        self._sketches: dict[str, Sketches] = {}
        self._last: dict[Hashable, tuple[int, float, int]] = {}  # attempt -> tokens, log-prob sum, rows, then
        self._kept: dict[str, dict[int, Look]] = {}

    def look(self, key: Hashable, group: str, member: int, total: int, tokens: Sequence[int],
             logprobs: tuple[float, int]) -> None:
        """An attempt that has made `tokens` so far, of a response of `total`; `logprobs`: their sum (nats), and of how
        many."""
        before, sum_before, rows_before = self._last.get(key, NOTHING)
        count, (summed, rows) = len(tokens), logprobs
        self._last[key] = count, summed, rows
        sketches = self._sketches.get(group)
        if sketches is None:
            sketches = self._sketches[group] = Sketches()
        kept = self._kept.get(group)
        if kept is None:
            kept = self._kept[group] = {}
        kept[member] = sketches.look(member, total, tokens[max(before, count - READ_TOKENS):], summed, rows,
                                     summed - sum_before, rows - rows_before)

    def ended(self, key: Hashable, group: str, was_last: bool) -> None:
        """An attempt ended; `was_last` of its group in this engine: what is known of the group goes with it."""
        self._last.pop(key, None)
        if was_last:
            self._sketches.pop(group, None)
            self._kept.pop(group, None)

    def take(self, groups: Iterable[str]) -> dict[str, dict[int, list]]:
        """New looks at members of these groups, each once; msgpack-plain."""
        return {group: {member: list(look) for member, look in self._kept.pop(group).items()}
                for group in groups if group in self._kept}
