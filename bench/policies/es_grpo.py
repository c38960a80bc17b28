"""ES-GRPO, by the decisions of overlay/esgrpo/algo: the same classes that the hooks drive.

Modules, each can be left out: A routing (longest forecast first, and perhaps replicas kept for the tail, where the rest
of a group moves that is all but finished), B keep (requests survive a weight sync with their KV cache; under sync, too,
so that groups can be carried over), C pruning (the resolved rule under its audit; what it cuts is trained, and left out
in "es-grpo/ABC+masked"), S the prompt sampler (prompts by the gradient that they promise). S takes other prompts than
all other policies, so that what is compared by its speed is without it. Older records have a letter D: segments whose
length followed the group.

Soft boundaries that decide nothing are not events here: they cost the engine nothing (bench.scheduler_cost). One audit
for all groups, as with one agent-loop worker. The rules for loops are not simulated: no tokens, no loops.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from dataclasses import dataclass, field

from bench.common.workload import Group, Sample
from bench.policies import (
    ABORT,
    ASYNC,
    KEEP,
    SYNC,
    Action,
    Continue,
    EndStep,
    Load,
    Policy,
    Prune,
    Restart,
    Tell,
    Yield,
)
from esgrpo import config
from esgrpo.algo import decisions, rollout
from esgrpo.algo.audit import Audit
from esgrpo.algo.carry_over import STALE, CarryOver, CarryOverError, Waiting
from esgrpo.algo.group_pruning import GroupPruner
from esgrpo.algo.history import PromptHistory
from esgrpo.algo.looks import next_multiple
from esgrpo.algo.prompt_sampling import PromptSampler
from esgrpo.algo.routing import BODY, TAIL, PromptQueue, TailShare
from esgrpo.algo.segments import MOVE, at_boundary
from esgrpo.algo.terms import Outcome, Rule, Treatment

ROUTING, KEPT, PRUNING, SAMPLER = ALL_MODULES = "ABCS"


@dataclass
class Member:
    sample: Sample
    replica: int
    length_class: str
    may_move: bool


@dataclass
class Open:
    """A group that runs."""

    group: Group
    running: dict[int, Member] = field(default_factory=dict)
    ended: list[tuple[int, bool | None, bool]] = field(default_factory=list)  # tokens, correct, only a lower bound


class EsGrpo(Policy):
    """As the hooks do it: groups are ordered, submitted whole, and queue in the engines.

    Under async as many are open as verl's rollouter allows. Under sync all that is visible goes at once, longest first;
    with module B in the order of the data, as verl's asynchronous trainers begin a group when another one ends, and
    more than an update's (`over` times as many, as verl's num_warmup_batches adds them). An update takes the oldest
    whole groups; the others decode on. As verl's replay buffer does with max_off_policy_strategy=wait, an unfinished
    group that is `bound` versions old is waited for, never dropped; with drop ("es-grpo/AB+drop") nobody is waited
    for, and a whole group that is older is dropped, another prompt begins in its place (verl's default, see
    bench.policies.carry.ColocateAsync). The class that watches verl's pool watches this one too (algo.carry_over), and
    nothing may be odd here. What is carried stays in its engine, which takes standalone
    replicas; under a colocated trainer it is aborted and resumed at once ("es-grpo/AB+abort").
    """

    name = "es-grpo"
    carries, over, bound = True, 2.0, 7  # versions beyond the first: verl's max_off_policy_threshold is 8 by default
    drops = False  # max_off_policy_strategy=drop
    modules = ROUTING + KEPT
    overrides: dict = {}  # of the elastic profile
    holds = False  # requests wait in the queue for a free place, not in an engine
    keeps = True  # with module B
    orders_carried = False  # longest first also where groups are carried over: nobody waits for the longest there, and
    #                         the others wait behind them ("es-grpo/AB+longest")

    def __init__(self, limits, rng):
        super().__init__(limits, rng)
        self.has = frozenset(self.modules)
        self.settings = self.settings_of_modules()
        self.trains_cut = self.settings.prune.treatment != Treatment.MASKED
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
        pruner = self.new_pruner() if PRUNING in self.has else None
        self.runs = rollout.GroupRuns(rollout.Rules(self.settings, limits.cap, limits.replicas, pruner))
        self.sampler: PromptSampler | None = None
        self.open: dict[int, Open] = {}
        self.asked: dict[int, None] = {}  # groups that want to know how far their members are
        self.moving: list[tuple[Member, int]] = []  # handed back, with their tokens
        self.in_flight = self.tails = self.version = 0
        self.carried: CarryOver | None = None
        self.born: dict[int, int] = {}  # version in which a group that is not trained began
        if carries:
            self.carried = CarryOver(None if self.bound is None else self.bound + 1, self.drops)
            self.dropped: dict[str, str] = {}  # in this step, and why
            self.fresh = self.wanted()

    def settings_of_modules(self) -> config.Segment:
        prune = self.overrides.get("prune", {"resolved": {"enable": True}, "audit": {"enable": True}})
        prune = {**prune, "verdict": {"enable": False}}  # nothing here says what a token was worth to its model
        settings = config.parse({"profile": "elastic", **self.overrides, "prune": prune})
        return dataclasses.replace(settings, routing=dataclasses.replace(settings.routing, enable=ROUTING in self.has))

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
        self.decisions[decisions.SAMPLER] += self.sampler.take_counts()["chosen"]
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
        actions = [*self.drop_old(), *(self.look(load) if self.asked else [])]
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
            self.decisions[decisions.ROUTING] += self.queue.inversions - inversions
            actions += self.begin_group(group)
        return actions

    def begin_group(self, group: Group) -> list[Action]:
        self.begin(group)
        self.born[group.index] = self.version
        forecast, size = self.history.forecast(str(group.prompt)), self.limits.members
        if ROUTING not in self.has:
            forecast = {**forecast, "length_class": BODY}
        entry = self.open[group.index] = Open(group)
        actions: list[Action] = []
        for sample in group.samples[:size]:
            submit, = self.runs.on(rollout.Submitted(str(group.index), size, self.now, sample.member, forecast))
            member = Member(sample, -1, submit.fields["length_class"], submit.fields["move"])
            entry.running[sample.member] = member
            actions.append(self.start(member, 0))
        return actions

    def start(self, member: Member, done: int) -> Action:
        """Place it by its class; a response that was handed back prefers its old replica unless it joins the tail."""
        self.count(member, 1)
        sticky = member.replica if member.replica >= 0 else None
        member.replica = self.pool.choose(member.length_class, sticky)
        self.runs.on(rollout.Placed(str(member.sample.group), member.sample.member, member.replica))
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
        if at_boundary(member.length_class, member.may_move, yields=False) is not MOVE:
            return Continue()
        self.attempt_ended(member, tokens, Outcome.YIELD, Rule.MOVE)
        self.left(replica)
        self.count(member, -1)
        self.moving.append((member, tokens))
        self.decisions[decisions.SEGMENTS] += 1
        return Yield()

    def attempt_ended(self, member: Member, tokens: int, outcome: Outcome, rule: str = "") -> None:
        """Tell the machine as a replica's book would; a response here is of one weight version, which nobody reads."""
        name, number = str(member.sample.group), member.sample.member
        made = tokens - self.runs.response(name, number).tokens
        answer = {"outcome": outcome, "rule": rule, "spans": [[self.version, made]], "boundaries": 0,
                  "logprob_sum": 0.0, "replica": str(member.replica), "arrived": self.now}
        action, = self.runs.on(rollout.AttemptEnded(name, number, self.now, made, self.limits.cap - tokens,
                                                    aborted=outcome == Outcome.ABORT, answer=answer))
        if isinstance(action, rollout.Submit):
            member.length_class, member.may_move = action.fields["length_class"], action.fields["move"]

    def resumed(self, sample, replica, tokens, now):
        """The machine says of which class the next attempt is, as it does in the hooks, and it is placed by that."""
        self.now = now
        member = self.open[sample.group].running[sample.member]
        self.attempt_ended(member, tokens, Outcome.ABORT)
        fields = self.runs.fields(str(sample.group), sample.member)
        member.length_class, member.may_move = fields["length_class"], fields["move"]
        if self.pool.tail:  # else every response stays where it is
            self.left(replica)
            member.replica = self.pool.choose(member.length_class, replica)
            self.pool.add(member.replica, 1)
        self.runs.on(rollout.Placed(str(sample.group), sample.member, member.replica))
        self.decisions[decisions.ROUTING] += member.replica != replica
        return member.replica

    def finished(self, sample, replica, now):
        self.now = now
        capped = sample.tokens >= self.limits.cap
        self.leave(sample, replica, sample.tokens, Outcome.FINISH, (sample.tokens, sample.correct, capped),
                   float(sample.correct))

    def aborted(self, sample, replica, tokens, now):
        """Only pruning stops a response here."""
        self.now = now
        self.decisions[decisions.PRUNING] += 1
        self.leave(sample, replica, tokens, Outcome.PRUNE, (tokens, None, True), None)

    def leave(self, sample: Sample, replica: int, tokens: int, outcome: Outcome, ending: tuple,
              score: float | None) -> None:
        entry, name = self.open[sample.group], str(sample.group)
        member = entry.running.pop(sample.member)
        self.left(replica)
        self.count(member, -1)
        self.attempt_ended(member, tokens, outcome)
        actions = self.runs.on(rollout.MemberEnded(name, sample.member, self.now, score))
        if any(isinstance(action, rollout.Ask) for action in actions):
            self.asked[sample.group] = None
        entry.ended.append(ending)
        self.ended(sample)
        if not entry.running:
            self.asked.pop(sample.group, None)
            self.learn(entry.group.prompt, entry.ended)
            del self.open[sample.group]

    def look(self, load: Load) -> list[Action]:
        """Members have ended: who of their siblings is pruned, and who joins the tail class?"""
        actions: list[Action] = []
        # a response that is between two places decodes nowhere: it is asked about at the next ending
        between = {id(member) for member, _ in self.moving}
        for index in self.asked:
            here = {number: member for number, member in self.open[index].running.items() if id(member) not in between}
            tokens = {number: load.progress(member.sample) for number, member in here.items()}
            doomed: set[int] = set()
            for action in self.runs.on(rollout.Progress(str(index), tokens)):
                if isinstance(action, rollout.Finish):
                    numbers = sorted(number for numbers in action.members.values() for number in numbers)
                    doomed.update(numbers)
                    for number in numbers:
                        response = self.runs.response(str(index), number)
                        actions.append(Prune(here[number].sample, action.rule, response.decision["keep_probability"]))
                elif isinstance(action, rollout.JoinTail):
                    actions += self.join_tail(index, action, here, tokens, doomed)
        self.asked.clear()
        return actions

    def join_tail(self, index: int, joins: rollout.JoinTail, here: dict[int, Member], tokens: dict[int, int],
                  doomed: set[int]) -> list[Tell]:
        """Only a member that joins the tail class has a boundary that decides anything."""
        actions = []
        for number, member in self.open[index].running.items():
            if member.length_class != TAIL:
                member.length_class = TAIL
                self.tails += number in here
            if member.may_move and number in here and number not in doomed:
                actions.append(Tell(member.sample, next_multiple(tokens[number], joins.length) - tokens[number]))
        return actions

    # updates

    def drop_old(self) -> list[Action]:
        """Whole groups that are older than an update takes them."""
        if self.carried is None or not self.drops or self.bound is None:
            return []
        old = [index for index in self.whole if self.version - self.born[index] > self.bound]
        for index in old:
            self.whole.remove(index)
            del self.born[index]
            self.dropped[str(index)] = STALE
        self.fresh += len(old)
        return [*map(Restart, old)]

    def step_is_over(self) -> bool:
        late = self.carried is not None and not self.drops and self.bound is not None and any(
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
                                                    for index, born in self.born.items()}, self.dropped)
        self.dropped = {}
        for kind, groups in self.carried.oddities.items():
            if groups:
                raise CarryOverError(f"groups {groups} are {kind}")
        self.fresh = self.wanted()
        return action

    def weights_changed(self, now: float) -> None:
        self.version += 1
        if self.sync == KEEP:
            self.decisions[decisions.KEEP] += self.in_flight


