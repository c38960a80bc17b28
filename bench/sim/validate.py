"""python -m bench.sim.validate RUNS... [--tau FILE ...] [--out FILE]: does the simulator predict real engines' times?

RUNS is what bench.engine wrote: JSON lines, or one JSON object with `tau` and `runs`. Each run is simulated with the
same policy, workload and limits on the measured device, which was measured with fixed batches and never saw these
workloads: with the median of the `tau` records of the file, which are taken where engines start. (One of them alone
says less: engines that start beside it disturb it.) These have one context length. What a longer one costs is known
from --tau, what bench.engine.tau wrote about the same device; the first of these serves a file that has no record.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from pathlib import Path

from bench.common import console
from bench.common.provenance import commit
from bench.common.workload import PRESETS, replay
from bench.sim.device import LEAST_MS, Device, read_tau
from bench.sim.experiment import Setting, run

CLOSE = 0.10  # of the measured makespan: what the project asks for
SAME = ("replicas", "groups", "members", "cap", "updates", "scenario", "seed", "scale", "train_s", "staleness")
NEEDED = ("workload", "policy", "max_num_seqs", "makespan_s")


def load(path: Path) -> tuple[dict | None, list[dict]]:
    """(record of the device, runs). Raises ValueError when there is no run."""
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except ValueError:  # JSON lines
        rows = [json.loads(row) for row in text.splitlines() if row.strip()]
        taus = [read_tau(row) for row in rows if row.get("kind") == "tau"]
        runs = [row for row in rows if row.get("kind") == "run"]
    else:
        taus = [read_tau(found)] if "tau" in found else []
        runs = found.get("runs") or ([found] if found.get("kind") == "run" else [])
    if not runs:
        raise ValueError(f"{path} has no runs")
    if missing := [name for row in runs for name in NEEDED if name not in row]:
        raise ValueError(f"a run without {missing[0]}")
    return median_of(taus), runs


def median_of(taus: list[dict]) -> dict | None:
    """One record of a device that was measured several times; None when it was not measured."""
    if not taus:
        return None
    found = dict(taus[-1])
    for key, value in found.items():
        each = [tau[key] for tau in taus if key in tau]
        if key.startswith("ms_per_step"):  # batch size -> ms
            found[key] = {batch: statistics.median(one[batch] for one in each if batch in one) for batch in value}
        elif key in ("ns_per_kv_token", "prefill_tokens_per_s"):
            found[key] = statistics.median(each)
    return found


def with_context(tau: dict, device: dict | None) -> dict:
    """`tau`, taken at one context length, with what `device` says of others: ns a step and token in the KV cache."""
    points = tau.get("points", [])
    if tau.get("ns_per_kv_token") or not points or device is None or not device.get("ns_per_kv_token"):
        return tau
    slope, tokens = device["ns_per_kv_token"], statistics.median(row["kv_tokens"] for row in points)
    return {**tau, "ns_per_kv_token": slope, "ms_per_step": {
        batch: max(LEAST_MS, ms - slope * 1e-6 * int(batch) * tokens) for batch, ms in tau["ms_per_step"].items()}}


def predict(measured: dict, tau: dict) -> dict:
    """One run beside its simulation. Seconds."""
    generated = measured["workload"] in PRESETS
    setting = Setting(**{name: measured[name] for name in SAME if name in measured},
                      workload=measured["workload"] if generated else Setting.workload,
                      sequences=measured["max_num_seqs"], prompts=measured.get("prompts", 0))
    device = Device.from_record(tau, kv_tokens=measured.get("kv_tokens"), weight_sync=measured.get("sync_s"),
                                devices=max(1, measured.get("devices", 0)))
    trace = None if generated else iter(replay(measured["workload"], setting.members, setting.cap))
    found = run(setting, measured["policy"], device, trace)
    error = found["makespan_s"] / measured["makespan_s"] - 1
    return {"policy": measured["policy"], "scenario": setting.scenario, "workload": measured["workload"],
            "seed": setting.seed, "groups": setting.groups, "cap": setting.cap, "repeat": measured.get("repeat", 0),
            "measured_s": measured["makespan_s"], "predicted_s": found["makespan_s"], "error": round(error, 4),
            "decoded_measured": measured.get("decoded"), "decoded_predicted": found["decoded"]}


def judge(rows: list[dict]) -> dict:
    """How close: over runs, and per workload (its mean over policies of the absolute error)."""
    errors = [abs(row["error"]) for row in rows]
    loads: dict[str, list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        name = " ".join(f"{key} {row[key]}" for key in ("workload", "seed", "cap", "groups", "scenario", "device"))
        loads.setdefault(name, []).append(error)
    each = {name: round(statistics.mean(found), 4) for name, found in loads.items()}
    return {"runs": len(rows), "median_error": round(statistics.median(errors), 4), "max_error": max(errors),
            "within_10_percent": sum(error <= CLOSE for error in errors), "workloads": each,
            "workloads_within_10_percent": sum(error <= CLOSE for error in each.values())}


def main(argv=None) -> int:
    parser = console.command_line("bench.sim.validate", __doc__)
    parser.add_argument("runs", type=console.existing_file, nargs="+")
    parser.add_argument("--tau", type=console.existing_file, nargs="+", default=[])
    parser.add_argument("--out", type=console.output_file)
    options = parser.parse_args(argv)
    given, rows = [], []
    for path in options.tau:
        with console.reading("--tau", path, "what bench.engine.tau writes"):
            given.append(read_tau(json.loads(path.read_text(encoding="utf-8"))))
    for path in options.runs:
        with console.reading("RUNS", path, "what bench.engine writes"):
            own, runs = load(path)
        if not (tau := own or next(iter(given), None)):
            parser.error(f"{path} has no record of kind tau; name one with --tau")
        tau = with_context(tau, next((one for one in given if one["device"] == tau["device"]), None))
        rows += [{**predict(row, tau), "device": tau["device"], "file": path.name} for row in runs]
    print(f"{'scenario':8} {'policy':14} {'workload':10} {'cap':>6} {'measured':>10} {'SIMULATED':>11} {'error':>7}")
    for row in rows:
        print(f"{row['scenario']:8} {row['policy']:14} {row['workload'][-10:]:10} {row['cap']:6d} "
              f"{row['measured_s']:10.2f} {row['predicted_s']:11.2f} {row['error']:+7.1%}")
    verdict = judge(rows)
    print(json.dumps(verdict))
    if options.out:
        command = shlex.join(["python", "-m", "bench.sim.validate", *(sys.argv[1:] if argv is None else argv)])
        record = {"simulated": True, "command": command, "commit": commit(), "runs": rows, "verdict": verdict,
                  "device": "simulated: " + ", ".join(dict.fromkeys(row["device"] for row in rows))}
        console.write(options.out, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
