"""Condenses the records of a run directory (RUN_DIR/esgrpo/*.jsonl) to curves and totals that a report can draw.

bench/ stores the same curves in its result files, so that a picture of an old run needs no run directory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from esgrpo.algo import books
from esgrpo.algo.accounting import bubble, is_left_out, quantile, tail_ratio, token_balance
from esgrpo.algo.terms import Outcome
from esgrpo.records import read, read_counted
from esgrpo.tools import hook_states, run_dirs

CAUSES = ("paused", "starved", "tail", "sync")  # of the bubble rate of a training run
KINDS = ("responses", "trained", "replaced", "windows", "events", "moves")
BIN_S = 10.0
BINS_PER_OCTAVE = 4  # of a histogram of lengths
QUEUE_ORDER_MARGIN_S = 2.0  # between the end of a group's last response and its place in the queue
DIGITS = 4
VERSION_ROWS = 12  # of a table over weight versions, which it puts together
WAITING = ("idle", "wait")  # of the rollouter and of the trainer
HOLD = 2  # evaluations in a row at which a target counts as reached


def directories(root: Path) -> list[Path]:
    """Run directories: `root` itself, or those directly in it, also one that has no response or may not be read."""
    return [path for path in (root, *sorted(p for p in root.iterdir() if p.is_dir()))
            if run_dirs.has_rows(str(path)) or _is_closed(path / "esgrpo")]


def _is_closed(folder: Path) -> bool:
    return os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK)


def time_average(timeline: list[tuple[float, float]], width: float = BIN_S) -> list[tuple[float, float]]:
    """Time-weighted means of a step function, given as (second, value from then on), over bins of `width` seconds.

    A point stands at the middle of its bin. The raw steps of two arms would cover one another.
    """
    sums: dict[int, float] = {}
    spans: dict[int, float] = {}
    for (start, value), (end, _) in zip(timeline, timeline[1:], strict=False):
        while start < end:
            bin_number = int(start // width)
            piece = min(end, (bin_number + 1) * width) - start
            sums[bin_number] = sums.get(bin_number, 0.0) + value * piece
            spans[bin_number] = spans.get(bin_number, 0.0) + piece
            start += piece
            if piece <= 0:  # float rounding at a bin's edge
                break
    return [((number + 0.5) * width, sums[number] / spans[number]) for number in sorted(spans) if spans[number] > 0]


def histogram(lengths: Iterable[int]) -> list[list[int]]:
    """[bin, count] pairs; bin k holds lengths from 2^(k / BINS_PER_OCTAVE) tokens up to the next bin's."""
    counts: dict[int, int] = {}
    for length in lengths:
        number = math.floor(BINS_PER_OCTAVE * math.log2(max(1, length)))
        counts[number] = counts.get(number, 0) + 1
    return [[number, counts[number]] for number in sorted(counts)]


def by_version(windows: list[dict]) -> list[tuple[float, dict[str, float]]]:
    """(start, causes of the bubble and mean decoding requests) per weight version, over all replicas.

    The rollouter's pause is one number for all replicas, repeated in each window.
    """
    versions: dict[int, list[dict]] = {}
    for window in windows:
        versions.setdefault(window["version"], []).append(window)
    found = []
    for ws in versions.values():
        running = sum(w["used"] / w["seconds"] for w in ws if w["seconds"] > 0)
        found.append((min(w["start"] for w in ws), {**bubble(ws, ws[0]["rollouter_paused"]), "running": running}))
    return sorted(found, key=lambda version: version[0])


def time_to_target(evaluations: list[tuple[float, float]], target: float) -> float | None:
    """Seconds of the first of `HOLD` consecutive evaluations (seconds, reward) at or above the target; the first of a
    run, before any training, is not among them."""
    for index in range(len(evaluations) - HOLD + 1):
        if all(reward >= target for _, reward in evaluations[index:index + HOLD]):
            return evaluations[index][0]
    return None


def curves(evaluations: list[tuple[float, float]], windows: list[dict], rows: list[dict], start: float,
           target: float | None = None) -> dict:
    """What a figure needs of one run; seconds since `start`. `rows` are responses with their fates."""
    versions = by_version(windows)
    end = (max((w["start"] + w["seconds"] for w in windows), default=start) - start, 0.0)
    series = {name: time_average([(at - start, found[name]) for at, found in versions] + [end])
              for name in (*CAUSES, "running")}
    points = {"evaluations": evaluations, "running": series["running"],
              "bubble": [[at, *[series[cause][i][1] for cause in CAUSES]]
                         for i, (at, _) in enumerate(series["running"])]}
    return {**{name: [[round(v, DIGITS) for v in point] for point in found if name == "evaluations" or point[0] >= 0]
               for name, found in points.items()},
            "target": target, "sampled": histogram(r["tokens"] for r in rows),
            "trained": histogram(r["tokens"] for r in rows if r["trained"] and not is_left_out(r))}


