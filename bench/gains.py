"""The table of comparisons, computed from the records, or the front page's figure.

usage: python -m bench.gains [--figure docs/training.png]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from bench.common import console, records
from bench.common.gains import ENGLISH, LEFT_OUT, PARTS, SUMS, TRAINING, V1_THREE, V1_THREE_ARM, table

DPI = 130


def draw(path: Path) -> None:
    """Rewards of a pre-trained model, effective tokens/s of each pair, and rewards of the longer runs, as PNG."""
    from esgrpo.tools.report import plots  # matplotlib is needed for the figure alone

    pairs, shades, dark = records.training_pairs(TRAINING), (plots.GREY, plots.OUR_COLOURS[0]), "#4b5563"
    sums, three = (records.read(record)["curves"] for record in (SUMS["sums"][0], V1_THREE))
    with plots.drawing(1, 3, 2.7, gridspec_kw={"width_ratios": [1.9, 0.9, 2.1]}) as ((left, right, long), _):
        for name, found, line, shade in (("overlay", sums["all"], "-", shades[1]),
                                         ("verl, v1, its filter, 3 ahead", three[V1_THREE_ARM], "--", dark),
                                         ("verl, fully async", sums["plain"], "-", shades[0])):
            curves = [curve["evaluations"] for curve in found.values()]
            for curve in curves:
                left.plot(*zip(*curve, strict=True), line, lw=0.8, alpha=0.45, color=shade)
            means = [tuple(map(statistics.mean, zip(*points, strict=True))) for points in zip(*curves, strict=True)]
            left.plot(*zip(*means, strict=True), line, lw=2.0, color=shade, label=f"{name}, {len(curves)} runs")
        left.set(title="Held-out reward, SmolLM2-135M", xlabel="seconds of training", ylim=(0, 0.33))
        left.grid(axis="y")
        left.legend(loc="lower left", fontsize="x-small", handlelength=2.0)
        for pair in pairs:
            values = [one["effective tokens/s"] / 1000 for one in (pair.plain, pair.overlay)]
            right.plot([0, 1], values, lw=0.8, color="#b9bdc6", zorder=1)
            right.scatter([0, 1], values, s=22, c=shades, zorder=2)
        right.set(title="Effective tokens/s", ylabel="thousands", xticks=[0, 1], xticklabels=["plain", "overlay"],
                  xlim=(-0.3, 1.3), ylim=(0, None))
        right.grid(axis="y")
        for record, line in ((PARTS, "-"), (LEFT_OUT, "--")):
            curves = records.read(record)["curves"]
            for name, shade in zip(("plain", "overlay"), shades, strict=True):
                (seed, curve), = curves[name].items()
                long.plot(*zip(*curve["evaluations"], strict=True), line, lw=1.6, color=shade,
                          label=f"{'plain verl' if name == 'plain' else name}, seed {seed}")
        long.set(title="Held-out reward, 33 M, longer runs", xlabel="seconds of training", ylim=(0, 1))
        long.grid(axis="y")
        long.legend(loc="lower left", ncols=2, fontsize="x-small", handlelength=1.4, columnspacing=1.0)
        left.figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.gains", __doc__.partition("\n")[0])
    parser.add_argument("--figure", type=console.output_file, help="draw it there, as PNG; else the table is printed")
    options = parser.parse_args(argv)
    if options.figure and options.figure.suffix != ".png":
        parser.error(f"--figure {options.figure}: wanted a name that ends in .png")
    if options.figure:
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(options.figure)
    else:
        for row in table(ENGLISH):
            print("  ".join(row))
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
