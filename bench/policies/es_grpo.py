"""ES-GRPO, by the decisions of overlay/esgrpo/algo: the same classes that the hooks drive.

Modules, each can be left out: A routing (longest forecast first, and perhaps replicas kept for the tail), B keep
(requests survive a weight sync with their KV cache; under sync, too, so that groups can be carried over), C pruning
(the resolved rule under its audit), D elastic segments (a group that is all but finished is told to look soon; its rest
joins the tail class and may move to a tail replica at that boundary), S the prompt sampler (prompts by the gradient
that they promise). S takes other prompts than all other policies, so that what is compared by its speed is without it.

Soft boundaries that decide nothing are not events here: they cost the engine nothing (bench.scheduler_cost). One audit
for all groups, as with one agent-loop worker. The rules for loops are not simulated: no tokens, no loops.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from esgrpo.algo.grouping import FINISHED, PRUNED, RUNNING, GroupCoordinator

from bench.policies import ABORT, ASYNC, KEEP, SYNC, Action, Continue, EndStep, Load, Policy, Prune, Tell, Yield
from bench.workload import Group, Sample
from esgrpo import config
from esgrpo.algo import elastic
from esgrpo.algo.audit import Audit
from esgrpo.algo.carry_over import CarryOver, CarryOverError, Waiting
from esgrpo.algo.group_pruning import Finished, GroupPruner
from esgrpo.algo.history import PromptHistory
from esgrpo.algo.prompt_sampling import PromptSampler
from esgrpo.algo.routing import BODY, TAIL, PromptQueue, TailShare
from esgrpo.algo.segments import next_multiple

ROUTING, KEPT, PRUNING, ELASTIC, SAMPLER = ALL_MODULES = "ABCDS"


@dataclass
class Member:
    sample: Sample
    replica: int
    length_class: str
    may_move: bool


@dataclass
class Open:
    """A group that runs. `prompt` is its name in the history, `length` its longest forecast."""

    group: Group
    forecast: dict
    told: elastic.Segments
    running: dict[int, Member] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)  # of members that ended, pruned ones included
    ended: list[tuple[int, bool | None, bool]] = field(default_factory=list)  # tokens, correct, only a lower bound


class EsGrpo(Policy):
    """As the hooks do it: groups are ordered, submitted whole, and queue in the engines.

    Under async as many are open as verl's rollouter allows. Under sync all that is visible goes at once, longest first;
    with module B in the order of the data, as verl's asynchronous trainers begin a group when another one ends, and
    more than an update's (`over` times as many, as verl's num_warmup_batches adds them). An update takes the oldest
    whole groups; the others decode on. As verl's replay buffer does with max_off_policy_strategy=wait, an unfinished
    group that is `bound` versions old is waited for, never dropped. The class that watches verl's pool watches this one
    too (algo.carry_over), and nothing may be odd here. What is carried stays in its engine, which takes standalone
    replicas; under a colocated trainer it is aborted and resumed at once ("es-grpo/ABD+abort").
    """

    name = "es-grpo"
    carries, over, bound = True, 2.0, 7  # versions beyond the first: verl's max_off_policy_threshold is 8 by default
    modules = ROUTING + KEPT + ELASTIC
    overrides: dict = {}  # of the elastic profile
    holds = False  # requests wait in the queue for a free place, not in an engine
    keeps = True  # with module B
    orders_carried = False  # longest first also where groups are carried over: nobody waits for the longest there, and
    #                         the others wait behind them ("es-grpo/ABD+longest")

    def __init__(self, limits, rng):
        super().__init__(limits, rng)
        self.settings = config.parse({"profile": "elastic", **self.overrides})
        self.has = frozenset(self.modules)
        self.sync = KEEP if KEPT in self.has and self.keeps else ABORT
        self.sleeps = KEPT not in self.has  # the hook resume-without-sleep
        routing = self.settings.routing
        self.history = PromptHistory(self.settings.history, routing, budget=limits.cap)
        # a barrier waits for all: nobody starves there, and the hooks sort the whole step
        ageing = routing.ageing if limits.scenario == ASYNC else limits.groups
        carries = limits.scenario == SYNC and KEPT in self.has and self.carries
        self.queue = PromptQueue(ageing, by_length=ROUTING in self.has and (self.orders_carried or not carries))
        self.now = 0.0
        self.share = TailShare(routing.tail_share if ROUTING in self.has else 0.0, lambda: self.now)
        self.coordinator = GroupCoordinator()
        self.pruner = self.new_pruner() if PRUNING in self.has else None
        self.sampler: PromptSampler | None = None
        self.open: dict[int, Open] = {}
        self.news: dict[int, None] = {}  # groups in which a member ended since the last `next`
        self.moving: list[tuple[Member, int]] = []  # handed back, with their tokens
        self.in_flight = self.tails = self.version = 0
        self.carried: CarryOver | None = None
        self.born: dict[int, int] = {}  # version in which a group that is not trained began
        if carries:
            self.carried = CarryOver(None if self.bound is None else self.bound + 1, drops=False)
            self.fresh = self.wanted()

    def new_pruner(self) -> GroupPruner:
        audit = Audit(self.settings.prune.audit, random.Random(self.rng.random()))
        return GroupPruner(self.settings, audit, self.limits.cap)

    # prompts

    def remember(self, groups) -> None:
        for group in groups:
            samples = group.samples[:self.limits.members]
            self.learn(group.prompt, [(sample.tokens, sample.correct, sample.tokens >= self.limits.cap)
                                      for sample in samples])

    def learn(self, prompt: int, endings: list[tuple[int, bool | None, bool]]) -> None:
        self.history.observe(str(prompt), *map(list, zip(*endings, strict=True)), version=self.version)

    def choose(self, prompts: int) -> int:
        if self.sampler is None:
            self.sampler = PromptSampler(self.settings.sampler, self.history, random.Random(self.rng.random()), prompts,
                                         str, self.limits.members)
        chosen = self.sampler.take(self.version)
        self.decisions["sampler"] += chosen != (self.sampler.taken - 1) % prompts
        return chosen

    def demand(self) -> int:
        if self.limits.scenario == SYNC:
            return self.fresh
        return max(0, self.limits.concurrent - len(self.queue))

    def wanted(self) -> int:
        """Fresh groups so that `over` times as many as an update needs are open or whole."""
        return max(0, round(self.over * self.limits.groups) - len(self.born) - len(self.queue))

    def admit(self, groups) -> None:
        self.fresh -= len(groups)
        lengths = {group.index: self.history.forecast(str(group.prompt))["tokens"] for group in groups}
        for group in groups:
            self.queue.push(group, lengths[group.index])

    # placement

    def place(self, now: float, load: Load) -> list[Action]:
        self.now = now
        actions = self.look(load) if self.news else []
        while self.moving:
            member, tokens = self.moving.pop(0)
            actions.append(self.start(member, tokens))
        room = len(self.queue)
        if self.limits.scenario == ASYNC:
            room = min(room, load.allowance, self.limits.concurrent - len(self.open))
        for _ in range(room):
            if self.holds and self.in_flight >= self.limits.slots:
                break
            inversions = self.queue.inversions
            group = self.queue.pop()
            self.decisions["routing"] += self.queue.inversions - inversions
            actions += self.begin_group(group)
        return actions

    def begin_group(self, group: Group) -> list[Action]:
        self.begin(group)
        self.born[group.index] = self.version
        forecast, size = self.history.forecast(str(group.prompt)), self.limits.members
        entry = self.open[group.index] = Open(group, forecast, elastic.Segments(self.settings.segment_length, False))
        name = str(group.index)
        if self.pruner is not None:
            self.pruner.watch(name, size, forecast)
        length = forecast["length_class"] if ROUTING in self.has else BODY
        actions: list[Action] = []
        for sample in group.samples[:size]:
            self.coordinator.join(name, size, sample.member)
            member = Member(sample, -1, length, length != TAIL and self.limits.replicas > 1 and self.share.largest > 0)
            entry.running[sample.member] = member
            actions.append(self.start(member, 0))
        return actions

    def start(self, member: Member, done: int) -> Action:
        """Place it by its class; a response that was handed back prefers its old replica unless it joins the tail."""
        self.count(member, 1)
        sticky = member.replica if member.replica >= 0 else None
        member.replica = self.pool.choose(member.length_class, sticky)
        return self.submit(member.sample, member.replica, None, done)

    def count(self, member: Member, change: int) -> None:
        """Requests in flight changed: so may the number of tail replicas."""
        self.in_flight += change
        self.tails += change * (member.length_class == TAIL)
        if self.share.largest > 0:
            before = len(self.pool.tail)
            count = self.share.observe(self.limits.replicas, self.tails, self.in_flight - self.tails)
            if count != before:
                self.pool.set_tail(count)

    # endings

    def boundary(self, sample: Sample, replica: int, tokens: int) -> Continue | Yield:
        member = self.open[sample.group].running[sample.member]
        if not (member.length_class == TAIL and member.may_move):
            return Continue()
        member.may_move = False
        self.left(replica)
        self.count(member, -1)
        self.moving.append((member, tokens))
        self.decisions["segments"] += 1
        return Yield()

    def finished(self, sample, replica, now):
        self.now = now
        capped = sample.tokens >= self.limits.cap
        self.leave(sample, replica, sample.tokens, FINISHED, (sample.tokens, sample.correct, capped),
                   Finished(sample.tokens, sample.correct, float(sample.correct)))

    def aborted(self, sample, replica, tokens, now):
        """Only pruning stops a response here."""
        self.now = now
        self.decisions["pruning"] += 1
        self.leave(sample, replica, tokens, PRUNED, (tokens, None, True), None)

    def leave(self, sample: Sample, replica: int, tokens: int, outcome: str, ending: tuple,
              finished: Finished | None) -> None:
        entry, name = self.open[sample.group], str(sample.group)
        member = entry.running.pop(sample.member)
        self.left(replica)
        self.count(member, -1)
        self.coordinator.leave(name, sample.member, outcome)
        if self.pruner is not None:
            self.pruner.ended(name, sample.member, finished)
        entry.lengths.append(tokens)
        entry.ended.append(ending)
        self.ended(sample)
        if entry.running:
            self.news[sample.group] = None
            return
        self.news.pop(sample.group, None)
        self.learn(entry.group.prompt, entry.ended)
        if self.pruner is not None:
            self.pruner.close(name)
        del self.open[sample.group]

    def look(self, load: Load) -> list[Action]:
        """Members have ended: who of their siblings is pruned, and how long are the segments of the others?"""
        actions: list[Action] = []
        for index in self.news:
            entry = self.open[index]
            doomed = self.prune(entry, load) if self.pruner is not None else []
            actions += doomed
            if ELASTIC in self.has and not entry.told.tail and len(doomed) < len(entry.running):
                actions += self.tell(entry, load, {action.sample.member for action in doomed})
        self.news.clear()
        return actions

    def prune(self, entry: Open, load: Load) -> list[Prune]:
        name = str(entry.group.index)
        if not self.pruner.wants_progress(name):
            return []
        # a response that is between two places decodes nowhere: it is asked about at the next ending
        between = {id(member) for member, _ in self.moving}
        running = {number: load.progress(member.sample) for number, member in entry.running.items()
                   if id(member) not in between}
        decided = self.pruner.checkpoint(name, running)
        return [Prune(entry.running[number].sample, item.verdict.rule, item.verdict.pi)
                for number, item in decided.items() if item.verdict.prune]

    def tell(self, entry: Open, load: Load, doomed: set[int]) -> list[Tell]:
        """The group is told its segment length. Only a member that joins the tail class has a boundary that decides
        anything, so nothing is computed before that can happen."""
        states = self.coordinator.groups[str(entry.group.index)].members
        ended = sum(state != RUNNING for state in states.values()) / self.limits.members
        if ended < self.settings.elastic.tail_fraction:
            return []
        between = {id(member) for member, _ in self.moving}
        running = list(entry.running.values())
        tokens = [load.progress(member.sample) for member in running]
        rest = [elastic.remaining_tokens(done, entry.forecast, entry.lengths, self.limits.cap) for done in tokens]
        entry.told = elastic.next_segments(self.settings.elastic, entry.told, 1 - ended, sum(rest) / len(rest))
        if not entry.told.tail:
            return []
        actions = []
        for member, done in zip(running, tokens, strict=True):
            if member.length_class != TAIL:
                member.length_class = TAIL
                self.tails += id(member) not in between
            if member.may_move and member.sample.member not in doomed and id(member) not in between:
                actions.append(Tell(member.sample, next_multiple(done, entry.told.length) - done))
        self.decisions["elastic"] += len(actions)
        return actions

    # updates

    def step_is_over(self) -> bool:
        late = self.carried is not None and self.bound is not None and any(
            self.version - self.born[index] >= self.bound for index in self.open)
        return super().step_is_over() and not late

    def oldest_first(self) -> list[int]:
        """Whole groups in the order of training: equally old ones as they became whole."""
        return sorted(self.whole, key=self.born.__getitem__)

    def end_step(self) -> EndStep:
        """Train the oldest whole groups, account for what is carried, and want so many fresh ones that `over` holds."""
        if self.carried is None:
            return super().end_step()
        self.whole = deque(self.oldest_first())
        action = super().end_step()
        trained = {str(index): self.born.pop(index) for index in action.groups}
        self.carried.settle(self.version, trained, {str(index): Waiting(born, index not in self.open)
                                                    for index, born in self.born.items()})
        for kind, groups in self.carried.oddities.items():
            if groups:
                raise CarryOverError(f"groups {groups} are {kind}")
        self.fresh = self.wanted()
        return action

    def weights_changed(self, now: float) -> None:
        self.version += 1
        if self.sync == KEEP:
            self.decisions["keep"] += self.in_flight


class Pruning(EsGrpo):
    """With audited pruning."""

    name = "es-grpo-prune"
    modules = ROUTING + KEPT + PRUNING + ELASTIC


# What the study asks about; part of a policy's name.
CHANGES = {"hold": {"holds": True},
           "tails": {"overrides": {"routing": {"tail_share": 0.25}}},
           "barrier": {"carries": False},
           "longest": {"orders_carried": True},
           "abort": {"keeps": False},
           "unbounded": {"bound": None},
           **{f"bound-{versions}": {"bound": versions} for versions in range(1, 9)},
           **{f"over-{factor}": {"over": factor} for factor in (1.25, 1.5, 3.0)},
           "few-tails": {"overrides": {"routing": {"tail_share": 0.25, "tail_quantile": 0.95}}},
           "loose": {"overrides": {"prune": {"resolved": {"enable": True, "null_prob": 0.3}, "audit": {
               "enable": True, "max_false_rate": 0.2, "max_fraction": 0.75}}}}}  # candidates, and pruned ones, abound


def variant(name: str) -> type[EsGrpo]:
    """ES-GRPO with some modules, and perhaps changes: "AB" or "ABD+no-tail+bound-1". Raises KeyError for what is
    unknown."""
    modules, *changes = name.split("+")
    if set(modules) - set(ALL_MODULES) or set(changes) - set(CHANGES):
        raise KeyError(f"{name}: wanted modules of {ALL_MODULES} and changes of {', '.join(CHANGES)}")
    changed: dict = {}
    for change in changes:
        changed.update(CHANGES[change])
    return type("Variant", (EsGrpo,), {"name": f"{EsGrpo.name}/{name}", "modules": modules, **changed,
                                       "chooses": SAMPLER in modules,
                                       "carries": KEPT in modules and changed.get("carries", True)})


POLICIES = (EsGrpo, Pruning)
