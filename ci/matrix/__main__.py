"""Runs the matrix: one cell a row of compat.toml, in parallel where memory allows, cached by content.

usage: bash ci/matrix.sh [--fast] [--only CELL,...] [--no-cache] [--out DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ci.matrix import cells, lanes
from ci.matrix.cells import FAIL, KINDS, NOT_RUN, PASS, ROOT, Outcome
from esgrpo import compat
from esgrpo.tools import upstreams

MEMORY_RESERVE = 2 * cells.GIB  # for everything else on the machine
PROGRESS_PERIOD_S = 15.0
POLL_S = 0.1
STYLE = ("body{font:15px/1.5 system-ui,sans-serif;max-width:80rem;margin:2rem auto}td,th{padding:.2rem .8rem;"
         "text-align:left;vertical-align:top;border-bottom:1px solid #e5e7eb}.pass{color:#15803d}.fail{color:#b91c1c}"
         ".not{color:#6b7280}")


def key_of(row: compat.Tested) -> str:
    """Content key: the row, this interpreter's upstreams, and every file that the cell's result depends on."""
    digest = hashlib.sha256(json.dumps([asdict(row), compat.installed(), sys.version, _has_verl_git()]).encode())
    for pattern in KINDS[cells.kind_of(row)].inputs:
        for path in sorted(p for p in ROOT.glob(pattern) if p.is_file() and "__pycache__" not in p.parts):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _has_verl_git() -> bool:
    return bool(os.environ.get(upstreams.VERL_GIT))


def cached(row: compat.Tested) -> Outcome | None:
    path = _cache_file(row)
    return Outcome(**json.loads(path.read_text())) if path.exists() else None


def _cache_file(row: compat.Tested) -> Path:
    return upstreams.cache_directory() / "matrix" / f"{key_of(row)}.json"


def available_memory() -> int:
    """Bytes that a new process may use."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return cells.GIB * 4


class Driver:
    """Starts cells as processes of their own, so that an upstream release never meets another one."""

    def __init__(self, rows: list[compat.Tested], use_cache: bool):
        self.waiting = list(rows)
        self.width = max(len(row.cell) for row in rows)
        self.use_cache = use_cache
        self.running: dict[subprocess.Popen, tuple[compat.Tested, float, lanes.Lane | None]] = {}
        self.free: list[lanes.Lane] = []
        self.outcomes: dict[str, Outcome] = {}

    def run(self) -> None:
        try:
            self._take_cached()
            last = time.monotonic()
            while self.waiting or self.running:
                self._start_what_fits()
                self._collect()
                if time.monotonic() - last > PROGRESS_PERIOD_S and self.running:
                    last = time.monotonic()
                    names = ", ".join(row.cell for row, *_ in self.running.values())
                    print(f"esgrpo: running {names}; {len(self.waiting)} wait", flush=True)
                time.sleep(POLL_S)
        finally:
            for process, (*_, lane) in self.running.items():  # each leads a session: its children go with it
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
                self.free += [lane] if lane else []
            for lane in self.free:
                lane.end()

    def _take_cached(self) -> None:
        for row in list(self.waiting):
            outcome = cached(row) if self.use_cache else None
            if outcome is not None:
                self.waiting.remove(row)
                self._done(row, outcome, "cached")

    def _start_what_fits(self) -> None:
        memory = available_memory() - MEMORY_RESERVE
        for row in list(self.waiting):
            alone = not self.running
            fits = len(self.running) < (os.cpu_count() or 1) and KINDS[cells.kind_of(row)].memory <= memory
            if not (alone or fits):
                continue
            memory -= KINDS[cells.kind_of(row)].memory
            command = [sys.executable, "-m", "ci.matrix", "--cell", row.cell]
            lane = self._lane(row)
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                       start_new_session=True, **(lane.options() if lane else {}))
            self.running[process] = (row, time.monotonic(), lane)
            self.waiting.remove(row)

    def _lane(self, row: compat.Tested) -> lanes.Lane | None:
        if not KINDS[cells.kind_of(row)].forks:
            return None
        if self.free:
            return self.free.pop()
        more = sum(KINDS[cells.kind_of(waiting)].forks for waiting in self.waiting)
        return lanes.Lane() if more >= lanes.WORTH else None

    def _collect(self) -> None:
        for process, (row, started, lane) in list(self.running.items()):
            if process.poll() is None:
                continue
            out, err = process.communicate()
            del self.running[process]
            if lane and process.returncode == 0:
                self.free.append(lane)
            elif lane:  # it may still be at what the cell asked for
                lane.end()
            try:
                outcome = Outcome(**json.loads(out.strip().splitlines()[-1]))
            except (ValueError, IndexError, TypeError):
                outcome = Outcome(FAIL, err.strip().splitlines()[-3:] or [f"exit code {process.returncode}"])
            if outcome.state == PASS:  # a failure is looked at again, and what was not run may be runnable tomorrow
                path = _cache_file(row)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(asdict(outcome)))
            self._done(row, outcome, f"{time.monotonic() - started:.0f} s")

    def _done(self, row: compat.Tested, outcome: Outcome, how: str) -> None:
        self.outcomes[row.cell] = outcome
        print(f"{outcome.state:<8}{row.cell:<{self.width}}  {how}", flush=True)
        for line in outcome.evidence if outcome.state == FAIL else outcome.evidence[:1] * (outcome.state == NOT_RUN):
            print(f"        {line}", flush=True)


