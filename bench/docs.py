"""Fills what is generated: the tables of the READMEs, patches/README.md, tox environments in setup.cfg.

usage: python -m bench.docs [--table runs/quickstart/table.json] [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from esgrpo import compat
from esgrpo.config import Segment
from esgrpo.tools import patchset
from esgrpo.tools.doctor import checks, logs

ROOT = Path(__file__).resolve().parent.parent
READMES = (ROOT / "README.md", ROOT / "README_zh.md")
SETUP = ROOT / "setup.cfg"
PATCHES = ROOT / "patches" / "README.md"
SIGN_LENGTH = 100  # characters of a log line in the table of errors


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
        elif "text" in spec:
            allowed = "text"
        else:
            low, high = ("−∞" if spec["low"] is None else spec["low"]), ("∞" if spec["high"] is None else spec["high"])
            allowed = f"{low} … {high}"
        default = "" if field.default == "" else f"`{field.default}`"
        rows.append([f"`{prefix}{field.name}`", default, allowed, spec["doc"]])
    return rows


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cell.strip() or " " for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def compatibility_rows() -> list[list[str]]:
    """One row a tested tuple, best level first: level, versions, date, the command that shows it again."""
    rows = sorted(compat.load(), key=lambda row: compat.LEVELS.index(row.level))
    return [[row.level, ", ".join(f"{name} {version}" for name, version in row.versions.items()), row.date,
             "needs GPUs: compat.toml says how" if row.level == "gpu-e2e" else f"`--only {row.cell}`"] for row in rows]


def stack_chapter() -> str:
    """README_zh.md: which versions go together on Ascend, what of them was tested, and the order of installation."""
    documented = checks.stacks()
    names = [name for name in compat.UPSTREAMS if any(name in stack["versions"] for stack in documented)]
    table = [["组合", *names, "本项目测过（都不在 NPU 上）"]]
    for stack in documented:
        levels = [f"{row.level}: {name} {row.versions[name]}"
                  for row in compat.load() for name in ("verl", "vllm-ascend")
                  if name in row.versions and checks.fits(row.versions[name], stack["versions"][name])]
        table.append([f"[{stack['name']}]({stack['source']})", *(stack["versions"].get(name, "") for name in names),
                      "<br>".join(dict.fromkeys(levels)) or "无"])
    orders = "\n\n".join(f"{stack['name']}（{stack['zh']}）：\n\n```bash\n" + "\n".join(stack["install"]) + "\n```"
                         for stack in documented)
    return f"{markdown(table)}\n\n{orders}"


def error_rows() -> list[list[str]]:
    """README_zh.md: what a log says, why and what to do, what cures it; one row a signature."""
    rows = []
    for signature in logs.signatures():
        line, hit = next((line, hit) for line in signature.excerpt.splitlines() for pattern in signature.patterns
                         if (hit := pattern.search(line)))
        said = line[line.rfind(" ", 0, hit.start() + 1) + 1:].strip().replace("|", "\\|")
        said = said if len(said) <= SIGN_LENGTH else said[:SIGN_LENGTH].rstrip() + "…"
        rows.append([f"`{said.replace('`', chr(39))}`", signature.zh, "；".join(signature.cured_by)])
    return rows


def tox_environments(text: str) -> str:
    """setup.cfg with one tox environment for each matrix cell."""
    cells = "".join(f"\n    {row.cell}" for row in compat.load() if row.level != "gpu-e2e")
    return re.sub(r"(?m)^env_list =(?:\n    \S+)*", lambda _: f"env_list ={cells}", text)


def patch_index() -> str:
    """patches/README.md: every slug once, with the releases it is for and what each header says."""
    fields = ("Why", "Invariant", "Target", "Upstream-Status", "Remove-When", "Hook", "Test")
    lines = ["# Patch sets", "", "Generated from the patches' headers by `python -m bench.docs`; applied with "
             "`./apply.sh`. A slug with a hook is cured by the overlay at run time, too, and never twice.", ""]
    sets = patchset.load_all(PATCHES.parent)
    for slug in sorted({slug for patches in sets for slug in patches.slugs}):
        having = [(patches.name, p) for patches in sets for p in patches.patches if p.slug == slug]
        header = having[-1][1].header
        lines += [f"## {slug}", "", ", ".join(name for name, _ in having), ""]
        lines += [f"- {name}: {header[name]}" for name in fields] + [""]
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
    setup = SETUP.read_text(encoding="utf-8")
    generated = tox_environments(setup)
    stale |= generated != setup
    index = patch_index()
    stale |= index != (PATCHES.read_text(encoding="utf-8") if PATCHES.exists() else "")
    if not options.check:
        SETUP.write_text(generated, encoding="utf-8")
        PATCHES.write_text(index, encoding="utf-8")
    for path in READMES:
        old = text = path.read_text(encoding="utf-8")
        text = fill(text, "config-table", markdown([["key", "default", "allowed", "meaning"], *config_rows()]))
        text = fill(text, "compat-table", markdown([["level", "versions", "date", "`bash ci/matrix.sh`"],
                                                    *compatibility_rows()]))
        text = fill(text, "ascend-stacks", stack_chapter())
        text = fill(text, "ascend-errors", markdown([["日志里的话", "原因与处理", "由谁治"], *error_rows()]))
        if options.table:
            run = json.loads(options.table.read_text())
            notes = "\n".join(f"- {note}" for note in run["notes"])
            text = fill(text, "quickstart-table", f"{markdown(run['table'])}\n\n{notes}")
        stale |= text != old
        if not options.check:
            path.write_text(text, encoding="utf-8")
    if options.check and stale:
        print("esgrpo: README, setup.cfg or patches/README.md is stale | wanted what the config fields, compat.toml "
              "and the patch headers say | CI stops | run python -m bench.docs", file=sys.stderr)
    return int(options.check and stale)


if __name__ == "__main__":
    sys.exit(main())
