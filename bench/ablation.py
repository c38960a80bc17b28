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

import os
import signal
import sys

from bench.common import ROOT, compare, console, stack, training
from bench.common.console import say
from bench.common.modules import ARMS
from bench.testbed.task import TASKS


def run_arm(name: str, seed: int, options, say=say) -> tuple[dict[str, float | None], dict]:
    """Measures and curves of one run."""
    size = f"x{options.replicas}-" if options.replicas > 1 else ""
    run_dir = options.out / f"{size}{options.task}-{seed}-{name.replace(' ', '-')}"
    common = stack.common_overrides(training.data_of(seed, options), seed, replicas=options.replicas)
    overrides = [o.replace("RUN_DIR", str(run_dir)) for o in common] + ARMS[name]
    return training.run_one(f"{name} seed {seed}", overrides, run_dir, options.budget, options.target, say)


def own_command(name: str, seed: int, options) -> list[str]:
    """This benchmark, for one run."""
    return ["bench.ablation", "--arms", name, "--seeds", str(seed), "--task", options.task,
            "--budget", str(options.budget), "--prompts", str(options.prompts),
            "--replicas", str(options.replicas), "--target", str(options.target), "--out", str(options.out)]


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.ablation", __doc__.splitlines()[0])
    parser.add_argument("--arms", type=console.names(ARMS), default=",".join(ARMS), help="which of: " + ", ".join(ARMS))
    parser.add_argument("--seeds", type=console.seeds, default="1,2,3")
    parser.add_argument("--budget", type=console.positive, default=300.0, help="wall seconds per run after start-up")
    parser.add_argument("--task", choices=TASKS, default="search", help="a task of bench/testbed")
    parser.add_argument("--prompts", type=console.count, default=training.TRAINING_PROMPTS, help="of the training set")
    parser.add_argument("--replicas", type=console.count, default=1, help="vLLM replicas of a run; routing needs two")
    parser.add_argument("--jobs", type=console.count, default=1, help="runs side by side")
    parser.add_argument("--cores", type=console.count, default=2, help="of each of them")
    parser.add_argument("--out", type=console.output_folder, default=ROOT / "runs" / "ablation")
    parser.add_argument("--results", type=console.output_file, help="also write the numbers to this JSON file")
    compare.add_target_option(parser)
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    options.target = compare.target_of(parser, options.task, options.target)
    names, seeds = options.arms, options.seeds
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    if options.jobs * options.cores > len(os.sched_getaffinity(0)):
        parser.error(f"--jobs {options.jobs} of {options.cores} cores: wanted at most the "
                     f"{len(os.sched_getaffinity(0))} that there are")
    pairs = [(name, seed) for number, seed in enumerate(seeds)
             for name in names[number % len(names):] + names[:number % len(names)]]
    found: dict[str, dict[int, dict]] = {name: {} for name in names}
    curves: dict[str, dict[int, dict]] = {name: {} for name in names}
    failed = []
    try:
        training.prepare_data(seeds, options)
        if options.jobs > 1:
            training.run_side_by_side(pairs, options, own_command)
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
    return training.report(found, curves, failed, options)


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
