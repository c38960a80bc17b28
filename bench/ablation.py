"""Which module brings what: the testbed under plain verl async, fixed segments, each module alone, and all.

    python -m bench.ablation --seeds 1,2,3 --budget 300 --task search

Every arm is a real fully-async run (Ray, vLLM, weight syncs) of the same command and the same wall-time budget; the
arms of one seed follow each other, in an order that rotates with the seed. A finished run is not run again, so an
interrupted command goes on where it was. Numbers are medians over seeds with their range; ratios are taken within a
seed against `off`; all arms race to the same held-out reward (--target), which is known before.

`B yield` hands every response back after a segment and submits it again at once, under the same weights. UloRL's
segments it is not: those wait for the next update (bench.policies plays them, under a barrier).

The training set is small on purpose: history, routing and the prompt sampler know a prompt from its second visit on,
so that a run of minutes has to come back to its prompts, as a run of days does. `--jobs` runs several arms side by
side, each on cores of its own, the arms of one seed together; the hook weight-socket-of-this-run keeps them apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import arm, compare, stack
from bench.quickstart import ROOT, VALIDATION_PROMPTS, common_overrides, cpu_model, print_table, say
from bench.startup import commit
from bench.testbed import make_data
from esgrpo.tools.report.tables import baseline_of, ratios, spread

SEGMENT = "+actor_rollout_ref.rollout.segment"
SEGMENT_LENGTH = 64  # tokens; responses of the testbed end between 20 and 512
TRAINING_PROMPTS = 64  # eight weight versions an epoch
POLL_S = 1.0


def switches(*keys: str) -> list[str]:
    """Overrides of the group `segment`; a key without a value is switched on."""
    return [f"{SEGMENT}.{key if '=' in key else key + '=True'}" for key in keys]


HISTORY = "history.enable"
LOOPS = ("prune.repetition.enable", "prune.repetition.keep_row")


def arms(segment_length: int) -> dict[str, list[str]]:
    """Arm -> overrides; `segment_length` is in tokens."""
    length = f"segment_length={segment_length}"
    on, groups = ("enable", length), ("elastic.enable", "prune.resolved.enable")  # which the profile leaves out
    return {
        "off": switches("observe"),
        "B yield": switches("profile=static", length),
        "A routing": switches(*on, HISTORY, "routing.enable"),
        "B soft": switches(*on),
        "C pruning": switches(*on, HISTORY, *LOOPS, "prune.resolved.enable", "prune.audit.enable"),
        "C sampler": switches(*on, HISTORY, "sampler.enable"),
        "D elastic": switches(*on, HISTORY, "elastic.enable"),
        "keep": switches(*on, "sync.requests=keep"),
        "token outputs": switches("observe", "token_outputs"),
        "all": switches("profile=elastic", *groups, length),
        # effective tokens reward what the sampler selects: the same without it stands beside
        "all without sampler": switches("profile=elastic", *groups, length, "sampler.enable=False"),
    }


ARMS = arms(SEGMENT_LENGTH)
SERVER, AGENT_LOOP = "vLLMHttpServer", "AgentLoopWorker"  # what Ray calls their processes
# verl's own timers: a step without evaluations, and its parts; the weight sync's key has its prefix twice
STEP_PARTS = {"": "step", ", wait for samples": "gen", ", update": "update_actor",
              ", weight sync": "timing_s/param_sync"}
WASTES = ("pruned", "zero_variance", "stale", "reprefill")


def measures(run_dir: Path, result: compare.Result) -> dict[str, float | None]:
    """The numbers of one run; None where the arm has no such thing."""
    metrics = [json.loads(line)["data"] for line in (run_dir / "metrics-timed.jsonl").read_text().splitlines()]

    def last(key):
        return next((m[key] for m in reversed(metrics) if key in m), None)

    def mean(key):
        values = [m[key] for m in metrics if key in m]
        return statistics.mean(values) if values else None

    cpu = json.loads((run_dir / "arm.json").read_text()).get("cpu_s", {})
    kept = [m["esgrpo/sync/kept"] for m in metrics if "esgrpo/sync/kept" in m]
    moved = [m["esgrpo/routing/moves"] for m in metrics if "esgrpo/routing/moves" in m]
    spent = max(1, result.balance["spent"])
    bias = [v for m in metrics[-1:] for k, v in m.items() if k.startswith("esgrpo/length_bias/")]
    return {
        "step time, s": result.seconds / result.steps if result.steps else None,
        **{f"verl's step{name}, s": mean(f"timing_s/{key}") for name, key in STEP_PARTS.items()},
        "bubble rate": result.bubble["bubble_rate"],
        "decoded tokens/s": result.decoded / result.seconds,
        "effective tokens/s": result.balance["trained"] / result.seconds,
        "CPU of vLLM's server, us a token": 1e6 * cpu[SERVER] / max(1, result.decoded) if SERVER in cpu else None,
        "CPU of the agent loop, ms a response": 1e3 * cpu[AGENT_LOOP] / max(1, result.responses)
        if AGENT_LOOP in cpu else None,
        "time to target, s": result.time_to_target,
        "samples to target": result.samples_to_target,
        "held-out reward, last": result.evaluations[-1][1] if result.evaluations else None,
        **{f"waste {cause}": result.balance[cause] / spent for cause in WASTES},
        "false-prune rate": last("esgrpo/prune/false_rate"),
        "length bias": max(bias) if bias else None,
        "requests kept per sync": statistics.mean(kept) if kept else None,
        "requests moved": sum(moved) if moved else None,
        "tail ratio": result.tail_ratio,
    }


def table(found: dict[str, dict[int, dict]]) -> list[list[str]]:
    """Rows of text, one per measure; `found` maps arm -> seed -> measures."""
    names = list(found)
    keys = list(dict.fromkeys(k for arms in found.values() for m in arms.values() for k in m))
    rows = [["", *names]]
    rows += [[key, *[spread([m.get(key) for m in found[name].values()]) for name in names]] for key in keys]
    base = baseline_of(names)
    for key in ("effective tokens/s", "decoded tokens/s") if base else ():
        rows.append([f"{key}, ratio to {base}", *[spread(ratios(found, name, key)) for name in names]])
    return rows


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
            counts = {"train": options.prompts, "val": VALIDATION_PROMPTS}
            partial = data_of(seed, options).with_suffix(".partial")
            make_data.write(options.task, seed, counts, partial)
            partial.rename(data_of(seed, options))  # whole or not there at all


def run_arm(name: str, seed: int, options, say=say) -> tuple[dict[str, float | None], dict]:
    """Measures and curves of one run."""
    size = f"x{options.replicas}-" if options.replicas > 1 else ""
    run_dir = options.out / f"{size}{options.task}-{seed}-{name.replace(' ', '-')}"
    common = common_overrides(data_of(seed, options), seed, replicas=options.replicas)
    overrides = [o.replace("RUN_DIR", str(run_dir)) for o in common] + ARMS[name]
    return run_one(f"{name} seed {seed}", overrides, run_dir, options.budget, options.target, say)


def run_one(label: str, overrides: list[str], run_dir: Path, budget: float, target: float,
            say=say) -> tuple[dict, dict]:
    """Measures and curves of a run of fully-async training, which is made unless it was made before."""
    if not is_done(run_dir / "arm.json", overrides):
        shutil.rmtree(run_dir, ignore_errors=True)
        arm.run(label, overrides, run_dir, ROOT / "overlay", budget_s=budget, say=say)
    result = compare.load(run_dir, target)
    return measures(run_dir, result), result.curves


def own_command(name: str, seed: int, options) -> list[str]:
    """This benchmark, for one run."""
    return ["bench.ablation", "--arms", name, "--seeds", str(seed), "--task", options.task,
            "--budget", str(options.budget), "--prompts", str(options.prompts),
            "--replicas", str(options.replicas), "--target", str(options.target), "--out", str(options.out)]


def run_side_by_side(pairs: list[tuple[str, int]], options, command=own_command) -> None:
    """Every run as a command of its own on its own cores; what fails there is the caller's to run again or to tell."""
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
                child = subprocess.Popen([sys.executable, "-m", *command(name, seed, options)], cwd=ROOT,
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

    return f"{torch.cuda.get_device_name()}, two a run, {options.cores} cores a run"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--arms", default=",".join(ARMS), help="which of: " + ", ".join(ARMS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--budget", type=float, default=300.0, help="wall seconds per run after start-up")
    parser.add_argument("--task", default="search", help="a task of bench/testbed")
    parser.add_argument("--prompts", type=int, default=TRAINING_PROMPTS, help="of the training set")
    parser.add_argument("--replicas", type=int, default=1, help="vLLM replicas of a run; routing needs two")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--cores", type=int, default=2, help="of each of them")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "ablation")
    parser.add_argument("--results", type=Path, help="also write the numbers to this JSON file")
    compare.add_target_option(parser)
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    options.target = compare.target_of(parser, options.task, options.target)
    if options.replicas < 1:
        parser.error("--replicas must be at least 1")
    names, seeds = options.arms.split(","), [int(seed) for seed in options.seeds.split(",")]
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        parser.error(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    if options.jobs * options.cores > len(os.sched_getaffinity(0)):
        parser.error(f"--jobs {options.jobs} of {options.cores} cores: there are {len(os.sched_getaffinity(0))} cores")
    pairs = [(name, seed) for number, seed in enumerate(seeds)
             for name in names[number % len(names):] + names[:number % len(names)]]
    found: dict[str, dict[int, dict]] = {name: {} for name in names}
    curves: dict[str, dict[int, dict]] = {name: {} for name in names}
    failed = []
    try:
        prepare_data(seeds, options)
        if options.jobs > 1:
            run_side_by_side(pairs, options)
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:options.cores])  # for a run that failed
        for name, seed in pairs:
            try:
                found[name][seed], curves[name][seed] = run_arm(name, seed, options)
            except RuntimeError as error:  # the others still count; the exit code tells
                failed.append(str(error))
                say(f"ablation: {error}")
    except KeyboardInterrupt:
        say("interrupted; every process of the run has been ended; the same command goes on from here")
        return 130
    return report(found, curves, failed, options)


