"""Figures of training runs: reward over wall time, ratios by arm, bubble over time, response lengths."""

from __future__ import annotations

import statistics
from itertools import accumulate

from esgrpo.tools.report import plots
from esgrpo.tools.report.load import Record
from esgrpo.tools.report.plots import Figure
from esgrpo.tools.report.runs import BINS_PER_OCTAVE, CAUSES
from esgrpo.tools.report.tables import baseline_of, ratios

PANELS = 3  # in a row
MARGIN = 0.03  # right of the last point, of the axis
BAND = 0.15  # opacity of the range over seeds
MEDIAN_FROM = 3  # seeds; fewer are drawn one by one
RATIO_KEYS = ("effective tokens/s", "time to target, s", "samples to target")


def curves_of(record: Record) -> dict[str, list[dict]]:
    """Arm -> curves, one entry per seed; empty for a record from before curves were kept."""
    found = record.data.get("curves", {})
    if record.kind in ("ablation", "robustness"):
        return {arm: list(seeds.values()) for arm, seeds in found.items() if seeds}
    if record.kind == "run":
        return {name: [one["curves"]] for name, one in record.data["runs"].items()}
    return {arm: [one] for arm, one in found.items()}


def training(record: Record) -> list[Figure]:
    figures = [_ratios(record)] if record.kind == "ablation" else []
    arms = curves_of(record)
    if arms:
        figures += [_reward(arms, record.kind), _bubble(arms), _lengths(arms)]
    if record.kind == "ablation":
        figures.append(_bias(record))
    return [figure for figure in figures if figure]


