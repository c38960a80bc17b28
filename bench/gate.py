"""The gate of learned verdicts, played again over a run: when it was shut, and why. Standard library only.

    python -m bench.gate RUN_DIR [RUN_DIR ...] [--window 500 --window 1500] [--json] [--results FILE]

The rows of a run's responses hold what its gate heard of each (`for_gate`). They are told again, a group when its last
one ended, to gates that judge the correct responses lost by their newest 1,500 (the product's) or so many as --window
says. What verdicts of another gate would have cut cannot be seen: who was cut has no outcome, and the model would have
learned otherwise. Beside the gates: what the run's own gate was at every weight sync of its agent-loop workers, and at
how many of them a gate that was told as many responses is open at the same limit. And of each stretch of STRETCH
responses the reward, how many were candidates, and how many of those ended correct.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
try:
    import esgrpo  # noqa: F401
except ImportError:  # not installed: this command needs the repository and Python only
    sys.path.insert(0, str(ROOT / "overlay"))

from bench.common import console  # noqa: E402
from bench.common.provenance import add_results, write_record  # noqa: E402
from esgrpo.algo.terms import Rule  # noqa: E402
from esgrpo.algo.verdict_gate import LOST_WINDOW, SCALES, Gate, Outcome, Settings  # noqa: E402

STRETCH = 500  # responses
SYNC = 64  # outcomes between two questions to a gate: a batch of the benchmarks
NOT_KEPT = ("Played over the rows of the runs' responses, which are no part of this record and are not kept beside it: "
            "the numbers cannot be computed again from what is here.")
SEED = "data.seed="  # among the settings of a run


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


@dataclass(frozen=True)
class Sync:
    """What the gate of a run was to one worker from one weight sync on, or from several in a row."""

    times: int
    responses: int  # that it had heard of
    limit: float | None  # at which it was open
    shut: str  # why, without numbers; empty while it was open


def synced(run: Path, settings: Settings) -> list[Sync]:
    """What the workers of a run wrote of their gate. Two syncs between two of a worker's rows count as the later."""
    found, limits = [], dict(zip(SCALES, settings.limits, strict=True))
    for path in sorted(run.glob("esgrpo/decisions-*.jsonl")):
        before = 0
        for row in map(json.loads, path.open()):
            count = sum(row["counts"].get(f"verdicts/{name}", 0) for name in ("gate_open", "gate_shut"))
            if count > before:
                gate = row["audit"][Rule.VERDICT]
                found.append(Sync(count - before, gate["responses"], limits[gate["scale"]] if gate["open"] else None,
                                  gate["shut"].partition(":")[0]))
                before = count
    return found


def beside(syncs: list[Sync], outcomes: list[Outcome], settings: Settings) -> dict:
    """How often the run's own gate was open and why it was shut, and how often a gate that is told of as many responses
    agrees: on being open, and on the limit, too."""
    gate, wanted, at = Gate(settings), {min(sync.responses, len(outcomes)) for sync in syncs}, {}
    for told in range(len(outcomes) + 1):
        if told:
            gate.learn(outcomes[told - 1])
        if told in wanted:
            index = gate.opens_at()
            at[told] = None if index is None else settings.limits[index]
    opened, shut, agree, same = Counter(), Counter(), 0, 0
    for sync in syncs:
        (shut if sync.limit is None else opened)[sync.shut or f"{sync.limit:g}"] += sync.times
        played = at[min(sync.responses, len(outcomes))]  # rows of the newest may not be written yet
        agree += sync.times * ((played is None) == (sync.limit is None))
        same += sync.times * (played == sync.limit)
    return {"syncs": sum(sync.times for sync in syncs), "open": dict(sorted(opened.items())),
            "shut": dict(shut.most_common()), "agree": agree, "same_limit": same,
            "unheard": sum(sync.times for sync in syncs if sync.responses > len(outcomes))}


def seeds_of(runs: list[Path]) -> list[int]:
    """As `bench.train` writes them beside a run; none where it did not start it."""
    files = [run / "arm.json" for run in runs]
    overrides = [json.loads(path.read_text())["overrides"] for path in files if path.is_file()]
    return sorted({int(one.removeprefix(SEED)) for these in overrides for one in these if one.startswith(SEED)})


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


def played_over(run: Path, settings: Settings, windows: list[int]) -> dict:
    """Empty where no gate heard of a response."""
    outcomes = heard(run)
    return outcomes and {
        "responses": len(outcomes), "gates": [play(outcomes, settings, window) for window in windows],
        "own": beside(synced(run, settings), outcomes, settings), "stretches": stretches(outcomes, settings.cut_below)}


def print_table(found: dict) -> None:
    for gate in found["gates"]:
        opened = ", ".join(f"below {limit} {share:.0%}" for limit, share in gate["open"].items()) or "never"
        why = ", ".join(f"{name} {share:.0%}" for name, share in gate["shut"].items()) or "never"
        print(f"window of {gate['window']:,} correct responses, of {gate['asked']} questions: open {opened}; shut {why}"
              f"; at the end {gate['now']}")
    own = found["own"]
    if own["syncs"]:
        print(f"the run's own gate: open at {sum(own['open'].values())} of {own['syncs']} weight syncs (a worker and a "
              f"sync each); told of as many responses, the one played is open or shut at the same {own['agree']}, at "
              f"the same limit at {own['same_limit']}")
    print(f"\n{'responses from':>14}{'reward':>8}{'candidates':>12}{'correct':>9}  of the longest tenth of the correct")
    for part in found["stretches"]:
        print(f"{part['from']:14,}{part['reward']:8.2f}{part['candidates']:12}{part['of them correct']:9}"
              f"{part['of the longest tenth of the correct']:38.0%}")


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.gate", __doc__)
    parser.add_argument("runs", type=console.existing_folder, nargs="+", metavar="RUN_DIR",
                        help="of a run with prune.verdict.enable")
    parser.add_argument("--window", type=console.count, action="append",
                        help="correct responses; may be given several times")
    parser.add_argument("--cut-below", type=console.share, default=Settings().cut_below, help="that of the runs")
    parser.add_argument("--json", action="store_true", help="one line of JSON a run instead of tables")
    parser.add_argument("--note", action="append", default=[], help="of --results: where the runs are from, for one")
    add_results(parser)
    options = parser.parse_args(argv)
    if options.note and not options.results:
        parser.error("--note goes with --results")
    settings, windows = Settings(cut_below=options.cut_below), [*dict.fromkeys([LOST_WINDOW, *(options.window or ())])]
    found: dict[str, dict] = {}
    for run in options.runs:
        name = run.resolve().name
        if name in found:
            parser.error(f"two runs are named {name}")
        found[name] = played_over(run, settings, windows)
        if not found[name]:
            print(f"bench.gate | {run}: no response that a gate heard of | the directory of a run with "
                  "prune.verdict.enable=True | nothing can be played | python -m bench.train --arms 'C verdicts'",
                  file=sys.stderr)
            return 1
    if options.results:
        write_record(options.results, "bench.gate", argv, seeds_of(options.runs), {
            "notes": [NOT_KEPT, *options.note], "cut_below": options.cut_below, "windows": windows, "sync": SYNC,
            "gates": found})
    for number, (name, one) in enumerate(found.items()):
        if options.json:
            print(json.dumps({"run": name, **one}))
            continue
        if len(found) > 1:
            print(f"{chr(10) if number else ''}{name}")
        print_table(one)
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
