"""Train the testbed's tiny Qwen2 model and tokenizer from scratch on demonstrations of both tasks.

    python -m bench.testbed.train_model --out DIR
    python -m bench.testbed.train_model --out DIR --scale large --device cuda    # 33 M parameters, responses to 8k

The committed model is not one run of this command. It was trained with it for about 1,000 steps, then for 310 more
steps in three short stages on demonstrations with long ones oversampled and stalls confined to the first 16 lines,
and is the weighted mean of the last two stages (0.59 and 0.41), because loops and late bloomers trade against each
other. bench.testbed.statistics says what it does; a recipe that gives the same in one command is still to be found.
"""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from bench.common import console
from bench.testbed.task import (
    MAX_PROMPT_TOKENS,
    SCALES,
    SMALL,
    TASKS,
    WORDS,
    Scale,
    Trace,
    generate,
    render_trace,
    split_tokens,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORTEST_CONTEXT = 1024
MICRO_BATCH, CHUNK = 16, 2048  # demonstrations; of the longest kind, shorter ones fill the room
WARM_UP = 100  # steps, at most a tenth of all
IGNORE = -100  # label that the loss skips


def build_tokenizer(out: Path) -> PreTrainedTokenizerBase:
    """Save the tokenizer (256 bytes, 3 chat tokens, the words of the tasks) to `out` and load it the way verl does.

    The words are added tokens, not merges, because Qwen2 splits numbers into digits before merging.
    A Qwen2Tokenizer, because AutoTokenizer rebuilds its pre-tokenizer: a hand-made one would lose the newline token.
    """
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[])
    tokenizer.add_special_tokens(
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
    )
    tokenizer.add_tokens(list(WORDS))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return AutoTokenizer.from_pretrained(out)


@dataclass(frozen=True)
class Size:
    """Defaults of a scale; `batch` in demonstrations.

    spread: standard deviation of initial weights (0.02 suits wide models; in a narrow one it delays learning).
    curriculum: (share of the steps, longest demonstration until then in tokens); rules are learnt fast on short ones.
    """

    hidden: int
    layers: int
    head: int
    spread: float
    steps: int
    batch: int
    lr: float
    curriculum: tuple[tuple[float, int], ...]


# large: 300 steps of full length taught no right answer (H200: loss 0.14), short walks are learnt in as many seconds
# (0.009). Only full length has endless loops: what comes there needs steps while the learning rate is still high.
SIZES = {"small": Size(128, 3, 32, 0.06, 1400, 64, 2e-3, ((0.2, 112),)),
         "large": Size(640, 9, 64, 0.02, 1200, 32, 1e-3, ((0.35, 320), (0.5, 1024), (0.6, 3072)))}


