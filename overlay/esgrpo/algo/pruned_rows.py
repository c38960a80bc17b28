"""What pruning did to the responses of a run: their lengths, the tokens saved, what it costs in variance. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from esgrpo.algo.terms import Treatment
from esgrpo.algo.treatment import is_cut


def ks_distance(sample: Iterable[tuple[float, float]], other: Iterable[tuple[float, float]]) -> float:
    """Kolmogorov-Smirnov distance of two weighted samples of (value, weight >= 0); 0 when one has no weight."""
    steps: dict[float, list[float]] = {}
    for side, pairs in enumerate((sample, other)):
        for value, weight in pairs:
            steps.setdefault(value, [0.0, 0.0])[side] += weight
    totals = [sum(step[side] for step in steps.values()) for side in (0, 1)]
    if min(totals, default=0.0) <= 0:
        return 0.0
    below, distance = [0.0, 0.0], 0.0
    for value in sorted(steps):
        below = [below[side] + steps[value][side] / totals[side] for side in (0, 1)]
        distance = max(distance, abs(below[0] - below[1]))
    return distance


def _is_trained(row: dict) -> bool:
    """Not cut, or trained as far as it came. Lines of older releases say nothing: those were masked."""
    return not is_cut(row) or (row.get("treatment") or Treatment.MASKED) != Treatment.MASKED


def _coin(row: dict) -> float:
    coin = row.get("coin")
    return row["keep_probability"] if coin is None else coin


def length_bias(rows: Iterable[dict]) -> dict[str, float]:
    """Per rule: KS distance of the lengths that are trained and those that were sampled, the rule acting alone.

    Trained: every row that is, once, and one that was cut at the length to which it came. Sampled, for a rule with a
    coin: the rows that ended by themselves weighted 1 / pi, which estimates the lengths of complete groups; for a rule
    without one: all rows, a cut one as far as it came, so that the distance is a lower bound.
    """
    rows = list(rows)
    rules = sorted({row["rule"] for row in rows if is_cut(row)} | {row["candidate_rule"] for row in rows} - {""})
    result = {}
    for rule in rules:
        mine = [row for row in rows if not is_cut(row) or row["rule"] == rule]
        trained = [(row["tokens"], 1.0) for row in mine if _is_trained(row)]
        sampled = [(row["tokens"], 1 / _coin(row) if row["candidate_rule"] == rule else 1.0)
                   for row in mine if not is_cut(row) or _coin(row) >= 1]
        result[rule] = ks_distance(trained, sampled)
    return result


def prune_report(rows: Iterable[dict]) -> dict[str, float]:
    """What audited pruning did to responses that ended; counts, tokens, and what it costs.

    tokens_saved: sum over kept tossed rows of (1 / pi - 1) * (tokens after the decision): its expectation is that of
    the tokens that pruned rows would still have made. variance_inflation: N * sum w^2 / (sum w)^2 over rows that no
    sample rule removed (w = 0 for masked ones, 1 where the treatment weighs no rows): Kish's factor by which the
    variance of a weighted mean exceeds that over complete groups, were lengths and rewards independent of pruning.
    false_rate and its bound are those of the latest reports: the mean over reports by outcomes, and the worst.
    """
    rows = list(rows)
    tossed = [row for row in rows if _coin(row) < 1]
    saved = sum((1 / _coin(row) - 1) * (row["tokens"] - row["tokens_at_decision"])
                for row in tossed if not is_cut(row))
    counted = [row for row in rows if _is_trained(row) or row["keep_probability"] < 1]
    weights = [0.0 if not _is_trained(row) else 1.0 if row.get("treatment") == Treatment.DOUBLY_ROBUST
               else 1 / row["keep_probability"] for row in counted]
    total = sum(weights)
    reports = [row["audit"] for row in rows if "audit" in row]
    outcomes = sum(report["outcomes"] for report in reports)
    return {
        "candidates": sum(row["candidate"] for row in rows),
        "exempted": sum(row["exempted"] for row in rows),
        "tokens_saved": saved,
        "variance_inflation": len(weights) * sum(w * w for w in weights) / total**2 if total else 1.0,
        **({"false_rate": sum(r["false_rate"] * r["outcomes"] for r in reports) / max(1, outcomes),
            "false_rate_bound": max(r["false_rate_bound"] for r in reports)} if reports else {}),
    }