class Pruning(EsGrpo):
    """With audited pruning."""

    name = "es-grpo-prune"
    modules = ROUTING + KEPT + PRUNING


# What the study asks about; part of a policy's name.
CHANGES = {"hold": {"holds": True},
           "tails": {"overrides": {"routing": {"tail_share": 0.25}}},
           "barrier": {"carries": False},
           "longest": {"orders_carried": True},
           "abort": {"keeps": False},
           "unbounded": {"bound": None},
           "drop": {"drops": True},
           **{f"bound-{versions}": {"bound": versions} for versions in range(1, 9)},
           **{f"over-{factor}": {"over": factor} for factor in (1.25, 1.5, 3.0)},
           "masked": {"overrides": {"prune": {"resolved": {"enable": True}, "audit": {"enable": True},
                                              "treatment": "masked"}}},
           "few-tails": {"overrides": {"routing": {"tail_share": 0.25, "tail_quantile": 0.95}}},
           "loose": {"overrides": {"prune": {"resolved": {"enable": True, "null_prob": 0.3}, "audit": {
               "enable": True, "max_false_rate": 0.2, "max_fraction": 0.75}}}}}  # candidates, and pruned ones, abound


def variant(name: str) -> type[EsGrpo]:
    """ES-GRPO with some modules, and perhaps changes: "AB" or "AB+no-tail+bound-1". Raises KeyError for what is
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
