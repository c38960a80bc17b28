"""Samples that bench.pretrained.measure kept, as the history that an overlay run begins with.

    python -m bench.pretrained.measure --model DIR/model --family chain_sum --split train --prompts 2048 --cap 256 \\
        --keep KEPT.json.gz
    python -m bench.pretrained.record_history KEPT.json.gz --out history.json
    python -m bench.train ... --arms "all,all history=warm" --history history.json

What an earlier pass over the prompts would have left: one visit of each, by the weights that training starts with.
Standard library only.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from bench.common import console
from bench.pretrained.record_groups import RIGHT
from esgrpo import config
from esgrpo.algo.history import PromptHistory, prompt_key
from esgrpo.algo.prompt_prior import features_of

START = 0  # weight version of the samples


def of_kept(kept: dict) -> PromptHistory:
    """What the overlay would know after these groups, in their order; with the settings that it has by itself."""
    settings, cap = config.Segment(), kept["cap"]
    history = PromptHistory(settings.history, settings.routing, cap)
    for group in kept["groups"]:
        question, samples = group["question"], group["samples"]
        lengths = [len(sample["ids"]) for sample in samples]
        history.observe(prompt_key([{"role": "user", "content": question}]), lengths,
                        [sample["reward"] >= RIGHT for sample in samples], [length >= cap for length in lengths], START,
                        features_of(question, f"reasoning_gym/{group['family']}"))
    return history


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.pretrained.record_history", __doc__)
    parser.add_argument("kept", type=Path, help="what bench.pretrained.measure --keep has written")
    parser.add_argument("--out", type=console.output_file, required=True)
    options = parser.parse_args(argv)
    try:
        history = of_kept(json.loads(gzip.decompress(options.kept.read_bytes())))
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        print(f"record_history | {options.kept}: {type(error).__name__}: {error} | samples of prompts | no history is "
              "written | python -m bench.pretrained.measure --keep FILE", file=sys.stderr)
        return 1
    options.out.write_text(json.dumps(history.to_state()))
    print(f"{options.out.name}: {len(history)} prompts, {options.out.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
