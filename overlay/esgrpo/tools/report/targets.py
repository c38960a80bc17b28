"""One target for all arms of a comparison, also in records from before that was the rule.

Then every arm raced to a tenth above its own first evaluation, which is off by 0.05 of itself: an arm that happened to
begin low had less to do. A record that names its `target` is left as it is.
"""

from __future__ import annotations

import statistics

from esgrpo.tools.report import runs

MARGIN = 0.1  # of reward above the first evaluations
TIME, SAMPLES, ROW = "time to target, s", "samples to target", "time to target"
LOST = "Times and samples to target are left out: every arm raced to a target of its own."


def shared(data: dict) -> dict:
    """The record with one target for all arms that are compared. Needs curves for it; without them what was raced to
    different targets is left out, as samples to target are in any case: no record says when they were made."""
    if "target" in data or not ("measures" in data or "difference" in data):
        return data
    arms = {arm: [arm] for arm in data.get("curves", {})} if "difference" in data else data.get("measures", {})
    if not (_raced(data) and isinstance(arms, dict)):
        return data
    found = {}
    for names in _compared(data, list(arms)):
        target = _target([one for name in names for one in _curves(data, name).values()])
        found |= dict.fromkeys(names, target)
    told = sorted({f"{target:.3f}" for target in found.values() if target is not None})
    note = LOST if not told else (
        f"Time to target: of all arms of a comparison the same, {', '.join(told)} (mean of their first evaluations "
        f"+ {MARGIN}); computed from the curves, because in this record every arm raced to a target of its own. "
        "Samples to target cannot be computed again and are left out.")
    curves = {name: {seed: {**one, "target": found.get(name)} for seed, one in _curves(data, name).items()}
              for name in data.get("curves", {})}
    changed = {**data, "notes": [*data.get("notes", []), note]}
    if "difference" in data:
        return {**changed, "curves": {name: one[""] for name, one in curves.items()},
                "table": [_row(row, data["table"][0], curves, found) if row[0] == ROW else row
                          for row in data["table"]]}
    return {**changed, **({"curves": curves} if curves else {}), "measures": {
        name: {seed: _numbers(one, curves.get(name, {}).get(seed), found.get(name)) for seed, one in seeds.items()}
        for name, seeds in data["measures"].items()}}


def _raced(data: dict) -> bool:
    if "difference" in data:
        return any(row[0] == ROW for row in data["table"])
    return any(TIME in one or SAMPLES in one for seeds in data["measures"].values() for one in seeds.values())


def _compared(data: dict, arms: list[str]) -> list[list[str]]:
    """Arms that are held against each other: those of a setting, or all."""
    cells = data.get("cells")
    return list(cells.values()) if isinstance(cells, dict) else [arms]


def _curves(data: dict, name: str) -> dict[str, dict]:
    """Seed -> curves; a comparison of single runs has no level of seeds."""
    found = data.get("curves", {}).get(name, {})
    return {"": found} if "evaluations" in found else found


def _target(curves: list[dict]) -> float | None:
    first = [one["evaluations"][0][1] for one in curves if one["evaluations"]]
    return round(statistics.fmean(first) + MARGIN, runs.DIGITS) if first else None


def _time(one: dict | None, target: float | None) -> float | None:
    return runs.time_to_target(one["evaluations"][1:], target) if one and target is not None else None


def _numbers(numbers: dict, curves: dict | None, target: float | None) -> dict:
    kept = {key: value for key, value in numbers.items() if key not in (TIME, SAMPLES)}
    return {**kept, TIME: _time(curves, target)} if TIME in numbers and target is not None else kept


def _row(row: list[str], head: list[str], curves: dict, found: dict) -> list[str]:
    """`time to target` of a comparison of single runs, as bench.common.compare says it."""
    cells = []
    for name in head[1:]:
        target = found.get(name)
        seconds = _time(curves.get(name, {}).get(""), target)
        cells.append("left out" if target is None else
                     f"{'not reached' if seconds is None else f'{seconds:.0f} s'} (>= {target:.3f})")
    return [row[0], *cells]
