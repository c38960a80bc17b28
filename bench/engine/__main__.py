"""Policies against each other on real vLLM replicas; see the package.

    python -m bench.engine --model random:273M --replicas 2 --groups 64 --members 8 --cap 16384 --workload math \\
        --policies verl,es-grpo --scenario sync --results FILE

The engines start once; the arms run one after another in them, with an empty prefix cache each; every repeat rotates
their order. Each run is added to FILE (JSON lines) when it ends, its requests to a folder beside it. Exit code 1 when
the books of a run do not agree.

Under sync, policies that carry work over (colocate_async, april, ulorl, rollpacker, tailsieve, es-grpo) end a step
before the longest responses of its groups: a run of few updates ends before these do and flatters them. Compare at
eight updates or more, and with colocate_async: what is gained over verl's barrier alone is mostly what verl ships.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterable
from itertools import islice, product

from bench.common import console, workload
from bench.common.console import print_table
from bench.engine import options as common
from bench.engine import tau
from bench.engine.driver import Course, Driver, OutOfTime
from bench.engine.fleet import Fleet
from bench.engine.measures import preempted, summary, table
from bench.policies import ASYNC, SYNC, Limits, baseline, policies, policy

LEAST_UPDATES = 4  # under sync, so that what is carried over can end inside the run
CAPACITY_CONTEXT = 1024  # tokens per request at which the capacity is measured, when it is not told


def workloads(text: str) -> list[str]:
    """A type of argparse."""
    for name in text.split(","):
        if name not in workload.PRESETS and not os.path.isfile(name):
            raise argparse.ArgumentTypeError(f"{name}: wanted {', '.join(workload.PRESETS)}, or a recorded trace")
    return text.split(",")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = console.command_line("bench.engine", __doc__.partition("\n")[0])
    common.add_engine_options(parser)
    parser.add_argument("--policies", default="verl,colocate_async,es-grpo", help=f"of {', '.join(policies())}")
    parser.add_argument("--scenario", type=console.names((SYNC, ASYNC)), default="sync",
                        help="sync, async or sync,async")
    parser.add_argument("--workload", type=workloads, default="math",
                        help=f"one or more of {', '.join(workload.PRESETS)}, or of recorded traces (files)")
    parser.add_argument("--groups", type=console.count, default=64, help="groups of an update")
    parser.add_argument("--members", type=console.count, default=8)
    parser.add_argument("--cap", type=console.count, default=16384, help="longest response, tokens")
    parser.add_argument("--scale", type=console.positive, default=1.0, help="factor on the preset's lengths")
    parser.add_argument("--updates", type=console.count, default=1)
    parser.add_argument("--repeats", type=console.count, default=1)
    parser.add_argument("--staleness", type=console.not_negative, default=0.5,
                        help="async: groups begun beyond an update's, share")
    parser.add_argument("--train-s", type=console.not_negative, default=0.0,
                        help="async: seconds of training per update")
    parser.add_argument("--sync-s", type=console.not_negative, default=1.0,
                        help="seconds in which the weights are loaded")
    parser.add_argument("--capacity", type=console.whole, default=0,
                        help="requests at which a replica is full; 0: measured")
    parser.add_argument("--seed", type=console.seeds, default="1",
                        help="of the workload, one or more: a pair of runs has the same")
    parser.add_argument("--results", type=console.output_file, required=True)
    options = parser.parse_args(argv)
    options.policies, options.workloads, options.seeds = options.policies.split(","), options.workload, options.seed
    for name in options.workloads:
        if name not in workload.PRESETS:
            with console.reading("--workload", name, "a recorded trace"):
                found = len(workload.replay(name, options.members, options.cap))
            if found < options.groups * options.updates:
                parser.error(f"--workload {name}: {found} groups of {options.members} responses, wanted "
                             f"{options.groups * options.updates}")
    for name in options.policies:
        try:
            kind = policy(name)
        except KeyError as error:
            parser.error(error.args[0])
        if kind.chooses:
            parser.error(f"{name} chooses its prompts and would decode other work than the others; python -m bench.sim "
                         "plays it")
    return options


def flattered(options) -> list[str]:
    """Policies that carry work over out of a run of too few updates: their ratios to the others mean nothing."""
    if SYNC not in options.scenario or options.updates >= LEAST_UPDATES:
        return []
    return [name for name in options.policies if policy(name).carries and SYNC in policy(name).scenarios]


def warning(options) -> str:
    """Empty when nobody is flattered, or nobody else is there to be compared with."""
    names = flattered(options)
    if not names or len(options.policies) == 1:
        return ""
    return (f"WARNING: {', '.join(names)} carry work over, and with --updates {options.updates} it never ends inside "
            f"the run: their ratios under sync are flattered, use --updates {LEAST_UPDATES} or more")


def visits(options, spare: int, scenario: str) -> tuple[list, Iterable]:
    """(an earlier epoch, the groups of the run), the same prompts in both; as bench.sim makes them.

    A recorded trace has no earlier epoch: policies with a history start cold.
    """
    if options.workload not in workload.PRESETS:
        groups = workload.replay(options.workload, options.members + spare, options.cap)
        return [], groups
    count = options.groups * options.updates
    groups = workload.stream(options.workload, count, options.members, options.cap, options.seed, spare=spare,
                             scale=options.scale)
    earlier = list(islice(groups, count))
    return earlier, islice(groups, count) if scenario == ASYNC else groups  # async: the same work for all, to its end


def play(fleet: Fleet, options, name: str, scenario: str, capacity: int, end: float) -> Driver:
    """One run of one policy; returns its driver, which has run."""
    kind = policy(name)
    limits = Limits(replicas=options.replicas, sequences=options.max_num_seqs, capacity=capacity, cap=options.cap,
                    members=options.members, groups=options.groups, scenario=scenario,
                    kv_tokens=fleet.blocks * fleet.block_size)
    earlier, groups = visits(options, math.ceil(kind.spare * options.members), scenario)
    chosen = kind(limits, random.Random(f"policy {options.seed}"))
    chosen.remember(earlier)
    stream = iter(groups)
    course = Course(options.updates, options.train_s, options.sync_s, options.staleness, options.vocabulary,
                    options.seed)
    driver = Driver(fleet, chosen, limits, course, lambda count: list(islice(stream, count)), end)
    driver.record = driver.run()
    return driver


def measured_capacity(fleet: Fleet, options, facts: dict, end: float) -> int:
    """Measures tau(b) at one context, which also warms up every batch size."""
    context = min(CAPACITY_CONTEXT, options.prompt)
    points, _ = tau.measure(fleet, options.max_num_seqs, [context], tau.STEPS, end, common.say, alone=False)
    found = options.capacity or tau.capacity(points, options.max_num_seqs)
    common.append(options.results, {"kind": "tau", **facts, **tau.record(points, facts, options), "points": points})
    common.say(f"a replica counts as full at {found} requests")
    return found


def schedule(options) -> list[tuple[int, int, str, str, str]]:
    """(repeat, seed, workload, scenario, policy) in the order of the runs; each repeat and seed rotates them."""
    found, names = [], options.policies
    for turn, (repeat, seed) in enumerate(product(range(options.repeats), options.seeds)):
        rotated = names[turn % len(names):] + names[:turn % len(names)]
        found += [(repeat, seed, kind, scenario, name) for kind in options.workloads for scenario in options.scenario
                  for name in rotated if scenario in policy(name).scenarios]
    return found


def save(options, facts: dict, driver: Driver, repeat: int, capacity: int) -> dict:
    record = {**facts, **driver.record, "repeat": repeat, "workload": options.workload, "groups": options.groups,
              "members": options.members, "cap": options.cap, "scale": options.scale, "updates": options.updates,
              "train_s": options.train_s, "sync_s": options.sync_s, "staleness": options.staleness,
              "capacity": capacity, "seed": options.seed}
    folder = options.results.with_suffix(".traces")
    folder.mkdir(parents=True, exist_ok=True)
    policy_name = record["policy"].replace("/", "_")  # variants: es-grpo/AB+barrier
    file = folder / f"{record['scenario']}-{policy_name}-{repeat}-{time.time_ns()}.json"
    file.write_text(json.dumps([*driver.trace.values()]))
    common.append(options.results, {**record, "trace": f"{folder.name}/{file.name}"})
    bubble = ", ".join(f"{name} {rate:.3f}" for name, rate in record["bubble"].items())
    common.say(f"{record['scenario']} {record['policy']} #{repeat}: {record['s_per_update']:.2f} s an update, "
               f"{record['tokens_per_s']:.0f} tokens/s, bubble {bubble}, {record['preemptions']} preemptions, "
               f"{record['reprefill_tokens']} tokens prefilled again, waste {record['waste']}")
    return record


def compare(fleet: Fleet, options, facts: dict, began: float) -> list[dict]:
    """The records of all runs that end before the deadline; one that would not, as far as is known, is left out."""
    end, records = began + options.deadline, []
    took: dict[tuple, float] = {}  # (workload, scenario, policy) -> seconds of its longest run
    capacity = measured_capacity(fleet, options, facts, end)
    left = []
    for run in schedule(options):
        repeat, options.seed, *kind = run
        options.workload, scenario, name = kind
        started, expected = time.monotonic(), took.get(tuple(kind), max(took.values(), default=0.0))
        if started + expected > end:
            left.append(run)
            continue
        common.say(f"{options.workload} {scenario} {name} #{repeat} of seed {options.seed} begins")
        try:
            driver = play(fleet, options, name, scenario, capacity, end)
        except OutOfTime:
            left.append(run)
            continue
        took[tuple(kind)] = max(took.get(tuple(kind), 0.0), time.monotonic() - started)
        records.append(save(options, facts, driver, repeat, capacity))
    if left:
        common.say(f"out of time, left out: {left}")
        names = [(repeat, f"seed {seed}", *rest) for repeat, seed, *rest in left]
        common.append(options.results, {"kind": "left_out", "runs": names, "why": "out of time",
                                        **{key: getattr(options, key) for key in ("groups", "members", "cap")}})
    return records


def show(records: list[dict], kind: str, options) -> None:
    """Prints and keeps the ratios of one workload."""
    found = summary(records)
    common.append(options.results,
                  {**found, "workload": kind, "runs": len(records), "flattered": flattered(options)})
    for base in dict.fromkeys(("verl", baseline(SYNC), found["best_rival"])):
        against = "best_rival" if base == found["best_rival"] else base
        for name, ratio in found[f"against_{against}"].items():
            decided = ", ".join(f"{module} {count}" for module, count in ratio["decisions"].items() if count)
            print(f"{kind}: {name} against {base}: x{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}], "
                  f"n = {ratio['n']}, stale rows {ratio['stale_rows']:.1%}, decisions: {decided or 'none'}")
    if records:
        print_table(table(found))
    if preempted(found):
        print(preempted(found))
    for note in dict.fromkeys(record["note"] for record in records if record["note"]):
        print(note)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    began = time.monotonic()
    if warning(options):
        common.say(warning(options))
    options.prompt = max(options.prompt, *(shape.prompt_tokens for name, shape in workload.PRESETS.items()
                                           if name in options.workloads), 1)
    with contextlib.suppress(KeyboardInterrupt):
        with common.start(options) as (fleet, facts):
            records = compare(fleet, options, facts, began)
        for kind in options.workloads:
            show([record for record in records if record["workload"] == kind], kind, options)
        if warning(options):  # again, next to the numbers
            print(warning(options))
        return 0
    return 130


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
