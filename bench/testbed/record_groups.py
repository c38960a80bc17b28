"""Record groups of the testbed's model for bench.verdict: tokens, log-probs and outcomes, with fixed seeds.

    python -m bench.testbed.record_groups [--prompts 400 --group 8 --seed 0 --threads 1]

Three files in bench/results: groups_search.json.gz and groups_chain.json.gz are samples of the committed model, and
groups_learning.json.gz is a run of GRPO on `search` (the loop of bench.testbed.grpo_check), every group of it, with
the number of updates that its weights had seen. Temperature 1, the testbed's cap.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import torch

from bench.common import console
from bench.common.provenance import commit, without_folders
from bench.common.recorded_groups import response, write
from bench.testbed.grpo_check import Policy, group_advantages, update
from bench.testbed.sampler import sample
from bench.testbed.statistics import MODEL
from bench.testbed.task import MAX_RESPONSE_TOKENS, TASKS, Problem, generate, score
from bench.testbed.train_model import encode_prompt

RESULTS = Path(__file__).parents[1] / "results"
LEARNING = "learning"
LEARNING_RATE = 4e-4  # of AdamW: from 0.5 to 0.9 within the steps that are recorded


def groups_of(policy: Policy, problems: list[Problem], size: int, version: int) -> tuple[list, list, torch.Tensor]:
    """(recorded groups, token ids (prompt, response) of every rollout, rewards of shape (rollouts,))."""
    each = [problem for problem in problems for _ in range(size)]
    prompts = [encode_prompt(policy.tokenizer, problem.prompt) for problem in each]
    log_probs: list[list[float]] = []
    responses = sample(policy.model, prompts, MAX_RESPONSE_TOKENS, policy.generator, policy.tokenizer.pad_token_id,
                       log_probs=log_probs)
    texts = policy.tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards = [score(text, problem) for text, problem in zip(texts, each, strict=True)]
    rows = [response(*row) for row in zip(responses, log_probs, [reward > 0.5 for reward in rewards], strict=True)]
    groups = [{"version": version, "responses": rows[at:at + size]} for at in range(0, len(rows), size)]
    return groups, [prompts, responses], torch.tensor(rewards)


def learning_run(seed: int, steps: int, prompts: int, size: int) -> list[dict]:
    policy = Policy(MODEL, seed)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    problems = generate("search", seed, steps * prompts)
    recorded = []
    for step in range(steps):
        groups, ids, rewards = groups_of(policy, problems[step * prompts:(step + 1) * prompts], size, step)
        update(policy, optimizer, *ids, group_advantages(rewards, size))
        recorded += groups
        print(f"step {step} reward {rewards.mean():.3f}", flush=True)
    return recorded


def main(argv: list[str] | None = None) -> None:
    parser = console.command_line("bench.testbed.record_groups", __doc__)
    parser.add_argument("--prompts", type=console.count, default=400)
    parser.add_argument("--group", type=console.count, default=8)
    parser.add_argument("--steps", type=console.count, default=24, help="of the learning run")
    parser.add_argument("--step-prompts", type=console.count, default=24, help="prompts of one of its steps")
    parser.add_argument("--only", choices=(*TASKS, LEARNING), help="one file of the three")
    parser.add_argument("--seed", type=console.whole, default=0)
    parser.add_argument("--threads", type=console.count, default=1)
    parser.add_argument("--out", type=console.output_folder, default=RESULTS, help="directory")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    command = shlex.join(["python", "-m", "bench.testbed.record_groups", *(sys.argv[1:] if argv is None else argv)])
    for name in (*TASKS, LEARNING) if options.only is None else (options.only,):
        began = time.time()
        if name == LEARNING:
            groups = learning_run(options.seed, options.steps, options.step_prompts, options.group)
        else:
            problems = generate(name, options.seed, options.prompts, "test")
            groups, _, _ = groups_of(Policy(MODEL, options.seed), problems, options.group, 0)
        facts = {"command": without_folders(command), "commit": commit(), "seed": options.seed,
                 "cap": MAX_RESPONSE_TOKENS, "task": "search" if name == LEARNING else name,
                 "model": "the testbed's", "temperature": 1.0,
                 "versions": {"torch": torch.__version__}}
        path = options.out / f"groups_{name}.json.gz"
        write(path, facts, groups)
        right = [row["correct"] for group in groups for row in group["responses"]]
        print(f"{path.name}: {len(groups)} groups, reward {sum(right) / len(right):.3f}, "
              f"{path.stat().st_size / 1000:.0f} kB, {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
