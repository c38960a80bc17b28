"""Fills the generated parts of README.md and README_zh.md: the config table and the quickstart table.

usage: python -m bench.docs [--table runs/quickstart/table.json] [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from esgrpo.config import Segment

ROOT = Path(__file__).resolve().parent.parent
READMES = (ROOT / "README.md", ROOT / "README_zh.md")


def config_rows(cls=Segment, prefix: str = "") -> list[list[str]]:
    """key, default, allowed, meaning: one row per leaf of the config group."""
    rows = []
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            rows += config_rows(field.default_factory, f"{prefix}{field.name}.")
            continue
        spec = field.metadata
        if field.type == "bool":
            allowed = "true, false"
        elif "options" in spec:
            allowed = ", ".join(spec["options"])
        else:
            low, high = ("−∞" if spec["low"] is None else spec["low"]), ("∞" if spec["high"] is None else spec["high"])
            allowed = f"{low} … {high}"
        rows.append([f"`{prefix}{field.name}`", f"`{field.default}`", allowed, spec["doc"]])
    return rows


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cell.strip() or " " for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def fill(text: str, name: str, content: str) -> str:
    """Replace what stands between <!-- name --> and <!-- /name -->; the first time, the end mark is added."""
    block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    pattern = re.compile(rf"<!-- {name} -->(?:.*?<!-- /{name} -->)?", re.DOTALL)
    return pattern.sub(lambda _: block, text, count=1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="table.json of a quickstart run")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the table is stale")
    options = parser.parse_args(argv)
    stale = False
    for path in READMES:
        old = text = path.read_text(encoding="utf-8")
        text = fill(text, "config-table", markdown([["key", "default", "allowed", "meaning"], *config_rows()]))
        if options.table:
            run = json.loads(options.table.read_text())
            notes = "\n".join(f"- {note}" for note in run["notes"])
            text = fill(text, "quickstart-table", f"{markdown(run['table'])}\n\n{notes}")
        stale |= text != old
        if not options.check:
            path.write_text(text, encoding="utf-8")
    if options.check and stale:
        print("esgrpo: README: the config table is stale | wanted the fields of esgrpo.config.Segment | CI stops | "
              "run python -m bench.docs", file=sys.stderr)
    return int(options.check and stale)


if __name__ == "__main__":
    sys.exit(main())
