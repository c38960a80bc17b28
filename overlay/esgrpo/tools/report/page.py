"""Writes the content as one HTML page that asks the network for nothing, and as Markdown beside it."""

from __future__ import annotations

import base64
import html
from itertools import count
from pathlib import Path

from esgrpo.tools.report.chinese import in_chinese
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
summary h2{display:inline-block;margin:1.2rem 0 .4rem;border:0;color:var(--ink)}
section{border-top:1px solid var(--line)}
.language{float:right;font:.85rem system-ui,sans-serif}#zh:checked~main [lang=en],#zh:not(:checked)~main [lang=zh]{
display:none}main{clear:both}
.cards td:nth-child(n+2):nth-child(-n+4){min-width:8.5rem}
@media (max-width:40rem){body{margin:1rem auto;padding:0 .8rem}h1{font-size:1.3rem}.cards thead{display:none}
.cards,.cards tbody,.cards tr,.cards td{display:block;width:100%}.cards tr{padding:.6rem 0;border-bottom:1px solid
var(--line)}.cards td{border:0;padding:.1rem 0}.cards td::before{content:attr(data-head) ": ";color:var(--soft)}
.cards td:first-child::before{content:""}td{min-width:4.5rem;overflow-wrap:anywhere}
.note,figcaption{overflow-wrap:anywhere}}
@media print{body{max-width:none;margin:0}details{display:block}.language{display:none}}
"""
LEAD = ("Every number stands with its command, commit, seed, device and spread; what is simulated is marked so; what "
        "was not run is listed.")
FIGURES_LEAD = "Everything else is folded below, by question."
NO_ANSWER = "No record here allows a headline number."
SIMULATED_BADGE = '<span class="badge simulated">simulated</span>'
NOT_RUN, SOURCES = "Not run", "Where every number comes from"
NOTHING_MISSING = "Nothing: every kind of evidence is there."
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


def _both(text: str, form=html.escape) -> str:
    """Our own words in both languages where the second has them; the switch of the page shows one."""
    chinese = in_chinese(text)
    if chinese == text:
        return form(text)
    return f'<span lang="en">{form(text)}</span><span lang="zh">{form(chinese)}</span>'


def _table(table: Table, number: int, cards: bool = False) -> str:
    """`cards`: cells are sentences, in both languages, and rows stand under each other where the page is narrow."""
    head, *body = table.rows
    cell = (lambda text: _both(text, _cell)) if cards else _cell
    heads = "".join(f"<th>{_both(text)}</th>" for text in head)
    lines = "".join("<tr>" + "".join(f'<td data-head="{html.escape(name, quote=True)}">{cell(text)}</td>' if cards
                                     else f"<td>{cell(text)}</td>" for name, text in zip(head, row, strict=True))
                    + "</tr>\n" for row in body)
    text = (f'<div class="scroll"><table{" class=cards" * cards}><caption><b>{_both("Table")} {number}.</b> '
            f"{_both(table.title)}</caption><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>\n")
    return f"<details><summary>{_both(table.title)}</summary>{text}</details>\n" if table.folded else text


def _figure(figure, number: int) -> str:
    image = base64.b64encode(figure.svg.encode()).decode()
    return (f'<figure><img alt="{html.escape(figure.title, quote=True)}" src="data:image/svg+xml;base64,{image}">'
            f"<figcaption><b>{_both('Figure')} {number}. {_both(figure.title)}.</b> {_both(figure.caption)}"
            "</figcaption></figure>\n")


def _folded(anchor: str, title: str, inside: str) -> str:
    return f'<section id="{anchor}"><details><summary><h2>{_both(title)}</h2></summary>\n{inside}</details></section>\n'


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
    """First screen: the answers and three pictures; then everything, folded by question."""
    tables, figures = count(1), count(1)
    answers = len(content.headline.rows) > 1
    parts = [_table(content.headline, next(tables), cards=True) if answers else f"<p>{_both(NO_ANSWER)}</p>"]
    parts += [_figure(figure, next(figures)) for figure in content.pictures]
    parts.append(f"<p>{_both(FIGURES_LEAD)}</p>")
    if len(content.claims.rows) > 1:
        parts.append(_folded("claims", content.claims.title, _table(content.claims, next(tables))))
    for index, section in enumerate(content.sections):
        if section.blocks:
            inside = "".join(_block(block, tables, figures) for block in section.blocks)
            parts.append(_folded(f"s{index}", section.title, f"<p>{_both(section.lead)}</p>\n{inside}"))
    rows = [["what", "command"], *content.missing]
    missing = f"<p>{_both(MISSING_LEAD)}</p>" + _table(Table(NOT_RUN, rows), next(tables)) if content.missing else (
        f"<p>{_both(NOTHING_MISSING)}</p>")
    parts.append(_folded("missing", NOT_RUN, missing))
    if content.unknown:
        items = "".join(f"<li><b>{html.escape(r.name)}</b>: {html.escape(shape_of(r))}</li>" for r in content.unknown)
        parts.append(f'<h2 id="unknown">{_both("Not understood")}</h2><p>{_both(UNKNOWN_LEAD)}</p><ul>{items}</ul>')
    parts.append(_folded("sources", SOURCES, _table(content.sources, next(tables))))
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{STYLE}</style></head><body>\n"
            '<input type="checkbox" id="zh" class="language"><label class="language" for="zh">中文&nbsp;</label>\n'
            f'<main><h1>{_both(TITLE)}</h1>\n<p class="lead">{_both(LEAD)}</p>\n{"".join(parts)}</main></body>'
            "</html>\n")


def markdown_table(rows: list[list[str]]) -> str:
    """GitHub's table; bars inside cells are escaped."""
    lines = ["| " + " | ".join(cell.strip().replace("|", "\\|") or " " for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def as_markdown(content: Content) -> str:
    parts = [f"# {TITLE}", "Figures are on the HTML page of the same name."]
    for title, table in (("Headline", content.headline), (content.claims.title, content.claims)):
        if len(table.rows) > 1:  # more than its head
            parts += [f"## {title}", markdown_table(table.rows)]
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
    parts += [f"## {NOT_RUN}",
              markdown_table([["what", "command"], *content.missing]) if content.missing else "Nothing."]
    if content.unknown:
        parts += ["## Not understood", UNKNOWN_LEAD, "\n".join(f"- {r.name}: {shape_of(r)}" for r in content.unknown)]
    parts += [f"## {SOURCES}", markdown_table(content.sources.rows)]
    return "\n\n".join(parts) + "\n"
