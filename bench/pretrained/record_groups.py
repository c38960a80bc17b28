"""Samples that bench.pretrained.measure kept, as a record of groups that bench.verdict replays. Standard library only.

    python -m bench.pretrained.record_groups KEPT.json.gz --model WORDS --out bench/results/groups_pretrained.json.gz

The families take turns, as the prompts of a mixed data set do.
"""

from __future__ import annotations

import gzip
import itertools
import json
import shlex
import sys
from pathlib import Path

from bench.common import console
from bench.common.recorded_groups import response, write

RIGHT = 0.5  # reward from which a kept sample is correct


def of_kept(kept: dict) -> list[dict]:
    """Groups of what `bench.pretrained.measure --keep` has written, the families in turn."""
    families: dict[str, list[dict]] = {}
    for group in kept["groups"]:
        rows = [response(sample["ids"], sample["logprobs"], sample["reward"] >= RIGHT) for sample in group["samples"]]
        families.setdefault(group["family"], []).append({"version": 0, "family": group["family"], "responses": rows})
    return [group for turn in itertools.zip_longest(*families.values()) for group in turn if group is not None]


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.pretrained.record_groups", __doc__)
    parser.add_argument("kept", type=Path, help="what bench.pretrained.measure --keep has written")
    parser.add_argument("--model", required=True, help="in words; the folder of that machine says nothing")
    parser.add_argument("--out", type=console.output_file, required=True)
    options = parser.parse_args(argv)
    try:
        kept = json.loads(gzip.decompress(options.kept.read_bytes()))
        groups = of_kept(kept)
    except (OSError, EOFError, ValueError, KeyError) as error:
        print(f"record_groups | {options.kept}: {type(error).__name__}: {error} | samples with log-probs | nothing "
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
    sys.exit(console.exit_code(main))
