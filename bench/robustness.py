"""Does the overlay train as well as plain verl where the setting changes? CPU testbed, a fixed number of updates.

    python -m bench.robustness --study grid --seeds 1,2,3 --steps 40 --model-medium DIR --jobs 8 --results FILE

`modes`   verl's v1 trainers sync, colocate_async and separate_async, plain and with the whole method.
`grid`    tasks search and chain x GRPO and DAPO x two model sizes, plain and with the whole method.
`losses`  verl fully async with fixed segments of 64 tokens, handed back and submitted again: the policy loss alone
          differs.

GRPO is verl's: clip ratio 0.2 on both sides, loss_agg_mode token-mean, no KL term. DAPO is clip-higher (0.28),
token-mean, verl's overlong penalty (its reward manager `dapo`, over the last 128 of 512 tokens) and dynamic sampling
(algorithm.filter_groups on the accuracy). verl 0.9.1 samples dynamically in its v1 trainers only, and
separate_async is the one that replaces a filtered group by one prompt (sync draws two for one and throws the surplus
away) and has a rollout replica of its own, as the overlay's routing and kept requests want: the grid runs there.
token-mean divides by what pruning leaves: the overlay says so at the start, and the grid keeps it.

The losses differ on data that later weights train on, so `losses` takes four optimiser steps per weight sync and
staleness 1; UloRL, too, steps several times a rollout. Its setting `one step` has one, and what is stale there is stale
by the weight syncs alone. `vanilla` is verl's default there, the clipped ratio against
stored log-probs: SAIS in other words, and so its control. `recomputed` is the default of verl's other trainers
(bypass_mode=False: log-probs under the last synced weights); `pois version` is POIS with that anchor, which clips. With
`dmmpt` mastered positive tokens are masked.

A run ends after --steps optimiser steps; --limit only guards. A run that crashes once training began is a result: it
is kept with its error line, and the command ends with 1. A run that never began is tried once more. An interrupted
command goes on where it was; seeds follow one another, so that what is there by then compares.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, TESTBED, algorithms, arm, compare, console, modules, stack, training
from bench.common.algorithms import ACTOR
from bench.common.console import say
from bench.common.provenance import commit
from bench.testbed.task import MAX_RESPONSE_TOKENS, TASKS
from esgrpo import errors
from esgrpo.errors import EsgrpoError
from esgrpo.records import read
from esgrpo.tools.report.tables import spread

OVERLONG_TOKENS = 128  # at the end of the budget, in which the penalty grows from 0 to 1
BATCH = 8  # prompts of an optimiser step
STEPS_PER_SYNC = 4  # of the study of losses, but for its setting of one
OBSERVED = (f"{ACTOR}.calculate_entropy=True",)  # logged, not trained: its coefficient is 0
BEGAN, ATTEMPTS = "actor/grad_norm", 2
LOGGED = {"training reward": ("critic/score/mean",), "response length": ("response_length/mean",),
          "entropy": ("actor/entropy_loss",),  # vanilla losses say how far they are from the old policy as ppo_kl
          "KL to the old policy": ("actor/ppo_kl", *(f"esgrpo/{name}/log_kl_rollout_current"
                                                     for name in ("sais", "pois")))}
COMPARED = "held-out reward, end"

ALGORITHMS = {name: algorithms.overrides(name, MAX_RESPONSE_TOKENS, OVERLONG_TOKENS, filters=True)
              for name in algorithms.ALGORITHMS}
SEGMENTED = tuple(modules.ARMS["B yield"])
ARMS = {"plain": tuple(modules.ARMS["off"]), "overlay": tuple(modules.ARMS["all"])}
LOSSES = {name: (*SEGMENTED, *algorithms.LOSSES[loss], *modules.switches(*own)) for name, loss, *own in (
    ("vanilla", "vanilla"), ("recomputed", "recomputed"), ("sais", "sais"), ("pois", "pois", "pois.anchor=token"),
    ("pois version", "pois", "pois.anchor=version"), ("pois dmmpt", "pois", "pois.anchor=token", "dmmpt.enable"),
    ("sais dmmpt", "sais+dmmpt"))}


@dataclass(frozen=True)
class Cell:
    """What the arms of a comparison share; `mode` is that of a v1 trainer, empty for fully-async training."""

    name: str
    task: str
    mode: str = ""
    own: tuple[str, ...] = ()
    size: str = "small"  # of the model
    sync_every: int = STEPS_PER_SYNC  # optimiser steps a weight version, of fully-async training


def cells(study: str) -> list[Cell]:
    if study == "modes":
        return [Cell(mode, "search", mode) for mode in ("sync", "colocate_async", "separate_async")]
    if study == "losses":
        return [Cell("fully async", "search"), Cell("one step", "search", sync_every=1)]
    return [Cell(f"{task} {algorithm} {size}", task, "separate_async", own, size) for size in ("small", "medium")
            for task in TASKS for algorithm, own in ALGORITHMS.items()]


def arms(study: str) -> dict[str, tuple[str, ...]]:
    """Arm -> overrides; differences are taken to the first one."""
    return LOSSES if study == "losses" else ARMS


def data_options(cell: Cell, options) -> argparse.Namespace:
    return argparse.Namespace(out=options.out, task=cell.task, prompts=options.prompts)


def overrides(cell: Cell, name: str, seed: int, run_dir: Path, options) -> list[str]:
    """verl's command line of one run; of a key that comes twice the last one counts."""
    data = training.data_of(seed, data_options(cell, options))
    model = TESTBED / "model" if cell.size == "small" else options.model_medium
    if cell.mode:
        sizes = {"trainer": functools.partial(stack.v1, cell.mode), "steps": options.steps,
                 "test_every": options.test_every, "mini_batch": BATCH}
    else:  # verl counts its evaluations in weight versions here
        sizes = {"rollout_steps": options.steps * BATCH, "test_every": max(1, options.test_every // cell.sync_every),
                 "mini_batch": BATCH, "sync_every": cell.sync_every, "staleness": 1.0, "concurrent": 2 * BATCH}
    common = stack.common_overrides(data, seed, model=model, **sizes)
    return [*(line.replace("RUN_DIR", str(run_dir)) for line in common), *OBSERVED, *cell.own,
            *arms(options.study)[name]]


def run_dir_of(cell: Cell, name: str, seed: int, options) -> Path:
    return options.out / f"{options.study}-{cell.name}-{name}-{seed}".replace(" ", "-")


def is_over(run_dir: Path, lines: list[str]) -> bool:
    """True for a run of this command that came to its end, or to a crash after its first optimiser step."""
    record = run_dir / "arm.json"
    found = json.loads(record.read_text()) if record.exists() else {"overrides": None}
    return found["overrides"] == lines and (found["return_code"] == 0 or any(
        BEGAN in row["data"] for row in logged(run_dir)))


def logged(run_dir: Path) -> list[dict]:
    """verl's metrics with the time of their arrival, a row per update or evaluation."""
    return [json.loads(line) for line in (run_dir / "metrics-timed.jsonl").read_text().splitlines()]


def run_one(cell: Cell, name: str, seed: int, options) -> None:
    run_dir = run_dir_of(cell, name, seed, options)
    lines = overrides(cell, name, seed, run_dir, options)
    shutil.rmtree(run_dir, ignore_errors=True)
    arm.run(f"{cell.name}, {name} seed {seed}", lines, run_dir, ROOT / "overlay", budget_s=options.limit, say=say,
            main=stack.MAIN_PPO if cell.mode else stack.FULLY_ASYNC)


def _quarters(rows: list[dict], *keys: str) -> tuple[float | None, float | None]:
    """Means over the first and the last quarter of the steps; of several keys a row has one."""
    values = [row[key] for row in rows for key in keys if key in row]
    count = math.ceil(len(values) / 4)
    return (statistics.fmean(values[:count]), statistics.fmean(values[-count:])) if values else (None, None)


def measures(cell: Cell, run_dir: Path, target: float) -> tuple[dict[str, float | None], dict]:
    """The numbers of one run, and its curves; None where it has no such number."""
    timed, record = logged(run_dir), json.loads((run_dir / "arm.json").read_text())
    result = compare.load(run_dir, target)
    rows = [row["data"] for row in timed]
    rewards = [reward for _, reward in result.evaluations]
    found = {"held-out reward, start": rewards[0] if rewards else None,
             COMPARED: statistics.fmean(rewards[1:][-2:]) if rewards[1:] else None,
             "held-out reward, best": max(rewards, default=None)}
    for what, keys in LOGGED.items():
        found[f"{what}, first quarter"], found[f"{what}, last quarter"] = _quarters(rows, *keys)
    per_row = 1 if cell.mode else cell.sync_every
    steps = [row["step"] * per_row for row in timed if any(key.startswith("val-core/") for key in row["data"])]
    curves = {**result.curves, "by_step": [list(point) for point in zip(steps, rewards, strict=False)]}
    norms = [row["actor/grad_norm"] for row in rows if "actor/grad_norm" in row]  # fully async: mean of a version
    found |= {"gradient norm, max": max(filter(math.isfinite, norms), default=None),
              "non-finite numbers": sum(
                  not math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float)),
              "crashed": float(record["return_code"] != 0 and not record["stopped_at_budget"]),
              "optimiser steps": len(norms) * per_row,
              "samples trained": len(read(str(run_dir), "trained")),
              "groups filtered": sum(row.get("training/filter_groups/evicted_samples", 0) for row in rows),
              "start-up, s": record["ready"] - record["started"], "wall, s": timed[-1]["time"] - record["ready"]}
    found = {**training.measures(run_dir, result), **found}
    return {key: None if value is None or not math.isfinite(value) else value  # JSON has no word for the others
            for key, value in found.items()}, curves


