"""The first table of the page: one line per claim, ours beside what it is measured against, win or lose."""

from __future__ import annotations

from esgrpo.tools.report.load import NOT_RECORDED, Record
from esgrpo.tools.report.policy_tables import (
    OWN_CARRY_OVER,
    base_of,
    best_rival,
    by_work,
    decisions,
    effective,
    makespan,
    pairs,
    rivals,
    speedups,
    staleness,
    titles,
)
from esgrpo.tools.report.study import against, modules_of, ratio
from esgrpo.tools.report.tables import (
    BASELINES,
    DASH,
    OURS,
    Table,
    baseline_of,
    chooses_prompts,
    interval,
    number,
    percent,
    ratios,
    spread,
)

HEAD = ["claim", "ours", "against", "ratio [range]", "runs", "verdict", "kind", "device", "record"]
HEADLINES = {"effective tokens/s": False, "time to target, s": True, "samples to target": True,
             "held-out reward, last": False}  # measure of training: is less better?
MEASURED, SIMULATED = "measured", "simulated"
WITHOUT_SAMPLER = "all without sampler"  # arm of bench.ablation
ENOUGH = 3  # pairs below which nothing is claimed


def verdict(found: list[float], less_is_better: bool = False, of: int = 0) -> str:
    """What ratios of ours to theirs allow to say, of `of` pairs; a range that holds 1 decides nothing."""
    if len(found) < of:
        return f"none: no ratio in {of - len(found)} of {of} pairs"  # as when an arm never reaches the target
    if len(found) < ENOUGH:
        return f"none: fewer than {ENOUGH} pairs"
    low, high = (float(f"{limit:.3g}") for limit in (min(found), max(found)))  # as printed: 0.9997 is 1 there
    if low <= 1 <= high:
        return "undecided: the range holds 1"
    return "better" if (low > 1) != less_is_better else "worse"


def _where(record: Record) -> list[str]:
    return [SIMULATED if record.simulated else MEASURED, record.device.partition(";")[0] or NOT_RECORDED, record.name]


def _policies(record: Record) -> list[list[str]]:
    rows = []
    grouped = by_work(record.data["runs"])
    names = titles(list(grouped))
    for work, found in grouped.items():
        ours = OURS if OURS in found else None  # its variants answer questions of a study; the best of them is no claim
        for other in dict.fromkeys((base_of(work, found), best_rival(found))):
            if ours and other:
                stale = {name: f"; stale: {staleness(found[name])}" for name in (ours, other)}
                if other in BASELINES and dict(work).get("scenario") == "sync":
                    stale[other] += f"; its own carry-over ({OWN_CARRY_OVER}) not played"
                # a pass without the strongest rival must not read as a win over all of them
                played = f" (rivals played: {', '.join(rivals(found))})" if other == best_rival(found) else ""
                gains = speedups(found[ours], found[other])
                rows.append([f"makespan per update, {names[work]}",
                             f"{ours}: {number(makespan(found[ours]))} s{stale[ours]}; decided: "
                             f"{decisions(found[ours])}",
                             f"{other}: {number(makespan(found[other]))} s{stale[other]}{played}",
                             spread(gains) + " x faster", str(len(gains)), verdict(gains), *_where(record)])
                gains = pairs(found[ours], found[other], effective)
                rows.append([f"trained tokens/s, {names[work]}",
                             f"{ours}: {spread(map(effective, found[ours]))}{stale[ours]}",
                             f"{other}: {spread(map(effective, found[other]))}{stale[other]}", spread(gains),
                             str(len(gains)), verdict(gains), *_where(record)])
    return rows


def _training(record: Record) -> list[list[str]]:
    measures = {arm: seeds for arm, seeds in record.data["measures"].items() if seeds}
    base = baseline_of(measures)
    ours = "all" if "all" in measures else "overlay" if "overlay" in measures else None
    if not base or not ours:
        return []
    claims = [(ours, key, less, "") for key, less in HEADLINES.items()]
    if chooses_prompts(record, ours) and not chooses_prompts(record, base):
        # the sampler prefers prompts whose tokens count as effective: what it does not choose stands beside the ratio
        claims[0] = (*claims[0][:3], "; prompts chosen by the sampler")
        claims.insert(1, (ours, "decoded tokens/s", False, "; of all prompts alike"))
        if WITHOUT_SAMPLER in measures:
            claims.insert(1, (WITHOUT_SAMPLER, "effective tokens/s", False, "; sampler off"))
    rows = []
    for arm, key, less, note in claims:
        found = ratios(measures, arm, key)
        values = [spread([n.get(key) for n in measures[one].values()]) for one in (arm, base)]
        if any(key in n for seeds in measures.values() for n in seeds.values()):
            said = verdict(found, less, len(measures[arm].keys() & measures[base].keys()))
            rows.append([f"training: {key}{note}", f"{arm}: {values[0]}", f"{base}: {values[1]}", spread(found),
                         str(len(found)), said, *_where(record)])
    return rows


def _scheduler(record: Record) -> list[list[str]]:
    arms = record.data["async"]["arms"]
    name = "boundaries" if "boundaries" in arms else next(iter(arms))
    return [[f"cost of a scheduler step, {record.data['requests']} requests, async",
             interval(arms[name]["own_microseconds_per_step"]) + " µs more",
             interval(arms["plain"]["microseconds_per_step"]) + " µs plain",
             interval(arms[name]["own_over_upstream"], percent) + " of a step",
             str(record.data["rounds"]), "a cost", *_where(record)]]


def _outputs(record: Record) -> list[list[str]]:
    return [[f"vLLM's front end, {requests} requests: a token", spread(found["us_a_token"]["token_outputs"]) + " µs",
             spread(found["us_a_token"]["verl"]) + " µs plain", spread(found["ratio_to_verl"]["token_outputs"]),
             str(len(found["us_a_token"]["verl"])), "a cost", *_where(record)]
            for requests, found in record.data["measured"].items()]


def _startup(record: Record) -> list[list[str]]:
    return [["start of an interpreter, overlay off", interval(record.data["overhead_ms"]) + " ms more",
             f"{record.data['baseline_ms']:.3g} ms plain", DASH, str(record.data["pairs"]), "a cost", *_where(record)]]


def _study(record: Record) -> list[list[str]]:
    rows = []
    for place, modules in list(modules_of(record).items())[:1]:  # the first is the base case
        for module, row in modules.items():
            whole = record.data["modules"][place]["whole"]
            stale = f"; stale: {staleness([whole])}" if "rows" in whole.get("staleness", {}) else ""
            base = against(row["without"])
            rows.append([f"module {module} {row['name']}, {place}: groups with gradient/s against {base}",
                         f"all: {ratio(whole['gradient'])}{stale}", f"without it: {ratio(row['without']['gradient'])}",
                         f"{row['brings']:+.3f}", str(len(record.seeds)), f"rank {row['rank']}", *_where(record)])
    return rows


CLAIMS = {"engine": _policies, "ablation": _training, "scheduler cost": _scheduler, "output cost": _outputs,
          "start-up": _startup, "study": _study, "simulation": _policies}


def table(records: list[Record]) -> Table:
    """Measured before simulated; the order of CLAIMS."""
    rows = [row for kind, claim in CLAIMS.items() for record in records if record.kind == kind for row in claim(record)]
    return Table("Headline", [HEAD, *rows])
