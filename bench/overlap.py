"""Overlap control in real runs whose rollout becomes twice as slow half way, beside fixed settings.

    python -m bench.overlap --results bench/results/overlap_cpu.json

Every arm is a real fully-async run (Ray, vLLM, weight syncs, an optimiser) of the same command, seed and wall time.
Engine steps sleep, so that rollout has a speed of its own although all processes share the cores: `bench/slow_engine`
makes the delay of --step-ms, and doubles the steps' length after --half seconds. In arms with long updates the trainer
sleeps, too, so that it is the slower side at first. Throughput is in trained tokens/s, and in fresh ones: each weighs
exp(-age / age_scale), age in optimiser steps. The first --skip seconds of either half are left out. With a
--learning-rate of 0 the policy stays as it is, so that the rates alone move a setting. Arms of v1 run verl's
separate_async, whose prompts in flight nobody sets.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, TESTBED, arm, console, stack
from bench.common.console import print_table, say
from bench.common.provenance import commit, cpu_model, without_folders
from bench.testbed import make_data
from esgrpo.errors import EsgrpoError
from esgrpo.records import read

SEGMENT = "+actor_rollout_ref.rollout.segment"
GROUP_SIZE, MINI_BATCH, RESPONSE_LENGTH, MAX_NUM_SEQS = 4, 8, 128, 128
AGE_SCALE = 4.0
PROMPTS, HELD_OUT = 256, 16
MADE = "made.json"  # in the folder of a run that came to its end


@dataclass(frozen=True)
class Arm:
    concurrent: int | None  # groups in flight; None: under v1, which has no such setting
    staleness: float
    controlled: bool = False
    long_updates: bool = False  # training is the slower side before rollout slows down


ARMS = {f"{name}{suffix}": Arm(*setting, long)
        for suffix, long in (("", False), (", long updates", True))
        for name, setting in (("controlled", (8, 0.5, True)), ("fixed 8, 0.5", (8, 0.5, False)),
                              ("fixed 24, 2", (24, 2.0, False)))}
V1_ARMS = {"v1 controlled": Arm(None, 0.5, True), "v1 fixed 0.5": Arm(None, 0.5), "v1 fixed 2": Arm(None, 2.0)}
EVERY_ARM = {**ARMS, **V1_ARMS}


def overrides(each: Arm, data: Path, run_dir: Path, seed: int, learning_rate: float) -> list[str]:
    control = [f"{SEGMENT}.overlap.enable=True", f"{SEGMENT}.overlap.override=True",
               f"{SEGMENT}.overlap.age_scale={AGE_SCALE}"] if each.controlled else []
    files = map(str, (TESTBED / "model", data / "train.parquet", data / "val.parquet", TESTBED / "reward.py", run_dir))
    sizes = {"response_length": RESPONSE_LENGTH, "group_size": GROUP_SIZE, "mini_batch": MINI_BATCH,
             "max_num_seqs": MAX_NUM_SEQS, "learning_rate": learning_rate}
    if each.concurrent is None:  # that it is ready is known by its first evaluation
        trainer = [*stack.v1("separate_async", *files, warmup=each.staleness, **sizes), "trainer.val_before_train=True"]
    else:
        trainer = stack.fully_async(*files, staleness=each.staleness, concurrent=each.concurrent, **sizes)
    return [*trainer, f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}", f"{SEGMENT}.observe=True",
            'trainer.logger=["console","file"]', *control]


def half(events: list[dict], start: float, end: float) -> dict[str, float]:
    """Of the trainer's batches that ended in it."""
    mine = [e for e in events if e["side"] == "train" and start <= e["start"] + e["seconds"] <= end]
    if not mine:
        raise RuntimeError(f"no batch was trained in {end - start:.0f} s: raise --half")
    seconds = sum(event["seconds"] for event in mine)
    # age in optimiser steps: in weight versions, times those of one, as a version here is one trigger
    fresh_of = [e["tokens"] * math.exp(-(e["age"] or 0.0) * e["groups"] / MINI_BATCH / AGE_SCALE) for e in mine]
    fresh = sum(fresh_of)
    tokens = sum(event["tokens"] for event in mine)
    rest = [worth - fresh / seconds * event["seconds"] for worth, event in zip(fresh_of, mine, strict=True)]
    noise = math.sqrt(len(mine) / max(1, len(mine) - 1) * sum(each * each for each in rest)) / seconds
    return {"versions": len(mine), "tokens/s": tokens / seconds, "fresh tokens/s": fresh / seconds,
            "standard error": noise,  # of the fresh ones, a ratio of sums over batches
            "trainer waits": sum(e["spent"]["wait"] for e in mine) / seconds,
            "mean age, versions": sum((e["age"] or 0.0) * e["tokens"] for e in mine) / tokens}


def unaccounted(events: list[dict]) -> float:
    """Share of the wall time between a side's first and last event that no part of its events accounts for."""
    worst = 0.0
    for side in {event["side"] for event in events}:  # v1 has no rollouter whose time could be counted
        mine = [event for event in events if event["side"] == side]
        wall = mine[-1]["start"] + mine[-1]["seconds"] - mine[0]["start"]
        worst = max(worst, abs(wall - sum(sum(event["spent"].values()) for event in mine)) / wall)
    return worst


