"""The first tables of the page: six questions with an answer each, then one line per claim, win or lose.

The answer of a question is the claim with the best evidence, never the one with the best number: measured before
simulated, a GPU before a CPU, then the most pairs; ratios of the same question elsewhere stand beside it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

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
    sides,
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
DECODED = "decoded tokens/s"
TIMES_AS_FAST = " times as fast"
HEADLINES = {"effective tokens/s": False, "time to target, s": True, "samples to target": True,
             "held-out reward, last": False}  # measure of training: is less better?
MEASURED, SIMULATED = "measured", "simulated"
WITHOUT_SAMPLER = "all without sampler"  # arm of bench.ablation
ENOUGH = 3  # pairs below which nothing is claimed
GPUS = ("NVIDIA", "GPU", "Ascend")
# What a reader wants to know first, in this order. A claim names the one it answers, or none.
FASTER_TRAINING = "Does training make more useful tokens a second than verl's?"
REWARD = "Is the reward higher after the same time?"
ASYNC_ROLLOUT = "Is asynchronous rollout faster than verl's?"
BARRIER_ROLLOUT = "Is rollout under a barrier faster than verl's?"
RIVAL = "Is it faster than the best other method that was played?"
COST = "What does the overlay itself cost a decode step?"
QUESTIONS = (FASTER_TRAINING, REWARD, ASYNC_ROLLOUT, BARRIER_ROLLOUT, RIVAL, COST)
ANSWER_HEAD = ["question", "answer", "ours", "against", "pairs", "where", "elsewhere", "record"]


@dataclass(frozen=True)
class Claim:
    """One line of the table of claims. `ratios` are ours over theirs, `answer` says them in words."""

    question: str
    what: str
    ours: str
    against: str
    shown: str
    runs: int
    verdict: str
    record: Record
    ratios: tuple[float, ...] = ()
    answer: str = ""

    def row(self) -> list[str]:
        return [self.what, self.ours, self.against, self.shown, str(self.runs), self.verdict, *_where(self.record)]

    def evidence(self) -> tuple:
        return not self.record.simulated, on_gpu(self.record), self.runs


def on_gpu(record: Record) -> bool:
    return any(word in record.device for word in GPUS)


def times(ratios: list[float], unit: str) -> str:
    """`1.4 times as fast [1.2, 1.6]`; a ratio below one says so in the same words."""
    low, high = min(ratios), max(ratios)
    return f"{number(statistics.median(ratios))} times {unit}" + (
        f" [{number(low)}, {number(high)}]" if len(ratios) > 1 else "")


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


def _policies(record: Record) -> list[Claim]:
    claims = []
    grouped = by_work(record.data["runs"])
    names = titles(list(grouped))
    for work, found in grouped.items():
        ours = OURS if OURS in found else None  # its variants answer questions of a study; the best of them is no claim
        barrier = dict(work).get("scenario") == "sync"
        base = base_of(work, found)
        rival = best_rival({name: runs for name, runs in found.items() if name != base})
        for other in (base, rival):
            if not (ours and other):
                continue
            question = RIVAL if other == rival else BARRIER_ROLLOUT if barrier else ASYNC_ROLLOUT
            mine, theirs = sides(found[ours], found[other])
            stale = {ours: f"; stale: {staleness(mine)}", other: f"; stale: {staleness(theirs)}"}
            if other in BASELINES and barrier:
                stale[other] += f"; its own carry-over ({OWN_CARRY_OVER}) not played"
            # a pass without the strongest rival must not read as a win over all of them
            played = f" (rivals played: {', '.join(rivals(found))})" if other == rival else ""
            gains = speedups(mine, theirs)
            claims.append(Claim(
                question, f"makespan per update, {names[work]}",
                f"{ours}: {number(makespan(mine))} s{stale[ours]}; decided: {decisions(mine)}",
                f"{other}: {number(makespan(theirs))} s{stale[other]}{played}", spread(gains) + TIMES_AS_FAST,
                len(gains), verdict(gains), record, tuple(gains),
                f"{times(gains, 'as fast')} as {other}, {names[work]}" if gains else ""))
            gains = pairs(mine, theirs, effective)
            claims.append(Claim(
                "", f"trained tokens/s, {names[work]}", f"{ours}: {spread(map(effective, mine))}{stale[ours]}",
                f"{other}: {spread(map(effective, theirs))}{stale[other]}", spread(gains), len(gains),
                verdict(gains), record))
    return claims


def _training(record: Record) -> list[Claim]:
    measures = {arm: seeds for arm, seeds in record.data["measures"].items() if seeds}
    base = baseline_of(measures)
    ours = "all" if "all" in measures else "overlay" if "overlay" in measures else None
    if not base or not ours:
        return []
    wanted = [(ours, key, less, "") for key, less in HEADLINES.items()]
    if chooses_prompts(record, ours) and not chooses_prompts(record, base):
        # the sampler prefers prompts whose tokens count as effective: what it does not choose stands beside the ratio
        wanted[0] = (*wanted[0][:3], "; prompts chosen by the sampler")
        wanted.insert(1, (ours, DECODED, False, "; of all prompts alike"))
        if WITHOUT_SAMPLER in measures:
            wanted.insert(1, (WITHOUT_SAMPLER, "effective tokens/s", False, "; sampler off"))
    decoded = ratios(measures, ours, DECODED)
    claims = []
    for arm, key, less, note in wanted:
        found = ratios(measures, arm, key)
        values = [spread([n.get(key) for n in measures[one].values()]) for one in (arm, base)]
        if any(key in n for seeds in measures.values() for n in seeds.values()):
            said = verdict(found, less, len(measures[arm].keys() & measures[base].keys()))
            question = {"effective tokens/s": FASTER_TRAINING, "held-out reward, last": REWARD}.get(key, "")
            unit = "as many" if question == FASTER_TRAINING else "as high"
            beside = f"; decoded tokens/s of all prompts alike: {spread(decoded)}" if note and decoded else ""
            claims.append(Claim(
                question if arm == ours else "", f"training: {key}{note}", f"{arm}: {values[0]}",
                f"{base}: {values[1]}", spread(found), len(found), said, record, tuple(found),
                f"{times(found, unit)}{note if question == FASTER_TRAINING else ''}"
                f"{beside if question == FASTER_TRAINING else ''}" if found else ""))
    return claims


def _scheduler(record: Record) -> list[Claim]:
    arms = record.data["async"]["arms"]
    mixin = [arm for arm in arms if "own_over_upstream" in arms[arm] and arm != "plain"]
    name = max(mixin, key=lambda arm: arms[arm]["own_over_upstream"]["median"])  # the dearest of what can be on
    share = interval(arms[name]["own_over_upstream"], percent)
    return [Claim(COST, f"cost of a scheduler step, {record.data['requests']} requests, async, {name}",
                  interval(arms[name]["own_microseconds_per_step"]) + " µs more",
                  interval(arms["plain"]["microseconds_per_step"]) + " µs plain", share + " of a step",
                  record.data["rounds"], "a cost", record,
                  answer=f"{share} of vLLM's scheduler step with {record.data['requests']} requests running; "
                         f"acting: {name}")]


def _outputs(record: Record) -> list[Claim]:
    return [Claim("", f"vLLM's front end, {requests} requests: a token",
                  spread(found["us_a_token"]["token_outputs"]) + " µs",
                  spread(found["us_a_token"]["verl"]) + " µs plain", spread(found["ratio_to_verl"]["token_outputs"]),
                  len(found["us_a_token"]["verl"]), "a cost", record)
            for requests, found in record.data["measured"].items()]


def _startup(record: Record) -> list[Claim]:
    return [Claim("", "start of an interpreter, overlay off", interval(record.data["overhead_ms"]) + " ms more",
                  f"{record.data['baseline_ms']:.3g} ms plain", DASH, record.data["pairs"], "a cost", record)]


def _study(record: Record) -> list[Claim]:
    claims = []
    for place, modules in list(modules_of(record).items())[:1]:  # the first is the base case
        for module, row in modules.items():
            whole = record.data["modules"][place]["whole"]
            stale = f"; stale: {staleness([whole])}" if "rows" in whole.get("staleness", {}) else ""
            base = against(row["without"])
            claims.append(Claim("", f"module {module} {row['name']}, {place}: groups with gradient/s against {base}",
                                f"all: {ratio(whole['gradient'])}{stale}",
                                f"without it: {ratio(row['without']['gradient'])}", f"{row['brings']:+.3f}",
                                len(record.seeds), f"rank {row['rank']}", record))
    return claims


CLAIMS = {"engine": _policies, "ablation": _training, "scheduler cost": _scheduler, "output cost": _outputs,
          "start-up": _startup, "study": _study, "simulation": _policies}


def claims_of(records: list[Record]) -> list[Claim]:
    """Measured before simulated; the order of CLAIMS. What later records replaced claims nothing."""
    return [one for kind, claims in CLAIMS.items() for record in records
            if record.kind == kind and not record.superseded for one in claims(record)]


def table(claims: list[Claim]) -> Table:
    return Table("Every claim", [HEAD, *[claim.row() for claim in claims]])


def _elsewhere(best: Claim, others: list[Claim]) -> str:
    """The medians of the other settings of a question, so that one of them cannot be picked for its number."""
    def setting(claim: Claim) -> str:
        if claim.record.name == best.record.name:
            return claim.what.partition(", ")[2] or claim.what
        return SIMULATED if claim.record.simulated else claim.record.name

    found = [f"{number(statistics.median(claim.ratios))} ({setting(claim)})" for claim in others if claim.ratios]
    return "; ".join(found) or DASH


def answers(claims: list[Claim]) -> Table:
    """One row a question that any claim answers."""
    rows = []
    for question in QUESTIONS:
        mine = sorted((claim for claim in claims if claim.question == question and claim.answer),
                      key=Claim.evidence, reverse=True)
        if mine:
            best, *others = mine
            device = best.record.device.partition(";")[0] or NOT_RECORDED
            said = f"{best.answer} ({best.verdict})" if best.verdict != "a cost" else best.answer
            rows.append([question, said, best.ours, best.against, str(best.runs),
                         f"{device}, {SIMULATED}" if best.record.simulated else device, _elsewhere(best, others),
                         best.record.name])
    return Table("Headline", [ANSWER_HEAD, *rows])
