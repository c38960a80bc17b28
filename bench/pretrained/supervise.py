"""The supervised stage: a low-rank difference that makes the published model answer the tasks now and then.

    python -m bench.pretrained --out DIR --raw
    python -m bench.pretrained.supervise --model DIR/model --out start.safetensors --device cuda --steps 400 \\
        --save-at 100,200
    python -m bench.pretrained --out STARTED --start start-100.safetensors

It learns written-out solutions of the questions of DIR/tasks/*/start.parquet, which no other split has, as many of
each family. Needs neither a network nor reasoning-gym. --save-at writes FILE-STEP.safetensors, so that a start can be
chosen that leaves reinforcement learning something to gain (bench.pretrained.measure). Fixed seeds; on CUDA sums of
floating-point numbers may still differ in the last bits.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

from bench.common import console
from bench.common.console import say
from bench.pretrained import lora, worked
from bench.pretrained.families import FAMILIES
from bench.pretrained.model import origin
from esgrpo import errors
from esgrpo.errors import EsgrpoError

RANK, STEPS, BATCH, PEAK_LR = 6, 400, 64, 2e-3
MOST_BYTES = 4_000_000  # of what may be shipped
# Padded, of one forward pass. Without checkpointing about 4 MB a token are kept for the backward pass in float32: eight
# demonstrations of 180 tokens on the CPU, 6 GB in all
MICRO_TOKENS = {"cpu": 1024, "cuda": 16384}
PAD_TO = 64  # few lengths, because a kernel may be chosen or planned for each
WARM_UP_SHARE, SHOWN_EVERY_S = 0.05, 5.0
LAST_LR = 0.02  # of the peak

Example = tuple[list[int], int]  # token ids, and where the response starts


def demonstrations(tokenizer, tasks: Path, family: str) -> list[Example]:
    """The prompts of a family's split `start` in the chat template, with their written-out solutions and the end."""
    import pandas as pd

    path = tasks / family / "start.parquet"
    if not path.is_file():
        raise EsgrpoError("supervise", f"{path} is missing", "the tasks that bench.pretrained writes",
                          "nothing was trained", "python -m bench.pretrained --out DIR --raw, or give --tasks")
    messages = [list(prompt) for prompt in pd.read_parquet(path, columns=["prompt"])["prompt"]]
    heads = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    bodies = tokenizer([worked.solve(family, prompt[-1]["content"]) for prompt in messages],
                       add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return [(head + body + [end], len(head)) for head, body in zip(heads, bodies, strict=True)]


def batches(examples: dict[str, list[Example]], steps: int, size: int, seed: int):
    """`steps` lists of about `size` examples, as many of each family; each family in a new order when it is through."""
    rng, pools = random.Random(seed), {family: [] for family in examples}
    for _ in range(steps):
        batch = []
        for family, pool in pools.items():
            while len(pool) < max(1, size // len(pools)):
                pool += rng.sample(examples[family], len(examples[family]))
            share = max(1, size // len(pools))
            batch += pool[:share]
            del pool[:share]
        yield batch


def accumulate(model, batch: list[Example], pad: int, micro_tokens: int) -> float:
    """Add the gradient of the mean loss per response token of a batch; returns that loss, in nats."""
    import torch

    from bench.testbed.train_model import collate, micro_batches

    base = model.get_base_model()
    device, total, loss_sum = base.device, sum(len(ids) - start for ids, start in batch), 0.0
    for part in micro_batches(batch, micro_tokens):
        ids, labels = collate(part, pad)
        room = (0, -ids.shape[1] % PAD_TO)
        ids, labels = (torch.nn.functional.pad(tensor, room, value=value).to(device)
                       for tensor, value in ((ids, pad), (labels, -100)))
        # padding is on the right, so causal attention needs no mask; logits only where something is learnt
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            learnt = labels[:, 1:] != -100
            logits = base.lm_head(hidden[learnt])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][learnt], reduction="sum")
        (loss / total).backward()
        loss_sum += loss.item()
    return loss_sum / total


def rate(step: int, steps: int) -> float:
    """The learning rate's share of its peak: a short warm-up, then a cosine."""
    warm_up = max(1, int(WARM_UP_SHARE * steps))
    return min(1.0, (step + 1) / warm_up) * (LAST_LR + (1 - LAST_LR) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(model, examples: dict[str, list[Example]], args, pad: int) -> None:
    """Train the differences, writing the checkpoints and the last state."""
    import torch

    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    began = shown = time.monotonic()
    model.train()
    for step, batch in enumerate(batches(examples, args.steps, args.batch, args.seed), start=1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate(step - 1, args.steps)
        loss = accumulate(model, batch, pad, args.micro_tokens or MICRO_TOKENS[torch.device(args.device).type])
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        if not math.isfinite(norm):
            raise EsgrpoError("supervise", f"gradient norm {norm} at step {step}", "a finite one",
                              "training ended; checkpoints so far are whole", "lower --lr")
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        if now - shown > SHOWN_EVERY_S or step in (1, args.steps):
            shown = now
            lr = optimizer.param_groups[0]["lr"]
            say(f"step {step}/{args.steps} loss {loss:.4f} lr {lr:.1e} {now - began:.0f} s")
        if step in args.save_at or step == args.steps:
            path = args.out if step == args.steps else args.out.with_name(f"{args.out.stem}-{step}{args.out.suffix}")
            about = {"license": "Apache-2.0", "base": "SmolLM2-135M-Instruct", "step": step, "steps": args.steps,
                     "batch": args.batch, "lr": args.lr, "seed": args.seed, "device": args.device,
                     "families": ",".join(examples)}
            size = lora.save(model, args.rank, path, {name: str(value) for name, value in about.items()})
            say(f"{path}: {size / 1e6:.2f} MB")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = console.command_line("bench.pretrained.supervise", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="made with bench.pretrained --raw")
    parser.add_argument("--tasks", type=Path, help="default: tasks/ beside the model")
    parser.add_argument("--out", type=console.output_file, required=True, help="safetensors file to write")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--families", default=",".join(FAMILIES), help="with a comma; default: all")
    parser.add_argument("--save-at", default="", help="steps after which to write a checkpoint, with a comma")
    parser.add_argument("--micro-tokens", type=console.count,
                        help=f"of a forward pass, padded; default: {MICRO_TOKENS}")
    for name, kind, default in (("steps", console.count, STEPS), ("batch", console.count, BATCH),
                                ("lr", console.positive, PEAK_LR), ("rank", console.count, RANK),
                                ("seed", console.whole, 0), ("threads", console.count, 2)):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"default: {default}")
    args = parser.parse_args(argv)
    unknown = set(args.families.split(",")) - set(FAMILIES)
    if unknown:
        parser.error(f"--families: {', '.join(sorted(unknown))} is not one of {', '.join(FAMILIES)}")
    if not args.save_at.replace(",", "0").isdecimal() and args.save_at:
        parser.error(f"--save-at {args.save_at}: wanted steps with a comma, such as 100,200")
    args.save_at = {int(step) for step in args.save_at.split(",") if step}
    return args


def run(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made_from = origin(args.model)
    if not made_from or made_from.get("start"):
        raise EsgrpoError("supervise", f"{args.model} " + ("carries a start already" if made_from else
                          "was not made by bench.pretrained"), "the published model: the difference is one to it",
                          "nothing was trained", "python -m bench.pretrained --out DIR --raw")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise EsgrpoError("supervise", f"--device {args.device}, and torch sees none", "a CUDA device",
                          "nothing was trained", "leave --device out to train on the CPU")
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.backends.cuda.enable_cudnn_sdp(False)  # builds a plan for every new length, see bench.common.stack
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tasks = args.tasks or args.model.parent / "tasks"
    examples = {family: demonstrations(tokenizer, tasks, family) for family in args.families.split(",")}
    say(", ".join(f"{len(of)} demonstrations of {family}" for family, of in examples.items()))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa")
    model = lora.attached(model, args.rank).to(args.device)
    size = 2 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    if size > MOST_BYTES:
        say(f"rank {args.rank} makes {size / 1e6:.1f} MB, more than the {MOST_BYTES / 1e6:.0f} MB that may be shipped")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    train(model, examples, args, tokenizer.pad_token_id)


def main(argv: list[str] | None = None) -> int:
    try:
        run(parse(argv))
    except EsgrpoError as error:
        errors.say(error)
        return 2
    except KeyboardInterrupt:
        errors.say(EsgrpoError("supervise", "interrupted", "a whole run", "checkpoints so far are whole",
                               "run it again"))
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