def measure(run_dir: Path, each: Arm, options) -> dict:
    events, moves = read(str(run_dir), "events"), read(str(run_dir), "moves")
    shift = float((run_dir / "slow_since").read_text())
    first = min(event["start"] for event in events if event["side"] == "train")
    last = max(event["start"] + event["seconds"] for event in events if event["side"] == "train")
    later = sorted(e["version"] for e in events if e["side"] == "train" and e["start"] + e["seconds"] > shift)
    moved = [move for move in moves if move["version"] >= later[0]]
    made = json.loads((run_dir / MADE).read_text())
    return {**made, "start": {"concurrency": each.concurrent, "staleness": each.staleness, "trigger": MINI_BATCH},
            "before": half(events, first + options.skip, shift), "after": half(events, shift + options.skip, last),
            "shift at version": later[0], "unaccounted": unaccounted(events),
            "versions from the shift to the first move": moved[0]["version"] - later[0] if moved else None,
            "moves": [{key: move[key] for key in ("version", "cause", "before", "after")} for move in moves]}


def folder(name: str, seed: int, options) -> Path:
    return options.out / f"{seed}-{name.replace(', ', '-').replace(' ', '-')}"


def run(name: str, seed: int, options) -> dict:
    each, run_dir = EVERY_ARM[name], folder(name, seed, options)
    if options.measure_only:
        return measure(run_dir, each, options)
    shutil.rmtree(run_dir, ignore_errors=True)
    data = options.out / "data"
    make_data.write("search", seed, {"train": PROMPTS, "val": HELD_OUT}, data)
    main_of = stack.MAIN_PPO if each.concurrent is None else stack.FULLY_ASYNC
    arm.run(name, overrides(each, data, run_dir, seed, options.learning_rate), run_dir, ROOT / "overlay",
            main=main_of, budget_s=2 * options.half + options.skip, say=say, environment={
                **stack.slow_engine(options.step_ms), "SLOW_AFTER_S": str(options.half),
                "SLOW_MARK": str(run_dir / "slow_since"),
                **({"SLOW_TOKEN_MS": str(options.token_ms)} if each.long_updates else {})})
    (run_dir / MADE).write_text(json.dumps({"commit": commit()}))
    return measure(run_dir, each, options)


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.overlap", __doc__.splitlines()[0])
    parser.add_argument("--arms", default=";".join(ARMS), help="separated by ;")
    parser.add_argument("--seeds", type=console.whole, nargs="+", default=[1, 2])
    parser.add_argument("--step-ms", type=console.positive, default=30.0,
                        help="that an engine step sleeps; twice that later")
    parser.add_argument("--token-ms", type=console.not_negative, default=1.75,
                        help="that an update sleeps for each token of a response, where updates are long")
    parser.add_argument("--learning-rate", type=console.not_negative, default=3e-4)
    parser.add_argument("--half", type=console.positive, default=100.0,
                        help="seconds before rollout becomes slower, and after")
    parser.add_argument("--skip", type=console.not_negative, default=20.0,
                        help="seconds at the start of a half that do not count")
    parser.add_argument("--out", type=console.output_folder, default=ROOT / "runs" / "overlap")
    parser.add_argument("--results", type=console.output_file, help="also write the numbers to this JSON file")
    parser.add_argument("--measure-only", action="store_true", help="of those runs that were made before")
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    names = options.arms.split(";")
    if set(names) - set(EVERY_ARM):
        parser.error(f"unknown arm in {names}; known: {'; '.join(EVERY_ARM)}")
    try:
        with console.measured("bench.overlap"):
            found = {f"{name}, seed {seed}": run(name, seed, options) for name in names for seed in options.seeds
                     if not options.measure_only or (folder(name, seed, options) / MADE).exists()}
    except KeyboardInterrupt:
        say("interrupted; every process of the run has been ended; --measure-only reads those that came to their end")
        return 130
    if not found:
        raise EsgrpoError("bench.overlap", f"no run in {options.out} that came to its end", f"a {MADE} in one of them",
                          "nothing was measured", "leave --measure-only out")
    rows = [[name, part, *(f"{number:.2f}" for number in result[part].values())]
            for name, result in found.items() for part in ("before", "after")]
    print_table([["run", "half", *next(iter(found.values()))["before"]], *rows])
    for name, result in found.items():
        say(f"{name}: {len(result['moves'])} moves, the first {result['versions from the shift to the first move']} "
            f"versions after the shift; {result['unaccounted']:.2%} of the wall time unaccounted for")
    if options.results:
        given = [each for each in (argv if argv is not None else sys.argv[1:]) if each != "--measure-only"]
        command = " ".join(["python -m bench.overlap", *map(shlex.quote, given)])
        console.write(options.results, json.dumps({
            "command": without_folders(command), "commit": next(iter(found.values()))["commit"], "seeds": options.seeds,
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": f"{os.cpu_count()} cores of {cpu_model()}",
            "python": platform.python_version(), "age_scale": AGE_SCALE, "step_ms": options.step_ms,
            "token_ms": options.token_ms, "learning_rate": options.learning_rate, "arms": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
