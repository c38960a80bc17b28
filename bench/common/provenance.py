"""What stands beside a benchmark's numbers: which code, which machine, which command."""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.common import ROOT, console


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def cpu_model() -> str:
    """As Linux names it, else as Python does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def cpu_flags() -> frozenset[str]:
    """What the processor can do, in the words of Linux; empty where they are not known."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(named, ()))


def without_folders(text: str) -> str:
    """Absolute paths as their last part: a machine's folders mean nothing to a reader."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:=]+/)+", "", text)


def add_results(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """`--results`, and `--seeds` where a study has one seed and its record several."""
    parser.add_argument("--results", type=console.output_file,
                        help="also write a record to this JSON file: numbers, command, commit, seeds, device")
    if several:
        parser.add_argument("--seeds", type=console.seeds, metavar="N,N",
                            help="of --results, each in turn; default: --seed")


def seeds_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[int]:
    if options.seeds and not options.results:
        parser.error("--seeds goes with --results")
    return options.seeds or [options.seed]


def write_record(path: Path, module: str, argv: Sequence[str] | None, seeds: Iterable[int], found: dict) -> None:
    """What `python -m module argv` has found with these seeds on this machine, to four decimals."""
    command = shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])
    device = f"{platform.machine()}, {cpu_model()}, Python {platform.python_version()}"
    record = {"command": without_folders(command), "commit": commit(), "seeds": [*seeds], "device": device,
              **_rounded(found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = re.sub(r"\[\s+([\d.,\s-]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", json.dumps(record, indent=1))
    path.write_text(text + "\n", encoding="utf-8")


def _rounded(value, digits: int = 4):
    if isinstance(value, dict):
        return {key: _rounded(one, digits) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one, digits) for one in value]
    return round(value, digits) if isinstance(value, float) else value