def table(found: dict[str, dict[int, dict]], study: str) -> list[list[str]]:
    """A row per cell and arm; differences are taken within a seed."""
    base = next(iter(arms(study)))
    shown = ("held-out reward, start", COMPARED, "held-out reward, best")
    also = ("training reward, last quarter", "response length, last quarter", "gradient norm, max",
            "non-finite numbers", "crashed", "optimiser steps", "samples trained", "wall, s")
    rows = [["setting", "arm", "runs", *shown, f"{COMPARED}, less {base}", *also]]
    for cell in cells(study):
        for name in arms(study):
            mine, theirs = (found.get(f"{cell.name}, {one}", {}) for one in (name, base))
            if not mine:
                continue
            pairs = [(numbers[COMPARED], theirs[seed][COMPARED]) for seed, numbers in mine.items() if seed in theirs]
            less = spread([None if None in pair else pair[0] - pair[1] for pair in pairs])
            first, rest = ([spread([one.get(key) for one in mine.values()]) for key in keys] for keys in (shown, also))
            rows.append([cell.name, name, str(len(mine)), *first, "" if name == base else less, *rest])
    return rows


def targets(options) -> dict[str, float]:
    """Setting -> the held-out reward that its arms race to; the sizes of the model begin at about the same."""
    return {cell.name: compare.TARGETS["small", cell.task] if options.target is None else options.target
            for cell in options.settings}


