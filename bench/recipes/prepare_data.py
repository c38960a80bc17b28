"""GSM8K, DAPO-Math-17k and AIME 2024 as parquet files in verl's format.

    pip install datasets
    python bench/recipes/prepare_data.py --out ~/data [--only gsm8k] [--raw DIR]

Fetches from the Hugging Face hub. --raw DIR reads files that were fetched elsewhere: DIR/gsm8k-train.parquet,
DIR/gsm8k-test.parquet, DIR/dapo-math-17k.parquet, DIR/aime-2024.parquet.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

# verl's reward function reads the last number behind ####
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ANSWER = re.compile(r"####\s*(-?[\d.,]+)")
COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
# file: (hub name, hub config, hub split, what to do with a row)
SETS = {
    "gsm8k/train": ("openai/gsm8k", "main", "train", "gsm8k"),
    "gsm8k/test": ("openai/gsm8k", "main", "test", "gsm8k"),
    "dapo-math-17k/train": ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train", "verl"),
    "aime-2024/test": ("BytedTsinghua-SIA/AIME-2024", None, "train", "verl"),
}


def gsm8k(row: dict, index: int, split: str) -> dict:
    """A row of verl from {question, answer}. Raises ValueError when the answer has no #### NUMBER."""
    found = ANSWER.search(row["answer"])
    if not found:
        raise ValueError(f"gsm8k {split} row {index}: no '#### NUMBER' in the answer")
    return {"data_source": "openai/gsm8k", "ability": "math",
            "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
            "reward_model": {"style": "rule", "ground_truth": found.group(1).replace(",", "")},
            "extra_info": {"split": split, "index": index, "answer": row["answer"], "question": row["question"]}}


def without_copies(dataset):
    """DAPO-Math-17k and AIME 2024 have verl's columns already, and every prompt many times: the first one stays."""
    missing = [name for name in COLUMNS if name not in dataset.column_names]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}; found {', '.join(dataset.column_names)}")
    seen, chosen = set(), []
    for index, prompt in enumerate(dataset["prompt"]):
        text = "\n".join(message["content"] for message in prompt)
        if text not in seen:
            seen.add(text)
            chosen.append(index)
    return dataset.select(chosen).select_columns(COLUMNS)


def load(name: str, raw: Path | None):
    """The raw data set, from the hub or from `raw`."""
    import datasets

    hub, config, split, _ = SETS[name]
    if raw is None:
        return datasets.load_dataset(hub, config, split=split)
    folder, _, part = name.partition("/")
    file = raw / (f"{folder}-{part}.parquet" if folder == "gsm8k" else f"{folder}.parquet")
    return datasets.Dataset.from_parquet(str(file), cache_dir=str(raw / ".cache"))


def prepare(name: str, out: Path, raw: Path | None = None) -> tuple[Path, int]:
    """Writes OUT/NAME.parquet; returns its path and its number of rows."""
    dataset, (_, _, split, kind) = load(name, raw), SETS[name]
    if kind == "gsm8k":
        dataset = dataset.map(lambda row, index: gsm8k(row, index, split), with_indices=True,
                              remove_columns=dataset.column_names, load_from_cache_file=False)
    else:
        dataset = without_copies(dataset)
    target = out / f"{name}.parquet"
    target.parent.mkdir(parents=True, exist_ok=True)
    dataset.to_parquet(str(target))
    return target, len(dataset)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path.home() / "data")
    parser.add_argument("--only", choices=sorted({name.partition("/")[0] for name in SETS}))
    parser.add_argument("--raw", type=Path)
    arguments = parser.parse_args(argv)
    for name in SETS:
        if arguments.only in (None, name.partition("/")[0]):
            try:
                target, rows = prepare(name, arguments.out.expanduser(), arguments.raw)
            except (OSError, ValueError) as error:
                print(f"prepare_data: {name}: {error} | wanted the data set | {name} was not written | "
                      "check the connection, or give --raw", file=sys.stderr)
                return 2
            print(f"{target}: {rows} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
