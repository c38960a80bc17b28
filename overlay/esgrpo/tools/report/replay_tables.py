"""Tables of rules that were played again on recorded responses, and of the simulated fully async loop."""

from __future__ import annotations

from esgrpo.tools.report.load import Record
from esgrpo.tools.report.tables import DASH, Table, percent, spread

OF_RULE = ("tokens_saved", "correct_lost", "worst_window", "open")  # of all groups
OF_LATER = ("tokens_saved", "false_rate", "makespan_saved")


def verdicts(record: Record) -> list[Table]:
    """By task and arm, over the seeds of the coins and the orders of the groups."""
    head = ["task", "arm", "played", "tokens saved", "correct ones lost", "worst of 50 in a row", "gate open",
            "later half: tokens saved", "false", "longest members' tokens saved", "area under the curve"]
    rows = []
    for task, played in record.data["tasks"].items():
        for arm in next(iter(played.values())):
            found = [one[arm] for one in played.values()]
            rows.append([task, arm, str(len(found)), *[spread(one[name] for one in found) for name in OF_RULE],
                         *[spread(one["later"][name] for one in found) for name in OF_LATER],
                         spread(one["auc"] for one in found)])
    missed = [[name, line] for name, lines in record.data["missed"].items() for line in lines]
    shuffled = ", outcomes shuffled" if record.data["shuffled"] else ""
    return [Table(f"Early verdicts, replayed on recorded groups{shuffled}", [head, *rows]),
            *([Table("What is wanted and was missed", [["played", "missed"], *missed], True)] if missed else [])]


def looks(record: Record) -> list[Table]:
    head = ["task", "cap, tokens", "distance of looks", "looks a response", "tokens saved, later half", "false"]
    rows = []
    for task, seeds in record.data["caps"].items():
        for cap, rules in next(iter(seeds.values())).items():
            for rule in rules:
                found = [one[cap][rule] for one in seeds.values()]
                rows.append([task, cap, rule, *[spread(one[name] for one in found) for name in (
                    "looks_per_response", "tokens_saved", "false_rate")]])
    return [Table("Distances of looks at about as many looks, replayed", [head, *rows])]


def thresholds(record: Record) -> list[Table]:
    head = ["task", "agreed on", "null_prob", "tokens saved", "cuts", "false", "groups with gradient lost",
            "groups with gradient per token, whole = 1"]
    rows = [[task, kind, limit, percent(row["tokens_saved"]), str(row["cuts"]), percent(row["false_rate"]),
             percent(row["gradient_lost"]), f"{row['yield']:.3f}"]
            for task, kinds in record.data["tasks"].items() for kind, limits in kinds.items()
            for limit, row in limits.items()]
    return [Table("Groups that are as good as known, replayed on recorded groups", [head, *rows])]


def loops(record: Record) -> list[Table]:
    data = record.data
    ways = list(dict.fromkeys(way for row in data["by_kind"].values() for way in row))
    rows = [[kind, *[f"{row[way][1]} of {row[way][0]:,}" if way in row else DASH for way in ways]]
            for kind, row in data["by_kind"].items()]
    found = data["found_after"] or {"median": DASH, "most": DASH}
    return [Table("The rule for loops",
                  [["placements", "false prunes", "recorded loops", "found within 512 tokens", "after, median", "most"],
                   [f"{data['placements']:,}", str(data["false_prunes"]), str(data["loops"]),
                    percent(data["found_within_512"]), str(found["median"]), str(found["most"])]]),
            Table("False prunes by text, and by what a token is", [["text", *ways], *rows], True)]


def verdict_cost(record: Record) -> list[Table]:
    """A task a row, over the seeds of the coins."""
    head = ["task", "played", "a look, µs", "an ending, µs", "a weight sync, µs", "a response in all, µs",
            "looks a response"]
    rows = [[task, str(len(played)), *[spread(one[name] for one in played.values()) for name in (
        "look", "ending", "update", "response", "looks_per_response")]]
        for task, played in record.data["worker_cost"].items()]
    return [Table("CPU time of learned verdicts in an agent-loop worker, by itself", [head, *rows])]


