"""python -m bench.sim --workload math --replicas 64 --groups 512 --policy es-grpo,verl --seed 1 --json

Simulated runs of policies over the same workload. The JSON has no wall-clock field: same arguments, same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys

from bench.common import console
from bench.common.workload import PRESETS, replay
from bench.policies import ASYNC, SYNC, baseline, policies
from bench.sim.device import DEFAULT, Device
from bench.sim.experiment import Setting, describe, policy_for, run
from bench.sim.simulation import Stuck


def parser() -> argparse.ArgumentParser:
    result = console.command_line("bench.sim", __doc__)
    choices = {"workload": sorted(PRESETS), "scenario": [SYNC, ASYNC]}
    zero = {"seed": console.whole, "prompts": console.whole, "warm": console.whole, "train_s": console.not_negative,
            "staleness": console.not_negative}  # may be 0
    kinds = {str: str, int: console.count, float: console.positive}
    for field in dataclasses.fields(Setting):
        result.add_argument("--" + field.name.replace("_", "-"), default=field.default,
                            type=zero.get(field.name, kinds[type(field.default)]),
                            choices=choices.get(field.name), help=f"default {field.default}")
    result.add_argument("--policy", default="", help="comma-separated, ratios are against the first: "
                        + ", ".join(policies()) + "; default: verl's best in the scenario, and es-grpo")
    result.add_argument("--replay", type=console.existing_file, metavar="FILE",
                        help="a recorded length trace instead of a generated workload")
    result.add_argument("--tau", type=console.existing_file, default=DEFAULT, metavar="FILE",
                        help="measured device (bench/sim/h100.json)")
    result.add_argument("--kv-tokens", type=console.count, help="KV cache of a replica, instead of the device's")
    result.add_argument("--json", action="store_true", help="the whole result instead of a table")
    return result


def table(results: dict[str, dict]) -> str:
    """One line a policy. Ratios are against the first one: updates per second, and used tokens per second, which does
    not reward a policy for taking the short responses first. `stale`: share of trained rows with a token of older
    weights, and versions that a row's oldest token is old; `decisions`: what changed something, by module."""
    first = next(iter(results.values()))
    lines = [f"{'SIMULATED':18} {'s/update':>8} {'ratio':>6} {'used t/s':>9} {'ratio':>6} {'tok/row':>7} {'bubble':>6} "
             f"{'p50 s':>6} {'p99 s':>6} {'preempt':>7} {'stale':>6} {'old':>5}  decisions"]
    for name, result in results.items():
        mean, used, done = result["update_s"]["mean"], result["used_tokens_per_s"], result["completion_s"]
        rows, decided = result["staleness"]["rows"], result["decisions"]
        lines.append(f"{name:18} {mean:8.2f} {first['update_s']['mean'] / mean:6.3f} {used:9.0f} "
                     f"{used / first['used_tokens_per_s']:6.3f} {result['tokens_per_trained_sample']:7.0f} "
                     f"{result['bubble']['bubble_rate']:6.3f} {done['p50']:6.1f} {done['p99']:6.1f} "
                     f"{result['preemptions']:7d} {rows['share']:6.1%} {rows['mean']:5.2f}  "
                     + (", ".join(f"{module} {count}" for module, count in decided.items() if count) or "none"))
    return "\n".join([*lines, *(result["note"] for result in results.values() if result["note"])])


def main(argv=None) -> int:
    reader = parser()
    options = reader.parse_args(argv)
    setting = Setting(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Setting)})
    names = (options.policy or f"{baseline(setting.scenario)},es-grpo").split(",")
    for name in names:
        try:
            policy_for(setting, name, bool(options.replay))
        except (KeyError, ValueError) as error:
            reader.error(error.args[0])
    gc.disable()  # millions of live objects and no cycles: a collection would walk all of them for nothing
    with console.reading("--tau", options.tau, "what bench.engine.tau writes"):
        device = Device.load(options.tau, kv_tokens=options.kv_tokens)
    results = {}
    for name in names:
        trace = None
        if options.replay:
            with console.reading("--replay", options.replay, "a trace as bench.common.workload.replay says"):
                trace = replay(options.replay, setting.members, setting.cap)
        try:
            results[name] = run(setting, name, device, None if trace is None else iter(trace))
        except Stuck:
            if trace is None:
                raise
            reader.error(f"--replay {options.replay}: {len(trace)} groups of {setting.members} responses, wanted more: "
                         f"{name} has not enough of them for {setting.updates} updates")
    if options.json:
        origin = "default: bench/sim/h100.json" if options.tau == DEFAULT else str(options.tau)
        print(json.dumps({**describe(setting, device, origin), "policies": results}, indent=1, sort_keys=True))
    else:
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
