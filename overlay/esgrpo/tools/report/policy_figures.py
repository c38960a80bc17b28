"""Figures of the engine benchmark and the simulator: makespan, bubble by cause, tau(b), predicted against measured."""

from __future__ import annotations

import statistics
from itertools import accumulate

from esgrpo.tools.report import plots
from esgrpo.tools.report.load import Record
from esgrpo.tools.report.plots import Figure
from esgrpo.tools.report.policy_tables import (
    best_rival,
    by_work,
    causes,
    makespan,
    seconds,
    tau_series,
    titles,
    validation_points,
)
from esgrpo.tools.report.tables import OURS, baseline_of
from esgrpo.tools.report.trace import of_policy_run

TOLERANCE = 0.1  # the simulator is asked to be within 10 % of the engine
MOST_SETTINGS = 6  # panels of one figure; a study of more is shown as a table


def policies(record: Record) -> list[Figure]:
    figures = _running(record)
    grouped = by_work(record.data["runs"])
    titled = titles(list(grouped))
    for work, found in list(grouped.items())[:MOST_SETTINGS]:
        names = sorted(found, key=lambda policy: makespan(found[policy]))
        height = plots.HEAD_IN + plots.ROW_IN * len(names)
        with plots.drawing(1, 2, height, sharey=True) as (axes, done):
            plots.dots(axes[0], names, {name: list(map(seconds, found[name])) for name in names}, "s per update")
            axes[0].set_xlim(left=0)
            axes[0].set_title("makespan")
            plots.stacked(axes[1], names, {name: _mean_bubble(found[name]) for name in names}, "share of capacity")
            plots.stamp(axes[0], record.simulated)
            figures.append(Figure("Makespan and bubble by policy: " + titled[work],
                                  "Left: every run a dot, the bar the median; shorter is better. Right: share of the "
                                  "bubble capacity that decoded nothing, by cause, mean over runs."
                                  + (" Simulated." if record.simulated else ""), done()))
    return figures


def has_trace(record: Record) -> bool:
    return any((record.folder / one["trace"]).is_file() for one in record.data["runs"] if one.get("trace"))


def _running(record: Record) -> list[Figure]:
    """Requests in the engines over time, one run a policy; nothing for a record without traces."""
    figures = []
    grouped = by_work(record.data["runs"])
    titled = titles(list(grouped))
    for work, found in grouped.items():
        base, rival = baseline_of(found), best_rival(found)
        ours = [name for name in found if name.startswith(OURS)]
        lines = {}
        for name in dict.fromkeys(name for name in (base, rival, *ours) if name):
            one = next((one for one in found[name] if one.get("trace")), None)
            stays, _ = of_policy_run(one, record.folder) if one else ([], [])
            if stays:
                lines[name] = _in_engine(stays)
        if lines:
            with plots.drawing(height=2.5) as (axes, done):
                palette = plots.colours(list(lines))
                for name, points in lines.items():
                    axes[0].step(*zip(*points, strict=True), where="post", lw=1.1, color=palette[name], label=name)
                axes[0].set(xlabel="seconds", ylabel="requests in the engines", xlim=(0, None), ylim=(0, None))
                capacity = found[base or next(iter(found))][0]
                full = capacity.get("capacity", 0) * capacity.get("replicas", 1)
                axes[0].axhline(full, color="#4b4f58", lw=0.8, ls=":")
                axes[0].legend(loc="upper right")
                figures.append(Figure("Requests in the engines over time: " + titled[work],
                                      "First repeat of each policy; waiting requests included. Below the dotted line "
                                      "(bubble capacity of all replicas) the device gives less than it could.", done()))
    return figures


def _in_engine(stays) -> list[tuple[float, int]]:
    changes = sorted([(stay.start, 1) for stay in stays] + [(stay.end, -1) for stay in stays])
    return [(at, total) for (at, _), total in zip(changes, accumulate(step for _, step in changes), strict=True)]


def _mean_bubble(runs: list[dict]) -> dict[str, float]:
    known = [causes(one) for one in runs if one.get("bubble")]
    names = dict.fromkeys(cause for found in known for cause in found)
    return {cause: statistics.mean(found.get(cause, 0.0) for found in known) for cause in names}


def tau(record: Record) -> list[Figure]:
    """ms per decode step and tokens/s against the number of running requests."""
    series = tau_series(record)
    with plots.drawing(1, 2, 2.6) as (axes, done):
        for (label, points), colour in zip(series.items(), plots.ARM_COLOURS[1:] * 3, strict=False):
            sizes = [point["batch"] for point in points]
            for axis, key in zip(axes, ("ms_per_step", "tokens_per_s"), strict=True):
                axis.plot(sizes, [point[key] for point in points], "o-", ms=3, lw=1.2, color=colour, label=label)
        for axis, name in zip(axes, ("ms per decode step", "tokens/s of a replica"), strict=True):
            axis.set(xlabel="running requests b", ylabel=name, ylim=(0, None))
            axis.axvline(record.data["capacity"], color="#4b4f58", lw=0.8, ls=":")
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.grid()
            plots.stamp(axis, record.simulated)
        if len(series) > 1:
            axes[0].legend()
        return [Figure("Time of a decode step, tau(b)",
                       "Flat on the left: a replica with few running requests steps no faster than one with many, so "
                       "its tokens/s are lost. That is what a tail costs. Dotted: bubble capacity.", done())]


def validation(record: Record) -> list[Figure]:
    """Predicted against measured makespan; the band is what the simulator is asked to hold."""
    points = validation_points(record.data)
    if not points:
        return []
    with plots.drawing(height=3.6) as (axes, done):
        axis = axes[0]
        workloads = list(dict.fromkeys(workload for workload, _, _ in points))
        top = max(max(predicted, measured) for _, predicted, measured in points) * 1.08
        axis.fill_between([0, top], [0, top * (1 - TOLERANCE)], [0, top * (1 + TOLERANCE)], color="#e4e6ea", lw=0)
        axis.plot([0, top], [0, top], color="#4b4f58", lw=0.8)
        for workload, colour in zip(workloads, plots.ARM_COLOURS[1:] * 3, strict=False):
            mine = [(m, p) for w, p, m in points if w == workload]
            axis.plot(*zip(*mine, strict=True), "o", ms=4, alpha=0.75, mew=0, color=colour, label=workload)
        axis.set(xlim=(0, top), ylim=(0, top), xlabel="measured makespan, s", ylabel="predicted makespan, s")
        axis.set_aspect("equal")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        within = sum(abs(p / m - 1) <= TOLERANCE for _, p, m in points)
        return [Figure("Predicted (simulated) against measured makespan",
                       f"A point is one policy on one workload; {within} of {len(points)} lie within the grey band of "
                       f"{TOLERANCE:.0%}.", done())]
