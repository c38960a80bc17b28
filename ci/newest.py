"""The newest releases of verl, vLLM, vllm-ascend and Ray in the package index, and what they change for the hooks.

    python -m ci.newest                 the report, as Markdown; exit code 1 when a hook does not act, 2 when a release
                                        cannot be had
    python -m ci.newest --report FILE   ... into a file, for an issue
    python -m ci.newest --record        ... into ci/newest_releases.json, from which docs/compatibility.md has its table

Of vllm-ascend, which no hook names, the scheduler classes are driven with the mixin beside the vLLM of its number.
.github/workflows/drift.yml runs it every week and opens an issue with the report.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "overlay"))

from ci.matrix import cells  # noqa: E402
from esgrpo import compat, releases  # noqa: E402
from esgrpo.errors import EsgrpoError  # noqa: E402
from esgrpo.tools import drift, upstreams  # noqa: E402

UPSTREAMS = ("verl", "vllm", "vllm-ascend", "ray")
RECORD = Path(__file__).with_name("newest_releases.json")
TIMEOUT_S = 120  # for one answer of the index
MOST_TRIED = 3  # releases of an upstream, the newest first: one may have no wheel, only an archive that would be run
FINE, LOST, UNKNOWN = 0, 1, drift.UNUSABLE  # exit codes


@dataclass
class Newest:
    """One upstream: its newest release, one sentence on it, hooks (or cases) that do not hold, the whole report."""

    upstream: str
    version: str
    tested: bool  # has a row in compat.toml
    says: str
    lost: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    code: int = FINE


def versions(name: str) -> list[str]:
    """Final releases in the package index, the newest first. Raises upstreams.Unavailable."""
    command = [*upstreams.pip_command(), "index", "versions", name, "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise upstreams.Unavailable(name, f"no answer within {TIMEOUT_S} s", "the package index", "not looked at",
                                    "check that it can be reached") from None
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if found is None:
        said = (done.stderr.strip().splitlines() or ["no version"])[-1]
        raise upstreams.Unavailable(name, said, "a release in the package index", "not looked at",
                                    "check that it can be reached")
    return [version.strip() for version in found[1].split(",")]


def look(upstream: str, say) -> Newest:
    """What the newest release with a wheel changes; never raises for what the index does not have."""
    tried = []
    try:
        for version in versions(upstream)[:MOST_TRIED]:
            try:
                upstreams.sources(upstream, version, say)
            except upstreams.Unavailable:
                tried.append(version)
                continue
            found = ascend(version) if upstream == "vllm-ascend" else hooks(upstream, version, say)
            found.says += f"; {' and '.join(tried)} has no wheel to look at" if tried else ""
            return found
    except EsgrpoError as error:
        return Newest(upstream, "", False, str(error), code=UNKNOWN)
    return Newest(upstream, "", False, f"no wheel of {', '.join(tried)} to look at", code=UNKNOWN)


def is_tested(upstream: str, version: str) -> bool:
    return any(row.versions.get(upstream) == version for row in compat.load())


def hooks(upstream: str, version: str, say) -> Newest:
    verdicts = drift.compare(upstream, version, say)
    counts = Counter(verdict.state for verdict in verdicts)
    bad = [verdict for verdict in verdicts if drift.needs_work([verdict])]
    lines = [line for verdict in verdicts if verdict.state not in (drift.UNCHANGED, drift.NOT_NEEDED)
             for line in (f"{verdict.slug} {verdict.state}", *(f"    {line}" for line in verdict.lines))]
    says = ", ".join(f"{counts[state]} {state}" for state in drift.STATES if counts[state])
    return Newest(upstream, version, is_tested(upstream, version), f"hooks: {says}",
                  [verdict.slug for verdict in bad], lines, LOST if bad else FINE)


def ascend(version: str) -> Newest:
    """vllm-ascend beside the vLLM whose number it has: the classes driven, and which of them have another source."""
    beside = releases.public(version).partition(".post")[0]
    row = compat.Tested("contract", "", {"vllm": beside, "vllm-ascend": version})
    outcome = cells.KINDS[cells.kind_of(row)].run(row)
    ok = outcome.state == cells.PASS
    verdicts, reference = drift.compare_ascend(version)
    classes = [verdict for verdict in verdicts if ":" in verdict.slug]
    changed = sum(drift.needs_work([verdict]) for verdict in classes)
    says = (f"{len(classes)} scheduler classes, {changed} changed since {reference}; "
            f"driven beside vLLM {beside}, {len(outcome.evidence)} cases: {outcome.state}")
    reasons = Counter(line.partition(": ")[2] for line in outcome.evidence)
    return Newest("vllm-ascend", version, is_tested("vllm-ascend", version), says,
                  [] if ok else [f"{count} cases: {reason}" for reason, count in reasons.most_common()],
                  outcome.evidence, FINE if ok else LOST)


def report(found: list[Newest], date: str) -> str:
    """Markdown: a line a release, then what is lost with the lines that changed upstream."""
    lines = [f"Newest releases in the package index, {date}.", ""]
    for one in found:
        tested = "in compat.toml" if one.tested else "not in compat.toml"
        lines.append(f"- **{one.upstream} {one.version}** ({tested}): {one.says}" if one.version
                     else f"- **{one.upstream}**: {one.says}")
    for one in found:
        if one.lines and one.code != FINE:
            lines += ["", f"### {one.upstream} {one.version}", "", "```text", *one.lines, "```"]
    if any(one.code == LOST for one in found):
        lines += ["", "How a release is taken in: `overlay/README.md`, \"Take in a release\"."]
    return "\n".join(lines) + "\n"


def title(found: list[Newest]) -> str:
    """Of the issue: the releases in which something is lost, so that the same one is not opened twice."""
    return "Drift: " + ", ".join(f"{one.upstream} {one.version}" for one in found if one.code == LOST)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.newest", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("upstream", nargs="*", default=[], help=f"of {', '.join(UPSTREAMS)}; all without a name")
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown; its title, if any, in FILE.title")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args(argv)
    wrong = sorted(set(options.upstream) - set(UPSTREAMS))
    if wrong:
        parser.error(f"{', '.join(wrong)}: wanted {', '.join(UPSTREAMS)}")
    date = datetime.date.today().isoformat()
    found = [look(upstream, lambda line: print(line, file=sys.stderr)) for upstream in options.upstream or UPSTREAMS]
    text = report(found, date)
    print(text, end="")
    code = LOST if any(one.code == LOST for one in found) else max(one.code for one in found)
    if options.report:
        options.report.write_text(text, encoding="utf-8")
        options.report.with_name(f"{options.report.name}.title").write_text(title(found) if code == LOST else "")
    if options.record:
        rows = [{key: value for key, value in asdict(one).items() if key not in ("lines", "code")} for one in found]
        RECORD.write_text(json.dumps({"date": date, "command": "python -m ci.newest --record", "releases": rows},
                                     indent=2) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