def collect(runs: list[tuple[Cell, str, int]], options) -> tuple[dict, dict, list[str]]:
    """Measures, curves and error lines of all runs."""
    found, curves = ({f"{cell.name}, {name}": {} for cell, name, _ in runs} for _ in range(2))
    failed = []
    for cell, name, seed in runs:
        ended = False
        label, run_dir = f"{cell.name}, {name}", run_dir_of(cell, name, seed, options)
        cause = arm.error_line(run_dir / "log.txt")
        try:
            if is_over(run_dir, overrides(cell, name, seed, run_dir, options)):
                found[label][seed], curves[label][seed] = measures(cell, run_dir, targets(options)[cell.name])
                ended = not json.loads((run_dir / "arm.json").read_text())["stopped_at_budget"]
        except (OSError, LookupError, ValueError) as error:
            cause = f"{cause}, {type(error).__name__} in its records"
        numbers = found[label].get(seed, {"crashed": True, "optimiser steps": 0})
        # one that ended by itself is whole: fully async may log no metrics of its last version
        if numbers["crashed"] or not ended and numbers["optimiser steps"] < options.steps:
            cause = cause if numbers["crashed"] else "stopped at its limit"
            failed.append(f"{label} seed {seed}, {numbers['optimiser steps']} optimiser steps: {cause}")
    return found, curves, failed


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = console.command_line("bench.robustness", __doc__.partition("\n")[0])
    parser.add_argument("--study", choices=("grid", "modes", "losses"), required=True)
    parser.add_argument("--cells", help="some of the study's settings only, with commas between them")
    parser.add_argument("--arms", help="likewise")
    parser.add_argument("--seeds", type=console.seeds, default="1,2,3")
    parser.add_argument("--steps", type=console.count, default=40,
                        help=f"optimiser steps, a multiple of {STEPS_PER_SYNC}")
    parser.add_argument("--test-every", type=console.count, default=8,
                        help="optimiser steps between held-out evaluations")
    parser.add_argument("--limit", type=console.positive, default=1800.0,
                        help="wall seconds of a run after start-up, at most")
    parser.add_argument("--prompts", type=console.count, default=training.TRAINING_PROMPTS, help="of the training set")
    parser.add_argument("--model-medium", type=console.model_folder, help="the grid's second model: python -m "
                        "bench.testbed.train_model --hidden 192 --layers 4 --steps 1500 --out DIR makes it")
    parser.add_argument("--jobs", type=console.count, default=1, help="runs side by side")
    parser.add_argument("--cores", type=console.count, default=2, help="of each of them")
    parser.add_argument("--out", type=console.output_folder, default=ROOT / "runs" / "robustness")
    parser.add_argument("--results", type=console.output_file, help="also write the numbers to this JSON file")
    parser.add_argument("--collect", action="store_true", help="start nothing: a table of what is there")
    parser.add_argument("--here", action="store_true", help="in this process and without a table: what --jobs starts")
    compare.add_target_option(parser)
    options = parser.parse_args(argv)
    options.out, options.replicas = options.out.resolve(), 1
    options.cells = options.cells.split(",") if options.cells else [cell.name for cell in cells(options.study)]
    options.arms = options.arms.split(",") if options.arms else list(arms(options.study))
    known = {cell.name: cell for cell in cells(options.study)}
    unknown = [one for one in options.cells if one not in known] + [
        one for one in options.arms if one not in arms(options.study)]
    if unknown:
        parser.error(f"unknown {unknown[0]!r}; known: {', '.join([*known, *arms(options.study)])}")
    if options.steps % STEPS_PER_SYNC:
        parser.error(f"--steps {options.steps}: not a multiple of {STEPS_PER_SYNC}")
    options.model_medium = options.model_medium and options.model_medium.resolve()
    if any(known[one].size == "medium" for one in options.cells) and not options.model_medium:
        parser.error("--model-medium DIR with a model is needed for the medium size (see --help)")
    if not options.here and options.jobs * options.cores > len(os.sched_getaffinity(0)):
        parser.error(f"--jobs {options.jobs} of {options.cores} cores: wanted at most the "
                     f"{len(os.sched_getaffinity(0))} that there are")
    options.settings = [known[one] for one in options.cells]
    return options


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    seeds = options.seeds
    runs = {(f"{cell.name},{name}", seed): (cell, name, seed)  # the arms of a setting together
            for seed in seeds for cell in options.settings for name in options.arms}

    def child(label: str, seed: int, _options) -> list[str]:
        cell, name, _ = runs[label, seed]
        return ["bench.robustness", *argv, "--cells", cell.name, "--arms", name, "--seeds", str(seed), "--here"]

    try:
        for cell in options.settings:
            training.prepare_data(seeds, data_options(cell, options))
        if options.here:
            for run in runs.values():
                run_one(*run, options)
            return 0
        for _ in range(0 if options.collect else ATTEMPTS):
            waiting = [key for key, (cell, name, seed) in runs.items() if not is_over(
                run_dir := run_dir_of(cell, name, seed, options), overrides(cell, name, seed, run_dir, options))]
            if waiting:
                training.run_side_by_side(waiting, options, child)
    except KeyboardInterrupt:
        say("interrupted; every process of the run has been ended; the same command goes on from here")
        return 130
    except RuntimeError as error:  # of the one run that is made here; the caller reads its log
        errors.say(EsgrpoError("robustness", str(error), "a run that ends", "it was not measured", "see its log"))
        return 1
    found, curves, failed = collect(list(runs.values()), options)
    say(f"{len(runs) - len(failed)} of {len(runs)} runs came to their end" + "".join(f"\n  {line}" for line in failed))
    notes = [f"study {options.study}, seeds {console.listed(seeds)}, {options.steps} optimiser steps of "
             f"{BATCH} prompts x 8, {options.prompts} training prompts, {time.strftime('%Y-%m-%d')}, commit {commit()}",
             f"{training.device(options)} for one trainer and one rollout replica, {options.jobs} runs side by side",
             "median [range] over seeds; differences within a seed; end: mean of the last two evaluations"]
    own = {f"{cell.name}, {name}": [*OBSERVED, *cell.own, *switches] for cell in options.settings
           for name, switches in arms(options.study).items() if name in options.arms}
    return training.publish(table(found, options.study), notes, options, {
        "target": targets(options),
        "cells": {cell.name: [f"{cell.name}, {name}" for name in options.arms] for cell in options.settings},
        "arms": own, "failed": failed, "measures": found, "curves": curves})


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