def robustness(record: Record) -> list[Figure]:
    """Held-out reward over optimiser steps, a panel per setting."""
    curves = curves_of(record)
    panels = {cell: {name.removeprefix(f"{cell}, "): [one["by_step"] for one in curves[name]]
                     for name in names if name in curves} for cell, names in record.data["cells"].items()}
    panels = {cell: arms for cell, arms in panels.items() if arms}
    if not panels:
        return []
    columns = min(PANELS, len(panels))
    rows = -(-len(panels) // columns)
    with plots.drawing(rows, columns, 0.8 + 1.8 * rows, sharex=True, sharey=True) as (axes, done):
        for axis, (cell, arms) in zip(axes, panels.items(), strict=False):
            for (arm, seeds), colour in zip(arms.items(), plots.ARM_COLOURS, strict=False):
                for number, points in enumerate(filter(None, seeds)):
                    axis.plot(*zip(*points, strict=True), marker="o", ms=2.5, lw=1.2, color=colour,
                              label="_" * bool(number) + arm)  # a leading underscore: not in the legend
            axis.set(title=cell)
            axis.grid(axis="y")
            axis.legend(handlelength=1.2)
        for axis in axes[len(panels):]:
            axis.set_visible(False)
        plots.outer_labels(axes[0].figure, "optimiser steps", "mean reward")
        return [Figure("Held-out reward over optimiser steps, by setting",
                       "A line is one seed.", done())]


def _ratios(record: Record) -> Figure | None:
    measures = {arm: seeds for arm, seeds in record.data["measures"].items() if seeds}
    base = baseline_of(measures)
    keys = [key for key in RATIO_KEYS if any(ratios(measures, arm, key) for arm in measures if arm != base)]
    if not base or not keys:
        return None
    names = list(measures)
    height = plots.HEAD_IN + plots.ROW_IN * len(names)
    with plots.drawing(1, len(keys), height, sharey=True) as (axes, done):
        for axis, key in zip(axes, keys, strict=True):
            plots.dots(axis, names, {arm: ratios(measures, arm, key) for arm in names}, f"ratio to {base}", 1.0)
            axis.set_title(key)
        return Figure("Ablation: each arm against the baseline of its seed",
                      f"A dot is one seed, the bar the median. Ratios are taken within a seed against {base!r}. For "
                      "tokens/s right of the dashed line is better, for time and samples to target left of it.", done())


def _held(series: list[list[list[float]]]) -> tuple[list[float], list[list[float]]]:
    """Values of every series at the times of any of them: the last one at or before that time."""
    first, last = max(points[0][0] for points in series), min(points[-1][0] for points in series)
    times = sorted({t for points in series for t, _ in points if first <= t <= last})
    return times, [[max(p for p in points if p[0] <= t)[1] for points in series] for t in times]


def _reward_line(axis, arm: str, seeds: list[dict], colour: str) -> None:
    series = [one["evaluations"] for one in seeds if one["evaluations"]]
    if len(series) < MEDIAN_FROM:
        for number, points in enumerate(series):
            axis.plot(*zip(*points, strict=True), marker="o", ms=2.5, lw=1.3, color=colour,
                      label="_" * bool(number) + arm)  # a leading underscore: not in the legend
        if len(series) == 1 and seeds[0]["target"] is not None:
            axis.axhline(seeds[0]["target"], color=colour, lw=0.8, ls=":")
    else:
        times, values = _held(series)
        axis.step(times, [statistics.median(v) for v in values], where="post", lw=1.5, color=colour, label=arm)
        axis.fill_between(times, [min(v) for v in values], [max(v) for v in values], step="post", color=colour,
                          alpha=BAND, lw=0)


def _whole(arms: dict[str, list[dict]]) -> dict:
    """The time axis over the longest run: that of a single evaluation would be a few milliseconds wide."""
    end = max((point[0] for seeds in arms.values() for one in seeds for name in ("evaluations", "running", "bubble")
               for point in one.get(name, ())), default=0.0)
    return {"xlim": (0, end * (1 + MARGIN))} if end > 0 else {}


def _length_lines(axis, arm: str, seeds: list[dict], colour: str) -> None:
    """Cumulative shares: the largest gap of two lines is their Kolmogorov-Smirnov distance."""
    for kind, style in (("sampled", "-"), ("trained", ":")):
        counts: dict[int, int] = {}
        for one in seeds:
            for number, count in one[kind]:
                counts[number] = counts.get(number, 0) + count
        if counts:
            numbers = range(min(counts), max(counts) + 2)
            total = sum(counts.values())
            below = accumulate(counts.get(n - 1, 0) / total for n in numbers)
            axis.plot([2 ** (n / BINS_PER_OCTAVE) for n in numbers], list(below), lw=1.3, ls=style, color=colour,
                      label=arm if kind == "sampled" else None)


def _against_baseline(arms: dict[str, list[dict]], draw, x: str, y: str, **axes_options) -> str:
    """One panel per arm with the baseline in grey behind it; two arms share one panel."""
    base = baseline_of(arms)
    shown = [arm for arm in arms if arm != base] if len(arms) > 1 else list(arms)
    columns = min(PANELS, len(shown))
    rows = -(-len(shown) // columns)
    height = 0.8 + (1.6 if rows > 1 else 2.0) * rows
    with plots.drawing(rows, columns, height, sharex=True, sharey=True) as (axes, done):
        palette = {**plots.colours(list(arms)), **({shown[0]: plots.OUR_COLOURS[0]} if len(shown) == 1 else {})}
        for axis, arm in zip(axes, shown, strict=False):
            if base and base != arm:
                draw(axis, base, arms[base], plots.GREY)
            draw(axis, arm, arms[arm], palette[arm])
            axis.grid(axis="y")
            axis.set(**axes_options)
            axis.legend(handlelength=1.2)
        for axis in axes[len(shown):]:
            axis.set_visible(False)
        plots.outer_labels(axes[0].figure, x, y)
        return done()


def _reward(arms, kind: str) -> Figure:
    several = max(map(len, arms.values())) > 1
    if kind == "run":
        meaning = "Mean score of the responses that were trained, in bins of 10 s."
    elif several:
        meaning = ("Held-out reward: median over three seeds or more, band from the lowest to the highest seed, an "
                   "evaluation holds until the next one; fewer seeds are lines of their own, dotted: a single one's "
                   "target, that of all arms.")
    else:
        meaning = "Held-out reward; dotted: the target of all arms."
    return Figure("Reward over wall time",
                  meaning + ("" if several else " One run each: differences of this size can be the seed."),
                  _against_baseline(arms, _reward_line, "seconds since ready", "mean reward", **_whole(arms)))


def _bubble(arms) -> Figure | None:
    shown = {arm: next((one["bubble"] for one in seeds if one["bubble"]), None) for arm, seeds in arms.items()}
    shown = {arm: points for arm, points in shown.items() if points and len(points) > 1}
    if not shown:
        return None
    columns = min(PANELS, len(shown))
    rows = -(-len(shown) // columns)
    with plots.drawing(rows, columns, 0.7 + 1.5 * rows, sharex=True, sharey=True) as (axes, done):
        for axis, (arm, points) in zip(axes, shown.items(), strict=False):
            times, *parts = zip(*points, strict=True)
            axis.stackplot(times, *parts, labels=CAUSES, colors=[plots.CAUSE_COLOURS[cause] for cause in CAUSES], lw=0)
            axis.set(title=arm, ylim=(0, 1), xlim=(times[0], times[-1]))
        for axis in axes[len(shown):]:
            axis.set_visible(False)
        figure = axes[0].figure
        figure.legend(*axes[0].get_legend_handles_labels(), ncols=len(CAUSES), loc="outside upper right")
        plots.outer_labels(figure, "seconds since ready", "share of capacity")
        return Figure("Bubble over time, by cause",
                      "Share of the replicas' capacity that decoded nothing, in bins of 10 s; first seed of each arm. "
                      "paused: the rollouter held prompts back (staleness limit); starved: nothing to run; tail: fewer "
                      "requests than capacity and nobody waiting; sync: weight update.", done())


def _lengths(arms) -> Figure:
    return Figure("Response lengths, sampled (solid) and trained (dotted)",
                  "Share of responses up to a length, all seeds of an arm together. Where the dotted line leaves the "
                  "solid one, training sees other lengths than the policy makes.",
                  _against_baseline(arms, _length_lines, "response length, tokens", "share of responses",
                                    xscale="log"))


def _bias(record: Record) -> Figure | None:
    values = {arm: [n.get("length bias") for n in seeds.values()] for arm, seeds in record.data["measures"].items()}
    known = {arm: [v for v in found if v is not None] for arm, found in values.items()}
    known = {arm: found for arm, found in known.items() if found}
    if not known:
        return None
    with plots.drawing(height=plots.HEAD_IN + plots.ROW_IN * len(known)) as (axes, done):
        plots.dots(axes[0], list(known), known, "largest Kolmogorov-Smirnov distance of any rule, last step")
        axes[0].set_xlim(left=0)
        return Figure("Length bias",
                      "Distance between the lengths that are trained and those that were sampled, the rule acting "
                      "alone; 0 is no bias. Arms without a pruning rule have none. For rules without a coin it is a "
                      "lower bound: a pruned row counts with the length at which it was cut.", done())


def comparison_panels(axes, arms: dict[str, list[dict]]) -> None:
    """Reward, lengths and running requests: the three panels of the quickstart's picture."""
    reward, lengths, running = axes
    for (arm, seeds), colour in zip(arms.items(), (plots.GREY, *plots.OUR_COLOURS), strict=False):
        _reward_line(reward, arm, seeds, colour)
        _length_lines(lengths, arm, seeds, colour)
        if seeds[0]["running"]:
            running.plot(*zip(*seeds[0]["running"], strict=True), lw=1.5, color=colour, label=arm)
    reward.set(xlabel="seconds since ready", ylabel="mean reward", title="held-out reward (dotted: target)",
               **_whole(arms))
    lengths.set(xlabel="tokens", ylabel="share of responses", xscale="log",
                title="lengths up to (solid: sampled, dotted: trained)")
    running.set(xlabel="seconds since ready", ylabel="requests", ylim=(0, None),
                title="decoding requests, mean of 10 s", **_whole(arms))
    for axis in axes:
        axis.legend()
