"""What each module decided, and why one that was on decided nothing. Pure: settings, facts and counts in, words out.

A decision is what changed something: a prompt that went before an older one, a response that was handed back, a member
that was pruned. Whoever decides counts under "module/what", from the start of its process on; the records hold these
running counts (kind `decisions`), so that a row that is lost costs nothing but its moment. Modules are the switches of
`config.Segment` that decide while responses are made. `history` forecasts for others, `pois` and `dmmpt` are losses
with metrics of their own, and which groups verl's v1 trainers carry over is decided by verl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from esgrpo.algo.terms import NullGroups, Rule

if TYPE_CHECKING:
    from esgrpo.config import Segment  # which asks here what switches a module on

ROUTING, SEGMENTS, LOOPS, PRUNING, REPLACED = "routing", "segments", "loops", "pruning", "replaced"
VERDICTS = "verdicts"
SAMPLER, KEEP, TOKEN_OUTPUTS, OVERLAP = "sampler", "keep", "token_outputs", "overlap"
KV_HEADROOM = "kv_headroom"

# Trainers, as the facts of a run name them
FULLY_ASYNC, RECIPE, SYNC, SEPARATE = "fully_async", "recipe-0.7.0", "sync", "separate_async"
STANDALONE = (FULLY_ASYNC, RECIPE, SEPARATE)  # their replicas share no memory with the trainer


@dataclass(frozen=True)
class Run:
    """What the reasons are made from. `counts` as above; `audit` maps a rule to its newest report (`Audit.report`),
    with "needed", the outcomes before it may prune. `trainer` is empty where nobody recorded it."""

    settings: Segment
    counts: Mapping[str, int] = field(default_factory=Counter)
    audit: Mapping[str, Mapping] = field(default_factory=dict)
    trainer: str = ""
    replicas: int = 1
    response_length: int = 0  # tokens; 0: not known
    fixed: Collection[str] = ()  # what the overlap control leaves alone

    def count(self, name: str) -> int:
        return self.counts.get(name, 0)


@dataclass(frozen=True)
class Module:
    """`counted`: names of the counts that are decisions. `why` is asked where these are all 0, else `more`."""

    name: str
    switch: str  # keys of `segment` that switch it on
    on: Callable[[Segment], bool]
    counted: tuple[str, ...]
    why: Callable[[Run], str]
    more: Callable[[Run], str] = lambda run: ""


@dataclass(frozen=True)
class Row:
    """One module in one run. `decided` is None where nothing was recorded."""

    module: str
    switch: str
    on: bool
    decided: int | None
    reason: str = ""


ONE_REPLICA = "one replica: nobody can move to another one"


def _tails(settings: Segment) -> bool:
    return settings.routing.enable and settings.routing.tail_share > 0


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _why_routing(run: Run) -> str:
    pops, known = run.count("routing/pops"), run.count("routing/known")
    if run.trainer == RECIPE:
        return "verl 0.7.0: prompts stay in order and replicas are not chosen"
    tails = f"; {ONE_REPLICA}" if _tails(run.settings) and run.replicas < 2 else ""
    if run.trainer not in ("", FULLY_ASYNC, SYNC):
        return f"{run.trainer} begins a prompt when another one ends: there is no order to choose{tails}"
    if not pops:
        return f"no prompt was begun{tails}"
    if not known:
        return f"first epoch: none of {_plural(pops, 'prompt')} was seen before{tails}"
    if not run.count("routing/choices"):
        return f"no queue: prompts start at once{tails}"
    return f"of the prompts that waited the longest was always the oldest{tails}"


def _why_segments(run: Run) -> str:
    if run.settings.boundary == "soft" and run.replicas < 2:
        return ONE_REPLICA
    return "no response reached a boundary at which it is handed back"


def _why_pruning(run: Run) -> str:
    exempted = run.count("pruning/exempted")
    if not exempted:
        return "no candidate: no group was as good as decided while members ran"
    found = [run.audit[rule] for rule in (Rule.RESOLVED, Rule.ENOUGH) if rule in run.audit]
    short = [report for report in found if report["outcomes"] < report["needed"]]
    if short:
        most = max(short, key=lambda report: report["outcomes"])
        return f"not enough exempted outcomes: {most['outcomes']} of {most['needed']}"
    limit = run.settings.prune.audit.max_false_rate
    doubtful = [report["false_rate_bound"] for report in found if report["false_rate_bound"] > limit]
    if doubtful:
        return f"the false-prune rate may be {min(doubtful):.3g}, above audit.max_false_rate={limit:g}"
    return f"the audit let {'its only candidate' if exempted == 1 else f'all {exempted} candidates'} run"


def _why_loops(run: Run) -> str:
    span, proven = run.settings.prune.repetition.min_span, run.count("loops/exempted") + run.count("loops/passed_by")
    if run.response_length and span > run.response_length:
        return f"min_span={span} is more than a response may have, {run.response_length} tokens"
    if not proven:
        return "no loop was proven"
    return f"the audit let {'the only proven loop' if proven == 1 else f'all {proven} proven loops'} run"


def _why_verdicts(run: Run) -> str:
    looks, report = run.count("verdicts/looks"), run.audit.get(Rule.VERDICT)
    if not looks:
        return "no response was looked at: none came as far as prune.verdict.check_interval"
    if not run.count("verdicts/gate_open"):
        if report is None:
            return f"{_plural(looks, 'look')}, but no weight sync at which they are learned from"
        if report["responses"] < report["needed_responses"]:
            return f"too few outcomes: {report['responses']} of {report['needed_responses']} responses"
        return f"the gate stayed shut: {report['shut'] or 'no weight sync since it would open'}"
    exempted = run.count("verdicts/exempted")
    if not exempted:
        return "no candidate: no response was below prune.verdict.cut_below"
    return f"the coin let {'its only candidate' if exempted == 1 else f'all {exempted} candidates'} run"


def _more_of_verdicts(run: Run) -> str:
    count, report = {name: run.count(f"verdicts/{name}") for name in (
        "looks", "pruned", "exempted", "false", "let_go", "gate_open", "gate_shut")}, run.audit.get(Rule.VERDICT) or {}
    gate = "open" if report.get("open") else f"shut: {report.get('shut') or 'unknown'}"
    return (f"{count['looks']} looks; {count['pruned']} cut, {count['exempted']} spared by the coin ({count['false']} "
            f"of them right), {count['let_go']} let go; gate open at {count['gate_open']} of "
            f"{count['gate_open'] + count['gate_shut']} questions of workers, now {gate}")


def _why_replaced(run: Run) -> str:
    if run.settings.null_groups != NullGroups.TRAIN:
        null = run.count("replaced/null")
        return f"{_plural(null, 'group')} had no gradient" + (
            ", and there were not enough others, or no further prompt" if null else "")
    if not run.count("pruning/pruned"):
        return "nothing was pruned"
    if run.trainer == SYNC:
        return "trainer_mode=sync submits another prompt in a group's place only with algorithm.filter_groups"
    return "each pruned group kept a gradient, or there was no further prompt"


def _why_sampler(run: Run) -> str:
    takes = run.count("sampler/takes")
    if not takes:
        return "no prompt was taken"
    if run.count("sampler/unseen") == takes:
        return f"first epoch: none of {_plural(takes, 'prompt')} was seen before, and their texts told nothing yet"
    return "no candidate promised more than another one"


def _why_keep(run: Run) -> str:
    aborted = run.count("keep/aborted")
    if run.trainer and run.trainer not in STANDALONE:
        return f"{run.trainer} has no standalone replicas: every sync aborts"
    if run.trainer == RECIPE:
        return "verl 0.7.0: its servers cancel requests by themselves"
    if not run.count("keep/syncs"):
        return "no weight sync"
    if aborted:
        return f"{_plural(aborted, 'request')} aborted instead: the log says why"
    return "no weight sync while requests ran"


def _more_of_keep(run: Run) -> str:
    moved = run.count("keep/moved")
    return f"{_plural(moved, 'request')} handed back for lent replicas" if moved else ""


def _why_kv_headroom(run: Run) -> str:
    return "no request waited for memory: the KV cache had room" if run.count("keep/syncs") else "no weight sync"


def _why_token_outputs(run: Run) -> str:
    if run.trainer == RECIPE:
        return "not made for the servers of verl 0.7.0"
    if run.count("token_outputs/with_text"):
        return "every request had stop strings, prompt log-probs or its own detokenize"
    return "no request was counted"


def _of_separate(run: Run) -> str:
    """What the overlap control cannot move there."""
    return ("prompts in process alone: v1 has no bound on prompts in flight, and its batch stays"
            if run.trainer == SEPARATE else "")


def _why_overlap(run: Run) -> str:
    if run.trainer not in ("", FULLY_ASYNC, SEPARATE):
        return f"{run.trainer}: its settings are not moved"
    if run.trainer == SEPARATE and "staleness" in run.fixed:
        return "separate_async: prompts in process stay (the first lines of the log say why), and nothing else can move"
    if not run.count("overlap/versions"):
        return "no weight version ended"
    if not run.count("overlap/measured"):
        return f"rates were missing in {_plural(run.count('overlap/versions'), 'weight version')}"
    return (f"in {_plural(run.count('overlap/versions'), 'weight version')} no setting within reach promised more; "
            "what is set by hand stays without overlap.override")


MODULES = (
    Module(ROUTING, "routing.enable", lambda s: s.enable and s.routing.enable,
           ("routing/inversions", "routing/moves"), _why_routing),
    Module(SEGMENTS, "boundary=yield or routing.tail_share",
           lambda s: s.enable and (s.boundary == "yield" or _tails(s)), ("segments/resubmitted",), _why_segments),
    Module(LOOPS, "prune.repetition.enable", lambda s: s.enable and s.prune.repetition.enable, ("loops/pruned",),
           _why_loops),
    Module(PRUNING, "prune.resolved.enable or prune.finish_group_after",
           lambda s: s.enable and (s.prune.resolved.enable or s.prune.finish_group_after > 0), ("pruning/pruned",),
           _why_pruning),
    Module(VERDICTS, "prune.verdict.enable", lambda s: s.enable and s.prune.verdict.enable, ("verdicts/pruned",),
           _why_verdicts, _more_of_verdicts),
    Module(REPLACED, "prune.resolved.enable or null_groups",
           lambda s: s.enable and (s.prune.resolved.enable or s.null_groups != NullGroups.TRAIN), ("replaced/groups",),
           _why_replaced),
    Module(SAMPLER, "sampler.enable", lambda s: s.enable and s.sampler.enable, ("sampler/chosen",), _why_sampler),
    Module(KEEP, "sync.requests=keep", lambda s: s.keeps, ("keep/kept",), _why_keep, _more_of_keep),
    Module(KV_HEADROOM, "kv_headroom", lambda s: s.enable and s.kv_headroom > 0, ("kv_headroom/held",),
           _why_kv_headroom),
    Module(TOKEN_OUTPUTS, "token_outputs", lambda s: s.token_outputs, ("token_outputs/responses",), _why_token_outputs),
    Module(OVERLAP, "overlap.enable", lambda s: s.overlap.enable, ("overlap/moves",), _why_overlap, _of_separate),
)
NAMES = tuple(module.name for module in MODULES)
# agent-loop workers decide about all but the last, and their rows tell the trainer
OF_TRAINER = (SEGMENTS, LOOPS, PRUNING, VERDICTS, OVERLAP)


def decided(settings: Segment, counts: Mapping[str, int], names: Iterable[str] = NAMES) -> dict[str, int]:
    """Decisions of each of these modules that is on."""
    wanted = frozenset(names)
    return {module.name: sum(counts.get(name, 0) for name in module.counted) for module in MODULES
            if module.name in wanted and module.on(settings)}


def table(run: Run, recorded: bool = True) -> list[Row]:
    """One row a module. A module that is off and decided all the same would be a defect: its count is shown."""
    rows = []
    for module in MODULES:
        on, number = module.on(run.settings), sum(run.count(name) for name in module.counted)
        if not recorded:
            rows.append(Row(module.name, module.switch, on, None, "not recorded"))
        else:
            reason = (module.more if number else module.why)(run) if on else ""
            rows.append(Row(module.name, module.switch, on, number, reason))
    return rows


class Gathered:
    """Running counts of several processes, in whatever order they come.

    Invariant: the total is the sum over processes of the largest count that each of them has told.
    """

    def __init__(self):
        self._known: dict[Hashable, Counter] = {}
        self._told: Counter = Counter()

    def add(self, process: Hashable, counts: Mapping[str, int]) -> None:
        """Running counts only grow: an older row changes nothing."""
        known = self._known.setdefault(process, Counter())
        known |= Counter(counts)
        self._known[process] = known

    def total(self) -> Counter:
        return sum(self._known.values(), Counter())

    def take(self) -> Counter:
        """What has come since the last call."""
        total = self.total()
        new, self._told = total - self._told, total
        return new


WHO = ("restart", "node", "pid", "process")  # what tells the counting processes of a run apart


def of_rows(rows: Iterable[Mapping]) -> tuple[Counter, dict[str, Mapping]]:
    """Counts of a whole run, over its restarts, and the newest report of every audited rule; rows in order of time."""
    gathered, audit = Gathered(), {}
    for row in rows:
        gathered.add(tuple(row.get(name) for name in WHO), row.get("counts", {}))
        audit.update(row.get("audit") or {})
    return gathered.total(), audit
