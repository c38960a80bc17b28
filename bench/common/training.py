"""The runs of a comparison by training: made unless they were made before, side by side, measured, published."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common import ROOT, arm, compare, console, stack
from bench.common.console import print_table, say
from bench.common.modules import ARMS
from bench.common.provenance import commit, cpu_model, without_folders
from bench.testbed import make_data
from esgrpo.tools.report.tables import baseline_of, ratios, spread

TRAINING_PROMPTS = 64  # eight weight versions an epoch
POLL_S = 1.0
SERVER, AGENT_LOOP = "vLLMHttpServer", "AgentLoopWorker"  # what Ray calls their processes
# verl's own timers: a step without evaluations, and its parts; it waits in the second one while the trainer's GPUs are
# lent. The weight sync's key has its prefix twice in fully async, and is another one under v1
STEP_PARTS = {"": ("step",), ", wait for samples": ("gen", "wait_for_enough_samples"), ", update": ("update_actor",),
              ", weight sync": ("timing_s/param_sync", "update_weights")}
MEASURED, ALL_OF_IT = "seconds measured", 0.98  # a measure; share of a time from which on it is the same one
REWARDS = "first_rewards"  # among the curves of a run until they are compared; too many for a record
PUSH = "critic/advantages/mean"  # of a token: below 0 more of them are pushed down than up
DRIFT = "actor/ppo_kl"  # of the trained policy from the one of the old log-probs, nats a token; mean over an update
DECISIONS = "decisions: "  # and the name of a module
SAME_PROMPTS = "reward on later prompts, less that of {} on the same"
RACE = re.compile(r"(time|samples) to ")
WASTES = ("pruned", "zero_variance", "stale", "reprefill")


def measures(run_dir: Path, result: compare.Result, targets: Sequence[float] = ()) -> dict[str, float | None]:
    """The numbers of one run; None where the arm has no such thing. `targets` come beside the result's own."""
    metrics = [json.loads(line)["data"] for line in (run_dir / "metrics-timed.jsonl").read_text().splitlines()]

    def last(key):
        return next((m[key] for m in reversed(metrics) if key in m), None)

    def mean(key):
        values = [m[key] for m in metrics if key in m]
        return statistics.mean(values) if values else None

    def total(key):
        values = [m[key] for m in metrics if key in m]
        return sum(values) if values else None

    def seconds(timers):
        """Of a step, the timers that there are."""
        found = [value for value in (mean(f"timing_s/{timer}") for timer in timers) if value is not None]
        return sum(found) if found else None

    late = [reward for at, reward in result.evaluations if at > result.seconds / 2]
    drifts = [m[DRIFT] for m in metrics if DRIFT in m]
    cpu = json.loads((run_dir / "arm.json").read_text()).get("cpu_s", {})
    kept = [m["esgrpo/sync/kept"] for m in metrics if "esgrpo/sync/kept" in m]
    spent = max(1, result.balance["spent"])
    spared = result.right.spared or (None, None)
    bias = [v for m in metrics[-1:] for k, v in m.items() if k.startswith("esgrpo/length_bias/")]
    return {
        MEASURED: result.seconds,
        "step time, s": result.seconds / result.steps if result.steps else None,
        **{f"verl's step{name}, s": seconds(timers) for name, timers in STEP_PARTS.items()},
        "bubble rate": result.bubble["bubble_rate"],
        "decoded tokens/s": result.decoded / result.seconds,
        "effective tokens/s": result.balance["trained"] / result.seconds,
        "effective tokens/s, later half": result.effective_later,
        "trained tokens/s, later half": result.batches_later.tokens_per_s,
        "age of a trained token, later half, versions": result.batches_later.age,
        "trainer without a batch, later half": result.batches_later.waited,
        "groups with gradient/s": result.gradient_groups / result.seconds,
        "decoded tokens per group with gradient": result.decoded / result.gradient_groups if result.gradient_groups
        else None,
        "CPU of vLLM's server, us a token": 1e6 * cpu[SERVER] / max(1, result.decoded) if SERVER in cpu else None,
        "CPU of the agent loop, ms a response": 1e3 * cpu[AGENT_LOOP] / max(1, result.responses)
        if AGENT_LOOP in cpu else None,
        "time to target, s": result.time_to_target,
        "samples to target": result.samples_to_target,
        **compare.races(result, targets),
        "held-out reward, first": result.evaluations[0][1] if result.evaluations else None,
        "held-out reward, last": result.evaluations[-1][1] if result.evaluations else None,
        "held-out reward, later half": statistics.mean(late) if late else None,
        "prompts": result.visits.prompts, "prompts that came back": result.visits.came_back,
        "reward of a prompt, last visit less first": result.visits.learned,
        "reward of a prompt, last visit less first, standard error": result.visits.error,
        "tokens of a right response, first half": result.right.tokens[0],
        "tokens of a right response, later half": result.right.tokens[1],
        "verdicts that a coin spared": spared[0],
        "verdicts that a coin spared, right": spared[1],
        **{f"waste {cause}": result.balance[cause] / spent for cause in WASTES},
        "false-prune rate": last("esgrpo/prune/false_rate"),
        "length bias": max(bias) if bias else None,
        "KL of an update, largest": max(drifts, default=None),
        "advantage of a token": mean(PUSH),
        "requests kept per sync": statistics.mean(kept) if kept else None,
        "requests moved": total("esgrpo/routing/moves"),
        "groups that verl's filter left out": total("training/filter_groups/evicted_samples"),
        "groups that verl dropped as too old": total("training/off_policy/evicted_samples"),
        "tail ratio": result.tail_ratio,
        "memory of all processes, GB": result.peak_bytes / 1e9 if result.peak_bytes else None,
        "responses": result.responses,
        "optimiser steps": result.updates,
        **{f"{DECISIONS}{row.module}": row.decided for row in result.modules if row.on},
    }


