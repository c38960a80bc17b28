"""Draws a comparison: one PNG and one self-contained HTML page."""

from __future__ import annotations

import base64
import html
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from bench.compare import Result  # noqa: E402

COLOURS = ("#7a7a7a", "#c2410c", "#1d4ed8", "#15803d")
LENGTH_BINS = 40
TIMELINE_BIN_S = 10.0
DPI = 130
TITLE = "ES-GRPO quickstart: verl 0.9.1 fully async GRPO, plain and with the overlay"

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1f2937}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .9rem;border-bottom:1px solid #e5e7eb;text-align:left}
th{background:#f9fafb}td:not(:first-child){font-variant-numeric:tabular-nums}img{max-width:100%}
code,pre{background:#f3f4f6;padding:.1rem .3rem;border-radius:3px}pre{overflow:auto;padding:.6rem}
.note{color:#6b7280}.APPLIED{color:#15803d}.NOT_NEEDED,.ABSENT{color:#6b7280}.DISABLED{color:#b45309}"""


def time_average(timeline: list[tuple[float, float]], width: float = TIMELINE_BIN_S) -> list[tuple[float, float]]:
    """Time-weighted means of a step function, given as (second, value from then on), over bins of `width` seconds.

    A point stands at the middle of its bin. The raw steps of two arms would cover one another.
    """
    sums: dict[int, float] = {}
    spans: dict[int, float] = {}
    for (start, value), (end, _) in zip(timeline, timeline[1:], strict=False):
        while start < end:
            bin_number = int(start // width)
            piece = min(end, (bin_number + 1) * width) - start
            sums[bin_number] = sums.get(bin_number, 0.0) + value * piece
            spans[bin_number] = spans.get(bin_number, 0.0) + piece
            start += piece
            if piece <= 0:  # float rounding at a bin's edge
                break
    return [((number + 0.5) * width, sums[number] / spans[number]) for number in sorted(spans) if spans[number] > 0]


def picture(results: list[Result], path: Path) -> None:
    """Reward over wall time, response lengths, running requests over time."""
    figure, (reward, length, running) = plt.subplots(1, 3, figsize=(15, 4.2))
    longest = max((max(r.lengths) for r in results if r.lengths), default=1)
    edges = [longest ** (i / LENGTH_BINS) for i in range(LENGTH_BINS + 1)]
    for result, colour in zip(results, COLOURS, strict=False):
        if result.evaluations:
            reward.plot(*zip(*result.evaluations, strict=True), marker="o", ms=4, color=colour, label=result.name)
        reward.axhline(result.target, color=colour, lw=0.8, ls=":")
        length.hist(result.lengths, bins=edges, histtype="step", lw=1.6, color=colour, label=result.name)
        if result.timeline:
            running.plot(*zip(*time_average(result.timeline), strict=True), lw=1.6, color=colour, label=result.name)
    reward.set(title="held-out reward (dotted: target)", xlabel="seconds since ready", ylabel="mean reward")
    length.set(title="response length", xlabel="tokens", ylabel="responses", xscale="log")
    running.set(title=f"running requests in the engine (mean of {TIMELINE_BIN_S:.0f} s)", ylim=(0, None),
                xlabel="seconds since ready", ylabel="requests")
    for axis in (reward, length, running):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _html_table(rows: list[list[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{html.escape(c)}</th>" for c in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body)
    return f"<table><tr>{cells}</tr>{lines}</table>"


def _states_table(reports: list[dict]) -> str:
    slugs = [hook["slug"] for hook in reports[0]["hooks"]]
    head = "".join(f"<th>{html.escape(r['process'])}</th>" for r in reports)
    lines = ""
    for index, slug in enumerate(slugs):
        cells = "".join(f"<td class='{h['state']}' title='{html.escape(h['detail'], quote=True)}'>{h['state']}</td>"
                        for h in (r["hooks"][index] for r in reports))
        lines += f"<tr><td>{slug}</td>{cells}</tr>"
    return f"<table><tr><th>hook</th>{head}</tr>{lines}</table>"


def page(rows: list[list[str]], png: Path, reports: list[dict], notes: list[str], difference: list[str],
         path: Path) -> None:
    """Everything in one file: no script, no network."""
    image = base64.b64encode(png.read_bytes()).decode()
    note_items = "".join(f"<li>{html.escape(n)}</li>" for n in notes)
    path.write_text(f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{TITLE}</title>
<style>{STYLE}</style>
<h1>{TITLE}</h1><ul class="note">{note_items}</ul>{_html_table(rows)}
<img alt="reward over wall time, response lengths, running requests" src="data:image/png;base64,{image}">
<h2>What differs between the arms</h2><pre>{html.escape(chr(10).join(difference))}</pre>
<h2>Hook states of the overlay arm</h2>{_states_table(reports)}</html>
""", encoding="utf-8")
