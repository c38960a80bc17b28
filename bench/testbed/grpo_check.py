"""Show that plain GRPO improves the testbed's model, with a loop of its own and no other framework.

    python -m bench.testbed.grpo_check --task search --steps 60

Each step: 8 prompts x 8 rollouts of the train split, one on-policy policy-gradient update (token mean). The mean
reward on the val split is measured before and after.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from bench.common import console
from bench.testbed.sampler import sample
from bench.testbed.statistics import MODEL
from bench.testbed.task import MAX_RESPONSE_TOKENS, TASKS, Problem, generate, score
from bench.testbed.train_model import collate, encode_prompt


class Policy:
    """The model with its tokenizer and random state."""

    def __init__(self, model_dir: Path, seed: int):
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.generator = torch.Generator().manual_seed(seed)

    def rollouts(self, problems: list[Problem]) -> tuple[list[list[int]], list[list[int]], torch.Tensor]:
        """Prompts and responses (token ids) and rewards, shape (problems,), one rollout for each problem."""
        prompts = [encode_prompt(self.tokenizer, p.prompt) for p in problems]
        pad = self.tokenizer.pad_token_id
        responses = sample(self.model, prompts, MAX_RESPONSE_TOKENS, self.generator, pad)
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return prompts, responses, torch.tensor([score(t, p) for t, p in zip(texts, problems, strict=True)])


def update(policy: Policy, optimizer, prompts, responses, advantages: torch.Tensor) -> None:
    """One policy-gradient step; `advantages` has shape (rollouts,). Micro-batches are sorted by length."""
    total = sum(map(len, responses))
    order = sorted((i for i in range(len(responses)) if advantages[i] != 0), key=lambda i: len(responses[i]))
    for start in range(0, len(order), 16):
        part = order[start : start + 16]
        group = [(prompts[i] + responses[i], len(prompts[i])) for i in part]
        ids, labels = collate(group, policy.tokenizer.pad_token_id)
        logits = policy.model(input_ids=ids, use_cache=False).logits[:, :-1]
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        loss = (nll * advantages[part, None]).sum() / total  # ignored labels have a loss of 0
        loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Rewards (rollouts,) minus the mean of their group, over its standard deviation; 0 in uniform groups."""
    grouped = rewards.view(-1, group)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)).flatten()


def evaluate(policy: Policy, task: str, count: int) -> str:
    """Mean reward and mean response length (tokens) on `count` problems of the val split, in words."""
    _, responses, rewards = policy.rollouts(generate(task, 1, count, "val"))
    return f"val reward {rewards.mean():.3f}, mean length {sum(map(len, responses)) / count:.1f} tokens"


def main(argv: list[str] | None = None) -> None:
    parser = console.command_line("bench.testbed.grpo_check", __doc__)
    parser.add_argument("--task", choices=TASKS, default="search")
    parser.add_argument("--steps", type=console.count, default=60)
    parser.add_argument("--prompts", type=console.count, default=8, help="per step")
    parser.add_argument("--group", type=console.count, default=8, help="rollouts per prompt")
    parser.add_argument("--lr", type=console.positive, default=2e-4)
    parser.add_argument("--seed", type=console.whole, default=0)
    parser.add_argument("--val", type=console.count, default=1000, help="val problems")
    parser.add_argument("--model", type=console.model_folder, default=MODEL, help="directory")
    parser.add_argument("--threads", type=console.count, default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    policy = Policy(args.model, args.seed)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=args.lr, weight_decay=0.0)
    print("before:", evaluate(policy, args.task, args.val), flush=True)
    problems = generate(args.task, args.seed, args.steps * args.prompts)
    began = time.time()
    for step in range(args.steps):
        chosen = problems[step * args.prompts : (step + 1) * args.prompts]
        prompts, responses, rewards = policy.rollouts([p for p in chosen for _ in range(args.group)])
        update(policy, optimizer, prompts, responses, group_advantages(rewards, args.group))
        if (step + 1) % 5 == 0:
            length = sum(map(len, responses)) / len(responses)
            seconds = time.time() - began
            print(f"step {step + 1} reward {rewards.mean():.3f} length {length:.0f} {seconds:.0f} s", flush=True)
    print("after:", evaluate(policy, args.task, args.val), flush=True)


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
