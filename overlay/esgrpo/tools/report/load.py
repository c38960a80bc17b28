"""Reads result files and run directories: what kind of record each one is, and where its numbers come from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from esgrpo.errors import EsgrpoError
from esgrpo.tools.report import runs, superseded, targets

# of a record with fields amiss
SHAPE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)
RUN_ERRORS = (*SHAPE_ERRORS, EsgrpoError)  # of a run directory; of a record an EsgrpoError is about matplotlib
NOT_RECORDED = "not recorded"
NO_RESULTS = ("arm.json", "metrics.jsonl", "metrics-timed.jsonl")  # of a run directory, which is read as a whole
SIMULATED = "simulated"
RUN_NOTE = "Read from the records of the runs, first response to last; times are those of their machines."


@dataclass(frozen=True)
class Record:
    """One file, or one part of a file. Texts are empty where the file does not say."""

    name: str
    kind: str
    data: dict
    command: str = ""
    commit: str = ""
    seeds: tuple[str, ...] = ()
    device: str = ""
    spread: str = ""
    simulated: bool = False
    notes: tuple[str, ...] = ()
    folder: Path = Path()  # that paths in `data` are relative to
    superseded: str = ""  # by which record, and why

    def provenance(self) -> dict[str, str]:
        """What a reader needs to get the numbers again, and what is missing for it."""
        facts = {"command": self.command, "commit": self.commit, "seed": ", ".join(self.seeds),
                 "device": self.device, "spread": self.spread}
        return {name: text or NOT_RECORDED for name, text in facts.items()}


def unknown(record: Record, error: Exception) -> Record:
    """The same record as one that was not understood, with the reason."""
    reason = f"taken for {record.kind!r}, but {type(error).__name__}: {error}"
    return replace(record, kind="unknown", notes=(*record.notes, reason))


BY_FIELDS = (
    (("points", "capacity"), "tau"), (("sync", "async", "requests"), "scheduler cost"),
    (("measured", "tokens"), "output cost"), (("overhead_ms", "control_ms"), "start-up"),
    (("scenarios", "penalty"), "estimator bias"), (("tasks", "projected", "draws"), "treatments"),
    (("families", "samples", "cap"), "start reward"), (("populations", "recovery_share"), "prompt sampling"),
    (("tasks", "shuffled", "missed"), "verdicts"), (("caps", "seeds"), "looks"),
    (("tasks", "thresholds"), "thresholds"), (("placements", "false_prunes", "by_kind"), "loops"),
    (("gates", "windows"), "gates"), (("worker_cost",), "verdict cost"),
)


# First match wins. A kind is recognised by the fields that its tables need, never by the file's name.
def _kind(data: dict) -> str:
    def has(*names):
        return all(name in data for name in names)

    runs_ = data.get("runs")  # of policies
    first = runs_[0] if isinstance(runs_, list) and runs_ and isinstance(runs_[0], dict) else {}
    if has("difference", "table"):
        return "comparison"
    if has("measures", "cells", "table"):
        return "robustness"
    if has("measures") and isinstance(data["measures"], dict):
        return "ablation"
    if "predicted_s" in first:
        return "validation"
    if has("ranks", "base"):
        return "study"
    if "policy" in first:
        return "simulation" if _is_simulated(data) else "engine"
    for names, kind in BY_FIELDS:
        if has(*names):
            return kind
    cases = data.get("cases")  # of the simulated fully async loop
    case = cases[0] if isinstance(cases, list) and cases and isinstance(cases[0], dict) else {}
    if "against_best_fixed" in case:
        return "simulated overlap"
    if "null_share" in case:
        return "simulated null groups"
    if "left_out" in case:
        return "simulated refill"
    arms = data.get("arms")
    if isinstance(arms, dict) and arms and all("throughput_ratio_own" in arm for arm in arms.values()):
        return "decode overhead"
    if isinstance(arms, dict) and arms and all({"before", "after", "moves"} <= set(arm) for arm in arms.values()):
        return "overlap"
    if has("command", "result"):
        return "check"
    return "unknown"


def _is_simulated(data: dict) -> bool:
    return SIMULATED in str(data.get("device", "")).lower() or bool(data.get(SIMULATED))


FACTS = ("versions",)  # parts of a file that are no records of their own
OVER_SEEDS = "median [lowest, highest] over seeds"
SPREADS = {
    "ablation": OVER_SEEDS, "robustness": OVER_SEEDS, "simulation": OVER_SEEDS, "prompt sampling": OVER_SEEDS,
    "study": "mean [lowest, highest] over seeds", "estimator bias": "z of every seed",
    "treatments": "mean [lowest, highest] over seeds", "start reward": "one seed",
    "engine": "median [lowest, highest] over runs", "validation": "every run shown",
    "comparison": "one run an arm", "overlap": "one run an arm", "check": "none: passes or fails",
    "scheduler cost": "median [95 % bootstrap] over rounds", "decode overhead": "median [95 % bootstrap] over windows",
    "output cost": "median [lowest, highest] over rounds", "start-up": "median [95 % bootstrap] over pairs",
    "tau": "median of three windows, spread in ms", "verdicts": "median [lowest, highest] over coins and orders",
    "looks": OVER_SEEDS, "thresholds": "none: no coin decides", "loops": "one seed", "gates": "every run shown",
    "verdict cost": OVER_SEEDS,
    "simulated overlap": OVER_SEEDS,
    "simulated null groups": "median over seeds", "simulated refill": "median over seeds",
}


def _commit(data: dict, notes: Iterable[str]) -> str:
    if data.get("commit"):
        return str(data["commit"])
    matches = (re.search(r"commit (\w+(?:-\w+)*)", note) for note in notes)
    return next((found.group(1) for found in matches if found), "")


def _device(data: dict, notes: list[str]) -> str:
    device = data.get("device") or data.get("machine") or {"cpu": data.get("cpu"), "cores": data.get("cores")}
    if isinstance(device, dict):
        parts = [device.get("cpu") or device.get("name"), device.get("cores") and f"{device['cores']} cores"]
        device = ", ".join(str(part) for part in parts if part)
    return str(device or (SIMULATED if data.get(SIMULATED) else notes[1] if len(notes) > 1 else ""))


def _seeds(data: dict) -> tuple[str, ...]:
    found = data.get("seeds", data.get("seed"))
    if found is None and isinstance(data.get("runs"), list):
        found = {run["seed"] for run in data["runs"] if isinstance(run, dict) and "seed" in run}
    if found is None and isinstance(data.get("measures"), dict):
        found = {seed for arm in data["measures"].values() for seed in arm}
    if found is None:
        return ()
    found = [found] if isinstance(found, int | str) else found
    return tuple(sorted(map(str, found), key=lambda seed: (len(seed), seed)))


def of(name: str, data: dict, outer: dict | None = None) -> list[Record]:
    """The records in one file: the file itself, or its parts when only they have a known shape."""
    data = targets.shared(_with_runs(_with_seed_level(data)))
    kind = _kind(data)
    if kind == "unknown" and outer is None:
        parts = [record for key, part in data.items() if isinstance(part, dict) and key not in FACTS
                 for record in of(f"{name}#{key}", {**part, **({SIMULATED: True} if key == SIMULATED else {})}, data)]
        if any(part.kind != "unknown" for part in parts):
            return parts
    notes = [str(note) for note in data.get("notes", [])]
    general = str((outer or {}).get("what") or data.get("what") or "")
    facts = {**{key: outer[key] for key in ("device", "commit", "command", "seeds") if outer and key in outer}, **data}
    if "command" not in facts and (commands := (outer or {}).get("commands")):
        facts["command"] = "; ".join(commands)
    return [Record(name, kind, data, command=str(facts.get("command", "")), commit=_commit(facts, notes),
                   seeds=_seeds(facts), device=_device(facts, notes), spread=SPREADS.get(kind, ""),
                   simulated=_is_simulated(facts) or kind in ("simulation", "study"),
                   notes=tuple([*notes, *([general] if general else [])]))]


def _with_seed_level(data: dict) -> dict:
    """`measures` as arm -> seed -> numbers; a file with one seed may leave that level out."""
    measures = data.get("measures")
    if not isinstance(measures, dict) or not measures or "seed" not in data:
        return data
    if all(isinstance(value, dict) for arm in measures.values() for value in arm.values()):
        return data
    return {**data, "measures": {arm: {str(data["seed"]): numbers} for arm, numbers in measures.items()}}


def _with_runs(data: dict) -> dict:
    """The simulator's `setting` and `policies` as `runs`, the shape of the engine benchmark."""
    if not isinstance(data.get("policies"), dict) or not isinstance(data.get("setting"), dict):
        return data
    setting = data["setting"]  # whose `staleness` is a bound, that of a run how old its rows were
    return {**data, "runs": [{"policy": name, **setting, **found, "staleness": setting.get("staleness"),
                              "versions_old": found.get("staleness")} for name, found in data["policies"].items()]}


