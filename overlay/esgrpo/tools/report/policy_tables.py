"""Tables of policies: the engine benchmark and the simulator, tau(b), predicted against measured."""

from __future__ import annotations

import statistics
from pathlib import Path

from esgrpo.tools.report.load import NOT_RECORDED, Record
from esgrpo.tools.report.tables import BASELINES, DASH, OURS, Table, baseline_of, number, spread

SETTING = ("workload", "scenario", "groups", "members", "cap", "replicas", "updates", "scale", "tail", "prompts",
           "sequences", "max_num_seqs", "train_s", "sync_s", "staleness", "capacity", "model", "kv_headroom",
           "device")
OWN_CARRY_OVER = "colocate_async"  # verl's: what it does best under a barrier
NO_RIVALS = (*BASELINES, "oracle")  # an oracle knows the true lengths; nobody has one


def same_work(run_: dict) -> tuple:
    """What two runs must share to be compared: (name, value) pairs."""
    return tuple((key, run_[key]) for key in SETTING if key in run_)


def titles(works: list[tuple]) -> dict[tuple, str]:
    """Short names of settings: the workload, and what else differs between the settings of a record."""
    always = {"workload", "scenario", "groups", "members", "cap", "replicas"}
    named = {work: dict(work) for work in works}
    other = [key for key in SETTING if key not in always and len({str(one.get(key)) for one in named.values()}) > 1]
    found = {}
    for work, one in named.items():
        parts = [str(one[key]) for key in ("workload", "scenario") if key in one]
        parts += [f"{one['groups']} groups x {one['members']}"] if {"groups", "members"} <= set(one) else []
        parts += [f"{key} {one[key]}" for key in ("cap", "replicas", *other) if key in one]
        found[work] = ", ".join(parts)
    return found


def settings(record: Record) -> str:
    """Everything that the runs of a record have in common and that no title says."""
    works = [dict(same_work(one)) for one in record.data["runs"]]
    common = {key: works[0].get(key) for key in SETTING[6:] if key != "device"
              and len({str(work.get(key)) for work in works}) == 1 and works[0].get(key) is not None}
    return ", ".join(f"{key} {value}" for key, value in common.items())


def by_work(runs: list[dict]) -> dict[tuple, dict[str, list[dict]]]:
    """Settings -> policy -> runs."""
    found: dict[tuple, dict[str, list[dict]]] = {}
    for one in runs:
        found.setdefault(same_work(one), {}).setdefault(one["policy"], []).append(one)
    return found


def seconds(one: dict) -> float:
    """Makespan of one update's batch of groups; of the whole run where nothing finer was kept."""
    if "s_per_update" in one:
        return one["s_per_update"]
    return one["update_s"]["mean"] if "update_s" in one else one["makespan_s"]


def makespan(runs: list[dict]) -> float:
    return statistics.median(map(seconds, runs))


def base_of(work: tuple, policies: dict[str, list[dict]]) -> str | None:
    """What ratios are against: under a barrier verl's own carry-over where it was played."""
    carried = dict(work).get("scenario") == "sync" and OWN_CARRY_OVER in policies
    return OWN_CARRY_OVER if carried else baseline_of(policies)


def staleness(runs: list[dict]) -> str:
    """Rows that hold a token of older weights and how many versions old a row is, medians over runs; of whole groups
    where a record has no more."""
    known = [found for one in runs if isinstance(found := one.get("versions_old", one.get("staleness")), dict)]
    if not known:
        return NOT_RECORDED
    what = "rows" if all("rows" in found for found in known) else "groups"
    parts = [found.get(what, found) for found in known]
    share, mean = (statistics.median(part[key] for part in parts) for key in ("share", "mean"))
    tokens = [found["tokens"]["share"] for found in known if "tokens" in found]
    also = f", {statistics.median(tokens):.0%} of tokens" if tokens else ""
    return f"{share:.0%} of {what}{also}, {number(mean)} versions"


def decisions(runs: list[dict]) -> str:
    """What changed something, by module, median over runs."""
    known = [one["decisions"] for one in runs if "decisions" in one]
    medians = {module: statistics.median(found[module] for found in known) for module in (known[0] if known else ())}
    return ", ".join(f"{module} {number(count)}" for module, count in medians.items() if count) or (
        "none" if known else NOT_RECORDED)


def rivals(policies: dict[str, list[dict]]) -> list[str]:
    """What is neither the baseline nor ours nor an oracle."""
    return sorted(name for name in policies if name not in NO_RIVALS and not name.startswith(OURS))


def best_rival(policies: dict[str, list[dict]]) -> str | None:
    """The fastest of the rivals that were played."""
    return min(rivals(policies), key=lambda name: makespan(policies[name]), default=None)


def effective(one: dict) -> float:
    """Trained tokens per second: what a policy that cuts or drops long responses cannot win by."""
    return one["trained"] / one["makespan_s"]


def matched(ours: list[dict], theirs: list[dict]) -> list[tuple[dict, dict]]:
    """(ours, theirs) of one command (its start is `time`), with the same seed and repeat."""
    def key(one):
        return one.get("time"), one.get("seed"), one.get("repeat")

    other = {key(one): one for one in theirs}
    return [(one, other[key(one)]) for one in ours if key(one) in other]


