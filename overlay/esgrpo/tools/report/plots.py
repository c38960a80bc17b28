"""What every figure shares: matplotlib, loaded when a figure is drawn, one style, and SVG text out of it."""

from __future__ import annotations

import io
import re
from contextlib import contextmanager
from dataclasses import dataclass

from esgrpo.errors import EsgrpoError
from esgrpo.tools.report.tables import BASELINES, OURS

WIDTH_IN = 7.4  # of the page's text
ROW_IN = 0.27  # of one line in a chart with names on its side
HEAD_IN = 1.0  # title, axis and labels around such lines
GREY, OTHER, INK = "#8a8f98", "#4c78a8", "#1f2430"
OUR_COLOURS = ("#c8431c", "#e08a3c", "#8c2d5e")
ARM_COLOURS = ("#8a8f98", "#c8431c", "#2f6db5", "#3f8f5b", "#9467bd", "#b5892f", "#3aa6a6", "#d46a9f", "#5b5b8c")
CAUSE_COLOURS = {"paused": "#9db4cf", "no_work": "#9db4cf", "starved": "#e3b25f", "barrier": "#e3b25f",
                 "tail": "#c8431c", "below_capacity": "#c8431c", "sync": "#6b8f71"}
STYLE = {"font.size": 8.5, "axes.titlesize": 9, "axes.labelsize": 8.5, "axes.spines.top": False,
         "axes.spines.right": False, "axes.edgecolor": "#4b4f58", "axes.linewidth": 0.7, "axes.titlelocation": "left",
         "xtick.color": "#4b4f58", "ytick.color": INK, "text.color": INK, "axes.labelcolor": INK,
         "grid.color": "#e4e6ea", "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
         "legend.fontsize": 8, "figure.constrained_layout.use": True, "svg.hashsalt": "esgrpo", "svg.fonttype": "none",
         "font.sans-serif": ["DejaVu Sans", "Verdana"]}  # of one width: what holds the one holds the other
STAMP = "SIMULATED"
TAG, LONG_NUMBER = re.compile(r"<[^>]+>"), re.compile(r"-?\d+\.\d{3,}")


@dataclass(frozen=True)
class Figure:
    """A caption that says what to see and what not to conclude, and the picture as SVG text."""

    title: str
    caption: str
    svg: str


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise EsgrpoError("report", "matplotlib is not installed", "matplotlib >= 3.7 for the figures",
                          "nothing was written", "pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


@contextmanager
def drawing(rows: int = 1, columns: int = 1, height: float = 2.6, **options):
    """Gives the axes as a flat list, and a function that returns the finished SVG."""
    plt = _pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=(WIDTH_IN, height), squeeze=False, **options)

        def done() -> str:
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
            return short_numbers(text.getvalue())

        try:
            yield list(axes.flat), done
        finally:
            plt.close(figure)


def short_numbers(svg: str) -> str:
    """Coordinates to a hundredth of a point, which nobody sees; matplotlib writes six decimals. Texts stay."""
    def short(number: re.Match) -> str:
        return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")

    return TAG.sub(lambda tag: LONG_NUMBER.sub(short, tag[0]), svg)


def save_png(draw, path, dpi: int = 130) -> None:
    """The same drawing as PNG; `draw(axes)` fills three panels."""
    plt = _pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(2 * WIDTH_IN, 4.0))
        draw(axes)
        figure.savefig(path, dpi=dpi)
        plt.close(figure)


def colours(names: list[str]) -> dict[str, str]:
    """Grey for the baseline, warm for ours, blue for the rest."""
    ours = sorted(name for name in names if name.startswith(OURS) or name in ("all", "overlay"))
    return {name: GREY if name in BASELINES else
            OUR_COLOURS[ours.index(name) % len(OUR_COLOURS)] if name in ours else OTHER for name in names}


def dots(axis, names: list[str], values: dict[str, list[float]], unit: str, reference: float | None = None) -> None:
    """One line per name: every run as a dot, the median as a bar. First name on top."""
    import statistics

    palette = colours(names)
    for line, name in enumerate(names):
        found = [v for v in values.get(name, []) if v is not None]
        if found:
            axis.plot(found, [line] * len(found), "o", ms=4, alpha=0.55, mew=0, color=palette[name])
            axis.plot([statistics.median(found)], [line], "|", ms=11, mew=2, color=palette[name])
    if reference is not None:
        axis.axvline(reference, color="#4b4f58", lw=0.8, ls=(0, (3, 3)))
    axis.set(yticks=range(len(names)), yticklabels=names, xlabel=unit, ylim=(len(names) - 0.4, -0.6))
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x")


def stacked(axis, names: list[str], shares: dict[str, dict[str, float]], unit: str) -> None:
    """One bar per name, split into causes."""
    causes = list(dict.fromkeys(cause for name in names for cause in shares.get(name, {})))
    left = [0.0] * len(names)
    for cause in causes:
        widths = [shares.get(name, {}).get(cause, 0.0) for name in names]
        axis.barh(range(len(names)), widths, left=left, height=0.62, color=CAUSE_COLOURS.get(cause, INK),
                  label=cause.replace("_", " "))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set(yticks=range(len(names)), yticklabels=names, xlabel=unit, ylim=(len(names) - 0.4, -0.6))
    axis.tick_params(axis="y", length=0)
    axis.legend(ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0), handlelength=1, columnspacing=1.2)


def outer_labels(figure, x: str, y: str) -> None:
    figure.supxlabel(x, fontsize=STYLE["axes.labelsize"])
    figure.supylabel(y, fontsize=STYLE["axes.labelsize"])


def stamp(axis, simulated: bool) -> None:
    if simulated:
        axis.figure.text(0.995, 0.005, STAMP, ha="right", va="bottom", color="#b3261e", fontsize=7, fontweight="bold")
