"""The threshold of the rule `resolved`, by recorded groups: what `prune.resolved.null_prob` saves and what it costs.

    python -m bench.resolved [--json] [--results FILE]

Recorded groups (bench/results/groups_*.json.gz) are decoded again, all members of a group at once, one token a tick.
The rule is that of `esgrpo.algo.group_pruning` without a history of prompts: after each ending it names the members
that will not differ. Every candidate runs to its end, so that its outcome is known and the rule's calibration learns
from all; counted is what a cut at that moment would have done, at most half of a group:

    tokens_saved      share of all recorded tokens
    cuts, false_rate  cuts, and the share of them that would have differed
    gradient_lost     share of the groups with right and wrong members that have only one kind after the cuts
    yield             groups with gradient per decoded token, in units of decoding everything

`both`: groups that agree on right or wrong; `wrong`: on wrong alone, all that is left under prune.treatment=failed.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
from pathlib import Path

from bench.common import console
from bench.common.provenance import add_results, commit, write_record
from bench.common.recorded_groups import read
from esgrpo import config
from esgrpo.algo.audit import Audit
from esgrpo.algo.group_pruning import Finished, GroupPruner

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
TREATMENTS = {"both": "value", "wrong": "failed"}
SEED = 0  # of coins, all of which exempt
LARGEST_SHARE = config.Audit().max_fraction  # of a group that is cut


def pruner_of(null_prob: float, treatment: str, cap: int) -> GroupPruner:
    """In which every candidate is exempted, whatever the coin says, and nothing tightens the rule."""
    settings = config.parse({"enable": True, "prune": {
        "treatment": treatment, "resolved": {"enable": True, "null_prob": null_prob},
        "audit": {"enable": True, "exempt_prob": 1.0, "max_false_rate": 1.0, "max_fraction": 1.0}}})
    return GroupPruner(settings, Audit(settings.prune.audit, random.Random(SEED)), cap)


def cuts_of(pruner: GroupPruner, name: str, rows: list[dict], cap: int) -> dict[int, int]:
    """Member -> tokens at which the rule names it, of one group."""
    pruner.watch(name, len(rows), None)
    found: dict[int, int] = {}
    running = dict(enumerate(rows))
    for member in sorted(running, key=lambda number: len(rows[number]["tokens"])):
        row, tokens = running.pop(member), len(rows[member]["tokens"])
        pruner.ended(name, member, Finished(tokens, row["correct"], float(row["correct"])))
        for number in pruner.checkpoint(name, dict.fromkeys(running, tokens)):
            if len(found) + 1 <= LARGEST_SHARE * len(rows) and len(rows[number]["tokens"]) > tokens:
                found[number] = tokens
    pruner.close(name)
    return found


def measured(record: dict, null_prob: float, kind: str) -> dict[str, float]:
    """One threshold on one record."""
    pruner = pruner_of(null_prob, TREATMENTS[kind], record["cap"])
    tokens = saved = cuts = false = mixed = lost = 0
    for index, group in enumerate(record["groups"]):
        rows = group["responses"]
        found = cuts_of(pruner, str(index), rows, record["cap"])
        answers = {row["correct"] for row in rows}
        left = {row["correct"] for number, row in enumerate(rows) if number not in found}
        mixed += len(answers) > 1
        lost += len(answers) > len(left)
        tokens += sum(len(row["tokens"]) for row in rows)
        saved += sum(len(rows[number]["tokens"]) - at for number, at in found.items())
        cuts += len(found)
        false += sum(rows[number]["correct"] not in _agreed(rows, at) for number, at in found.items())
    return {"tokens_saved": saved / tokens, "cuts": cuts, "false_rate": false / max(1, cuts),
            "gradient_lost": lost / max(1, mixed), "yield": (1 - lost / max(1, mixed)) / (1 - saved / tokens)}


def _agreed(rows: list[dict], tokens: int) -> set[bool]:
    """What the members agree on that had ended when one of `tokens` was named."""
    return {row["correct"] for row in rows if len(row["tokens"]) <= tokens}


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.resolved", __doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    add_results(parser)
    options = parser.parse_args(argv)
    records = {path.name.removeprefix("groups_").removesuffix(".json.gz"): read(path)
               for path in sorted(RESULTS.glob("groups_*.json.gz"))}
    found = {name: {kind: {str(threshold): measured(record, threshold, kind) for threshold in THRESHOLDS}
                    for kind in TREATMENTS} for name, record in records.items()}
    if options.results:
        write_record(options.results, "bench.resolved", argv, (SEED,), {"thresholds": THRESHOLDS, "tasks": found})
    if options.json:
        command = shlex.join(["python", "-m", "bench.resolved", *(sys.argv[1:] if argv is None else argv)])
        print(json.dumps({"command": command, "commit": commit(), "tasks": found}))
        return 0
    print(f"{'':12}{'agreed on':10}{'null_prob':>10}{'saved':>8}{'cuts':>6}{'false':>8}{'gradient lost':>15}"
          f"{'yield':>8}")
    for name, kinds in found.items():
        for kind, rows in kinds.items():
            for threshold, row in rows.items():
                print(f"{name:12}{kind:10}{threshold:>10}{row['tokens_saved']:8.3f}{row['cuts']:6}"
                      f"{row['false_rate']:8.3f}{row['gradient_lost']:15.3f}{row['yield']:8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
