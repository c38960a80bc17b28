"""What the overlay costs a program that does not use it: CPU time of an interpreter's start, in pairs.

    python -m bench.startup [--pairs 300] [--json PATH]

A is `python -c pass` without PYTHONPATH, B is the same with overlay/ on PYTHONPATH and ESGRPO_ENABLE unset. Pairs run
in ABBA order, so that a machine that slowly gets faster or slower favours neither. An A/A comparison with the same
number of pairs runs in between: its interval says what the machine's noise alone looks like.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys

from bench.common import ROOT, console
from bench.common.provenance import commit, cpu_model

RESAMPLES = 2000
WARM_UP = 5  # starts that are thrown away: byte code is written and the page cache is filled
SEED = 0


def environments() -> tuple[dict[str, str], dict[str, str]]:
    """(A, B): without the overlay, and with it on the path but switched off."""
    # All of PYTHON*: with PYTHONDONTWRITEBYTECODE, say, B would compile sitecustomize at every start.
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("ESGRPO_", "PYTHON"))}
    return bare, {**bare, "PYTHONPATH": str(ROOT / "overlay")}


def start(environment: dict[str, str]) -> float:
    """CPU milliseconds (user + system) of one interpreter that does nothing."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], environment)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{sys.executable} -c pass: wait status {status}")
    return (usage.ru_utime + usage.ru_stime) * 1e3


def pair(index: int, first, second, measure) -> tuple[float, float]:
    """(first, second) measured in the order of an ABBA sequence: every other pair is turned round."""
    if index % 2 == 0:
        return measure(first), measure(second)
    later = measure(second)
    return measure(first), later


def interval(differences: list[float], rng: random.Random) -> dict[str, float]:
    """Median and its bootstrap 95 % interval."""
    medians = sorted(statistics.median(rng.choices(differences, k=len(differences))) for _ in range(RESAMPLES))
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
    return {"median": round(statistics.median(differences), 4), "low": round(low, 4), "high": round(high, 4)}


def run(pairs: int, measure=start, progress=sys.stderr) -> dict:
    """All pairs of both comparisons, interleaved, and what they say; milliseconds."""
    bare, overlaid = environments()
    overhead, control, baseline = [], [], []
    for index in range(pairs):
        a, b = pair(index, bare, overlaid, measure)
        c, d = pair(index, bare, bare, measure)
        overhead.append(b - a)
        control.append(d - c)
        baseline.append(a)
        if progress and (index + 1) % 10 == 0:
            print(f"\r{index + 1}/{pairs} pairs", end="", file=progress, flush=True)
    if progress:
        print(file=progress)
    rng = random.Random(SEED)
    return {"pairs": pairs, "starts": 4 * pairs, "overhead_ms": interval(overhead, rng),
            "control_ms": interval(control, rng), "baseline_ms": round(statistics.median(baseline), 4)}


def machine() -> dict:
    return {"cpu": cpu_model(), "cores": os.cpu_count(), "load": [round(x, 2) for x in os.getloadavg()]}


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.startup", __doc__.splitlines()[0])
    parser.add_argument("--pairs", type=console.count, default=300)
    parser.add_argument("--json", type=console.output_file, help="write the result here, too")
    options = parser.parse_args(argv)
    arguments = f" --pairs {options.pairs}" + (f" --json {options.json}" if options.json else "")
    for environment in environments() * WARM_UP:
        start(environment)
    found = run(options.pairs)
    result = {"command": "python -m bench.startup" + arguments, "commit": commit(), "seed": SEED,
              "python": platform.python_version(), "machine": machine(), **found}
    for name, text in (("overhead_ms", "overlay on the path, disabled"), ("control_ms", "A/A control")):
        m = result[name]
        print(f"{text}: {m['median']:+.3f} ms CPU per start, 95 % [{m['low']:+.3f}, {m['high']:+.3f}]")
    print(f"baseline {result['baseline_ms']:.2f} ms, {options.pairs} pairs, python {result['python']}")
    if options.json:
        console.write(options.json, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