def build_model(tokenizer: PreTrainedTokenizerBase, size: Size, scale: Scale = SMALL) -> Qwen2ForCausalLM:
    """A randomly initialised float32 model. The vocabulary is exactly the tokenizer's."""
    hidden = size.hidden
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=hidden // size.head,
        num_key_value_heads=max(1, hidden // (2 * size.head)),
        max_position_embeddings=max(SHORTEST_CONTEXT, MAX_PROMPT_TOKENS + scale.max_response_tokens),
        initializer_range=size.spread,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.pad_token_id,
    )
    return model


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a user prompt in the chat template, up to where the response starts."""
    message = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert len(ids) <= MAX_PROMPT_TOKENS
    return ids


class Corpus:
    """Endless demonstrations of the tasks, as many of each, as (ids, prompt length) pairs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, scale: Scale = SMALL,
                 curriculum: tuple[tuple[float, int], ...] = SIZES["small"].curriculum,
                 tasks: tuple[str, ...] = TASKS):
        self.tokenizer, self.seed, self.scale, self.curriculum = tokenizer, seed, scale, curriculum
        self.tasks = tasks
        self.rng = random.Random(seed)
        words = [*WORDS, "\n", *map(chr, range(32, 127))]
        self.word_ids = {word: tokenizer.encode(word, add_special_tokens=False)[0] for word in words}
        empty = encode_prompt(tokenizer, "~")
        cut = empty.index(self.word_ids["~"])
        self.head, self.tail = empty[:cut], empty[cut + 1 :]

    def _encode(self, prompt: str, trace: Trace) -> tuple[list[int], int]:
        # by table, which spares the tokenizer in the inner loop
        ids = [*self.head, *(self.word_ids[t] for t in split_tokens(prompt)), *self.tail]
        start = len(ids)
        ids += [self.word_ids[t] for t in trace.tokens]
        if trace.finished:
            ids.append(self.tokenizer.eos_token_id)
        return ids[: start + self.scale.max_response_tokens], start

    def chunk(self, index: int, count: int, longest: float = math.inf) -> list[tuple[list[int], int]]:
        """Those of `count` fresh demonstrations whose walk fits into `longest` tokens; `index` numbers the chunk."""
        line = self.scale.digits + 2  # tokens: two numbers of two digits a token, a sign and the end
        problems = [p for t in self.tasks
                    for p in generate(t, self.seed * 1_000_003 + index, count // len(self.tasks), scale=self.scale)]
        return [self._encode(p.prompt, render_trace(self.rng, p)) for p in problems if p.steps * line <= longest]

    def batches(self, steps: int, size: int):
        """`steps` lists of `size` random demonstrations; the curriculum keeps the early ones short."""
        index, pool = 0, []
        for step in range(steps):
            limit = next((longest for share, longest in self.curriculum if step < share * steps), math.inf)
            pool = [item for item in pool if len(item[0]) <= limit]
            while len(pool) < size:
                chunk = [item for item in self.chunk(index, CHUNK, limit) if len(item[0]) <= limit]
                self.rng.shuffle(chunk)
                pool += chunk
                index += 1
            yield pool[:size]
            pool = pool[size:]


def collate(group: list[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels, both (batch, time) int64; prompt and padding are not learnt."""
    width = max(len(ids) for ids, _ in group)
    ids = torch.full((len(group), width), pad)
    labels = torch.full((len(group), width), IGNORE)
    for i, (row, start) in enumerate(group):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, start : len(row)] = ids[i, start : len(row)]
    return ids, labels


def micro_batches(batch: list[tuple[list[int], int]], tokens: int) -> list[list[tuple[list[int], int]]]:
    """The batch by length, cut where a part with its padding would exceed `tokens`."""
    parts: list[list[tuple[list[int], int]]] = [[]]
    for item in sorted(batch, key=lambda item: len(item[0])):
        if parts[-1] and (len(parts[-1]) + 1) * len(item[0]) > tokens:
            parts.append([])
        parts[-1].append(item)
    return parts


def accumulate(model: Qwen2ForCausalLM, batch: list[tuple[list[int], int]], pad: int, tokens: int) -> float:
    """Add the gradient of the mean loss per response token of a batch; returns that loss, in nats.

    The batch is cut into micro-batches of similar lengths to save padding. They share one optimiser step: steps on
    short or on long demonstrations alone would pull the model to and fro.
    """
    total = sum(len(ids) - start for ids, start in batch)
    loss_sum = 0.0
    for part in micro_batches(batch, tokens):
        ids, labels = (tensor.to(model.device) for tensor in collate(part, pad))
        # padding is on the right, so causal attention needs no mask
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type != "cpu"):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")
        (loss / total).backward()
        loss_sum += loss.item()
    return loss_sum / total


def train(model: Qwen2ForCausalLM, corpus: Corpus, steps: int, size: int, peak_lr: float) -> None:
    """Train in place for `steps` AdamW steps of `size` demonstrations, warm-up and cosine decay."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.98))
    began = shown = time.time()
    warm_up = max(1, min(WARM_UP, steps // 10))
    model.train()
    for step, batch in enumerate(corpus.batches(steps, size)):
        lr = peak_lr * min(1.0, (step + 1) / warm_up) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = accumulate(model, batch, corpus.tokenizer.pad_token_id, MICRO_BATCH * corpus.scale.max_response_tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if time.time() - shown > 5 or step + 1 == steps:
            shown = time.time()
            print(f"step {step + 1}/{steps} loss {loss:.4f} lr {lr:.1e} {shown - began:.0f} s", flush=True)
    model.eval()


def main(argv: list[str] | None = None) -> None:
    parser = console.command_line("bench.testbed.train_model", __doc__)
    parser.add_argument("--out", type=console.output_folder, required=True,
                        help="directory of the model and the tokenizer")
    parser.add_argument("--seed", type=console.whole, default=0)
    parser.add_argument("--scale", choices=SCALES, default="small", help="length of the tasks' walks")
    parser.add_argument("--tasks", type=console.names(TASKS), default=",".join(TASKS),
                        help="what the demonstrations are of, with a comma")
    parser.add_argument("--device", type=console.device, default="cpu")
    for name, kind in (("steps", console.count), ("batch", console.count), ("lr", console.positive),
                       ("hidden", console.count), ("layers", console.count)):
        parser.add_argument(f"--{name}", type=kind, help="default: " + ", ".join(
            f"{getattr(size, name)} ({scale})" for scale, size in SIZES.items()))
    parser.add_argument("--threads", type=console.count, default=1)
    args = parser.parse_args(argv)
    tasks = tuple(args.tasks)
    given = {name: getattr(args, name) for name in ("steps", "batch", "lr", "hidden", "layers")}
    size = replace(SIZES[args.scale], **{name: value for name, value in given.items() if value is not None})
    if size.hidden != size.head and size.hidden % (2 * size.head):
        parser.error(f"--hidden {size.hidden}: wanted {size.head}, or a multiple of {2 * size.head}")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # builds a plan for every new length, see bench.common.stack
    tokenizer = build_tokenizer(args.out)
    model = build_model(tokenizer, size, SCALES[args.scale]).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    corpus = Corpus(tokenizer, args.seed, SCALES[args.scale], size.curriculum, tasks)
    train(model, corpus, size.steps, size.batch, size.lr)
    model.half().save_pretrained(args.out)


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
