"""Puts records into the order of an evaluation: headline, evidence by kind, what was not run, where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from esgrpo.tools.report import (
    headline,
    policy_figures,
    policy_tables,
    pool,
    replay_tables,
    study,
    tables,
    training_figures,
)
from esgrpo.tools.report.load import NOT_RECORDED, SHAPE_ERRORS, Record, unknown
from esgrpo.tools.report.plots import Figure
from esgrpo.tools.report.tables import OURS, Table


@dataclass(frozen=True)
class Block:
    """What one record says: caveats stand beside its numbers."""

    record: Record
    tables: list[Table]
    figures: list[Figure]
    caveats: list[str]


@dataclass(frozen=True)
class Section:
    """Blocks that answer one question; only the first thing a reader looks for is unfolded on the page."""

    title: str
    lead: str
    blocks: list[Block]


@dataclass(frozen=True)
class Content:
    headline: Table
    pictures: list[Figure]
    claims: Table
    sections: list[Section]
    missing: list[list[str]]
    unknown: list[Record]
    sources: Table


TABLES = {
    "engine": policy_tables.policies, "simulation": policy_tables.policies, "tau": policy_tables.tau,
    "study": study.study, "validation": policy_tables.validation,
    "ablation": tables.ablation, "robustness": tables.robustness, "comparison": tables.comparison, "run": tables.run,
    "prompt sampling": tables.prompt_sampling, "estimator bias": tables.estimator_bias,
    "treatments": tables.treatments, "start reward": tables.start_reward,
    "scheduler cost": tables.scheduler_cost, "output cost": tables.output_cost,
    "decode overhead": tables.decode_overhead, "start-up": tables.startup, "check": tables.check,
    "overlap": tables.slowed_rollout,
    "verdicts": replay_tables.verdicts, "looks": replay_tables.looks, "thresholds": replay_tables.thresholds,
    "loops": replay_tables.loops, "gates": replay_tables.gates,
    "verdict cost": replay_tables.verdict_cost, "simulated overlap": replay_tables.overlap,
    "simulated null groups": replay_tables.null_groups, "simulated refill": replay_tables.refill,
}
FIGURES = {
    "engine": policy_figures.policies, "simulation": policy_figures.policies, "tau": policy_figures.tau,
    "study": study.figures, "validation": policy_figures.validation,
    "ablation": training_figures.training, "robustness": training_figures.robustness,
    "comparison": training_figures.training, "run": training_figures.training,
}
MANY_ARMS = 3  # above it a training record asks which module brings what


def _of_modules(record: Record) -> bool:
    switches = {arm.partition(" staleness=")[0] for arm in _arms(record)}  # the same arm at another staleness
    return record.kind == "study" or record.kind == "ablation" and len(switches) > MANY_ARMS


# question, which records answer it, what a reader must know of all of them
ORDER = (
    ("Does training get faster, and is the reward as good?",
     lambda r: r.kind in ("ablation", "comparison", "overlap", "run") and not _of_modules(r),
     "Whole runs of verl under the same command and the same wall-time budget, or for the same number of updates where "
     "a record says so; arms differ in switches."),
    ("Is rollout faster?", lambda r: r.kind == "engine",
     "Real vLLM engines. The same target lengths are enforced for every policy, so that all decode the same work; "
     "nothing is timed before warm-up."),
    ("Which module brings what?", _of_modules,
     "The same training with one module at a time or with one left out. What is marked as simulated was not seen on a "
     "device."),
    ("Does it hold under other tasks, algorithms and sizes?", lambda r: r.kind == "robustness",
     "The same training in other settings, arms side by side."),
    ("Is what is trained right?",
     lambda r: r.kind in ("estimator bias", "treatments", "prompt sampling", "start reward", "check", "verdicts",
                          "looks", "thresholds", "loops", "gates"),
     "Estimators against the gradient of whole groups, which prompts are drawn, runs that pass or fail, and rules "
     "played again on recorded responses."),
    ("What does the overlay itself cost, and save?",
     lambda r: r.kind in ("scheduler cost", "output cost", "decode overhead", "start-up", "verdict cost"),
     "Each against plain upstream in one process, with a control of plain against plain; what learned verdicts take in "
     "an agent-loop worker is timed by itself."),
    ("What is to be expected at other sizes?",
     lambda r: r.kind in ("tau", "validation", "simulation", "simulated overlap", "simulated null groups",
                          "simulated refill"),
     "A virtual clock drives the overlay's own decision code, with step times measured on real engines. These numbers "
     "are simulated where it says so: what to expect, not what was seen."),
)
REPLACED = ("What later records replaced", "Kept so that no number disappears; nothing above rests on them.")
# What a complete evaluation holds: name, is it there?, how to make it.
EXPECTED = (
    ("Makespan by policy on a real engine", lambda rs: _any(rs, "engine"), "python -m bench.engine --results FILE"),
    ("Requests in the engines over time", lambda rs: any(policy_figures.has_trace(r) for r in rs if r.kind == "engine"),
     "python -m bench.engine --results FILE (keep FILE's folder .traces beside it)"),
    ("tau(b), time of a decode step", lambda rs: _any(rs, "tau"), "python -m bench.engine.tau --out FILE"),
    ("Ablation of the modules in training", lambda rs: any(r.kind == "ablation" and len(_arms(r)) > 3 for r in rs),
     "python -m bench.ablation --results FILE"),
    ("Training under other tasks, algorithms and sizes", lambda rs: _any(rs, "robustness"),
     "python -m bench.robustness --study grid --model-medium DIR --results FILE"),
    ("Training on GPUs, three seeds or more", lambda rs: any(
        r.kind == "ablation" and headline.on_gpu(r) and min(map(len, _arms(r).values()), default=0) > 2 for r in rs),
     "ESGRPO_BENCH_DEVICE=cuda python -m bench.ablation --results FILE"),
    ("Reward over wall time", lambda rs: any(training_figures.curves_of(r) for r in _training(rs)),
     "python -m bench.ablation --results FILE (records with curves)"),
    ("Bubble over time, by cause", lambda rs: any(training_figures.curves_of(r) for r in _training(rs)),
     "python -m bench.ablation --results FILE (records with curves)"),
    ("Length bias of pruning", lambda rs: any("length bias" in numbers for r in rs if r.kind == "ablation"
                                              for seeds in _arms(r).values() for numbers in seeds.values()
                                              if numbers.get("length bias") is not None),
     "python -m bench.ablation --arms 'off,C pruning,all' --results FILE"),
    ("Simulated policies", lambda rs: _any(rs, "simulation"), "python -m bench.sim --json"),
    ("Scaling with replicas, concurrency and cap (simulated)", lambda rs: _any(rs, "study"),
     "python -m bench.sim.study --out FILE"),
    ("Predicted against measured makespan", lambda rs: _any(rs, "validation"),
     "python -m bench.sim.validate ENGINE_RESULTS.json"),
    ("Cost of a scheduler step", lambda rs: _any(rs, "scheduler cost"), "python -m bench.scheduler_cost"),
    ("Cost of a token in the front end", lambda rs: _any(rs, "output cost"),
     "python -m bench.output_cost --results FILE"),
    ("Decoding overhead", lambda rs: _any(rs, "decode overhead"), "python -m bench.decode_overhead"),
    ("Start-up overhead", lambda rs: _any(rs, "start-up"), "python -m bench.startup --json FILE"),
)
FEW_UPDATES = 4  # under a barrier, so that what is carried over can end inside the run
FEW_SEEDS = 3
TAILSIEVE_REPLICAS = 8  # in its paper, one of them or more for the tail
BUSY = 1.0  # load average before a run, beside the run itself


def _any(records, kind) -> bool:
    return any(record.kind == kind for record in records)


def _training(records) -> list[Record]:
    return [record for record in records if record.kind in ("ablation", "comparison", "run")]


def _arms(record: Record) -> dict[str, dict]:
    return {arm: seeds for arm, seeds in record.data.get("measures", {}).items() if seeds}


def _unfair(record: Record) -> list[str]:
    """What makes a ratio of policies say less than it seems to."""
    found = list(dict.fromkeys(one["note"] for one in record.data["runs"] if one.get("note")))
    played = {one["policy"] for one in record.data["runs"] if one["scenario"] == "sync"}
    if any(name.startswith(OURS) for name in played) and policy_tables.OWN_CARRY_OVER not in played:
        found.append(f"verl's own carry-over under a barrier ({policy_tables.OWN_CARRY_OVER}) was not played: most of "
                     "what is gained over verl's barrier is carry-over, which verl ships, too, and its price is stale "
                     "rows.")
    few = sorted({one["replicas"] for one in record.data["runs"] if one["policy"] == "tailsieve" and "note" not in one
                  and one["replicas"] < TAILSIEVE_REPLICAS})
    found += [f"tailsieve: not at its paper's size: 1 of {count} replicas is its tail pool, 1 of {TAILSIEVE_REPLICAS} "
              "in the paper." for count in few]
    if "static" in played:
        found.append("static: UloRL's segments, by its former name.")
    return found


def caveats(record: Record) -> list[str]:
    """What a reader must know before quoting a number of this record."""
    found = [f"Superseded {record.superseded}."] if record.superseded else []
    found += record.notes
    if record.kind in ("ablation", "robustness"):
        arms = _arms(record)
        if "static" in arms:
            found.append("Arm `static` submits every response again at once after a segment, under the same weights: "
                         "it is not UloRL's carry-over, which waits for the next update.")
        if min(map(len, arms.values()), default=0) < FEW_SEEDS:
            found.append(f"Fewer than {FEW_SEEDS} seeds in some arm: a difference can be chance.")
        if not training_figures.curves_of(record):
            found.append("The record holds no curves: reward, bubble and lengths over time cannot be drawn.")
    if record.kind in ("engine", "simulation"):
        wrong = [one for one in record.data["runs"] if policy_tables.balance_error(one)]
        if wrong:
            found.append(f"{len(wrong)} runs do not reconcile (decoded != trained + waste): do not quote this record.")
        if len(record.seeds) < FEW_SEEDS:
            found.append(f"Fewer than {FEW_SEEDS} seeds of the workload"
                         + (": repeats tell the noise of the machine only." if record.kind == "engine" else "."))
        found += _unfair(record)
        carrying = sorted({one["policy"] for one in record.data["runs"] if one.get("waste", {}).get("left_over")
                           and one["scenario"] == "sync" and one.get("updates", FEW_UPDATES) < FEW_UPDATES})
        if carrying:
            found.append(f"Fewer than {FEW_UPDATES} updates: what {', '.join(carrying)} carried over never ended "
                         "inside the run, which flatters them.")
        found.append("Settings: " + policy_tables.settings(record))
    machine = record.data.get("machine")
    load = machine["load"][0] if isinstance(machine, dict) else record.data.get("load_average_before")
    if load is not None and load > BUSY:
        found.append(f"The machine was busy (load average {load:.1f} before the run): wall times are noisy, own times "
                     "and controls are the ones to read.")
    lacking = [name for name, text in record.provenance().items() if text == NOT_RECORDED]
    if lacking:
        found.append("Not in the record: " + ", ".join(lacking) + ".")
    return found


def _sources(records: list[Record]) -> Table:
    rows = [["record", "kind", "command", "commit", "seed", "device", "spread"]]
    for record in records:
        rows.append([record.name, record.kind + (" (simulated)" if record.simulated and record.kind != "simulation"
                                                 else ""), *record.provenance().values()])
    return Table("Where every number comes from", rows)


def _understood(record: Record) -> Block | Record:
    """What the record says, or the record as an unknown one when a field that its kind needs is amiss."""
    if record.kind == "unknown":
        return record
    try:
        headline.claims_of([record])
        figures = FIGURES[record.kind](record) if record.kind in FIGURES else []
        return Block(record, TABLES[record.kind](record), figures, caveats(record))
    except SHAPE_ERRORS as error:
        return unknown(record, error)


# The pictures of the first screen, by the beginning of their titles.
PICTURES = ("Requests in the engines over time", "Reward over wall time", "Makespan and bubble by policy")


def _pictures(blocks: list[Block], answers: Table) -> list[Figure]:
    """A figure of each kind, of the record with the best evidence for it: measured, on a GPU, most runs. Of its figures
    the one of a setting that an answer names, where there is one."""
    said = " ".join(cell for row in answers.rows for cell in row)

    def setting(figure: Figure) -> str:
        return figure.title.partition(": ")[2]

    def evidence(block: Block) -> tuple:
        record = block.record
        runs = len(record.data.get("runs", ())) or sum(map(len, _arms(record).values()))
        return headline.on_gpu(record), runs

    found = []
    for wanted in PICTURES:
        having = [block for block in blocks if not block.record.simulated and not block.record.superseded
                  and block.record.kind != "run" and any(figure.title.startswith(wanted) for figure in block.figures)]
        if having:
            best = max(having, key=evidence)
            drawn = [figure for figure in best.figures if figure.title.startswith(wanted)]
            figure = next((one for one in drawn if setting(one) and setting(one) in said), drawn[0])
            found.append(replace(figure, caption=f"{figure.caption} From {best.record.name}."))
    return found


def build(records: list[Record]) -> Content:
    parts = [_understood(record) for record in pool.pooled(records)]
    blocks = [part for part in parts if isinstance(part, Block)]
    known = [block.record for block in blocks]
    sections = []
    for title, answers, lead in ORDER:
        mine = [block for block in blocks if answers(block.record) and not block.record.superseded]
        sections.append(Section(title, lead, sorted(mine, key=lambda block: not headline.on_gpu(block.record))))
    sections.append(Section(*REPLACED, [block for block in blocks if block.record.superseded]))
    missing = [[name, command] for name, there, command in EXPECTED if not there(known)]
    claims = headline.claims_of(known)
    answers = headline.answers(claims)
    return Content(answers, _pictures(blocks, answers), headline.table(claims), sections, missing,
                   [part for part in parts if isinstance(part, Record)], _sources(known))


def shape_of(record: Record) -> str:
    """Why a record was not understood, and its top-level fields, for its author to see."""
    fields = [f"{key}: {type(value).__name__}" for key, value in record.data.items() if key != "notes"]
    return "; ".join([*record.notes, *([", ".join(fields)] if fields else [])])
