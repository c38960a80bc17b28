"""What a model earns on the tasks and how long it answers, at temperature 1: one vLLM engine for all families.

    python -m bench.pretrained.measure --model DIR/model --tasks DIR/tasks --prompts 64 --samples 8 \\
        [--family lcm] [--json FILE] [--keep FILE.json.gz]

reward: mean over all responses. mixed: share of groups with right and wrong answers, which alone have a gradient. at
cap: share of responses that were cut. mode: what always giving the commonest answer of these prompts earns. --keep
writes the samples themselves, with the log-probability of each token. The device is vLLM's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections import Counter
from pathlib import Path

from bench.common import console
from bench.common.console import print_table, say
from bench.common.scales import cpu_dtype
from bench.pretrained.families import FAMILIES, MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, SPLITS
from bench.pretrained.reward import score
from esgrpo import errors
from esgrpo.errors import EsgrpoError

DIGITS = 4  # of a kept log-probability
_PROMPTS = 1_000_003  # seeds between two of --seed


def prompts(tasks: Path, family: str, split: str, count: int) -> list[dict]:
    """The first `count` rows of a split: question and gold."""
    import pandas as pd

    path = tasks / family / f"{split}.parquet"
    if not path.is_file():
        raise EsgrpoError("measure", f"{path} is missing", "the tasks that bench.pretrained writes",
                          "nothing was measured", "python -m bench.pretrained --out DIR")
    rows = pd.read_parquet(path).head(count)
    if len(rows) < count:
        say(f"{path} has {len(rows)} prompts, fewer than {count}: all are taken")
    return [{"question": prompt[-1]["content"], "gold": gold["ground_truth"]}
            for prompt, gold in zip(rows["prompt"], rows["reward_model"], strict=True)]


def engine(args: argparse.Namespace):
    """vLLM's engine in this process' device, bfloat16 where that is not slower."""
    from vllm import LLM
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    room = {"kv_cache_memory_bytes": 1 << 30} if on_cpu else {"gpu_memory_utilization": args.memory}
    return LLM(model=str(args.model), dtype=cpu_dtype() if on_cpu else "bfloat16", seed=args.seed, enforce_eager=on_cpu,
               max_model_len=MAX_PROMPT_TOKENS + args.cap, max_num_seqs=32 if on_cpu else 512,
               disable_log_stats=True, **room)


def sample(llm, family: str, asked: list[dict], args: argparse.Namespace) -> list[dict]:
    """The asked, each with `samples`: token ids, log-probabilities, text, whether it ended, reward."""
    from vllm import SamplingParams

    # logprobs=0: of the sampled token alone. vLLM gives the samples of a prompt its seed and those after it
    settings = [SamplingParams(n=args.samples, temperature=1.0, max_tokens=args.cap, logprobs=0,
                               seed=args.seed * _PROMPTS + i * args.samples) for i in range(len(asked))]
    outputs = llm.chat([[{"role": "user", "content": row["question"]}] for row in asked], settings, use_tqdm=True)
    groups = []
    for row, output in zip(asked, outputs, strict=True):
        samples = [{
            "ids": list(answer.token_ids),
            "logprobs": [round(of[token].logprob, DIGITS)
                         for of, token in zip(answer.logprobs, answer.token_ids, strict=True)],
            "text": answer.text, "ended": answer.finish_reason == "stop",
            "reward": score(family, answer.text, row["gold"]),
        } for answer in output.outputs]
        groups.append({"family": family, **row, "samples": samples})
    return groups


def summary(groups: list[dict]) -> dict[str, float]:
    """The numbers of one family; lengths in tokens, with the end token."""
    samples = [s for group in groups for s in group["samples"]]
    lengths = sorted(len(s["ids"]) for s in samples)
    p50, p90, p99 = (lengths[int(share * (len(lengths) - 1))] for share in (0.5, 0.9, 0.99))
    mixed = sum(0 < sum(s["reward"] for s in group["samples"]) < len(group["samples"]) for group in groups)
    commonest = Counter(group["gold"] for group in groups).most_common(1)[0][1]
    return {"responses": len(samples), "reward": sum(s["reward"] for s in samples) / len(samples),
            "mode": commonest / len(groups), "mixed": mixed / len(groups), "P50": p50, "P90": p90, "P99": p99,
            "at cap": sum(not s["ended"] for s in samples) / len(samples), "mean": sum(lengths) / len(lengths)}


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}" if value < 2 else f"{value:.0f}"


def run(args: argparse.Namespace) -> None:
    if not (args.model / "config.json").is_file():
        raise EsgrpoError("measure", f"{args.model} holds no model", "a model folder", "nothing was measured",
                          "python -m bench.pretrained --out DIR makes one")
    asked = {family: prompts(args.tasks, family, args.split, args.prompts) for family in args.families}
    for path in filter(None, (args.json, args.keep)):  # a folder that is not there would be found out at the end
        path.parent.mkdir(parents=True, exist_ok=True)
    llm, numbers, kept = engine(args), {}, []
    for family, rows in asked.items():
        began = time.monotonic()
        groups = sample(llm, family, rows, args)
        numbers[family] = {**summary(groups), "seconds": round(time.monotonic() - began, 1)}
        kept += groups
        say(f"{family}: reward {numbers[family]['reward']:.3f}, {numbers[family]['seconds']} s")
    columns = [name for name in next(iter(numbers.values())) if name != "mean"]
    print_table([["family", *columns], *([name, *(_cell(of[c]) for c in columns)] for name, of in numbers.items())])
    about = {"model": str(args.model), "split": args.split, "prompts": args.prompts, "samples": args.samples,
             "cap": args.cap, "seed": args.seed}
    if args.json:
        args.json.write_text(json.dumps({**about, "families": numbers}, indent=1) + "\n")
    if args.keep:
        with gzip.open(args.keep, "wt") as stream:
            json.dump({**about, "groups": kept}, stream, separators=(",", ":"))


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.pretrained.measure", __doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", type=console.existing_folder, help="default: tasks/ beside the model")
    parser.add_argument("--family", dest="families", action="append", choices=FAMILIES,
                        help="may be repeated; default: all")
    parser.add_argument("--split", choices=SPLITS, default="val")
    parser.add_argument("--prompts", type=console.count, default=64, help="of each family")
    parser.add_argument("--samples", type=console.count, default=8, help="of each prompt")
    parser.add_argument("--cap", type=console.count, default=MAX_RESPONSE_TOKENS, help="tokens of a response")
    parser.add_argument("--memory", type=console.share, default=0.8, help="share of the GPU's")
    parser.add_argument("--seed", type=console.whole, default=0)
    parser.add_argument("--json", type=console.output_file, help="write the numbers there")
    parser.add_argument("--keep", type=console.output_file, help="write the samples there, gzipped")
    args = parser.parse_args(argv)
    args.families = args.families or list(FAMILIES)
    args.tasks = args.tasks or args.model.parent / "tasks"
    try:
        run(args)
    except EsgrpoError as error:
        errors.say(error)
        return 2
    return 0


if __name__ == "__main__":  # vLLM starts processes that import this file
    sys.exit(console.exit_code(main))
