"""Fills what is generated: tables of the READMEs and of docs/, patches/README.md, tox environments in setup.cfg.

usage: python -m bench.docs [--table runs/quickstart/table.json] [--check]

A page holds its blocks between <!-- NAME --> and <!-- /NAME -->; BLOCKS says what each of them is filled with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.common import console, front, gains, hook_tables, targets
from bench.common.gains import CHINESE, ENGLISH
from esgrpo import cli, compat
from esgrpo.config import Segment
from esgrpo.tools import patchset
from esgrpo.tools.doctor import checks, logs
from esgrpo.tools.explain.report import load as metrics

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SETTINGS_ZH = Path(__file__).with_name("settings_zh.toml")
SETUP = ROOT / "setup.cfg"
PATCHES = ROOT / "patches" / "README.md"
SIGN_LENGTH = 100  # characters of a log line in the table of errors


CONFIG_HEAD = {ENGLISH: ["key", "default", "allowed", "meaning"], CHINESE: ["键", "默认值", "可取的值", "含义"]}
METRIC_HEAD = {ENGLISH: ["metric", "meaning", "formula", "healthy", "what to change"],
               CHINESE: ["指标", "含义", "公式", "正常值", "不正常时改什么"]}




def config_rows(language: str, cls=Segment, prefix: str = "") -> list[list[str]]:
    """key, default, allowed, meaning: one row per leaf of the config group. Raises KeyError without a translation."""
    rows, chinese = [], compat.toml(SETTINGS_ZH)
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        if field.default_factory is not dataclasses.MISSING:
            rows += config_rows(language, field.default_factory, f"{name}.")
            continue
        spec = field.metadata
        if field.type == "bool":
            allowed = "true, false"
        elif "options" in spec:
            allowed = ", ".join(spec["options"])
        elif "text" in spec:
            allowed = "text" if language == ENGLISH else "文本"
        else:
            low, high = ("−∞" if spec["low"] is None else spec["low"]), ("∞" if spec["high"] is None else spec["high"])
            allowed = f"{'> ' * spec['open_low']}{low} … {high}"
        default = "" if field.default == "" else f"`{field.default}`"
        rows.append([f"`{name}`", default, allowed, chinese[name] if language == CHINESE else spec["doc"]])
    return rows


def metric_rows(language: str) -> list[list[str]]:
    """One row per entry of explain's metrics; a text that has no translation stays English."""
    rows = []
    for name, entry in metrics().items():
        releases = f" ({', '.join(entry['verl'])})" if "verl" in entry else ""
        texts = [entry.get(f"{key}_zh", entry.get(key, "")) if language == CHINESE else entry.get(key, "")
                 for key in ("means", "formula", "healthy", "change")]
        rows.append([f"`{name}`{releases}", *(text.replace("|", "\\|") for text in texts)])
    return rows


def examples(language: str) -> str:
    """What doctor says of a log, and explain of a metric."""
    excerpt = next(one.excerpt for one in logs.signatures() if one.slug == "keyword-repeated")
    lines = []
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        print(excerpt, file=log, flush=True)
        for command in (["doctor", "--log", log.name], ["explain", "count/staleness_samples"]):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                cli.main([*command, "--lang", language])
            lines += [f"$ esgrpo {' '.join(command)}".replace(log.name, "train.log"), output.getvalue().rstrip()]
    return "\n".join(["```text", *lines, "```"])


def markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cell.strip() or " " for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def stack_chapter() -> str:
    """docs/ascend_zh.md: which versions go together, what of them was tested, and the order of installation."""
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


def error_rows(language: str) -> list[list[str]]:
    """What a log says, why and what to do, what cures it; one row a signature that ends a run."""
    rows = []
    for signature in logs.signatures():
        if signature.weight in ("echo", "notice"):
            continue
        line, hit = next((line, hit) for line in signature.excerpt.splitlines() for pattern in signature.patterns
                         if (hit := pattern.search(line)))
        said = line[line.rfind(" ", 0, hit.start() + 1) + 1:].strip().replace("|", "\\|")
        said = said if len(said) <= SIGN_LENGTH else said[:SIGN_LENGTH].rstrip() + "…"
        why = [signature.zh] if language == CHINESE else [signature.cause, signature.fix]
        texts = (re.sub(r"\{\w+\}", "…", text).replace("|", "\\|") for text in why)  # the log at hand fills these in
        rows.append([f"`{said.replace('`', chr(39))}`", *texts,
                     ("；" if language == CHINESE else "; ").join(signature.cured_by)])
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