def write_tables(rows: list[compat.Tested], outcomes: dict[str, Outcome], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = ["| cell | result | evidence |", "|---|---|---|"]
    body = ""
    for row in rows:
        outcome = outcomes[row.cell]
        lines.append(f"| {row.cell} | {outcome.state} | {'<br>'.join(outcome.evidence).replace('|', '/')} |")
        evidence = "<br>".join(map(html.escape, outcome.evidence))
        body += f"<tr><td>{row.cell}<td class='{outcome.state}'>{outcome.state}<td>{evidence}"
    (out / "matrix.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    page = (f"<!doctype html><meta charset=utf-8><title>ES-GRPO matrix</title><style>{STYLE}</style>"
            f"<table><tr><th>cell<th>result<th>evidence{body}</table>")
    (out / "matrix.html").write_text(page, encoding="utf-8")


def choose(rows: list[compat.Tested], fast: bool, only: str | None, quiet: bool = False) -> list[compat.Tested]:
    for row in rows:
        if row.level == "gpu-e2e" and not quiet:
            print(f"esgrpo: matrix: {row.cell} needs GPUs and is not run here", flush=True)
    rows = [row for row in rows if row.level != "gpu-e2e"]
    if fast:
        rows = [row for row in rows if KINDS[cells.kind_of(row)].fast]
    if only:
        wanted = only.split(",")
        unknown = sorted(set(wanted) - {row.cell for row in rows})
        if unknown:
            sys.exit(f"esgrpo: matrix: no cell {', '.join(unknown)} | wanted one of "
                     f"{', '.join(r.cell for r in rows)} | nothing was run | correct --only")
        rows = [row for row in rows if row.cell in wanted]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="ci/matrix.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--fast", action="store_true", help="only apply and contract cells")
    parser.add_argument("--only", metavar="CELL,...")
    parser.add_argument("--no-cache", action="store_true", help="run every cell again")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "matrix", help="where matrix.md and matrix.html go")
    parser.add_argument("--list", action="store_true", help="print the cells that would be run, as a JSON list")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # the driver's call of itself
    options = parser.parse_args()
    rows = compat.load()
    if options.cell:
        row = next(row for row in rows if row.cell == options.cell)
        print(json.dumps(asdict(KINDS[cells.kind_of(row)].run(row))))
        return 0
    rows = choose(rows, options.fast, options.only, quiet=options.list)
    if options.list:
        print(json.dumps([row.cell for row in rows]))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    driver = Driver(rows, not options.no_cache)
    try:
        driver.run()
    except KeyboardInterrupt:
        print("esgrpo: matrix: interrupted; every cell has been ended", file=sys.stderr)
        return 130
    write_tables(rows, driver.outcomes, options.out)
    states = [outcome.state for outcome in driver.outcomes.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in (PASS, FAIL, NOT_RUN))
    print(f"esgrpo: matrix: {counts} in {time.monotonic() - started:.0f} s; tables in {options.out}")
    return int(FAIL in states)


if __name__ == "__main__":
    sys.exit(main())