def with_equal_samples(found: dict[str, dict[int, dict]],
                       curves: dict[str, dict[int, dict]]) -> dict[str, dict[int, dict]]:
    """The measures, each run's with its held-out reward after as many samples as all arms of its seed had."""
    rewards = {}
    for seed in {seed for seeds in curves.values() for seed in seeds}:
        points = {name: seeds[seed].get("by_samples", []) for name, seeds in curves.items() if seed in seeds}
        rewards |= {(name, seed): reward for name, reward in compare.at_equal_samples(points).items()}
    return {name: {seed: measures | ({"held-out reward, equal samples": rewards[name, seed]}
                                     if (name, seed) in rewards else {})
                   for seed, measures in seeds.items()} for name, seeds in found.items()}


def with_same_prompts(found: dict[str, dict[int, dict]],
                      rewards: dict[str, dict[int, dict[str, float]]]) -> dict[str, dict[int, dict]]:
    """The measures, each run's with its reward on the prompts that the baseline had, too (`compare.on_same_prompts`).

    rewards: arm -> seed -> `compare.first_rewards`.
    """
    base = baseline_of(list(found))
    told = {name: {seed: dict(measures) for seed, measures in seeds.items()} for name, seeds in found.items()}
    for name in [name for name in found if base and name != base]:
        for seed in set(rewards[name]) & set(rewards[base]):
            mean, error = compare.on_same_prompts(rewards[name][seed], rewards[base][seed]) or (None, None)
            told[name][seed] |= {SAME_PROMPTS.format(base): mean, f"{SAME_PROMPTS.format(base)}, standard error": error}
    return told


def table(found: dict[str, dict[int, dict]]) -> list[list[str]]:
    """Rows of text, one per measure; `found` maps arm -> seed -> measures. Decisions stand under the ratios, so that no
    ratio is read without them."""
    names = list(found)
    keys = list(dict.fromkeys(k for arms in found.values() for m in arms.values() for k in m))
    decided = [key for key in keys if key.startswith(DECISIONS)]

    def row(key: str) -> list[str]:
        return [key, *[spread([m.get(key) for m in found[name].values()]) for name in names]]

    rows = [["", *names], *[row(key) for key in keys if key not in decided]]
    base = baseline_of(names)
    for key in ("effective tokens/s", "decoded tokens/s", *[k for k in keys if RACE.match(k)]) if base else ():
        within = {name: ratios(found, name, key) for name in names}
        if within[base]:  # else nobody is compared with a baseline that did not come so far
            rows.append([f"{key}, ratio to {base}", *[spread(values) for values in within.values()]])
    return rows + [row(key) for key in decided]


def is_done(record: Path, overrides: list[str]) -> bool:
    """True for a run of this command that came to its end; a failed one is run again."""
    if not record.exists():
        return False
    found = json.loads(record.read_text())
    return found["overrides"] == overrides and (found["stopped_at_budget"] or found["return_code"] == 0)


def data_of(seed: int, options) -> Path:
    return options.out / f"data-{options.task}-{options.prompts}-{seed}"


def prepare_data(seeds: list[int], options) -> None:
    for seed in seeds:
        if not data_of(seed, options).exists():
            counts = {"train": options.prompts, "val": stack.VALIDATION_PROMPTS}
            partial = data_of(seed, options).with_suffix(".partial")
            make_data.write(options.task, seed, counts, partial)
            partial.rename(data_of(seed, options))  # whole or not there at all


def run_one(label: str, overrides: list[str], run_dir: Path, budget: float, target: float, say=say, *,
            targets: Sequence[float] = (), main: str = stack.FULLY_ASYNC,
            brought: dict[str, Path] | None = None, stop: Path | None = None,
            environment: dict[str, str] | None = None) -> tuple[dict, dict]:
    """Measures and curves of a run of `main`, which is made unless it was made before.

    brought: name in the run directory -> a file that is copied there before the run begins. stop, environment: as in
    `arm.run`.
    """
    if not is_done(run_dir / "arm.json", overrides):
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        for name, source in (brought or {}).items():
            shutil.copy(source, run_dir / name)
        arm.run(label, overrides, run_dir, ROOT / "overlay", budget_s=budget, main=main, stop=stop, say=say,
                environment=environment)
    result = compare.load(run_dir, target)
    return measures(run_dir, result, targets), {**result.curves, REWARDS: result.first_rewards}


