"""Requests on replicas as a Chrome trace (JSON object format), for Perfetto or chrome://tracing.

A replica is a process, a slot a thread: a request takes the lowest slot that is free. A span is what a request decoded
on a replica between two decision points; weight syncs and prunes are instant events; running requests are a counter.
"""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from esgrpo.algo.terms import Outcome
from esgrpo.errors import EsgrpoError
from esgrpo.records import read
from esgrpo.tools.report import load, runs
from esgrpo.tools.report.files import write_whole

US = 1e6  # the format counts microseconds
REPLICAS_UNKNOWN = "replica not told"
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Stay:
    """One request on one replica; seconds. `cuts` are decision points inside it, (second, tokens so far)."""

    process: str
    name: str
    start: float
    end: float
    outcome: str
    cuts: tuple[tuple[float, int | None], ...] = ()
    facts: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """An instant event of a process."""

    process: str
    name: str
    at: float


def slots(stays: list[Stay]) -> list[int]:
    """The lowest free slot of its process for every stay, in the order given; stays of one slot never overlap."""
    free: dict[str, list[int]] = {}
    busy: dict[str, list[tuple[float, int]]] = {}
    found = [0] * len(stays)
    for index in sorted(range(len(stays)), key=lambda i: (stays[i].start, stays[i].end)):
        stay = stays[index]
        mine, unused = busy.setdefault(stay.process, []), free.setdefault(stay.process, [])
        while mine and mine[0][0] <= stay.start:
            heapq.heappush(unused, heapq.heappop(mine)[1])
        found[index] = heapq.heappop(unused) if unused else len(mine)
        heapq.heappush(mine, (stay.end, found[index]))
    return found


def events(stays: list[Stay], moments: list[Moment]) -> list[dict]:
    """The trace events; time 0 is the first of them."""
    start = min([*(stay.start for stay in stays), *(moment.at for moment in moments)], default=0.0)
    names = sorted({stay.process for stay in stays} | {moment.process for moment in moments})
    pids = {name: number for number, name in enumerate(names, 1)}

    def at(second: float) -> float:
        return round((second - start) * US, 1)

    found = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
             for name, pid in pids.items()]
    placed = list(zip(stays, slots(stays), strict=True))
    found += [{"ph": "M", "name": "thread_name", "pid": pids[process], "tid": slot + 1,
               "args": {"name": f"slot {slot}"}} for process, slot in sorted({(s.process, n) for s, n in placed})]
    for stay, slot in placed:
        inside = [(min(max(at_, stay.start), stay.end), tokens) for at_, tokens in stay.cuts]
        edges = [(stay.start, None), *inside, (stay.end, stay.facts.get("tokens"))]
        for number, ((begin, _), (end, tokens)) in enumerate(zip(edges, edges[1:], strict=False)):
            facts = {**stay.facts, "segment": number, "tokens_so_far": tokens, "outcome": stay.outcome}
            found.append({"ph": "X", "name": stay.name, "cat": stay.outcome, "pid": pids[stay.process],
                          "tid": slot + 1, "ts": at(begin), "dur": max(0.0, round(at(end) - at(begin), 1)),
                          "args": {key: value for key, value in facts.items() if value is not None}})
    pruned = (Moment(s.process, f"prune {s.name}", s.end) for s in stays if s.outcome == Outcome.PRUNE)
    for moment in [*moments, *pruned]:
        found.append({"ph": "i", "name": moment.name, "cat": "event", "ts": at(moment.at), "tid": 0,
                      "pid": pids[moment.process], "s": "p"})
    return found + _counters(stays, pids, at)


def _counters(stays: list[Stay], pids: dict[str, int], at) -> list[dict]:
    changes = sorted([(s.start, 1, s.process) for s in stays] + [(s.end, -1, s.process) for s in stays])
    running = dict.fromkeys(pids, 0)
    found = []
    for second, step, process in changes:
        running[process] += step
        found.append({"ph": "C", "name": "running", "pid": pids[process], "ts": at(second),
                      "args": {"requests": running[process]}})
    return found


