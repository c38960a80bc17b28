"""python -m bench.sim.null_groups [--json] [--groups N] [--seeds N ...] [--results FILE]

SIMULATED: what the group filter of algo/null_groups.py does to a fully async loop (async_loop.py), by how fast rollout
is beside training, by the staleness bound, and by the share of groups without a gradient. Of each mode beside `train`
(verl's own): groups with a gradient a second, optimiser steps a second, and the share of the time that the trainer
trains. Groups without a gradient are as long as others here. What a step with more of them is worth to
learning is not simulated.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product

from bench.common import console
from bench.common.provenance import add_results, write_record
from bench.sim.async_loop import Case, Loop
from esgrpo.algo.overlap_law import Setting
from esgrpo.algo.terms import NullGroups

RATIOS = (0.5, 1.0, 2.0, 4.0, 8.0)  # rollout's tokens/s at full replicas over the trainer's
SHARES = (0.3, 0.5, 0.7)
SETTINGS = {"0.5": Setting(32, 0.5, 32), "2": Setting(64, 2.0, 32)}  # by staleness; verl's 16 groups a replica, and 32
GROUPS, SEEDS = 512, (1, 2, 3)
COLUMNS = (("groups with gradient/s", 6), ("optimiser steps/s", 5), ("trainer at work", 5))  # of the table; widths


def play(case: Case, setting: Setting) -> dict[str, dict[str, float]]:
    gc.disable()  # no cycles: a collection would walk all prompts for nothing
    found, plain = {}, None
    for mode in NullGroups:
        loop = Loop(replace(case, null_groups=mode), setting)
        loop.run()
        rates = loop.useful / loop.now, loop.steps / loop.now
        plain = plain or rates
        found[str(mode)] = {"groups with gradient/s": rates[0] / plain[0], "optimiser steps/s": rates[1] / plain[1],
                            "trainer at work": loop.work_s / loop.now,
                            "left out": loop.left_out / (loop.left_out + loop.trained)}
    return found


def median(rows: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {mode: {name: round(statistics.median(row[mode][name] for row in rows), 3) for name in rows[0][mode]}
            for mode in rows[0]}


def main(argv: list[str] | None = None) -> int:
    reader = console.command_line("bench.sim.null_groups", __doc__)
    reader.add_argument("--json", action="store_true", help="the whole result instead of a table")
    reader.add_argument("--groups", type=console.count, default=GROUPS,
                        help=f"trained groups of a run, default {GROUPS}")
    reader.add_argument("--seeds", type=console.whole, nargs="+", default=SEEDS,
                        help="of the lengths and of who has no gradient")
    add_results(reader)
    options = reader.parse_args(argv)
    chosen = list(product(SETTINGS, SHARES, RATIOS))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        played = {key: [pool.submit(play, Case("", key[2], null_share=key[1], groups=options.groups, seed=seed),
                                    SETTINGS[key[0]]) for seed in options.seeds] for key in chosen}
        rows = [{"staleness": float(staleness), "null_share": share, "ratio": ratio,
                 **median([each.result() for each in played[staleness, share, ratio]])}
                for staleness, share, ratio in chosen]
    if options.results:
        write_record(options.results, "bench.sim.null_groups", argv, options.seeds,
                     {"simulated": True, "groups": options.groups, "cases": rows})
    if options.json:
        print(json.dumps({"simulated": True, "seeds": list(options.seeds), "cases": rows}, indent=1))
        return 0
    modes = [str(mode) for mode in NullGroups][1:]
    print(f"{'SIMULATED':9} {'null':>5} {'ratio':>5}" + "".join(
        f"  {mode:>7}: {'groups':>6} {'steps':>5} {'works':>5}" for mode in modes) + "   train: works")
    for row in rows:
        told = "".join(f"{'':10} " + " ".join(f"{row[mode][name]:{width}.2f}" for name, width in COLUMNS)
                       for mode in modes)
        case = f"{row['staleness']:9g} {row['null_share']:5g} {row['ratio']:5g}"
        print(f"{case}{told}{row['train']['trainer at work']:15.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