def _left_out(line: dict) -> str:
    """Runs are [repeat, ..., policy]; the sizes are in no record from before they were kept."""
    sizes = [f"{line['groups']} groups x {line['members']}"] if "groups" in line else []
    sizes += [f"{key} {line[key]}" for key in ("cap", "seed") if key in line]
    names = ", ".join(" ".join([*names, *([f"#{repeat}"] if repeat else [])]) for repeat, *names in line["runs"])
    return f"Left out, {line.get('why', 'no reason given')}: {names}" + (f" ({', '.join(sizes)})" if sizes else "")


def _with_headroom(line: dict) -> dict:
    """A run of "april@0.05" is one of april in engines with that KV headroom: compared with others of the same."""
    name, _, share = line["policy"].partition("@")
    return {**line, "policy": name, "kv_headroom": float(share)} if share else line


def _joined(lines: list[dict]) -> list[dict]:
    """Appended lines of the engine benchmark: all runs as one record. A tau(b) that was measured where its engines
    started is counted, not shown: the simulator's validation uses it."""
    played = [_with_headroom(line) for line in lines if "policy" in line]
    runs_ = [line for line in played if "withdrawn" not in line]
    if not runs_:
        return [line for line in lines if line.get("kind") not in ("summary", "left_out")]
    facts = {key: "; ".join(dict.fromkeys(str(line[key]) for line in runs_ if line.get(key)))
             for key in ("command", "commit", "device")}
    left = [_left_out(line) for line in lines if line.get("kind") == "left_out"]  # a summary repeats what runs say
    wrong = dict.fromkeys(f"Withdrawn, {line['policy']}: {line['withdrawn']}."
                          for line in played if "withdrawn" in line)
    hosts = dict.fromkeys(f"Beside it on the host: {line['host']}." for line in runs_ if line.get("host"))
    taus = sum(line.get("kind") == "tau" for line in lines)
    starts = [f"tau(b) was measured at {taus} of the starts, too: the file holds it."] if taus else []
    return [{**facts, "runs": runs_, "notes": [*left, *wrong, *hosts, *starts]}]


