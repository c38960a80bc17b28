"""Write a task as train, val and test parquet files in verl's format. For example:

python -m bench.testbed.make_data --task search --seed 0 --out data/search
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from bench.common import console
from bench.testbed.task import SMALL, SPLITS, TASKS, Problem, Scale, generate

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


def row(problem: Problem, split: str, index: int) -> dict:
    """One record in verl's format."""
    return {
        "data_source": f"testbed/{problem.task}",
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": {"split": split, "index": index},
    }


def write(task: str, seed: int, counts: dict[str, int], out: Path, scale: Scale = SMALL) -> dict[str, Path]:
    """Write one parquet file per split; `counts` is the number of rows of each. Returns split -> path."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {}
    for split, count in counts.items():
        rows = [row(problem, split, i) for i, problem in enumerate(generate(task, seed, count, split, scale))]
        paths[split] = out / f"{split}.parquet"
        pd.DataFrame(rows, columns=list(COLUMNS)).to_parquet(paths[split])
    return paths


def main(argv: list[str] | None = None) -> None:
    parser = console.command_line("bench.testbed.make_data", __doc__)
    parser.add_argument("--task", choices=TASKS, default="search")
    parser.add_argument("--seed", type=console.whole, default=0)
    parser.add_argument("--train", type=console.whole, default=2048, help="rows")
    parser.add_argument("--val", type=console.whole, default=256, help="rows")
    parser.add_argument("--test", type=console.whole, default=256, help="rows")
    parser.add_argument("--out", type=console.output_folder, required=True, help="directory")
    args = parser.parse_args(argv)
    counts = dict(zip(SPLITS, (args.train, args.val, args.test), strict=True))
    for split, path in write(args.task, args.seed, counts, args.out).items():
        print(f"{path}: {counts[split]} rows")


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