def with_fates(run_dir: Path, since: float, until: float) -> list[dict]:
    """Responses that ended in this time, each with what became of it so far."""
    updates = [row for row in read(str(run_dir), "trained") if row["time"] <= until]
    starts = {kind: [row for row in read(str(run_dir), kind) if row["time"] <= until]
              for kind in ("start", "checkpoint")}
    undone = books.rolled_back(updates, starts)
    trained = {books.response_of(row): row for row in updates}
    replaced = {books.response_of(row) for sample in read(str(run_dir), "replaced") for row in sample["rows"]}
    rows = []
    for row in read(str(run_dir), "responses"):
        response = books.response_of(row)
        if since <= row["time"] <= until:
            fate = {"trained": False, "gradient": False, "rolled_back": response in undone}
            update = vars(trained[response]) if response in trained and response not in undone else {}
            rows.append({**vars(row), "pruned": row["outcome"] == Outcome.PRUNE, "replaced": response in replaced,
                         **fate, **update})
    return rows


def settled(rows: list[dict]) -> list[dict]:
    """Rows whose fate is known. What still runs or queues when the budget ends is neither trained nor wasted.

    verl's queue is first in, first out, `algo.experience.Backlog` has the oldest weights first: in both a complete
    group that is not trained, although a later one of the same or newer weights is, was dropped.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(books.response_of(row)[:-1], []).append(row)
    size = max(map(len, groups.values()), default=0)
    queued = {group: max(r["ended"] for r in members) for group, members in groups.items()}
    oldest = {group: min((span[0] for r in members for span in r.get("spans") or ()), default=0)
              for group, members in groups.items()}
    last: dict[int, float] = {}  # of the trained groups of these weights the one that came last
    for group, members in groups.items():
        if any(r["trained"] for r in members):
            last[oldest[group]] = max(last.get(oldest[group], 0.0), queued[group])

    def dropped(group: tuple) -> bool:
        return any(weights >= oldest[group] and queued[group] < ended - QUEUE_ORDER_MARGIN_S
                   for weights, ended in last.items())

    return [row for group, members in groups.items() for row in members
            if row["trained"] or row["rolled_back"] or (len(members) == size and dropped(group))]


def training_reward(rows: list[dict], start: float) -> list[tuple[float, float]]:
    """Mean score of trained responses per bin of the time at which they were trained."""
    bins: dict[int, list[float]] = {}
    for row in rows:
        if row["trained"] and not is_left_out(row):
            bins.setdefault(int((row["time"] - start) // BIN_S), []).append(row["score"])
    return [((number + 0.5) * BIN_S, sum(scores) / len(scores)) for number, scores in sorted(bins.items())]


def since(events: Iterable[Mapping], start: float) -> list[Mapping]:
    """Events of the loop from `start` on, when the first response began: what went before is start-up.

    Of an event that began earlier the time before is cut off what was idle in it, because nothing could run then.
    """
    found = []
    for event in events:
        before = start - event["start"]
        if before >= event["seconds"] > 0:
            continue
        name = next((name for name in WAITING if name in event["spent"]), None)
        cut = min(before, event["spent"][name]) if before > 0 and name else 0.0
        found.append({**event, "seconds": event["seconds"] - cut,
                      "spent": {**event["spent"], name: event["spent"][name] - cut}} if cut else event)
    return found


def of_loop(events: Iterable[Mapping], windows: Iterable[Mapping]) -> dict[str, float]:
    """Where both sides of a fully async loop spent their time, and what they measured; without events only surprisal.

    Shares of a side sum to 1. Ages are weighted by trained tokens, groups in flight by time.
    """
    found, events = {}, list(events)
    for side in ("train", "rollout"):
        mine = [event for event in events if event["side"] == side]
        seconds = sum(event["seconds"] for event in mine)
        if seconds > 0:
            found.update({f"{side}: {name}, share of its time": sum(
                event["spent"].get(name, 0.0) for event in mine) / seconds for name in mine[0]["spent"]})
    flying = [event for event in events if event["in_flight"] is not None and event["seconds"] > 0]
    if flying:
        found["groups in flight"] = sum(event["in_flight"] * event["seconds"] for event in flying) / sum(
            event["seconds"] for event in flying)
    aged = [event for event in events if event["age"] is not None and event["tokens"]]
    if aged:
        found["age of trained tokens, weight versions"] = sum(event["age"] * event["tokens"] for event in aged) / sum(
            event["tokens"] for event in aged)
    queued = [event for event in events if event["queued_s"] is not None and event["groups"]]
    if queued:
        found["wait in the queue, s"] = sum(event["queued_s"] * event["groups"] for event in queued) / sum(
            event["groups"] for event in queued)
    windows = list(windows)
    counted = sum(window["surprisal_tokens"] for window in windows)
    if counted:
        found["surprisal, nats a token"] = sum(window["surprisal"] for window in windows) / counted
    return found


def loop_by_version(events: Iterable[Mapping]) -> list[list]:
    """[first version, last version, part -> share of its side's time], oldest first; as many versions in each row.

    Shares of a side in a row sum to 1; a side without an event there has none.
    """
    events = list(events)
    versions = sorted({event["version"] for event in events})
    step = max(1, -(-len(versions) // VERSION_ROWS))
    found = []
    for first in range(0, len(versions), step):
        mine = versions[first:first + step]
        shares = {}
        for side in ("train", "rollout"):
            theirs = [event for event in events if event["side"] == side and event["version"] in mine]
            seconds = sum(event["seconds"] for event in theirs)
            if seconds > 0:
                shares.update({f"{side}: {name}": sum(event["spent"].get(name, 0.0) for event in theirs) / seconds
                               for name in theirs[0]["spent"]})
        found.append([mine[0], mine[-1], shares])
    return found


def moves_of(rows: Iterable[Mapping]) -> list[list]:
    """[version, cause, name -> (before, after) of what changed] of every move of the overlap controller."""
    return [[row["version"], row["cause"], {**{name: (row["before"].get(name), value) for name, value in
                                               row["after"].items() if value != row["before"].get(name)},
                                            **row.get("also", {})}] for row in rows]


def _arm(run_dir: Path) -> dict:
    path = run_dir / "arm.json"  # written by bench/common/arm.py; another launcher writes none
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def responses_of(run_dir: Path) -> list[Mapping]:
    """Raises ValueError without any: a run that died early."""
    found = read(str(run_dir), "responses")
    if not found:
        raise ValueError("there are rows, but no responses")
    return found


def condense(run_dir: Path) -> dict:
    """Totals and curves of one run, from its first response on."""
    arm = _arm(run_dir)
    responses = responses_of(run_dir)
    start = min(r["started"] for r in responses)
    rows = with_fates(run_dir, 0.0, math.inf)
    windows = [w for w in read(str(run_dir), "windows") if w["start"] + w["seconds"] > start]
    balance = token_balance(settled(rows))
    seconds = max(r["time"] for r in responses) - start
    rates = bubble(windows, sum({w["version"]: w["rollouter_paused"] for w in windows}.values()))
    lengths = [r["tokens"] for r in responses]
    overrides = arm.get("overrides", [])
    hooks, events = run_dir / "esgrpo" / "hooks.json", since(read(str(run_dir), "events"), start)
    return {
        "command": f"arm {arm['name']!r} of a benchmark, {len(overrides)} overrides in its arm.json" if arm else "",
        "seeds": [o.partition("=")[2] for o in overrides if o.startswith("data.seed=")],
        "torn": sum(read_counted(str(run_dir), kind)[1] for kind in KINDS),
        "hooks": hook_states.read("report", str(hooks), "the run is left out") if hooks.exists() else [],
        "curves": curves(training_reward(rows, start), windows, rows, start),
        "facts": {
            "seconds": seconds, "responses": len(rows), "pruned": sum(r["outcome"] == Outcome.PRUNE for r in rows),
            "decoded tokens/s": sum(lengths) / seconds if seconds else 0.0,
            "bubble rate": rates["bubble_rate"], **{f"bubble {cause}": rates[cause] for cause in CAUSES},
            **{f"tokens {fate}": count for fate, count in balance.items()},
            "length P50": quantile(lengths, 0.5), "length P99": quantile(lengths, 0.99),
            "tail ratio": tail_ratio(r["ended"] - r["started"] for r in responses),
            **of_loop(events, windows)},
        "loop": loop_by_version(events),
        "moves": moves_of(read(str(run_dir), "moves")),
    }
