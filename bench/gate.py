"""The gate of learned verdicts, played again over a run: when it was shut, and why. Standard library only.

    python -m bench.gate RUN_DIR [--window 500 --window 1500] [--json]

The rows of a run's responses hold what its gate heard of each (`for_gate`). They are told again, a group when its last
one ended, to gates that judge the correct responses lost by their newest 1,500 (the product's) or so many as --window
says. What verdicts of another gate would have cut cannot be seen: who was cut has no outcome, and the model would have
learned otherwise. Beside the gates: of each stretch of STRETCH responses the reward, how many were candidates, and how
many of those ended correct.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
try:
    import esgrpo  # noqa: F401
except ImportError:  # not installed: this command needs the repository and Python only
    sys.path.insert(0, str(ROOT / "overlay"))

from esgrpo.algo.verdict_gate import LOST_WINDOW, Gate, Outcome, Settings  # noqa: E402

STRETCH = 500  # responses
SYNC = 64  # outcomes between two questions to a gate: a batch of the benchmarks


def heard(run: Path) -> list[Outcome]:
    """What the gate of a run heard, oldest first: of a group all at once, when its last response ended."""
    rows = [json.loads(line) for path in sorted(run.glob("esgrpo/trained-*.jsonl")) for line in path.open()]
    closed: dict[str, float] = {}
    for row in rows:
        closed[row["group"]] = max(row["ended"], closed.get(row["group"], 0.0))
    rows = sorted((row for row in rows if row.get("for_gate")), key=lambda row: (closed[row["group"]], row["member"]))
    return [Outcome(row["tokens"], row["correct"], **row["for_gate"]) for row in rows]


def play(outcomes: list[Outcome], settings: Settings, window: int) -> dict:
    """Shares of the questions: `open` at each limit, and `shut` for each reason, which is that of `cut_below`."""
    gate, opened, shut = Gate(settings), Counter(), Counter()
    gate.lost = deque(maxlen=window)
    for number, outcome in enumerate(outcomes, start=1):
        gate.learn(outcome)
        if number % SYNC == 0:
            at = gate.opens_at()
            (shut if at is None else opened)[gate.why_shut() if at is None else f"{settings.limits[at]:g}"] += 1
    asked = max(1, len(outcomes) // SYNC)
    now = gate.opens_at()
    return {"window": window, "asked": asked, "open": {limit: times / asked for limit, times in sorted(opened.items())},
            "shut": {why: times / asked for why, times in shut.most_common()},
            "now": gate.says() if now is None else f"open below {settings.limits[now]:g}"}


def stretches(outcomes: list[Outcome], limit: float) -> list[dict]:
    found = []
    for at in range(0, len(outcomes), STRETCH):
        part = outcomes[at:at + STRETCH]
        right = sorted((row.tokens, row.lowest < limit) for row in part if row.correct)
        longest = right[len(right) * 9 // 10:]
        found.append({"from": at, "reward": len(right) / len(part),
                      "candidates": sum(row.lowest < limit for row in part),
                      "of them correct": sum(candidate for _, candidate in right),
                      "of the longest tenth of the correct":
                          sum(candidate for _, candidate in longest) / max(1, len(longest))})
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="RUN_DIR of a run with prune.verdict.enable")
    parser.add_argument("--window", type=int, action="append", help="correct responses; may be given several times")
    parser.add_argument("--cut-below", type=float, default=Settings().cut_below, help="that of the run")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args(argv)
    outcomes = heard(options.run)
    if not outcomes:
        print(f"bench.gate | {options.run}: no response that a gate heard of | the directory of a run with "
              "prune.verdict.enable=True | nothing can be played | python -m bench.train --arms 'C verdicts'",
              file=sys.stderr)
        return 1
    settings = Settings(cut_below=options.cut_below)
    gates = [play(outcomes, settings, window) for window in dict.fromkeys([LOST_WINDOW, *(options.window or ())])]
    parts = stretches(outcomes, settings.cut_below)
    if options.json:
        print(json.dumps({"responses": len(outcomes), "gates": gates, "stretches": parts}))
        return 0
    for gate in gates:
        opened = ", ".join(f"below {limit} {share:.0%}" for limit, share in gate["open"].items()) or "never"
        why = ", ".join(f"{name} {share:.0%}" for name, share in gate["shut"].items()) or "never"
        print(f"window of {gate['window']:,} correct responses, of {gate['asked']} questions: open {opened}; shut {why}"
              f"; at the end {gate['now']}")
    print(f"\n{'responses from':>14}{'reward':>8}{'candidates':>12}{'correct':>9}  of the longest tenth of the correct")
    for part in parts:
        print(f"{part['from']:14,}{part['reward']:8.2f}{part['candidates']:12}{part['of them correct']:9}"
              f"{part['of the longest tenth of the correct']:38.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