def of_run_directory(run_dir: Path) -> tuple[list[Stay], list[Moment]]:
    """Attempts of the responses of a training run, from second 0 on. An attempt that a weight sync aborted does not say
    where it was; nor do records from before replicas were named, where a response is one span."""
    def process(replica: str) -> str:
        return f"{run_dir.resolve().name}: {f'replica {replica}' if replica else REPLICAS_UNKNOWN}"

    responses = runs.responses_of(run_dir)
    zero = min(r["started"] for r in responses)
    stays = []
    for r in responses:
        places, done = r.get("places") or [["", r["started"], r["ended"], r["tokens"]]], 0
        for number, (replica, since, until, tokens) in enumerate(places, 1):
            last, done = number == len(places), done + tokens
            stays.append(Stay(
                process(replica), f"{r['group']}/{r['member']}", max(0.0, since - zero), until - zero,
                r["outcome"] if last else INTERRUPTED,
                facts={"tokens": done, "attempt": number, "boundaries": r["boundaries"],
                       "rule": r["rule"] or None if last else None, "versions": str(r["spans"])}))
    ends: dict[tuple[str, int], float] = {}
    for window in read(str(run_dir), "windows"):
        key, end = (window.get("replica", ""), window["version"]), window["start"] + window["seconds"]
        ends[key] = max(end, ends.get(key, -math.inf))
    return stays, [Moment(process(replica), f"weight sync after version {version}", end - zero)
                   for (replica, version), end in ends.items() if end >= zero]


def of_policy_run(one: dict, folder: Path) -> tuple[list[Stay], list[Moment]]:
    """Requests of one run of the engine benchmark; nothing when its trace is not kept beside the record.

    The first span of a request lasts until its first token: waiting and prefill.
    """
    file = folder / one["trace"]
    if not file.is_file():
        return [], []
    label = f"{one['scenario']} {one['policy']} #{one.get('repeat', 0)}"
    stays = []
    for sample in json.loads(file.read_text(encoding="utf-8")):
        for number, row in enumerate(sample["attempts"]):
            if row.get("end") is None:
                continue  # was running when the run was over
            cuts = ([(row["first"], row["done"])] if row["first"] is not None else []) + row["boundaries"]
            stays.append(Stay(f"{label} replica {row['replica']}", f"{sample['group']}/{sample['member']}",
                              row["submit"], row["end"], row["outcome"], tuple((at, tokens) for at, tokens in cuts),
                              {"tokens": row["done"] + row["decoded"], "target": sample["tokens"], "attempt": number}))
    syncs = [Moment(process, f"update {number}", at) for process in sorted({stay.process for stay in stays})
             for number, at in enumerate(one.get("update_times", ()), 1)]
    return stays, syncs


def collect(root: Path) -> tuple[list[Stay], list[Moment], list[str]]:
    """All requests that the records of `root` know, and what was not understood; several runs stand below one another,
    each from second 0."""
    stays: list[Stay] = []
    moments: list[Moment] = []
    odd: list[str] = []
    parts = [(path.resolve().name, of_run_directory, (path,)) for path in runs.directories(root)]
    parts += [(one["trace"], of_policy_run, (one, record.folder)) for record in load.records(root)
              if record.kind == "engine" for one in record.data["runs"] if one.get("trace")]
    for name, read_part, arguments in parts:
        try:
            more_stays, more_moments = read_part(*arguments)
        except load.SHAPE_ERRORS:
            odd.append(name)
            continue
        stays += more_stays
        moments += more_moments
    return stays, moments, odd


def write(root: Path, path: Path) -> tuple[int, list[str]]:
    """Writes the trace of all records under `root`; returns the number of events, and what was not understood.

    Raises EsgrpoError when no record has requests, or `path` cannot be written.
    """
    stays, moments, odd = collect(root)
    if not stays:
        raise EsgrpoError("report --trace", f"no record in {root} has requests", "a run directory, or engine results "
                          "with traces", "nothing was written", "give a run directory (trainer.default_local_dir)")
    found = events(stays, moments)
    write_whole(path, json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}), "--trace")
    return len(found), odd
