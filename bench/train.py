"""The testbed at the scale of a GPU: verl fully async, plain and with the overlay; wall time and samples to a reward.

    ESGRPO_BENCH_DEVICE=cuda python -m bench.train --seeds 1,2 --arms plain,overlay --budget 240 --results FILE

The first call trains the model (33 M parameters, responses to 8,192 tokens with a heavy tail) from random weights on
demonstrations, a few minutes on one GPU; --model takes one that is there already. `plain` is verl's own fully-async
GRPO, `overlay` the whole method; the arms of bench.ablation are known, too. Both have the same GPUs, batch, data and
budget. `plain staleness=4` is plain with another staleness threshold than the scale's, so that a baseline can be tuned.
A finished run is not run again; --scale small is the testbed as it is, for a look on a CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, TESTBED, compare, modules, stack, training
from bench.common.console import say
from bench.testbed import make_data
from bench.testbed.task import SCALES, TASKS

NAMES = {"plain": "off", "overlay": "all"}  # for arms of bench.ablation
OWN_STALENESS = " staleness="  # between an arm and its own value


@dataclass(frozen=True)
class Setting:
    """Of a scale. Segments in tokens, `validation` and `concurrent` in prompts, `test_every` in weight versions.

    micro_batch: rows of the trainer's forward pass, padded to the longest of them. workers: processes of the agent
    loop, and of the reward loop. staleness: verl's own, for all arms that do not name theirs.
    """

    segment: int
    validation: int
    test_every: int
    concurrent: int
    sequences: int
    batched_tokens: int
    micro_batch: int
    workers: int
    learning_rate: float
    staleness: float


# large: with 0.5 twelve groups are in flight at most, and a version waits for the longest of them; with 2.0 it is
# 24, plain verl's best of 1, 2 and 4 on H200s (bench/results/train_h200_staleness.json). 8 workers are verl's default
SETTINGS = {"small": Setting(modules.SEGMENT_LENGTH, 128, 5, 8, 64, 1024, 16, 1, 3e-4, 0.5),
            "large": Setting(1024, 128, 15, 32, 256, 8192, 4, 8, 1e-4, 2.0)}


def own_staleness(arm: str) -> tuple[str, str]:
    """(arm of bench.ablation, the staleness that `arm` names or an empty string)."""
    name, _, value = arm.partition(OWN_STALENESS)
    return NAMES.get(name, name), value


def overrides(options, seed: int, data: Path, run_dir: Path, arm: str) -> list[str]:
    """verl's command line of one run; of a key that comes twice the last one counts."""
    setting, (arm, staleness) = SETTINGS[options.scale], own_staleness(arm)
    common = stack.common_overrides(
        data, seed, model=options.model, test_every=setting.test_every,
        staleness=float(staleness) if staleness else setting.staleness,
        response_length=SCALES[options.scale].max_response_tokens, concurrent=setting.concurrent,
        max_num_seqs=setting.sequences, learning_rate=setting.learning_rate)
    return [*(o.replace("RUN_DIR", str(run_dir)) for o in common),
            f"actor_rollout_ref.rollout.max_num_batched_tokens={setting.batched_tokens}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={setting.micro_batch}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={setting.micro_batch}",
            f"actor_rollout_ref.rollout.agent.num_workers={setting.workers}", f"reward.num_workers={setting.workers}",
            *modules.arms(setting.segment)[arm]]


def prepare(options, seeds: list[int]) -> dict[int, Path]:
    """The model, and the data of every seed; what is there already stays."""
    if not (options.model / "config.json").exists():
        from bench.testbed import train_model

        say(f"training the model of scale {options.scale} into {options.model}")
        partial = options.model.with_suffix(".partial")
        train_model.main(["--out", str(partial), "--scale", options.scale, "--device", stack.DEVICE,
                          *([f"--steps={options.sft_steps}"] if options.sft_steps else [])])
        partial.rename(options.model)
    found = {}
    for seed in seeds:
        found[seed] = options.out / f"data-{options.scale}-{options.task}-{options.prompts}-{seed}"
        if not found[seed].exists():
            partial = found[seed].with_suffix(".partial")
            counts = {"train": options.prompts, "val": SETTINGS[options.scale].validation}
            make_data.write(options.task, seed, counts, partial, SCALES[options.scale])
            partial.rename(found[seed])
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.train", description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", default="plain,overlay",
                        help=f"also: {', '.join(modules.ARMS)}; each also with '{OWN_STALENESS}NUMBER' behind it")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--budget", type=float, default=240.0, help="wall seconds per run after start-up")
    parser.add_argument("--scale", choices=SCALES, default="large")
    parser.add_argument("--task", choices=TASKS, default="search")
    parser.add_argument("--prompts", type=int, default=256, help="of the training set; they come back")
    parser.add_argument("--model", type=Path, help="default: the testbed's (small); OUT/model-large, made if need be")
    parser.add_argument("--sft-steps", type=int, help="of the model's training, instead of the scale's")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "train")
    parser.add_argument("--results", type=Path, help="also write the numbers to this JSON file")
    compare.add_target_option(parser)
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    options.target = compare.target_of(parser, options.task, options.target, options.scale)
    options.model = (options.model or (TESTBED / "model" if options.scale == "small" else
                                       options.out / "model-large")).resolve()
    options.cores, options.jobs, options.replicas = os.cpu_count(), 1, 1  # what bench.ablation also records
    for arm in options.arms.split(","):
        name, staleness = own_staleness(arm)
        if name not in modules.ARMS:
            parser.error(f"unknown arm {arm!r}; known: {', '.join([*NAMES, *modules.ARMS])}")
        if OWN_STALENESS in arm and not re.fullmatch(r"\d+(\.\d+)?", staleness):
            parser.error(f"arm {arm!r}: staleness is a number from 0 on, as in 'plain{OWN_STALENESS}4'")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    names, seeds, failed = options.arms.split(","), [int(seed) for seed in options.seeds.split(",")], []
    found: dict[str, dict[int, dict]] = {name: {} for name in names}
    curves: dict[str, dict[int, dict]] = {name: {} for name in names}
    try:
        data = prepare(options, seeds)
        for number, seed in enumerate(seeds):
            for name in names[number % len(names):] + names[:number % len(names)]:
                run_dir = options.out / f"{options.scale}-{options.task}-{seed}-{re.sub('[ =]', '-', name)}"
                try:
                    found[name][seed], curves[name][seed] = training.run_one(
                        f"{name} seed {seed}", overrides(options, seed, data[seed], run_dir, name), run_dir,
                        options.budget, options.target)
                except RuntimeError as error:  # the others still count; the exit code tells
                    failed.append(str(error))
                    say(f"train: {error}")
    except KeyboardInterrupt:
        say("interrupted; every process of the run has been ended; the same command goes on from here")
        return 130
    arms = modules.arms(SETTINGS[options.scale].segment)
    return training.report(found, curves, failed, options, {name: arms[own_staleness(name)[0]] for name in names})


if __name__ == "__main__":
    sys.exit(main())
