"""Writes the content as one HTML page that asks the network for nothing, and as Markdown beside it."""

from __future__ import annotations

import base64
import html
from itertools import count
from pathlib import Path

from esgrpo.tools.report.files import write_whole
from esgrpo.tools.report.load import NOT_RECORDED, Record
from esgrpo.tools.report.sections import Block, Content, shape_of
from esgrpo.tools.report.tables import Table

TITLE = "ES-GRPO: what was measured"
STYLE = """
:root{--ink:#1f2430;--soft:#5b6270;--line:#d5d8de;--warn:#8a5a00;--bad:#b3261e}
body{font:15px/1.55 Georgia,'Times New Roman',serif;color:var(--ink);max-width:64rem;
margin:2.5rem auto;padding:0 1.2rem}
h1,h2,h3,nav,table,figcaption,caption,.badge,.note,summary{font-family:system-ui,-apple-system,'Segoe UI',sans-serif}
h1{font-size:1.65rem;margin-bottom:.2rem}h2{font-size:1.2rem;margin-top:2.6rem;border-bottom:1px solid var(--ink)}
h3{font-size:1rem;margin:2rem 0 .3rem}nav{font-size:.85rem;margin:1rem 0}nav a{margin-right:1rem;color:inherit}
.scroll{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.8rem;line-height:1.35;overflow-wrap:break-word;
border-top:1.6px solid var(--ink);
border-bottom:1.6px solid var(--ink);font-variant-numeric:tabular-nums}
caption{caption-side:top;text-align:left;font-size:.85rem;padding-bottom:.4rem}
th{font-weight:600;text-align:left;vertical-align:bottom;border-bottom:1px solid var(--ink);padding:.3rem .7rem .3rem 0}
td{white-space:pre-wrap;padding:.25rem .7rem .25rem 0;
vertical-align:top;border-bottom:1px solid #eceef1}tr:last-child td{border-bottom:0}
td:first-child{font-weight:500}code{font-size:.85em}
figure{margin:1.4rem 0}figure img{width:100%;height:auto}figcaption{font-size:.82rem;color:var(--soft)}
figcaption b,caption b{color:var(--ink)}
.note{font-size:.82rem;color:var(--soft);margin:.3rem 0;padding-left:.8rem;border-left:3px solid var(--line)}
.note li{margin:.1rem 0}.note ul{margin:0;padding-left:1rem}.lacking{color:var(--warn)}
.badge{font-size:.7rem;font-weight:600;padding:.05rem .4rem;border:1px solid currentColor;border-radius:3px;
margin-left:.4rem}
.simulated{color:var(--bad)}summary{cursor:pointer;font-size:.85rem;color:var(--soft)}
@media print{body{max-width:none;margin:0}details{display:block}}
"""
SIMULATED_BADGE = '<span class="badge simulated">simulated</span>'
MISSING_LEAD = "Part of a complete evaluation, and not among these records:"
UNKNOWN_LEAD = "These files have a shape that this version does not know; their numbers are not on this page:"


def write(content: Content, path: Path) -> None:
    """`path` and the same name with .md; each is complete or absent."""
    write_whole(path, as_html(content), "--out")
    write_whole(path.with_suffix(".md"), as_markdown(content), "--out")


def _cell(text: str) -> str:
    if text in ("simulated", "yes", "NO"):
        return {"simulated": SIMULATED_BADGE, "NO": "<b class='simulated'>NO</b>"}.get(text, text)
    escaped = html.escape(text)
    return f'<span class="lacking">{escaped}</span>' if text == NOT_RECORDED else escaped


def _table(table: Table, number: int) -> str:
    head, *body = table.rows
    cells = "".join(f"<th>{_cell(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>\n" for row in body)
    text = (f'<div class="scroll"><table><caption><b>Table {number}.</b> {html.escape(table.title)}</caption>'
            f"<thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>\n")
    return f"<details><summary>{html.escape(table.title)}</summary>{text}</details>\n" if table.folded else text


def _figure(figure, number: int) -> str:
    image = base64.b64encode(figure.svg.encode()).decode()
    return (f'<figure><img alt="{html.escape(figure.title, quote=True)}" src="data:image/svg+xml;base64,{image}">'
            f"<figcaption><b>Figure {number}. {html.escape(figure.title)}.</b> {html.escape(figure.caption)}"
            "</figcaption></figure>\n")


