"""Records to tables of text. A cell says how many runs it rests on; what a record lacks is a dash."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from esgrpo.tools.report.load import Record

BASELINES = ("verl", "off", "plain")
OURS = "es-grpo"  # policies of the engine benchmark and the simulator that begin so are ours
MAIN_MEASURES = ("effective tokens/s", "step time, s", "bubble rate", "time to target, s",
                 "samples to target", "held-out reward, last",
                 "tail ratio")
DASH = "–"
THOUSAND, TINY = 1000, 1e-9


@dataclass(frozen=True)
class Table:
    """First row is the header. `folded`: on the page shown on request only."""

    title: str
    rows: list[list[str]]
    folded: bool = False


def number(value: float) -> str:
    """Three digits, thousands in full."""
    if abs(value) >= THOUSAND:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= TINY else "0"


def spread(values: Iterable[float | None]) -> str:
    """Median [lowest, highest]; says how many of the values are known when some are not."""
    values = list(values)
    known = sorted(v for v in values if v is not None)
    if not known:
        return "-"
    text = number(statistics.median(known))
    if len(known) > 1:
        text += f" [{number(known[0])}, {number(known[-1])}]"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def interval(found: dict, form=number) -> str:
    """Median [low, high] of a measured quantity."""
    return f"{form(found['median'])} [{form(found['low'])}, {form(found['high'])}]"


def percent(share: float) -> str:
    return f"{round(share, 4) + 0.0:.2%}"  # + 0.0: no minus in front of zero


def near_one(ratio: float) -> str:
    return f"{ratio:.4f}"


def baseline_of(names: Iterable[str]) -> str | None:
    """The arm that others are compared with; plain verl with values of its own where no other plain one is there."""
    names = list(names)
    own = [name for name in names if name.startswith("plain ")]
    return next((name for name in BASELINES if name in names), own[0] if len(own) == 1 else None)


def ratios(measures: dict[str, dict[str, dict]], arm: str, key: str) -> list[float]:
    """Arm over baseline, each within a seed."""
    base = measures.get(baseline_of(measures), {})
    pairs = [(numbers.get(key), base[seed].get(key)) for seed, numbers in measures[arm].items() if seed in base]
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]


def chooses_prompts(record: Record, arm: str) -> bool:
    """Whether an arm trains with the prompt sampler, by its overrides."""
    overrides = record.data.get("arms", {}).get(arm, ())
    said = [o.endswith("=True") for o in overrides if ".sampler.enable=" in o]
    return said[-1] if said else any(o.endswith("segment.profile=elastic") for o in overrides)


# --- training runs -------------------------------------------------------------------------------------------------

def ablation(record: Record) -> list[Table]:
    """Arms as rows with the measures that decide, and who chose their prompts; every measure folded below."""
    measures = {arm: seeds for arm, seeds in record.data["measures"].items() if seeds}
    keys = list(dict.fromkeys(k for seeds in measures.values() for numbers in seeds.values() for k in numbers))
    base = baseline_of(measures)
    head = ["arm", "seeds", *([f"effective tokens/s, ratio to {base}"] if base else []),
            *[key for key in MAIN_MEASURES if key in keys]]
    chosen = {arm: "sampler" if chooses_prompts(record, arm) else "as they come" for arm in measures}
    mixed = len(set(chosen.values())) > 1  # then effective tokens reward what the sampler selects
    head[1:1] = ["prompts"] if mixed else []
    rows = [[arm, *([chosen[arm]] if mixed else []), str(len(seeds)),
             *([spread(ratios(measures, arm, "effective tokens/s"))] if base else []),
             *[spread([numbers.get(key) for numbers in seeds.values()]) for key in MAIN_MEASURES if key in keys]]
            for arm, seeds in measures.items()]
    return [Table("Training runs by arm", [head, *rows]), *_every_run(record)]


def _every_run(record: Record) -> list[Table]:
    """Every measure, and what failed."""
    measures = {arm: seeds for arm, seeds in record.data["measures"].items() if seeds}
    keys = list(dict.fromkeys(k for seeds in measures.values() for numbers in seeds.values() for k in numbers))
    every = [["", *measures]] + [[key, *[spread([n.get(key) for n in seeds.values()]) for seeds in measures.values()]]
                                 for key in keys]
    missing = [arm for arm, seeds in record.data["measures"].items() if not seeds]
    failures = [[arm, "no run came to its end"] for arm in missing] + [["", text] for text in
                                                                       record.data.get("failed", [])]
    return [Table("Every measure", every, folded=True),
            *([Table("Failed runs", [["arm", "what happened"], *failures])] if failures else [])]


def robustness(record: Record) -> list[Table]:
    return [Table("The same training under other settings, arms side by side", record.data["table"]),
            *_every_run(record)]


def comparison(record: Record) -> list[Table]:
    return [Table("Plain and overlay, one run each", record.data["table"]),
            Table("What differs between the arms", [["override"], *[[d] for d in record.data["difference"]]], True),
            *hook_states(record.data.get("hooks", []))]


def hook_states(reports: list[dict]) -> list[Table]:
    """Hooks as rows, processes as columns."""
    if not reports:
        return []
    states = [{hook["slug"]: hook["state"] for hook in report["hooks"]} for report in reports]
    rows = [[slug, *[found.get(slug, DASH) for found in states]] for slug in states[0]]
    return [Table("Hook states by process", [["hook", *[r["process"] for r in reports]], *rows], True)]


def run(record: Record) -> list[Table]:
    """Totals as rows, runs as columns; hook states by run."""
    found = record.data["runs"]
    names = dict.fromkeys(name for one in found.values() for name in one["facts"])
    rows = [["", *found], *[[name, *[number(one["facts"][name]) if name in one["facts"] else DASH
                                     for one in found.values()]] for name in names]]
    loops = [table for name, one in found.items() for table in overlap(name, one.get("loop", []), one.get("moves", []))]
    return [Table("Totals by run", rows), *loops] + [
        Table(f"{table.title}: {name}", table.rows, True)
        for name, one in found.items() for table in hook_states(one["hooks"])]


def overlap(name: str, loop: list, moves: list) -> list[Table]:
    """Idle breakdown over weight versions, and what the overlap controller moved; none where nothing is recorded."""
    parts = list(dict.fromkeys(part for *_, shares in loop for part in shares))
    found = []
    if loop:
        found.append(Table(f"Time of trainer and rollouter by weight version: {name}", [["versions", *parts]] + [
            [str(first) if first == last else f"{first} … {last}",
             *[percent(shares[part]) if part in shares else DASH for part in parts]] for first, last, shares in loop]))
    if moves:
        found.append(Table(f"Moves of the overlap controller: {name}", [["version", "cause", "before → after"]] + [
            [str(version), cause, ", ".join(f"{what} {_short(before)} → {_short(after)}"
                                            for what, (before, after) in changed.items()) or DASH]
            for version, cause, changed in moves]))
    return found


def _short(value) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


# --- costs of the overlay itself -----------------------------------------------------------------------------------

def scheduler_cost(record: Record) -> list[Table]:
    rows = [["scheduler", "arm", "µs per step", "own µs per step", "own share of upstream's step"]]
    for mode in ("sync", "async"):
        for arm, found in record.data[mode]["arms"].items():
            rows.append([record.data[mode]["class"], arm, interval(found["microseconds_per_step"]),
                         interval(found["own_microseconds_per_step"]), interval(found["own_over_upstream"], percent)])
    return [Table(f"Scheduler step with {record.data['requests']} running requests", rows)]


def output_cost(record: Record) -> list[Table]:
    rows = [["running requests", "arm", "µs a token", "ratio to verl", "outputs a response"]]
    for requests, found in record.data["measured"].items():
        rows += [[requests, arm, spread(values), spread(found["ratio_to_verl"].get(arm, [])),
                  number(found["outputs_a_response"][arm])] for arm, values in found["us_a_token"].items()]
    return [Table(f"vLLM's front end, responses of {record.data['tokens']} tokens", rows)]


def decode_overhead(record: Record) -> list[Table]:
    rows = [["arm", "throughput ratio, own time", "ratio, wall", "tokens per wall second"]]
    rows += [[arm, interval(found["throughput_ratio_own"], near_one),
              interval(found["throughput_ratio_wall"], near_one),
              interval(found["tokens_per_wall_second"])] for arm, found in record.data["arms"].items()]
    return [Table("Decoding with the scheduler hook, no boundary acting (1 = plain)", rows)]


def startup(record: Record) -> list[Table]:
    data = record.data
    rows = [["", "ms"], ["start of a plain interpreter", f"{data['baseline_ms']:.3g}"],
            ["added by the overlay, switched off", interval(data["overhead_ms"])],
            ["control: plain against plain", interval(data["control_ms"])]]
    return [Table(f"Interpreter start, {data['pairs']} pairs", rows)]


def slowed_rollout(record: Record) -> list[Table]:
    """Arms in which rollout became slower half way."""
    arms = record.data["arms"]
    measures = list(next(iter(arms.values()))["before"])
    moved = "versions from the shift to the first move"
    rows = [[name, half, *[number(arm[half][measure]) for measure in measures]]
            for name, arm in arms.items() for half in ("before", "after")]
    facts = [[name, str(len(arm["moves"])), DASH if arm[moved] is None else str(arm[moved]),
              f"{arm['unaccounted']:.2%}"] for name, arm in arms.items()]
    return [Table("Rollout becomes twice as slow half way", [["arm", "half", *measures], *rows]),
            Table("What moved", [["arm", "moves", moved, "wall time unaccounted for"], *facts])]


def check(record: Record) -> list[Table]:
    also = [["also", str(record.data["also"])]] if "also" in record.data else []
    return [Table("Checks that passed", [["command", "result"], [record.command, str(record.data["result"])], *also])]


# --- decisions checked by simulation --------------------------------------------------------------------------------

def prompt_sampling(record: Record) -> list[Table]:
    measures = {"gradient": "groups with gradient", "gain": "mean p (1 - p)^2", "distinct": "prompts seen",
                "most_often": "most often drawn"}

    def rows_of(arms: dict) -> list[list[str]]:
        return [[name, *[spread(found[key]["seeds"]) for key in measures]] for name, found in arms.items()]

    head = list(measures.values())
    tables = [Table(f"Which prompts are drawn, prompts: {population}", [["arm", *head], *rows_of(arms)])
              for population, arms in record.data["populations"].items()]
    tuning = record.data["recovery_share"]
    return [*tables, Table(f"Recovery of a drawn prompt, other seeds (in use: {tuning['in_use']})",
                           [["share of the prompts", *head], *rows_of(tuning["tried"])], True)]


def estimator_bias(record: Record) -> list[Table]:
    rows = [["scenario", "pruned", "estimator", "bias", "variance ratio", "z of every seed", "unbiased"]]
    for scenario, found in record.data["scenarios"].items():
        for name, one in found["estimators"].items():
            rows.append([scenario, percent(found["pruned_share"]), name, percent(one["bias"]), number(one["variance"]),
                         " ".join(f"{z:+.1f}" for z in one["z"]), "yes" if one["within_limit"] else "no"])
    return [Table("Gradient under audited pruning against that of the whole group", rows)]


def treatments(record: Record) -> list[Table]:
    """What becomes of a response that is cut: true gradients on recorded responses, by task and rule."""
    tables = []
    for task, rules in record.data["tasks"].items():
        for rule, found in rules.items():
            rows = [["treatment", "information per token (full rollout = 1)", "tokens", "bias", "z of every seed",
                     "responses cut", "of these right"]]
            for name, one in found.items():
                low, high = one["information_spread"]
                rows.append([name, f"{one['information']:.2f} [{low:.2f}, {high:.2f}]", percent(one["tokens"]),
                             percent(one["bias"]), " ".join(f"{z:+.1f}" for z in one["z"]), percent(one["cut_share"]),
                             percent(one["cut_right_share"])])
            tables.append(Table(f"What a cut response is worth to the gradient: {task}, cut by {rule}", rows))
    return tables


def start_reward(record: Record) -> list[Table]:
    """A model on the tasks before any reinforcement learning."""
    names = {"reward": percent, "mode": percent, "mixed": percent, "at cap": percent, "P50": number, "P90": number,
             "P99": number, "responses": number}
    rows = [["family", "reward", "the commonest answer earns", "groups with right and wrong answers", "at the cap",
             "P50, tokens", "P90", "P99", "responses"]]
    rows += [[family, *[show(found[name]) for name, show in names.items()]]
             for family, found in record.data["families"].items()]
    return [Table(f"Start, {record.data['samples']} responses a prompt, cap {record.data['cap']} tokens", rows)]
