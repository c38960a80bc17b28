"""Reward targets, one list for all arms: when the runs of each had one, and where they stood in the end.

The settings are those of targets.toml, numbers come from the records' curves. A target is reached with the first of
HOLD evaluations in a row that have it, as everywhere here; one that a run had before training is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from bench.common import compare, records
from esgrpo import compat
from esgrpo.tools.report.runs import time_to_target

TARGETS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BY_TIME, BY_RESPONSES = "evaluations", "by_samples"
NONE = "-"
LEVEL = 0.005  # a reward less by so much is shown as a loss


def _middle(values: Iterable[float], form: str) -> str:
    """Median [lowest, highest], of one value itself."""
    values = sorted(values)
    middle, low, high = (f"{value:{form}}" for value in (statistics.median(values), values[0], values[-1]))
    return middle if low == high else f"{middle} [{low}, {high}]"


def _reached(curves: list[dict], target: float) -> tuple[int, float | None, str]:
    """(runs that reached it, median of their seconds, both as text)."""
    seconds, responses = ([at for curve in curves if (at := time_to_target(curve[by], target)) is not None]
                          for by in (BY_TIME, BY_RESPONSES))
    if not seconds:
        return 0, None, NONE
    said = f"{_middle(seconds, '.0f')} s; {_middle((at / 1000 for at in responses), '.1f')}"
    return len(seconds), statistics.median(seconds), f"{said} ({len(seconds)}/{len(curves)})"


def _sooner(ours: tuple, theirs: tuple, of: tuple[int, int]) -> str:
    """Which arm reached it in the larger share of its runs, or sooner: a key of targets.toml's `sooner`."""
    shares = ours[0] / of[0], theirs[0] / of[1]
    if shares[0] != shares[1]:
        return "overlay" if shares[0] > shares[1] else "plain"
    return "overlay" if ours[1] < theirs[1] else "plain"


def _level(plain: list[dict], ours: list[dict], by: str) -> tuple[float, list[float], list[float]]:
    """(what all runs of a setting had at least, of seconds or responses; the rewards of both arms' runs there)."""
    curves = {number: curve[by] for number, curve in enumerate([*plain, *ours])}
    found = list(compare.at_equal_samples(curves).values())
    return min(points[-1][0] for points in curves.values()), found[:len(plain)], found[len(plain):]


def table(language: str) -> list[list[str]]:
    """One row a target that an arm reached and none had at the start, then rewards at level; the header first."""
    texts = compat.toml(Path(__file__).with_suffix(".toml"))
    rows = [texts["head"][language]]
    for setting in texts["setting"]:
        plain, ours = (list(records.read(record)["curves"][arm].values())
                       for record, arm in (setting["plain"], setting["overlay"]))
        begin = max(curve[BY_TIME][0][1] for curve in (*plain, *ours))
        name = setting[language]
        for target in TARGETS:
            theirs, mine = _reached(plain, target), _reached(ours, target)
            if target <= begin or not theirs[0] + mine[0]:
                continue
            sooner = texts["sooner"][_sooner(mine, theirs, (len(ours), len(plain)))][language]
            rows.append([name, f"{target:.2f}", theirs[2], mine[2], sooner])
            name = ""
        for by in (BY_TIME, BY_RESPONSES):
            at, *rewards = _level(plain, ours, by)
            less = statistics.median(rewards[1]) - statistics.median(rewards[0])
            rows.append([name, texts[by][language].format(at=at), *(_middle(some, ".2f") for some in rewards),
                         f"{less:+.2f}" if less > -LEVEL else f"**{less:+.2f}**"])
            name = ""
    return rows