def _contents(path: Path) -> list[dict]:
    """One object, or an object a line; what cannot be read says so in its notes."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # what is no UTF-8, no JSON, or brackets without end
        try:
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            lines = []
        if not lines:
            return [{"notes": [f"no JSON: {error}"]}]
        if all(isinstance(line, dict) for line in lines):
            return _joined(lines)
        data = lines
    if isinstance(data, dict) and data.get("kind") == "run":  # the engine benchmark's first line, alone so far
        return _joined([data])
    return [data if isinstance(data, dict) else {"notes": [f"a JSON {type(data).__name__}, not an object"]}]


def records(root: Path) -> list[Record]:
    """Every *.json and *.jsonl directly in `root`, and every run directory in it or it itself, in order of name."""
    found, later = [], superseded.replaced(root)
    for path in sorted([*root.glob("*.json"), *root.glob("*.jsonl")]):
        if path.name in NO_RESULTS:
            continue
        parts = _contents(path)
        for number, data in enumerate(parts, 1):
            name = path.name if len(parts) == 1 else f"{path.name}#{number}"
            try:
                found += [replace(record, folder=root, superseded=later.get(path.name, ""))
                          for record in of(name, data)]
            except SHAPE_ERRORS as error:
                found.append(unknown(Record(name, "unknown", data), error))
    covered = {arm for record in found if record.kind == "comparison" for arm in record.data.get("curves", {})}
    return found + _runs([path for path in runs.directories(root) if path.name not in covered])


def _runs(run_dirs: list[Path]) -> list[Record]:
    """Run directories side by side as one record, named as they are; one that cannot be read as one of its own."""
    found, broken = {}, []
    for path in run_dirs:
        name = path.resolve().name
        try:
            found[name] = runs.condense(path)
        except RUN_ERRORS as error:
            broken.append(unknown(Record(name, "run", {}), error))
    if not found:
        return broken
    commands = [f"{name}: {one['command']}" for name, one in found.items() if one["command"]]
    seeds = {seed for one in found.values() for seed in one["seeds"]}
    torn = [f"{name}: {one['torn']} rows were cut short, as where a process is killed, and are left out"
            for name, one in found.items() if one["torn"]]
    return [Record("run directories", "run", {"runs": found}, command="; ".join(commands), spread="one run each",
                   seeds=tuple(sorted(seeds)), notes=(RUN_NOTE, *torn)), *broken]