def _from(record: Record) -> str:
    facts = record.provenance()
    return "; ".join(f"{name} {_cell(text) if name != 'command' else f'<code>{_cell(text)}</code>'}"
                     for name, text in facts.items())


def _block(block: Block, tables: count, figures: count) -> str:
    badge = SIMULATED_BADGE if block.record.simulated else ""
    text = f"<h3>{html.escape(block.record.name)}{badge}</h3>\n"
    notes = "".join(f"<li>{html.escape(caveat)}</li>" for caveat in block.caveats)
    text += f'<div class="note"><ul>{notes}<li>{_from(block.record)}</li></ul></div>\n'
    text += "".join(_table(table, next(tables)) for table in block.tables if not table.folded)
    text += "".join(_figure(figure, next(figures)) for figure in block.figures)
    return text + "".join(_table(table, next(tables)) for table in block.tables if table.folded)


def as_html(content: Content) -> str:
    tables, figures = count(1), count(1)
    parts = [_table(content.headline, next(tables))] if len(content.headline.rows) > 1 else [
        "<p>No record here allows a headline number.</p>"]
    links = ""
    for index, section in enumerate(content.sections):
        if section.blocks:
            links += f'<a href="#s{index}">{section.title}</a>'
            parts.append(f'<h2 id="s{index}">{section.title}</h2>\n<p>{html.escape(section.lead)}</p>\n')
            parts += [_block(block, tables, figures) for block in section.blocks]
    parts.append('<h2 id="missing">Not run</h2>\n')
    rows = [["what", "command"], *content.missing]
    parts.append(f"<p>{MISSING_LEAD}</p>" + _table(Table("Not run", rows), next(tables)) if content.missing else
                 "<p>Nothing: every kind of evidence is there.</p>")
    if content.unknown:
        items = "".join(f"<li><b>{html.escape(r.name)}</b>: {html.escape(shape_of(r))}</li>" for r in content.unknown)
        parts.append(f'<h2 id="unknown">Not understood</h2><p>{UNKNOWN_LEAD}</p><ul>{items}</ul>')
    parts.append('<h2 id="sources">Sources</h2>\n' + _table(content.sources, next(tables)))
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
            '<meta name="viewport" content="width=device-width">'
            f"<style>{STYLE}</style></head><body>\n<h1>{TITLE}</h1>\n"
            '<p class="lead">Every number stands with its command, commit, seed, device and spread; what is simulated '
            'is marked so; what was not run is listed.</p>\n'
            f'<nav>{links}<a href="#missing">Not run</a><a href="#sources">Sources</a></nav>\n'
            f'{"".join(parts)}</body></html>\n')


def markdown_table(rows: list[list[str]]) -> str:
    """GitHub's table; bars inside cells are escaped."""
    lines = ["| " + " | ".join(cell.strip().replace("|", "\\|") or " " for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def as_markdown(content: Content) -> str:
    parts = [f"# {TITLE}", "Figures are on the HTML page of the same name.", "## Headline",
             markdown_table(content.headline.rows)]
    for section in content.sections:
        if section.blocks:
            parts += [f"## {section.title}", section.lead]
        for block in section.blocks:
            facts = "; ".join(f"{name}: {text}" for name, text in block.record.provenance().items())
            parts.append(f"### {block.record.name}" + (" (simulated)" if block.record.simulated else ""))
            parts.append("\n".join(f"- {line}" for line in [*block.caveats, facts]))
            for table in block.tables:
                parts += [f"**{table.title}**", markdown_table(table.rows)]
            parts += [f"*Figure: {figure.title}.* {figure.caption}" for figure in block.figures]
    parts += ["## Not run", markdown_table([["what", "command"], *content.missing]) if content.missing else "Nothing."]
    if content.unknown:
        parts += ["## Not understood", UNKNOWN_LEAD, "\n".join(f"- {r.name}: {shape_of(r)}" for r in content.unknown)]
    parts += ["## Sources", markdown_table(content.sources.rows)]
    return "\n\n".join(parts) + "\n"