def run_side_by_side(pairs: list[tuple[str, int]], options, command) -> None:
    """Every run as `command(name, seed, options)` on its own cores, where paths mean what they mean here; what fails
    there is the caller's to run again or to tell."""
    cores = sorted(os.sched_getaffinity(0))
    slots = [set(cores[i * options.cores:(i + 1) * options.cores]) for i in range(options.jobs)]
    waiting, running = list(pairs), {}
    try:
        while waiting or running:
            for slot in [slot for slot, (child, _) in running.items() if child.poll() is not None]:
                child, label = running.pop(slot)
                say(f"{label} ended with exit code {child.returncode}, {len(waiting)} to start")
            for slot in [s for s in range(options.jobs) if s not in running][:len(waiting)]:
                name, seed = waiting.pop(0)
                os.sched_setaffinity(0, slots[slot])  # inherited by the child
                child = subprocess.Popen([sys.executable, "-m", *command(name, seed, options)],
                                         stdout=subprocess.DEVNULL, start_new_session=True)
                running[slot] = child, f"{name} seed {seed}"
                os.sched_setaffinity(0, cores)
                say(f"{name} seed {seed} on cores {sorted(slots[slot])}, {len(waiting)} to start")
            time.sleep(POLL_S)
    finally:
        for child, _ in running.values():
            child.terminate()
        for child, _ in running.values():
            child.wait()


def device(options) -> str:
    if stack.DEVICE == "cpu":
        return f"{platform.machine()}, {cpu_model()}, {options.cores} cores a run"
    import torch

    shared = len(stack.gpus()) if options.jobs > 1 else 1
    gpus = f"{'one' if shared == 1 else shared} for all" if stack.SHARED else \
        f"{trainers(options) + options.replicas} a run"
    return f"{torch.cuda.get_device_name()}, {gpus}, {options.cores} cores a run"


def trainers(options) -> int:
    """GPUs of the trainer; a benchmark without that option has one."""
    return getattr(options, "trainers", 1)


def report(found, curves, failed: list[str], options, arms: dict[str, list[str]] = ARMS) -> int:
    rewards = {name: {seed: of.get(REWARDS, {}) for seed, of in seeds.items()} for name, seeds in curves.items()}
    curves = {name: {seed: {key: value for key, value in of.items() if key != REWARDS} for seed, of in seeds.items()}
              for name, seeds in curves.items()}
    found = with_same_prompts(with_equal_samples(found, curves), rewards)
    rows = table({name: seeds for name, seeds in found.items() if seeds})
    notes = [f"task {options.task}, seeds {console.listed(options.seeds)}, {time_of(found, options.budget)}, "
             f"{options.prompts} training prompts, {time.strftime('%Y-%m-%d')}, commit {commit()}",
             f"{device(options)} for {['one trainer', f'a trainer on {trainers(options)}'][trainers(options) > 1]} and "
             f"{options.replicas} rollout replica{'s' * (options.replicas > 1)}, {options.jobs} runs side by side",
             "median [range] over seeds; ratios within a seed; waste as a share of spent tokens",
             f"target of all arms: a held-out reward of {options.target}", *getattr(options, "notes", ())]
    return publish(rows, notes, options, {"target": options.target, "arms": arms,
                                          "failed": failed, "measures": found, "curves": curves})


def time_of(found: dict[str, dict[int, dict]], budget: float) -> str:
    """What was measured, which is less than the budget where runs were stopped."""
    seconds = sorted(measures[MEASURED] for seeds in found.values() for measures in seeds.values()
                     if MEASURED in measures) or [budget]
    low, high = (f"{value:.0f}" for value in (seconds[0], seconds[-1]))
    stopped = f" of a budget of {budget:.0f} s" if seconds[0] < ALL_OF_IT * budget else ""
    unequal = "; of unequal length: compare their rates" if seconds[0] < ALL_OF_IT * seconds[-1] else ""
    return f"{low if low == high else f'{low} to {high}'} s per run{stopped}{unequal}"


def publish(rows: list[list[str]], notes: list[str], options, data: dict) -> int:
    """Print the table and write the results file; 1 when `data` tells of failed runs."""
    print("\n" + "\n".join(notes) + "\n")
    print_table(rows)
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        module = getattr(sys.modules["__main__"].__spec__, "name", "bench.ablation")
        command = without_folders(shlex.join(["python", "-m", module, *sys.argv[1:]]))
        record = {"command": command, "commit": commit(), "seeds": options.seeds,
                  "device": device(options), "notes": notes, "table": rows, **data,
                  "failed": [without_folders(line) for line in data["failed"]]}
        options.results.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if data["failed"] else 0
