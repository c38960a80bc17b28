"""python -m bench.sim.study --out FILE [--seeds 1,2,3] [--parts modules,policies,sync,steady,sweeps] [--small]

Which module brings how much, how gains move with load, cap, tail, KV memory, replicas and staleness, and where there is
none. Every number is simulated. Ratios are against verl's best at the same setting and seed: its fully-async order, or
under a barrier its own carry-over (colocate_async); `verl` is its barrier then. `updates` is updates per second, `used`
is used tokens per second, which does not reward a policy for taking the short responses first; for policies that decode
the same responses the two agree; `trained` counts of these the tokens with a gradient. `gradient` is groups with
a gradient per second, by which modules are ranked: pruning must not lose them, the prompt sampler is there for them.
`staleness`: weight versions since a trained group began; of rows and tokens, since they were decoded. `decisions`: what
changed something, by module, a run.

Only module S decodes other prompts than verl. Here prompts do not change while they are trained, and what it costs to
train one again soon is not modelled: bench.prompt_sampling lets them drift.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from bench.common import console
from bench.policies import ASYNC, DECISIONS, SYNC, baseline, policies
from bench.policies.tail import TailSieve
from bench.sim.device import Device
from bench.sim.experiment import Setting, run

BASE = Setting(replicas=4, groups=64, updates=6)
SMALL = {"replicas": 2, "groups": 4, "members": 4, "cap": 128, "scale": 0.02, "updates": 2, "sequences": 8}
WHOLE, PRUNED, PLAIN = "es-grpo/ABCS", "es-grpo/ABC", "es-grpo/"
MODULES = {"A": "routing", "B": "carry-over and kept requests", "C": "audited pruning", "S": "prompt sampler"}
CHANGES = ("es-grpo/AB", "es-grpo/AB+abort", "es-grpo/AB+tails", "es-grpo/AB+few-tails", "es-grpo/AB+hold")
HIGH, MEDIUM = 0.10, 0.03  # a module that brings as much of the baseline's groups with gradient per second ranks so
NO_HELP = 1.01  # below this ratio a setting is listed as one where ES-GRPO does not help
STEADY = 24  # updates after which the end of a run hardly counts
BARRIER = ("verl", "colocate_async", "colocate_async/wait", "ulorl", "april/1.5", "april", "april/3", "rollpacker",
           "es-grpo", *(f"es-grpo/AB+{change}" for change in (
               "barrier", "bound-1", "bound-1+drop", "bound-2", "bound-2+drop", "bound-4", "drop", "unbounded",
               "over-3.0+unbounded", "abort", "tails")))
FREE = 1e9  # prefilled tokens per second: nothing is lost by an abort but its sleep
SCARCE = 300_000  # KV tokens of a replica: about a third of what its 256 requests grow to
SWEPT = {SYNC: ("es-grpo", "april"), ASYNC: ("es-grpo", "es-grpo/AB+tails")}  # april: the best rival there
SWEEPS: dict[str, list[dict]] = {
    "concurrency (groups of an update)": [{"groups": groups} for groups in (16, 64, 256)],
    "cap": [{"cap": cap} for cap in (4096, 16384, 32768)],
    "tail weight (factor of the spread)": [{"tail": tail} for tail in (0.6, 1.3)],
    "KV memory (tokens of a replica)": [{"kv_tokens": tokens} for tokens in (600_000, 150_000)],
    "replicas (16 groups each)": [{"replicas": count, "groups": 16 * count} for count in (1, 2, 16)],
    "staleness (async)": [{"staleness": bound, "scenario": ASYNC} for bound in (0.1, 1.0, 2.0)],
    "workload": [{"workload": name} for name in ("code", "agentic")],
    "epochs remembered": [{"warm": epochs} for epochs in (0, 3)],
    "weight sync (s)": [{"weight_sync": seconds} for seconds in (0.1, 10.0)],
}


class Runs:
    """Runs each arm of each setting once."""

    def __init__(self, seeds: list[int], changes: dict):
        self.seeds, self.changes, self.done = seeds, changes, 0
        self._baselines: dict = {}

    def _run(self, name: str, changes: dict, seed: int) -> dict:
        machine = {key: changes[key] for key in ("kv_tokens", "weight_sync", "prefill_rate") if key in changes}
        setting = {**{key: value for key, value in changes.items() if key not in machine}, **self.changes, "seed": seed}
        self.done += 1
        if sys.stderr.isatty():
            print(f"\r{self.done} runs", end="", file=sys.stderr)
        return run(dataclasses.replace(BASE, **setting), name, Device.load(**machine))

    def arm(self, name: str, **changes) -> dict:
        """Ratios to the baseline over the seeds, and what explains them."""
        key, base = tuple(sorted(changes.items())), baseline(changes["scenario"])
        if key not in self._baselines:
            self._baselines[key] = [self._run(base, changes, seed) for seed in self.seeds]
        first = self._baselines[key]
        found = first if name == base else [self._run(name, changes, seed) for seed in self.seeds]
        pairs = list(zip(found, first, strict=True))
        return {"policy": name, "setting": changes, "against": base,
                "updates": spread([b["makespan_s"] / a["makespan_s"] for a, b in pairs]),
                "used": spread([a["used_tokens_per_s"] / b["used_tokens_per_s"] for a, b in pairs]),
                "gradient": spread([a["gradient_groups"] * b["makespan_s"] / (b["gradient_groups"] * a["makespan_s"])
                                    for a, b in pairs]),
                "trained": spread([a["trained_tokens_per_s"] / b["trained_tokens_per_s"] for a, b in pairs]),
                "staleness": {"mean": mean(a["staleness"]["mean"] for a in found),
                              "max": max(a["staleness"]["max"] for a in found),
                              "share": mean(a["staleness"]["share"] for a in found),
                              **{what: {key: mean(a["staleness"][what][key] for a in found)
                                        for key in ("mean", "share")} for what in ("rows", "tokens")}},
                "decisions": {module: mean(a["decisions"][module] for a in found) for module in DECISIONS},
                "note": found[0]["note"],
                "s_per_update": spread([a["update_s"]["mean"] for a in found]),
                "tokens_per_row": mean(a["tokens_per_trained_sample"] for a in found),
                "bubble": {cause: mean(a["bubble"][cause] for a in found) for cause in found[0]["bubble"]},
                "p99_s": mean(a["completion_s"]["p99"] for a in found),
                "preemptions": mean(a["preemptions"] for a in found),
                "pruned": mean(a["pruned_samples"] for a in found),
                "waste": {cause: mean(a["waste"][cause] / a["decoded"] for a in found) for cause in found[0]["waste"]}}


def mean(values) -> float:
    return round(statistics.mean(values), 4)


def spread(values: list[float]) -> dict:
    """Mean, smallest and largest over the seeds."""
    return {"mean": mean(values), "low": round(min(values), 4), "high": round(max(values), 4)}


def modules(runs: Runs) -> dict:
    """Each module left out of the whole, and alone; per scenario and memory."""
    found = {}
    for place, changes in (("async", {"scenario": ASYNC}), ("sync", {"scenario": SYNC}),
                           ("async, KV scarce", {"scenario": ASYNC, "kv_tokens": SCARCE}),
                           ("async, 16 replicas", {"scenario": ASYNC, "replicas": 16, "groups": 256})):
        whole = runs.arm(WHOLE, **changes)
        rows = {"whole": whole, "none": runs.arm(PLAIN, **changes)}
        for module in MODULES:
            without = runs.arm(WHOLE.replace(module, ""), **changes)
            brings, faster = (round(whole[what]["mean"] - without[what]["mean"], 4) for what in ("gradient", "updates"))
            rows[module] = {"name": MODULES[module], "without": without, "brings": brings, "brings_updates": faster,
                            "rank": rank(brings), "alone": runs.arm(PLAIN + module, **changes)}
        rows["changes"] = [runs.arm(name, **changes) for name in CHANGES]
        found[place] = rows
    return found


def rank(brings: float) -> str:
    if brings < -MEDIUM:
        return "Harms"
    return "High" if brings >= HIGH else "Medium" if brings >= MEDIUM else "Low"


def compared(runs: Runs) -> dict:
    """Every policy at the base setting, in its scenarios; twice the updates, for those that carry work over. And at the
    size that TailSieve's paper has: with fewer replicas its tail pool is more than an eighth of them."""
    places = {SYNC: (SYNC, {}), ASYNC: (ASYNC, {}),
              f"sync, {TailSieve.REPLICAS} replicas": (SYNC, {"replicas": TailSieve.REPLICAS})}
    return {title: [runs.arm(name, scenario=scenario, updates=2 * BASE.updates, **place)
                    for name, cls in policies().items() if scenario in cls.scenarios]
            for title, (scenario, place) in places.items()}


