"""python -m bench.sim.overlap [--json] [--case NAME] [--groups N] [--seed N] [--null-groups MODE]
                            [--results FILE [--seeds N,N]]

SIMULATED: the controller of algo/overlap.py on the fully async loop, against the best fixed setting and against verl's
own `default` policy. Nothing tells it how fast rollout is beside training.

The loop is async_loop.py's. The trainer's device is lent to rollout and taken back by verl's `default` policy in every
arm, so that arms differ in concurrency, staleness and trigger alone.

The objective. Tokens a second would always ask for the largest staleness. What counts is *fresh* tokens: each trained
token weighs exp(-age / AGE_SCALE), age in optimiser steps between the weights that made it and those that train on it.
What there is of ours to place AGE_SCALE by is bench/results/train_h200_staleness.json (one mini-batch a version,
verl's loss, 33 M parameters): after 13 to 18 updates plain verl's held-out reward, 0.42 at the start over all its runs,
was 0.54 at staleness 1 and 2 (three runs) and 0.40 at 4 (two runs), each of 256 prompts. So age costs, and at 4 it cost
most of what an update is worth: with a mean age as large as the bound, a scale above 3 is outside of two standard
errors. Published systems with corrected losses lose little up to 4 to 8. AGE_SCALE = 4 lies between; there are cases
with 2 and 8, too.

best fixed: coordinate search over CONCURRENCY x STALENESS x TRIGGER, in the same simulator, over the same prompts.
verl default: the START setting, not moved. Ratios are of fresh tokens a second over the whole run, its first versions
included, but in the cases that begin at an extreme setting and say "second half".
"""

from __future__ import annotations

import gc
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from bench.common import console
from bench.common.provenance import add_results, seeds_of, write_record
from bench.sim.async_loop import GROUPS, MINI_BATCH, Case, Loop, begun_at_most
from esgrpo.algo.overlap import Controller
from esgrpo.algo.overlap_law import Limits, Setting
from esgrpo.algo.terms import NullGroups

LIMITS = Limits((4, 128), (0.0, 8.0), (16, 128), MINI_BATCH)
CONCURRENCY, TRIGGER = (8, 16, 32, 48, 64, 96), (16, 32, 64, 128)
STALENESS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0)
RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)  # rollout's tokens/s at full replicas over the trainer's
FILTERED_RATIOS = (0.5, 1.0, 2.0, 4.0, 8.0)
WORKLOADS = ("math", "code", "agentic")


def fixed(case: Case, setting: Setting, found: dict[Setting, float]) -> float:
    setting = replace(setting, concurrency=min(setting.concurrency, begun_at_most(setting)))  # more changes nothing
    if setting not in found:
        found[setting] = Loop(case, setting).run()
    return found[setting]


def search(case: Case, found: dict[Setting, float]) -> Setting:
    """One coordinate after the other until none gains."""
    now = Setting(32, 1, 32)
    while True:
        before = now
        for name, values in (("trigger", TRIGGER), ("concurrency", CONCURRENCY), ("staleness", STALENESS)):
            now = max((replace(now, **{name: value}) for value in values), key=lambda each: fixed(case, each, found))
        if now == before:
            return now


def cases(groups: int = GROUPS, seed: int = 1) -> list[Case]:
    found = [Case(f"{workload}, ratio {ratio:g}", ratio, workload) for workload in WORKLOADS for ratio in RATIOS]
    found += [Case(f"{workload}, ratio {ratio:g}, rollout {shift:g} times as slow from half way on", ratio, workload,
                   shift) for workload, ratio, shift in (("math", 1.5, 2.0), ("code", 1.0, 2.0), ("agentic", 1.0, 0.5))]
    found += [Case(f"math, ratio 1, age scale {scale:g}", 1.0, age_scale=scale) for scale in (2.0, 8.0)]
    found += [Case("math, ratio 1, weight sync 10 s", 1.0, sync_s=10.0),
              Case("math, ratio 1, validation of 60 s every 8 versions", 1.0, validation_s=60.0),
              *(Case(f"{workload}, ratio {ratio:g}, rates as noisy as on a shared GPU", ratio, workload, by_group=0.8,
                     noise=0.15) for workload, ratio in (("math", 1.0), ("agentic", 1.5))),
              Case("math, ratio 2, second half, half of the groups left out", 2.0, settled=True, null_share=0.5,
                   null_groups=NullGroups.REPLACE)]
    found += [Case(f"math, ratio 1, second half, from staleness {start.staleness:g}", 1.0, start=start, settled=True)
              for start in (Setting(64, 8.0, 32), Setting(96, 0.0, 128))]
    return [replace(case, groups=groups, seed=seed) for case in found]


