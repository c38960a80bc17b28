"""Recorded groups of responses: tokens, how surprising the model found each, and how they ended. Standard library only.

One file, gzip of JSON: {"command", "commit", "seed", "task", "model", "cap", "temperature", "groups"}. A group is
{"version": weight version that sampled it, "responses": [{"tokens": ids, "surprisal": hundredths of nats, one a token,
"correct": bool}]}, and "family" where a record has several kinds of prompts. A response of `cap` tokens was ended by
the budget. Recorded by bench.testbed.record_groups; bench.pretrained.measure keeps samples, of which

    python -m bench.common.recorded_groups KEPT.json.gz --model WORDS --out bench/results/groups_pretrained.json.gz

makes one record: the families take turns, as prompts of a mixed data set do.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

RIGHT = 0.5  # reward from which a kept sample is correct
NATS = 0.01  # of one unit of a recorded surprisal
LARGEST = 2000  # units: what a rounded probability of zero counts


def response(tokens: Sequence[int], log_probs: Sequence[float], correct: bool) -> dict:
    """One response as it is recorded; `log_probs` of its tokens, nats."""
    units = [min(LARGEST, max(0, round(-value / NATS))) for value in log_probs]
    return {"tokens": list(tokens), "surprisal": units, "correct": bool(correct)}


def write(path: Path, facts: dict, groups: Sequence[dict]) -> None:
    """`facts`: everything beside the groups; the bytes depend on nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**facts, "groups": list(groups)}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> dict:
    """Raises OSError when there is no such file, ValueError when it is none of these."""
    record = json.loads(gzip.decompress(path.read_bytes()))
    if not isinstance(record.get("cap"), int) or not record.get("groups"):
        raise ValueError(f"{path.name} holds no recorded groups")
    return record


def of_kept(kept: dict) -> list[dict]:
    """Groups of what `bench.pretrained.measure --keep` has written, the families in turn."""
    families: dict[str, list[dict]] = {}
    for group in kept["groups"]:
        rows = [response(sample["ids"], sample["logprobs"], sample["reward"] >= RIGHT) for sample in group["samples"]]
        families.setdefault(group["family"], []).append({"version": 0, "family": group["family"], "responses": rows})
    return [group for turn in itertools.zip_longest(*families.values()) for group in turn if group is not None]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, help="what bench.pretrained.measure --keep has written")
    parser.add_argument("--model", required=True, help="in words; the folder of that machine says nothing")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        kept = json.loads(gzip.decompress(options.kept.read_bytes()))
        groups = of_kept(kept)
    except (OSError, EOFError, ValueError, KeyError) as error:
        print(f"recorded_groups | {options.kept}: {type(error).__name__}: {error} | samples with log-probs | nothing "
              "is recorded | python -m bench.pretrained.measure --keep FILE", file=sys.stderr)
        return 1
    families = dict.fromkeys(group["family"] for group in groups)
    sampled = ["python", "-m", "bench.pretrained.measure", "--prompts", str(kept["prompts"]), "--samples",
               str(kept["samples"]), "--cap", str(kept["cap"]), "--seed", str(kept["seed"]), "--split", kept["split"],
               *itertools.chain.from_iterable(("--family", family) for family in families)]
    write(options.out, {"command": shlex.join(sampled), "seed": kept["seed"], "cap": kept["cap"],
                        "task": ", ".join(families), "model": options.model, "temperature": 1.0}, groups)
    right = [row["correct"] for group in groups for row in group["responses"]]
    print(f"{options.out.name}: {len(groups)} groups, reward {sum(right) / len(right):.3f}, "
          f"{options.out.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