def carried(runs: Runs) -> dict:
    """Under a barrier in a long run: what carrying over brings, and how stale it makes the updates."""
    places = {"2 replicas": {"replicas": 2}, "4 replicas": {"replicas": 4},
              "4 replicas, code": {"replicas": 4, "workload": "code"},
              "4 replicas, prefill for nothing": {"replicas": 4, "prefill_rate": FREE}}
    return {f"{STEADY} updates, {title}": [runs.arm(name, scenario=SYNC, updates=STEADY, **place) for name in BARRIER]
            for title, place in places.items()}


def steady(runs: Runs) -> dict:
    """Async in a long run. A run ends when all its groups are trained, and longest first shortens that end, which a
    training of many updates hardly has: what is left here is what a stream gains."""
    arms = ("es-grpo/A", "es-grpo/B", "es-grpo", PRUNED, WHOLE, *CHANGES[1:], "seer", "oracle")
    return {f"async, {STEADY} updates": [runs.arm(name, scenario=ASYNC, updates=STEADY) for name in arms],
            "the same, three epochs remembered": [runs.arm(name, scenario=ASYNC, updates=STEADY, warm=3)
                                                  for name in ("es-grpo", PRUNED, PRUNED + "+loose")]}


def sweeps(runs: Runs) -> dict:
    found = {}
    for title, points in SWEEPS.items():
        rows = []
        for point in points:
            for scenario in (SYNC, ASYNC):
                if point.get("scenario", scenario) == scenario:
                    rows += [runs.arm(name, **{**point, "scenario": scenario}) for name in SWEPT[scenario]]
        found[title] = rows
    return found


