"""Seconds of one core that `esgrpo doctor --log` takes for a large log.

usage: python -m bench.doctor_log [--megabytes 50]

Three logs are written and read: lines of this project's clean runs with other numbers in each (usual), prose in which
no two lines are alike (prose), and the failing excerpts of the corpus again and again (failures).
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from bench.common import ROOT, console
from esgrpo.tools.doctor import logs

LOGS = ROOT / "ci" / "tests" / "unit" / "logs"
WORDS = 20_000  # of the prose's vocabulary
MEGABYTE = 1 << 20


def usual(rng: random.Random):
    lines = [line for path in sorted((LOGS / "clean").glob("*.txt")) for line in path.read_text("utf-8").splitlines()]
    while True:
        for line in lines:
            yield re.sub(r"\d{2,}", lambda number: str(rng.randrange(10 ** len(number.group()))), line)


def prose(rng: random.Random):
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(WORDS)]
    while True:
        yield " ".join(rng.choices(words, k=rng.randint(4, 30)))


def failures(rng: random.Random):
    lines = [line for name in ("failing", "held_out", "held_out_2")
             for line in (LOGS / "corpus" / f"{name}.txt").read_text("utf-8").splitlines() if not line.startswith("@@")]
    while True:
        yield rng.choice(lines)


def measured(lines, path: Path, size: int) -> dict:
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            file.writelines(f"{next(lines)}\n" for _ in range(1000))
    start = time.process_time()
    answer = logs.read_file(str(path))
    return {"seconds": round(time.process_time() - start, 2), "lines": answer.lines, "state": answer.state}


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.doctor_log", __doc__)
    parser.add_argument("--megabytes", type=console.count, default=50)
    size = parser.parse_args(argv).megabytes * MEGABYTE
    with tempfile.TemporaryDirectory() as directory:
        for lines in (usual, prose, failures):
            found = measured(lines(random.Random(1)), Path(directory) / "run.log", size)
            print(json.dumps({"log": lines.__name__, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
