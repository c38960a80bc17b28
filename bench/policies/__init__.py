"""Rollout policies: which response is decoded where, when and for how long. Pure and driven by events.

The driver (bench.sim's virtual clock or bench.engine's real vLLM) owns time and replicas; a policy owns decisions. The
driver calls, in this order:

    remember(groups)   once, before the run: visits of an earlier epoch, for policies that keep a history
    demand()           before every `next`: how many fresh groups the policy wants to see now
    admit(groups)      these groups became visible; fewer than wanted at the end of the workload
    next(now, load)    after every event, and again until it returns nothing; actions are carried out in their order
    boundary(...)      a segment ended: Continue, Yield or Prune. After Yield the response is the policy's again: it
                       comes back as a Submit from a later `next`
    finished(...)      a response is whole
    aborted(...)       an Abort or Prune was carried out; `tokens` is what the response had then
    weights_changed(now)
    choose(prompts)    only if the policy `chooses`: the prompt of the next group that `admit` will bring

Scenarios. sync: a policy ends a step by EndStep(groups) with `limits.groups` whole groups; weights change then, and
what is still running goes on afterwards (its KV cache is that of old weights: see `sync`). async: the driver takes the
oldest whole groups itself, EndStep is never returned; a policy may start no more than `load.allowance` groups.

A group is whole when `limits.members` of its samples are finished or pruned. Tokens are response tokens; time is in
seconds since the start.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bench.common.workload import Group, Sample
from bench.policies.pool import Pool
from esgrpo.algo import decisions

OVERSUBSCRIBED = 2.0  # requests of begun groups per place: stragglers of a group must not keep places empty
SYNC, ASYNC = "sync", "async"
KEEP, ABORT = "keep", "abort"  # what a weight sync does to running requests
# Modules that are played here and what is counted of each: prompts begun before an older one, responses handed back at
# a boundary, responses pruned, prompts chosen by what is known of the candidates, requests kept over a sync.
DECISIONS = (decisions.ROUTING, decisions.SEGMENTS, decisions.PRUNING, decisions.SAMPLER, decisions.KEEP)


@dataclass(frozen=True)
class Limits:
    replicas: int
    sequences: int  # requests that run at once on a replica (max_num_seqs)
    capacity: int  # requests at which a replica is full, for the bubble rate
    cap: int  # tokens of the longest response
    members: int  # samples of a group that are trained
    groups: int  # groups of an update
    scenario: str = SYNC
    kv_tokens: int = 1 << 60  # KV cache of a replica

    @property
    def slots(self) -> int:
        return self.replicas * self.sequences

    @property
    def concurrent(self) -> int:
        """Groups that are open at once under async: verl's concurrent_samples_per_replica, tuned."""
        return math.ceil(OVERSUBSCRIBED * self.slots / self.members)


class Load(Protocol):
    """What a driver shows of the replicas, numbered from 0."""

    running: Sequence[int]
    waiting: Sequence[int]
    free_blocks: Sequence[int]  # KV blocks
    allowance: int  # groups that may still be begun before the next weights (staleness bound); large under sync. The
    #                 driver lowers it with the first Submit of each group

    def progress(self, sample: Sample) -> int:
        """Tokens of this response so far, decoded or brought along."""


class Submit(NamedTuple):
    """Decode on `replica`; `segment` tokens until the next boundary (None: to the end); `done` tokens exist already."""

    sample: Sample
    replica: int
    segment: int | None = None
    done: int = 0


class Abort(NamedTuple):
    """Stop a response that was submitted; without `keep_tokens` it starts from nothing when it is submitted again."""

    sample: Sample
    keep_tokens: bool


class Tell(NamedTuple):
    """The next boundary of a running response comes after `segment` more tokens, if that is earlier."""

    sample: Sample
    segment: int


class Prune(NamedTuple):
    """End a response for good; `pi`: the probability of keeping it. Also an answer of `boundary`."""

    sample: Sample
    rule: str
    pi: float


class Restart(NamedTuple):
    """Throw away all that a group has finished; nothing of it runs. Its spare samples stand in for a new attempt."""

    group: int


class EndStep(NamedTuple):
    """These whole groups are trained (their indexes)."""

    groups: list[int]


class Continue(NamedTuple):
    """Answer of `boundary`: decode on, the next boundary after `segment` tokens (None: to the end)."""

    segment: int | None = None


class Yield(NamedTuple):
    """Answer of `boundary`: hand the response back with its tokens."""


Action = Submit | Abort | Tell | Prune | Restart | EndStep