def no_help(found: dict) -> list[dict]:
    """Settings in which ES-GRPO is not faster than verl's best."""
    rows = [row for part in found.get("sweeps", {}).values() for row in part]
    rows += [row for part in found.get("policies", {}).values() for row in part]
    return [{"setting": row["setting"], "updates": row["updates"]} for row in rows
            if row["policy"] == "es-grpo" and row["updates"]["mean"] < NO_HELP]


def table(found: dict) -> str:
    """What the study says, for a terminal."""
    lines = ["SIMULATED. Ratios to verl (async) and its colocate_async (sync): updates/s (low to high over seeds) | "
             "used tokens/s, groups with gradient/s"]
    for place, rows in found.get("modules", {}).items():
        lines.append(f"\n{place}: {line(rows['whole'])}")
        for module, name in MODULES.items():
            row = rows[module]
            lines.append(f"  {row['rank']:6} {module} {name:28} brings {row['brings']:+.3f} groups with gradient/s, "
                         f"{row['brings_updates']:+.3f} updates/s, alone {row['alone']['gradient']['mean']:.3f}")
        lines += ["  " + line(row) for row in rows["changes"]]
    for part in ("policies", "sync", "steady", "sweeps"):
        for title, rows in found.get(part, {}).items():
            lines.append(f"\n{title}")
            lines += ["  " + line(row) for row in rows]
    return "\n".join(lines)


def line(row: dict) -> str:
    ratio, stale = row["updates"], row["staleness"]
    setting = {key: value for key, value in row["setting"].items() if key != "updates"}
    return (f"{row['policy']:22} {ratio['mean']:6.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) | "
            f"{row['used']['mean']:.3f}, {row['gradient']['mean']:.3f}  stale rows {stale['rows']['share']:.1%}, "
            f"{stale['rows']['mean']:.2f} versions, groups at most {stale['max']}  "
            f"bubble {row['bubble']['bubble_rate']:.2f}  {setting}")


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True,
                          cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


PARTS = {"modules": modules, "policies": compared, "sync": carried, "steady": steady, "sweeps": sweeps}


def main(argv=None) -> int:
    parser = console.command_line("bench.sim.study", __doc__)
    parser.add_argument("--out", type=console.output_file)
    parser.add_argument("--seeds", type=console.seeds, default="1,2,3")
    parser.add_argument("--parts", type=console.names(PARTS), default=",".join(PARTS))
    parser.add_argument("--small", action="store_true", help="toy sizes, to see that it works")
    options = parser.parse_args(argv)
    runs = Runs(options.seeds, SMALL if options.small else {})
    found = {"simulated": True, "device": f"simulated: {Device.load().name}", "tau": "bench/sim/h100.json",
             "command": shlex.join(["python", "-m", "bench.sim.study", *(sys.argv[1:] if argv is None else argv)]),
             "commit": commit(), "seeds": runs.seeds, "base": dataclasses.asdict(BASE),
             "ranks": {"High": HIGH, "Medium": MEDIUM,
                       "of": "what leaving the module out loses, in the baseline's groups with gradient/s"}}
    for part in options.parts:
        found[part] = PARTS[part](runs)
        found["where_it_does_not_help"] = no_help(found)
        if options.out:  # after each part: a killed study keeps what it has
            console.write(options.out, json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
