"""Record how the testbed's model loops, and how it does not: tokens and log-probs of its own responses.

    python -m bench.testbed.record_loops [--samples 8000 --seed 0 --out bench/results/loops_testbed.json.gz]

bench.loops plays the rule for loops over the record. A loop repeats one pattern for at least `LOOP_TOKENS` tokens and
never ends by itself, up to a cap above the testbed's own. What ended by itself is no loop, however long it repeated
itself before: of those, the ones with the longest repeated spans are recorded, and as many others. The model was
trained on responses of the testbed's length only; beyond it loops get holes, and a response that goes on for so long
without being a loop is neither. Log-probs are of the sampled token at temperature 1, in nats.
"""

from __future__ import annotations

import gzip
import json
import shlex
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from bench.common import console
from bench.common.provenance import commit
from bench.testbed.sampler import sample
from bench.testbed.statistics import LOOP_PATTERN, MODEL
from bench.testbed.task import SMALL, TASKS, generate, score
from bench.testbed.train_model import encode_prompt

RESULT = Path(__file__).parents[1] / "results" / "loops_testbed.json.gz"
CAP = 1000  # tokens of a response; prompt and response fit into the model's 1,024 positions
LOOP_TOKENS = 384  # a loop repeats itself at least so long; more, and the few loops that start late would be missed
BEFORE, AFTER = 64, 600  # tokens recorded before and after the start of a loop
LOOPS, OTHERS = 150, 150  # recorded of each kind
DIGITS = 4  # of a log-prob


def repeated_spans(tokens: list[int]) -> list[int]:
    """For every token: how many tokens up to it repeat one pattern of at most `LOOP_PATTERN` tokens, at least twice."""
    best = [1] * len(tokens)
    for period in range(1, LOOP_PATTERN + 1):
        run = 0
        for at in range(period, len(tokens)):
            run = run + 1 if tokens[at] == tokens[at - period] else 0
            if run >= period:
                best[at] = max(best[at], run + period)
    return best


def _entry(prompt: int, tokens: list[int], log_probs: list[float], first: int, last: int, reward: float) -> dict:
    """Tokens `first` to `last` of a response, with the log-probs that the model gave them."""
    return {"prompt": prompt, "first": first, "tokens": tokens[first:last], "reward": reward,
            "log_probs": [round(value, DIGITS) for value in log_probs[first:last]]}


def record(task: str, samples: int, seed: int, model_dir: Path = MODEL, batch: int = 500) -> dict:
    """Sample one response to each of `samples` problems; {"loops": [...], "others": [...], counts}."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = Qwen2ForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    problems = generate(task, seed, samples, "test")
    prompts = [encode_prompt(tokenizer, problem.prompt) for problem in problems]
    generator = torch.Generator().manual_seed(seed)
    log_probs: list[list[float]] = []
    responses = sample(model, prompts, CAP, generator, tokenizer.pad_token_id, batch=batch, log_probs=log_probs)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    loops, others = [], []
    for number, (tokens, values) in enumerate(zip(responses, log_probs, strict=True)):
        reward, spans = score(texts[number], problems[number]), repeated_spans(tokens)
        if len(tokens) == CAP:
            last = next((at for at, span in enumerate(spans) if span >= LOOP_TOKENS), None)
            if last is None:
                continue
            start = last + 1 - spans[last]
            first = max(0, start - BEFORE)
            loops.append({"start": start - first,
                          **_entry(number, tokens, values, first, min(CAP, start + AFTER), reward)})
        elif len(tokens) <= SMALL.max_response_tokens:
            others.append((max(spans), _entry(number, tokens, values, 0, len(tokens), reward)))
    longest = sorted(others, key=lambda other: -other[0])[:OTHERS // 2]
    rest = [other for other in others if other[0] < longest[-1][0]][:OTHERS - len(longest)]
    return {"sampled": len(responses), "looped": len(loops), "ended": len(others), "loops": loops[:LOOPS],
            "others": [{"longest_repeated_span": span, **entry} for span, entry in longest + rest]}


def main(argv: list[str] | None = None) -> dict:
    parser = console.command_line("bench.testbed.record_loops", __doc__)
    parser.add_argument("--task", choices=TASKS, default="search")
    parser.add_argument("--samples", type=console.count, default=8000)
    parser.add_argument("--seed", type=console.whole, default=0)
    parser.add_argument("--threads", type=console.count, default=1)
    parser.add_argument("--out", type=console.output_file, default=RESULT)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    began = time.time()
    result = {"command": shlex.join(["python", "-m", "bench.testbed.record_loops", *(sys.argv[1:] if argv is None
                                                                                      else argv)]),
              "commit": commit(), "seed": options.seed, "task": options.task, "cap": CAP, "temperature": 1.0,
              "versions": {"torch": torch.__version__}, **record(options.task, options.samples, options.seed)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, separators=(",", ":"))
    options.out.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{result['looped']} of {result['sampled']} responses loop; {len(result['loops'])} loops and "
          f"{len(result['others'])} others recorded in {options.out} ({options.out.stat().st_size / 1000:.0f} kB, "
          f"{time.time() - began:.0f} s)")
    return result


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
