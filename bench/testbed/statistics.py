"""Measure how the testbed's model samples on a task, and check what the benchmark relies on.

    python -m bench.testbed.statistics --samples 2000 [--task search] [--json]

Start it with ``-m``: run by path, this file would hide the standard library's module of the same name. The exit code
is 1, with a line for each criterion, if a value is out of its range; the ranges are meant for the task ``search``.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from bench.common import console
from bench.testbed.sampler import sample
from bench.testbed.task import SCALES, SMALL, SPLITS, TASKS, Scale, generate, score
from bench.testbed.train_model import encode_prompt

MODEL = Path(__file__).with_name("model")
LOOP_PATTERN = 32  # tokens, the longest pattern that counts as a loop
LOOP_REPEATS = 4
CRITERIA = {  # name -> (smallest, largest) allowed value
    "p99_over_p50": (6.0, math.inf),
    "mean_reward": (0.2, 0.6),
    "prompt_share": (0.50, 0.75),
    "loop_share": (0.03, 1.0),
    "late_bloomer_share": (0.03, 1.0),
}


def is_loop(tokens: list[int]) -> bool:
    """Whether the response ends in a pattern of at most 32 tokens, at least 4 times in a row."""
    for width in range(1, LOOP_PATTERN + 1):
        tail = tokens[-width * LOOP_REPEATS :]
        if len(tail) == width * LOOP_REPEATS and tail == tail[:width] * LOOP_REPEATS:
            return True
    return False


def prompt_share(values: np.ndarray) -> float:
    """Share of the variance that the prompt explains; `values` has shape (prompts, samples per prompt).

    Variance components of the one-way random-effects model: the between-prompt mean square is freed of the part
    that stems from the spread within prompts. Dimensionless, 0..1.
    """
    samples = values.shape[1]
    within = values.var(axis=1, ddof=1).mean()
    between = max(0.0, values.mean(axis=1).var(ddof=1) - within / samples)
    return float(between / (between + within))


def summarise(responses: list[list[int]], rewards: list[float], per_prompt: int,
              cap: int = SMALL.max_response_tokens) -> dict[str, float]:
    """Statistics of responses (token ids, `per_prompt` in a row for each prompt); lengths are in tokens with EOS."""
    length = np.array([len(r) for r in responses], dtype=float)
    reward = np.array(rewards)
    p50, p90, p99 = np.percentile(length, [50, 90, 99])
    grouped = reward.reshape(-1, per_prompt).mean(axis=1)
    return {
        "samples": len(responses),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "mean_length": float(length.mean()),
        "p99_over_p50": float(p99 / p50),
        "mean_reward": float(reward.mean()),
        "prompt_share": prompt_share(np.log(length).reshape(-1, per_prompt)),
        "loop_share": float(np.mean([is_loop(r) for r in responses])),
        "late_bloomer_share": float(np.mean((length > p90) & (reward == 1.0))),
        "at_cap_share": float(np.mean(length == cap)),
        "mixed_group_share": float(np.mean((grouped > 0) & (grouped < 1))),
    }


def failures(stats: dict[str, float]) -> list[str]:
    """One line per criterion that is out of its range."""
    return [
        f"{name} = {stats[name]:.3f} is outside {low:g}..{high:g}"
        for name, (low, high) in CRITERIA.items()
        if not low <= stats[name] <= high
    ]


def measure(task: str, samples: int, per_prompt: int = 8, seed: int = 0, split: str = "test", model_dir: Path = MODEL,
            scale: Scale = SMALL, device: str = "cpu") -> dict[str, float]:
    """Sample at temperature 1 on `samples` // `per_prompt` problems of a split and summarise."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    number = torch.float32 if device == "cpu" else torch.bfloat16  # as the rollout has it
    model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=number).to(device).eval()
    problems = [p for p in generate(task, seed, samples // per_prompt, split, scale) for _ in range(per_prompt)]
    prompts = [encode_prompt(tokenizer, p.prompt) for p in problems]
    generator = torch.Generator(device).manual_seed(seed)
    responses = sample(model, prompts, scale.max_response_tokens, generator, tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards = [score(text, p) for text, p in zip(texts, problems, strict=True)]
    return summarise(responses, rewards, per_prompt, scale.max_response_tokens)


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.testbed.statistics", __doc__)
    parser.add_argument("--task", choices=TASKS, default="search")
    parser.add_argument("--samples", type=console.count, default=2000)
    parser.add_argument("--per-prompt", type=console.count, default=8, help="samples per prompt, at least 2")
    parser.add_argument("--seed", type=console.whole, default=0)
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--model", type=console.model_folder, default=MODEL, help="directory")
    parser.add_argument("--scale", choices=SCALES, default="small", help="length of the tasks' walks")
    parser.add_argument("--device", type=console.device, default="cpu")
    parser.add_argument("--threads", type=console.count, default=1)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    args = parser.parse_args(argv)
    if args.per_prompt < 2 or args.samples < 2 * args.per_prompt:
        parser.error(f"--samples {args.samples} --per-prompt {args.per_prompt}: wanted two prompts of two at least")
    torch.set_num_threads(args.threads)
    began = time.time()
    stats = measure(args.task, args.samples, args.per_prompt, args.seed, args.split, args.model,
                    SCALES[args.scale], args.device)
    bad = failures(stats)
    if args.json:
        print(json.dumps({"task": args.task, **stats, "failures": bad}))
    else:
        for name, value in stats.items():
            low, high = CRITERIA.get(name, (None, None))
            print(f"{name:20} {value:10.3f}" + ("" if low is None else f"   wanted {low:g}..{high:g}"))
        print(f"{time.time() - began:.0f} s")
    for line in bad:
        print(f"{args.task}: {line}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