class Policy:
    """What all policies share: groups that are open, groups that are whole, requests in flight per replica."""

    name = ""
    scenarios: tuple[str, ...] = (SYNC, ASYNC)
    sync = ABORT
    sleeps = True  # a client whose request a weight sync aborted waits before it resumes, as verl's does
    spare = 0.0  # spare samples per trained one that the workload must have
    carries = False  # under sync a step ends while groups that it began are unfinished
    trains_cut = False  # what it cuts is trained as it is
    headroom = 0.0  # share of the KV cache that stays free when a request is let in (vLLM's watermark)
    chooses = False  # takes other prompts than the data's order has, and therefore does other work than the others

    def __init__(self, limits: Limits, rng: random.Random):
        self.limits, self.rng = limits, rng
        self.pool = Pool(range(limits.replicas), rng)
        self.missing: dict[int, int] = {}  # group -> samples that it still needs
        self.whole: deque[int] = deque()  # whole groups, oldest first (sync)
        self.waiting: deque = deque()  # visible groups that have not begun
        self.fresh = limits.groups  # groups that this step still wants to see (sync)
        self.unsent: set[int] = set()  # groups that have begun, none of their samples submitted yet
        self.decisions: Counter[str] = Counter()  # that changed something, by module (DECISIONS)

    @property
    def note(self) -> str:
        """What a reader of this policy's numbers must know; empty: nothing."""
        return ""

    def decided(self) -> dict[str, int]:
        """Decisions that changed something, of every module; what is not ours has none to count."""
        return {module: self.decisions[module] for module in DECISIONS}

    def remember(self, groups: Iterable[Group]) -> None:
        pass

    def demand(self) -> int:
        """Under sync what a step needs; under async as many waiting groups as could run at once: there is a choice."""
        if self.limits.scenario == SYNC:
            return self.fresh
        return max(0, self.limits.concurrent - len(self.waiting))

    def admit(self, groups: Sequence[Group]) -> None:
        self.fresh -= len(groups)
        self.waiting.extend(groups)

    def next(self, now: float, load: Load) -> list[Action]:
        actions = self.place(now, load)
        if self.limits.scenario == SYNC and self.step_is_over():
            actions.append(self.end_step())
        return actions

    def step_is_over(self) -> bool:
        return len(self.whole) >= self.limits.groups

    def end_step(self) -> EndStep:
        """Train the oldest whole groups; the next step wants as many fresh ones."""
        self.fresh = self.limits.groups
        return EndStep([self.whole.popleft() for _ in range(self.limits.groups)])

    def place(self, now: float, load: Load) -> list[Action]:
        """Submissions that are possible now."""
        raise NotImplementedError

    def boundary(self, sample: Sample, replica: int, tokens: int) -> Continue | Yield | Prune:
        return Continue()

    def room(self, load: Load) -> int:
        """Groups that may begin now."""
        if self.limits.scenario == SYNC:
            return len(self.waiting)
        return min(len(self.waiting), load.allowance - len(self.unsent))

    def begin(self, group: Group) -> None:
        self.missing[group.index] = self.limits.members
        self.unsent.add(group.index)

    def finished(self, sample: Sample, replica: int, now: float) -> None:
        self.left(replica)
        self.ended(sample)

    def ended(self, sample: Sample) -> None:
        """One sample less that its group needs; a group that is whole joins the queue of those."""
        self.missing[sample.group] -= 1
        if self.missing[sample.group] == 0:
            del self.missing[sample.group]
            if self.limits.scenario == SYNC:
                self.whole.append(sample.group)

    def aborted(self, sample: Sample, replica: int, tokens: int, now: float) -> None:
        self.left(replica)

    def resumed(self, sample: Sample, replica: int, tokens: int, now: float) -> int:
        """A weight sync aborted a response of so many tokens; returns where its client submits it again."""
        return replica

    def weights_changed(self, now: float) -> None:
        pass

    def submit(self, sample: Sample, replica: int, segment: int | None = None, done: int = 0) -> Submit:
        self.pool.add(replica, 1)
        self.unsent.discard(sample.group)
        return Submit(sample, replica, segment, done)

    def left(self, replica: int) -> None:
        self.pool.add(replica, -1)


def policies() -> dict[str, type[Policy]]:
    """Every policy by its name on the command line, the baseline first."""
    from bench.policies import carry, es_grpo, order, seer, tail

    families = (order, carry, tail, seer, es_grpo)
    return {cls.name: cls for family in families for cls in family.POLICIES}


def baseline(scenario: str) -> str:
    """verl at its best, which ratios are against: under a barrier its own carry-over."""
    return "colocate_async" if scenario == SYNC else "verl"


def with_headroom(kind: type[Policy], share: str) -> type[Policy]:
    """Raises KeyError where `share` is none."""
    if not re.fullmatch(r"0?\.\d+", share):
        raise KeyError(f"{kind.name}@{share}: wanted a share of the KV cache, as in {kind.name}@0.05")
    return type(kind.__name__, (kind,), {"name": f"{kind.name}@{share}", "headroom": float(share)})


FORMERLY = {"static": "ulorl"}  # names in older records


def policy(name: str) -> type[Policy]:
    """A policy by its name; "es-grpo/AB" is ES-GRPO with modules A and B only, "april/1.5" APRIL with another factor,
    "verl@0.05" any of them with that headroom in its engines. Raises KeyError with the names."""
    from bench.policies import carry, es_grpo

    name, at, share = name.partition("@")
    if at:
        return with_headroom(policy(name), share)
    name = FORMERLY.get(name, name)
    family, slash, rest = name.partition("/")
    variants = {es_grpo.EsGrpo.name: es_grpo.variant, carry.April.name: carry.variant}
    if slash and family in variants:
        return variants[family](rest)
    known = policies()
    if name not in known:
        raise KeyError(f"unknown policy {name!r}, wanted one of {', '.join(known)}")
    return known[name]