def sides(ours: list[dict], theirs: list[dict]) -> tuple[list[dict], list[dict]]:
    """The runs of both that have a partner, all of them where nobody has one: what may stand beside their ratio."""
    both = matched(ours, theirs)
    return ([mine for mine, _ in both], [other for _, other in both]) if both else (ours, theirs)


def pairs(ours: list[dict], theirs: list[dict], measure) -> list[float]:
    """Ours over theirs, each pair `matched`."""
    return [measure(mine) / measure(other) for mine, other in matched(ours, theirs) if measure(other)]


def speedups(ours: list[dict], theirs: list[dict]) -> list[float]:
    """Their makespan over ours."""
    return pairs(ours, theirs, lambda one: 1 / seconds(one))


def _completion(runs: list[dict]) -> str:
    parts = [[one["completion_s"].get(q) for one in runs if "completion_s" in one] for q in ("p50", "p90", "p99")]
    return " / ".join(f"{statistics.median(v):.3g}" if (v := [x for x in p if x is not None]) else DASH for p in parts)


def causes(one: dict) -> dict[str, float]:
    """Bubble by cause; the total that records also hold is left out."""
    return {cause: share for cause, share in one["bubble"].items() if cause not in ("rate", "bubble_rate")}


def balance_error(one: dict) -> int:
    """decoded - trained - sum(waste): tokens; anything but 0 says that the accounting is wrong."""
    return one["decoded"] - one["trained"] - sum(one["waste"].values())


def _waste(runs: list[dict]) -> str:
    return spread([sum(one["waste"].values()) / max(1, one["decoded"]) for one in runs])


def policies(record: Record) -> list[Table]:
    """One table per workload and setting, fastest policy first."""
    tables = []
    grouped = by_work(record.data["runs"])
    names = titles(list(grouped))
    for work, found in grouped.items():
        base, rival = base_of(work, found), best_rival(found)
        rival = None if rival == base else rival
        head = ["policy", "runs", "makespan, s per update", *([f"speed-up over {base}"] if base else []),
                *([f"over best rival ({rival})"] if rival else []), "trained tokens/s",
                *([f"ratio to {base}"] if base else []), "stale", "decisions", "bubble rate",
                "completion P50 / P90 / P99, s", "wasted share", "preemptions", "tokens reconcile"]
        rows = []
        for name in sorted(found, key=lambda policy: makespan(found[policy])):
            mine = found[name]
            rows.append([name, str(len(mine)), spread(map(seconds, mine)),
                         *([spread(speedups(mine, found[base]))] if base else []),
                         *([spread(speedups(mine, found[rival]))] if rival else []), spread(map(effective, mine)),
                         *([spread(pairs(mine, found[base], effective))] if base else []),
                         staleness(mine), decisions(mine),
                         spread([sum(causes(one).values()) for one in mine if one.get("bubble")]), _completion(mine),
                         _waste(mine), spread([one.get("preemptions") for one in mine]),
                         "yes" if not any(map(balance_error, mine)) else "NO"])
        tables.append(Table("Policies on " + names[work], [head, *rows]))
    return tables


def tau_series(record: Record) -> dict[str, list[dict]]:
    """Context and replicas at work -> measured points by batch."""
    found: dict[str, list[dict]] = {}
    for point in sorted(record.data["points"], key=lambda p: p["batch"]):
        label = f"context {point['context']}, {point['replicas']} replicas at once"
        found.setdefault(label.replace("1 replicas at once", "1 replica"), []).append(point)
    return found


def tau(record: Record) -> list[Table]:
    """ms per decode step (spread) by batch; a column per context and number of replicas at work."""
    series = {label: {p["batch"]: p for p in points} for label, points in tau_series(record).items()}
    rows = [["running requests", *[f"ms, {label}" for label in series]]]
    for batch in sorted({p["batch"] for p in record.data["points"]}):
        rows.append([str(batch), *[f"{number(p['ms_per_step'])} (±{number(p['spread_ms'])}), "
                                   f"{number(p['tokens_per_s'])} tokens/s" if (p := points.get(batch)) else DASH
                                   for points in series.values()]])
    left = [[str(one.get(key)) for key in ("batch", "context", "replicas", "why")]
            for one in record.data.get("left_out", [])]
    tables = [Table(f"tau(b), time of a decode step; bubble capacity {record.data['capacity']}", rows)]
    return tables + ([Table("Points left out", [["batch", "context", "replicas", "why"], *left])] if left else [])


def validation(record: Record) -> list[Table]:
    """Every engine run beside its prediction."""
    rows = [[_workload(one), one["policy"], str(one.get("repeat", 0)), number(one["measured_s"]),
             number(one["predicted_s"]), f"{one['predicted_s'] / one['measured_s'] - 1:+.1%}"]
            for one in record.data["runs"]]
    return [Table("Makespan of engine runs, measured and predicted",
                  [["workload", "policy", "repeat", "measured, s", "predicted (simulated), s", "error"], *rows])]


def _workload(one: dict) -> str:
    name = Path(str(one["workload"])).name  # a recorded trace is a file
    return ", ".join([name, *(f"{key} {one[key]}" for key in ("cap", "groups", "seed", "scenario") if key in one)])


def validation_points(data: dict) -> list[tuple[str, float, float]]:
    """(workload, predicted seconds, measured seconds)."""
    return [(_workload(one), one["predicted_s"], one["measured_s"]) for one in data["runs"]]