def filtered(mode: str, groups: int = GROUPS, seed: int = 1) -> list[Case]:
    """Half of the groups without a gradient, under a mode of `segment.null_groups`."""
    return [Case(f"math, ratio {ratio:g}, second half, {mode}", ratio, settled=True, null_share=0.5, null_groups=mode,
                 groups=groups, seed=seed) for ratio in FILTERED_RATIOS]


def play(case: Case) -> dict:
    gc.disable()  # no cycles: a collection would walk all prompts for nothing
    found: dict[Setting, float] = {}
    search(case, found)
    plain = fixed(case, case.start, found)
    controller = Controller(case.start, LIMITS, case.age_scale, lambda: 0.0)
    loop = Loop(case, controller.setting, controller)
    fresh = loop.run()
    return {"name": case.name, "against_best_fixed": round(fresh / max(found.values()), 4),
            "against_verl_default": round(fresh / plain, 4), "fresh_tokens_per_s": round(fresh, 1),
            "best_fixed": _said(max(found, key=found.get)), "ended_at": _said(loop.setting), "moves": len(loop.changes),
            "settings_tried": len(found)}


def _said(setting: Setting) -> dict:
    return {"concurrency": setting.concurrency, "staleness": round(setting.staleness, 3), "trigger": setting.trigger}


def main(argv: list[str] | None = None) -> int:
    reader = console.command_line("bench.sim.overlap", __doc__)
    reader.add_argument("--json", action="store_true", help="the whole result instead of a table")
    reader.add_argument("--case", default="", metavar="NAME", help="only cases whose name contains this")
    reader.add_argument("--groups", type=console.count, default=GROUPS, help=f"groups of a run, default {GROUPS}")
    reader.add_argument("--seed", type=int, default=1, help="of the lengths, default 1")
    reader.add_argument("--null-groups", choices=tuple(map(str, NullGroups)), metavar="MODE",
                        help="other cases: half of the groups without a gradient, under this segment.null_groups")
    add_results(reader, several=True)
    options = reader.parse_args(argv)
    seeds = seeds_of(reader, options)
    found = {seed: filtered(options.null_groups, options.groups, seed) if options.null_groups else
             cases(options.groups, seed) for seed in seeds}
    chosen = [case for each in found.values() for case in each if options.case in case.name]
    if not chosen:
        known = dict.fromkeys(case.name for each in found.values() for case in each)
        reader.error(f"--case {options.case}: wanted a part of {'; '.join(known)}")
    with ProcessPoolExecutor(min(len(chosen), os.cpu_count() or 1)) as pool:
        results = list(pool.map(play, chosen))
    if options.results:
        write_record(options.results, "bench.sim.overlap", argv, seeds, {
            "simulated": True, "groups": options.groups, "null_groups": options.null_groups or "as each case says",
            "cases": [{"seed": case.seed, **row} for case, row in zip(chosen, results, strict=True)]})
        results = results[:len(chosen) // len(seeds)]
    if options.json:
        print(json.dumps({"simulated": True, "cases": results}, indent=1))
        return 0
    print(f"{'SIMULATED':52} {'/ best fixed':>12} {'/ verl default':>14}  best fixed -> ended at (moves)")
    for row in results:
        best, ended = (", ".join(f"{value:g}" for value in row[name].values()) for name in ("best_fixed", "ended_at"))
        print(f"{row['name']:52} {row['against_best_fixed']:12.3f} {row['against_verl_default']:14.3f}  "
              f"{best} -> {ended} ({row['moves']})")
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