def gates(record: Record) -> list[Table]:
    """A run's own gate at the weight syncs of its workers, and the gates that were played over its responses."""
    limits = _limits(record)
    head = ["run", "gate", "asked", "open", *(f"open below {limit}" for limit in limits), "shut"]
    rows, beside = [], [["run", "responses", "weight syncs", "played gate open or shut as the run's own",
                         "and at the same limit"]]
    for name, run in record.data["gates"].items():
        own = run["own"]
        if own["syncs"]:
            shares = {key: {what: count / own["syncs"] for what, count in own[key].items()} for key in ("open", "shut")}
            rows.append(_of_gate(name, "the run's own, at weight syncs", own["syncs"], shares, limits))
            beside.append([name, f"{run['responses']:,}", *(str(own[key]) for key in ("syncs", "agree", "same_limit"))])
        rows += [_of_gate(name, f"played, of {gate['window']:,} correct responses", gate["asked"], gate, limits)
                 for gate in run["gates"]]
    return [Table("The gate of learned verdicts, played again over runs", [head, *rows]),
            *([Table("Told of as many responses as the run's own gate", beside, True)] if beside[1:] else [])]


def _limits(record: Record) -> list[str]:
    found = {limit for run in record.data["gates"].values() for gate in (run["own"], *run["gates"])
             for limit in gate["open"]}
    return sorted(found, key=float)


def _of_gate(run: str, gate: str, asked: int, shares: dict, limits: list[str]) -> list[str]:
    why = ", ".join(f"{name} {percent(share)}" for name, share in shares["shut"].items())
    return [run, gate, str(asked), percent(sum(shares["open"].values())),
            *(percent(shares["open"].get(limit, 0.0)) for limit in limits), why or DASH]


def overlap(record: Record) -> list[Table]:
    """A case a row, over the seeds."""
    cases: dict[str, list[dict]] = {}
    for case in record.data["cases"]:
        cases.setdefault(case["name"], []).append(case)
    rows = [[name, str(len(found)), *[spread(one[key] for one in found) for key in (
        "against_best_fixed", "against_verl_default", "moves")]] for name, found in cases.items()]
    return [Table("Overlap control, fresh tokens/s",
                  [["case", "seeds", "over the best fixed setting", "over verl's default policy", "moves"], *rows])]


def null_groups(record: Record) -> list[Table]:
    """Modes side by side. Rates are times those of `train`, the others shares."""
    cases = record.data["cases"]
    modes = [name for name, found in cases[0].items() if isinstance(found, dict)]
    measures = [(mode, name) for mode in modes for name in cases[0][mode]
                if mode != "train" or name == "trainer at work"]
    rows = [[f"{case['staleness']:g}", percent(case["null_share"]), f"{case['ratio']:g}",
             *[f"{case[mode][name]:.2f}" for mode, name in measures]] for case in cases]
    return [Table("The group filter; rates of train = 1", [["staleness", "without a gradient", "rollout / training", *[
        f"{mode}: {name}" for mode, name in measures]], *rows])]


def refill(record: Record) -> list[Table]:
    """What a step begins ahead of verl's filter, by who says it and how many batches ahead."""
    cases = record.data["cases"]
    arms = [name for name, found in cases[0].items() if isinstance(found, dict)]
    measures = list(cases[0][arms[0]])
    rows = [[percent(case["left_out"]), f"{case['median_s']:g}",
             *[f"{case[arm][name]:.2f}" for arm in arms for name in measures]] for case in cases]
    return [Table("What a step of separate_async begins", [["left out", "a group lasts, s", *[
        f"{arm}: {name}" for arm in arms for name in measures]], *rows])]