def _in_both(page: str, name: str, make: Callable[[str], list[list[str]]]) -> dict[tuple[Path, str], Callable]:
    """A table of a page and of its Chinese twin."""
    return {(ROOT / page.format(end), name): lambda language=language: markdown(make(language))
            for language, end in ((ENGLISH, ""), (CHINESE, "_zh"))}


# (page, block) -> what fills it
BLOCKS: dict[tuple[Path, str], Callable[[], str]] = {
    **_in_both("README{}.md", "comparisons-table", front.table),
    **_in_both("README{}.md", "modules-table", front.modules),
    **_in_both("docs/results{}.md", "gains-table", gains.table),
    **_in_both("docs/results{}.md", "brought-table", gains.module_table),
    **{(ROOT / f"README{end}.md", "examples"): lambda language=language: examples(language)
       for language, end in ((ENGLISH, ""), (CHINESE, "_zh"))},
    **_in_both("docs/results{}.md", "costs-table", gains.cost_table),
    **_in_both("docs/results{}.md", "targets-table", targets.table),
    **_in_both("docs/reference{}.md", "config-table",
               lambda language: [CONFIG_HEAD[language], *config_rows(language)]),
    **_in_both("docs/reference{}.md", "metrics-table",
               lambda language: [METRIC_HEAD[language], *metric_rows(language)]),
    **_in_both("docs/compatibility{}.md", "compat-table",
               lambda language: [hook_tables.COMPAT_HEAD[language], *hook_tables.compatibility_rows(language)]),
    **_in_both("docs/compatibility{}.md", "newest-table", hook_tables.newest_rows),
    (ROOT / "overlay" / "README.md", "process-map"): lambda: markdown(hook_tables.process_rows()),
    (DOCS / "ascend_zh.md", "ascend-stacks"): stack_chapter,
    (DOCS / "ascend_zh.md", "ascend-errors"):
        lambda: markdown([["日志里的话", "原因与处理", "由谁治"], *error_rows(CHINESE)]),
    (DOCS / "errors.md", "errors-table"):
        lambda: markdown([["the log says", "cause", "fix", "cured by"], *error_rows(ENGLISH)]),
}
QUICKSTART = tuple(DOCS / f"results{end}.md" for end in ("", "_zh"))  # have the table of a quickstart run


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.docs", __doc__)
    parser.add_argument("--table", type=console.existing_file, help="table.json of a quickstart run")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when something is stale")
    options = parser.parse_args(argv)
    blocks = dict(BLOCKS)
    if options.table:
        with console.reading("--table", options.table, "the table.json of a quickstart run"):
            run = json.loads(options.table.read_text())
            told = "\n\n".join((markdown(run["table"]), "\n".join(f"- {note}" for note in run["notes"])))
        blocks |= {(page, "quickstart-table"): lambda: told for page in QUICKSTART}
    before = {page: page.read_text(encoding="utf-8") if page.exists() else ""
              for page in (SETUP, PATCHES, *dict.fromkeys(page for page, _ in blocks))}
    after = {**before, SETUP: tox_environments(before[SETUP]), PATCHES: patch_index()}
    for (page, name), make in blocks.items():
        after[page] = fill(after[page], name, make())
    stale = [page for page, text in after.items() if text != before[page]]
    if options.check and stale:
        print(f"esgrpo: {', '.join(str(page.relative_to(ROOT)) for page in stale)}: stale | wanted what the config "
              "fields, compat.toml, the patch headers, the records and the known errors say | CI stops | "
              "run python -m bench.docs", file=sys.stderr)
    elif not options.check:
        for page in stale:
            page.write_text(after[page], encoding="utf-8")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
