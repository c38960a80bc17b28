"""Runs of one seed beside each other, out of the records, and how a range of them is written."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

from bench.common import ROOT

RESULTS = ROOT / "bench" / "results"


def read(name: str):
    return json.loads((RESULTS / name).read_text())


def engine(name: str) -> dict[tuple, dict[str, dict]]:
    """Of a record of bench.engine: (cap, groups, time of the command, seed) -> policy -> run."""
    found: dict[tuple, dict[str, dict]] = {}
    for line in (RESULTS / name).read_text().splitlines():
        row = json.loads(line)
        if row.get("kind") == "run" and "withdrawn" not in row:  # with the reason, where a policy was not played right
            found.setdefault((row["cap"], row["groups"], row["time"], row["seed"]), {})[row["policy"]] = row
    return found


@dataclass(frozen=True)
class Pair:
    """One seed of one record: measures and curves of the plain and of the overlay's run."""

    plain: dict
    overlay: dict
    curves: tuple[dict, dict] | None = None

    def ratio(self, key: str) -> float:
        return self.overlay[key] / self.plain[key]

    def first_rewards(self) -> tuple[float, float]:
        """Held-out reward at the first evaluation after the start, of plain's run and of the overlay's."""
        plain, overlay = (curve["evaluations"][1][1] for curve in self.curves)
        return plain, overlay


def training_pairs(names, plain: str = "plain", overlay: str = "overlay") -> list[Pair]:
    """Pairs with both runs, over the records."""
    found = []
    for name in names:
        runs = read(name)
        ours, theirs = runs["measures"][overlay], runs["measures"][plain]
        curves = runs.get("curves", {})
        for seed in theirs:
            if seed in ours:
                both = (curves[plain][seed], curves[overlay][seed]) if {plain, overlay} <= curves.keys() else None
                found.append(Pair(theirs[seed], ours[seed], both))
    return found


def side_by_side(ours: tuple[str, str], theirs: tuple[str, str]) -> list[Pair]:
    """Pairs of two records whose runs were made side by side: (record, arm) of the overlay and of its rival."""
    one, other = (read(name) for name, _ in (ours, theirs))
    mine, held = one["measures"][ours[1]], other["measures"][theirs[1]]
    return [Pair(held[seed], mine[seed], (other["curves"][theirs[1]][seed], one["curves"][ours[1]][seed]))
            for seed in held if seed in mine]


def spread(values, digits: int = 2) -> str:
    """Median [lowest, highest]."""
    values = sorted(values)
    return f"{statistics.median(values):.{digits}f} [{values[0]:.{digits}f}, {values[-1]:.{digits}f}]"


def span(values, digits: int = 2) -> str:
    values = sorted(values)
    low, high = (f"{value:.{digits}f}" for value in (values[0], values[-1]))
    return low if low == high else f"{low} … {high}"
