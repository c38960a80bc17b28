"""How good the forecasts were: rank correlation and coverage over a sliding window of prompts. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

WINDOW = 512  # prompts
FEWEST = 8  # prompts with a forecast from history before a correlation is reported


def ranks(values: Sequence[float]) -> list[float]:
    """Rank of each value from 1 on; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    result = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start:end + 1]:
            result[place] = (start + end) / 2 + 1
        start = end + 1
    return result


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None when one side has no order."""
    a, b = ranks(left), ranks(right)
    middle = (len(a) + 1) / 2
    top = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    bottom = sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)
    return top / bottom**0.5 if bottom > 0 else None


class Calibration:
    """Compares each forecast with the responses it was made for.

    Invariants: only the last `window` prompts count; rates are in [0, 1], the correlation in [-1, 1].
    """

    def __init__(self, window: int = WINDOW):
        self._known: deque[tuple[float, float]] = deque(maxlen=window)  # (forecast, mean length), with history only
        self._rows: deque[tuple[bool, int, int]] = deque(maxlen=window)  # (known, responses inside, responses)

    def add(self, forecast: dict, lengths: Sequence[int], capped: Sequence[bool]) -> None:
        """Responses that ran to their end, or to the budget (`capped`, in tokens): one that did may have been of any
        length beyond, so it is inside unless the interval ended before. Pruned responses do not belong here."""
        if not lengths:
            return
        inside = sum(n <= forecast["high"] and (cut or n >= forecast["low"])
                     for n, cut in zip(lengths, capped, strict=True))
        self._rows.append((forecast["known"], inside, len(lengths)))
        if forecast["known"]:
            self._known.append((forecast["tokens"], sum(lengths) / len(lengths)))

    def metrics(self) -> dict[str, float]:
        """Without the prefix: rank_correlation (forecasts from history), coverage, known_rate; what cannot be told
        yet is left out."""
        if not self._rows:
            return {}
        found = {"coverage": sum(row[1] for row in self._rows) / sum(row[2] for row in self._rows),
                 "known_rate": sum(row[0] for row in self._rows) / len(self._rows)}
        if len(self._known) >= FEWEST:
            correlation = spearman([row[0] for row in self._known], [row[1] for row in self._known])
            if correlation is not None:
                found["rank_correlation"] = correlation
        return found