def report(found, curves, failed: list[str], options, arms: dict[str, list[str]] = ARMS) -> int:
    rows = table({name: seeds for name, seeds in found.items() if seeds})
    notes = [f"task {options.task}, seeds {options.seeds}, {options.budget:.0f} s per run, "
             f"{options.prompts} training prompts, {time.strftime('%Y-%m-%d')}, commit {commit()}",
             f"{device(options)} for one trainer and {options.replicas} rollout "
             f"replica{'s' * (options.replicas > 1)}, {options.jobs} runs side by side",
             "median [range] over seeds; ratios within a seed; waste as a share of spent tokens",
             f"target of all arms: a held-out reward of {options.target}"]
    return publish(rows, notes, options, {"target": options.target, "arms": arms,
                                          "failed": failed, "measures": found, "curves": curves})


def without_folders(text: str) -> str:
    """Absolute paths as their last part: a machine's folders mean nothing to a reader."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:=]+/)+", "", text)


def publish(rows: list[list[str]], notes: list[str], options, data: dict) -> int:
    """Print the table and write the results file; 1 when `data` tells of failed runs."""
    print("\n" + "\n".join(notes) + "\n")
    print_table(rows)
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        module = getattr(sys.modules["__main__"].__spec__, "name", "bench.ablation")
        command = without_folders(shlex.join(["python", "-m", module, *sys.argv[1:]]))
        record = {"command": command, "commit": commit(), "seeds": list(map(int, options.seeds.split(","))),
                  "device": device(options), "notes": notes, "table": rows, **data,
                  "failed": [without_folders(line) for line in data["failed"]]}
        options.results.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
