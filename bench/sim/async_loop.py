"""SIMULATED: verl's fully async loop on a virtual clock: rollouter, trainer, weight syncs, and who of them waits.

Replicas decode groups under continuous batching, with the step times measured on an H100 made SLOWER times as long. The
rollouter begins a group when fewer than `concurrency` are in flight and fewer than N (1 + staleness) were begun since
the last weights, those in process then counted. The trainer takes `trigger` groups, one optimiser step a mini-batch,
and syncs the weights; a sync aborts what runs and prefills it again, as verl does. A validation follows a sync:
meanwhile the rollouter begins nothing and the trainer stands still. The trainer's device is also a replica that verl's
`default` policy lends to rollout and takes back (its rules, restated here).

A share of the groups may have no gradient: they are as long as others and worth nothing, and algo/null_groups.py says
which of them give their place to another prompt.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from dataclasses import dataclass, replace

from bench.common.workload import Group, stream
from bench.sim.device import Device
from bench.sim.replica import NEVER, Replica, Run
from esgrpo.algo.accounting import Pace, pace_of
from esgrpo.algo.null_groups import NullFilter, costs_rollout, spare_share
from esgrpo.algo.overlap import Change, Controller, Window
from esgrpo.algo.overlap_law import Setting
from esgrpo.algo.terms import NullGroups

SLOWER = 4.0  # than the 273 M model of bench/sim/h100.json
REPLICAS, SEQUENCES, MEMBERS, MINI_BATCH = 2, 128, 4, 16
FIXED_TRAIN = 0.1  # of a mini-batch's train time: what a trigger costs beside its tokens
SYNC_S, ACTIVATE_S, DEACTIVATE_S = 1.0, 2.0, 1.0  # assumed
CAP, PROMPTS = 8192, 1 << 20
AGE_SCALE = 4.0
START = Setting(concurrency=32, staleness=0.5, trigger=32)  # 16 a replica, verl's own
VALIDATED = 8  # versions; a validation itself decodes nothing here
GROUPS, AHEAD = 1024, 1024  # of a run; that may be begun beyond them


@dataclass(frozen=True)
class Case:
    """`shift`: factor on rollout's step times in the second half of the run."""

    name: str
    ratio: float
    workload: str = "math"
    shift: float = 1.0
    age_scale: float = AGE_SCALE
    sync_s: float = SYNC_S
    validation_s: float = 0.0  # after every VALIDATED-th weight sync
    start: Setting = START
    settled: bool = False  # only the second half of the run counts
    by_group: float = 0.0  # of a mini-batch's train time: what does not depend on its tokens
    noise: float = 0.0  # of train times, and of step times, anew when syncs end and training begins: of the logarithm
    null_share: float = 0.0  # of the groups whose rewards are all alike; they are as long as others
    null_groups: str = NullGroups.TRAIN
    groups: int = GROUPS
    seed: int = 1


@functools.cache
def device(slower: float) -> Device:
    measured = Device.load()
    return replace(measured, steps=tuple((b, seconds * slower) for b, seconds in measured.steps),
                   prefill_rate=measured.prefill_rate / slower)


@functools.cache
def prompts(workload: str, count: int, seed: int) -> list[Group]:
    source = stream(workload, PROMPTS, MEMBERS, CAP, seed)
    return [next(source) for _ in range(count)]


def train_rate(case: Case) -> float:
    """Tokens a second of the trainer at work."""
    full = device(SLOWER)
    return REPLICAS * SEQUENCES / full.step(SEQUENCES) / case.ratio


def begun_at_most(setting: Setting) -> int:
    """Groups of a version, those in process at its start counted."""
    return int(setting.trigger * (1 + setting.staleness) + 1e-6)


class Roles:
    """The trainer's device is lent by verl 0.9.1's `default` rules: taken back when `share` of a version is collected;
    the share grows by the part of a version that was waited for (2 to 10 %) and shrinks by 2 % without waits; lent only
    if the missing groups would take longer than a switch took."""

    def __init__(self):
        self.share, self.per_group, self.switches = 0.3, 1000.0, deque(maxlen=3)
        self.lent, self.switched, self.waited_s, self.waited = False, 0.0, 0.0, 0
        self.generated = self.expected = 0

    def lends(self, version_groups: int) -> bool:
        """At a sync."""
        self.expected += version_groups
        gap = self.share * version_groups - (self.generated - self.expected)
        if gap <= 0:
            return False
        if self.waited_s > 0 and self.waited:
            self.per_group = self.waited_s / self.waited
        return gap * self.per_group > (sum(self.switches) / len(self.switches) if self.switches else 10.0)

    def adapt(self, version_groups: int) -> None:
        if self.switched:
            self.switches.append(self.switched)
        if self.waited:
            self.share = min(1.0, self.share + min(0.1, max(0.02, self.waited / version_groups)))
        else:
            self.share -= 0.02
        self.switched, self.waited_s, self.waited = 0.0, 0.0, 0


class Loop:
    """One run of a case at a setting, or under a controller."""

    def __init__(self, case: Case, setting: Setting, controller: Controller | None = None):
        self.case, self.setting, self.controller = case, setting, controller
        self.now, self.version = 0.0, 0
        self.replicas = [Replica(device(SLOWER), SEQUENCES, SEQUENCES, lambda: self.now) for _ in range(REPLICAS + 1)]
        self.events = [NEVER] * len(self.replicas)
        begun = math.ceil(case.groups / (1 - case.null_share)) + AHEAD
        self.source = iter(prompts(case.workload, begun, case.seed))
        self.rate = train_rate(case)
        self.filter, self.coins = NullFilter(), random.Random(case.seed)
        self.weather = random.Random(case.seed)
        self.usual = sum(sample.tokens for group in prompts(case.workload, begun, case.seed)
                         for sample in group.samples) / begun  # tokens of a group
        self.nulls: set[int] = set()  # groups in flight or waiting that have no gradient
        self.roles = Roles()
        self.where: dict[int, tuple[int, Run]] = {}  # sample -> replica, submission
        self.missing: dict[int, int] = {}  # group in flight -> members that run
        self.spans: dict[int, dict[int, int]] = {}  # group -> optimiser steps of the weights -> tokens
        self.told: dict[int, int] = {}  # sample -> tokens that are in spans
        self.queue: deque[int] = deque()
        self.begun = self.steps = self.synced = self.trained = self.useful = self.left_out = 0
        self.busy_until, self.doing, self.batch = NEVER, "wait", []
        self.wait_from, self.pending, self.room = 0.0, 0, True  # room: another group may be begun
        self.disturbed = False  # a validation is in this version's time
        self.fresh = self.tokens = self.work_s = 0.0
        self.changes: list[Change] = []
        self.mark = 0.0
        self._window()

    def run(self) -> float:
        """Fresh tokens a second over the whole run, or its second half."""
        half, from_s, from_fresh = False, 0.0, 0.0
        while self.trained < self.case.groups:
            if not half and self.trained >= self.case.groups / 2:
                half = True
                if self.case.settled:
                    from_s, from_fresh = self.now, self.fresh
                if self.case.shift != 1:
                    self._slow(self.case.shift)
            if self.room:
                self._begin()
            self._collect()
            place = min(range(len(self.replicas)), key=self.events.__getitem__)
            then = min(self.events[place], self.busy_until)
            if then == NEVER:
                raise RuntimeError(f"{self.case.name}: nothing happens after {self.now:.1f} s at {self.setting}")
            self._pass(then)
            if self.busy_until <= self.now:
                self._trainer()
            else:
                self._fire(place)
        return (self.fresh - from_fresh) / (self.now - from_s)

    def _pass(self, then: float) -> None:
        self.inflight_s += (then - self.now) * len(self.missing)
        self.now = then

    def _slow(self, factor: float) -> None:
        for replica in self.replicas:
            replica.advance(self.now)
            replica.device = device(SLOWER * factor)
            replica.share(replica.company)
        self._look(range(len(self.replicas)))

    def _noise(self) -> float:
        return math.exp(self.weather.gauss(0, self.case.noise))

    def _look(self, places) -> None:
        for place in places:
            self.replicas[place].advance(self.now)
            self.replicas[place].admit(self.now)
            self.events[place] = self.replicas[place].next_event()

    @property
    def _active(self) -> range:
        return range(REPLICAS + self.roles.lent)

    def _submit(self, sample, base: int) -> int:
        loads = [(len(self.replicas[place].running) + self.replicas[place].waits, place) for place in self._active]
        place = min(loads)[1]
        run = Run(sample, base, None, False)
        self.replicas[place].advance(self.now)
        self.replicas[place].submit(run)
        self.where[sample.key] = place, run
        return place

    def _begin(self) -> None:
        dirty, bound = set(), begun_at_most(self.setting) if self.doing != "validate" else 0
        while len(self.missing) < self.setting.concurrency and self.begun < bound:
            group = next(self.source)
            self.begun += 1
            self.missing[group.index], self.spans[group.index] = MEMBERS, {}
            if self.coins.random() < self.case.null_share:
                self.nulls.add(group.index)
            for sample in group.samples:
                self.told[sample.key] = 0
                dirty.add(self._submit(sample, 0))
        self._look(dirty)
        self.room = False

    def _fire(self, place: int) -> None:
        replica = self.replicas[place]
        replica.advance(self.now)
        for run in replica.fire():
            sample = run.sample
            replica.drop(run)
            del self.where[sample.key]
            self._tell(sample, run.base)
            del self.told[sample.key]
            self.missing[sample.group] -= 1
            if not self.missing[sample.group]:
                del self.missing[sample.group]
                self.room = True
                self._put(sample.group)
        self._look([place])

    def _put(self, group: int) -> None:
        """Into the queue, or its place goes to another prompt."""
        left_out = self.filter.leaves_out(self.case.null_groups, group in self.nulls, len(self.queue),
                                          self.setting.trigger)
        self.filter.note(left_out, self.setting.trigger)
        tokens = sum(self.spans[group].values())
        self.judged += 1
        self.judged_nulls += group in self.nulls
        if left_out:
            del self.spans[group]
            self.nulls.discard(group)
            self.begun -= 1
            self.left_out += 1
            if costs_rollout(self.case.null_groups, foreseen=False):
                self.left_out_tokens += tokens
            return
        self.queue.append(group)
        self.roles.generated += 1
        self.finished += 1
        self.finished_tokens += tokens

    def _tell(self, sample, tokens: int) -> None:
        """Tokens since the last sync are of its weights."""
        made = tokens - self.told[sample.key]
        if made:
            spans = self.spans[sample.group]
            spans[self.synced] = spans.get(self.synced, 0) + made
            self.told[sample.key] = tokens

    # the trainer: wait -> (take its device back) -> train -> sync -> (lend its device)

    def _collect(self) -> None:
        if self.doing != "wait":
            return
        if self.roles.lent:
            if len(self.queue) >= int(self.roles.share * self.setting.trigger):
                self._switch(False)
                self._busy("take", DEACTIVATE_S)
            return
        if self.wait_from is None:
            self.wait_from, self.pending = self.now, max(0, self.setting.trigger - len(self.queue))
        if len(self.queue) >= self.setting.trigger:
            self.waited_s = self.now - self.wait_from
            self.roles.waited_s += self.waited_s
            self.roles.waited += self.pending
            self.batch = [self.queue.popleft() for _ in range(self.setting.trigger)]
            tokens = sum(sum(self.spans[group].values()) for group in self.batch)
            fixed = FIXED_TRAIN * MINI_BATCH / len(self.batch)
            tokens += self.case.by_group * (self.usual * len(self.batch) - tokens)
            seconds = tokens * (1 + fixed) / self.rate * self._noise()
            self.train_s += seconds
            self.work_s += seconds
            self._busy("train", seconds)
            if self.case.noise:
                self._slow(self._noise())

    def _busy(self, doing: str, seconds: float) -> None:
        self.doing, self.busy_until = doing, self.now + seconds

    def _trainer(self) -> None:
        doing, self.busy_until = self.doing, NEVER
        if doing == "train":
            self._train()
            for place in self._active:
                self.replicas[place].advance(self.now)
            for place, run in self.where.values():
                self._tell(run.sample, self.replicas[place].tokens_of(run))
            for place in self._active:
                self.replicas[place].pause(self.now, self.case.sync_s, False)
            self.pause_s = sum(self.replicas[place].stall - self.now for place in self._active) / len(self._active)
            self._look(self._active)
            self._busy("sync", self.case.sync_s)
        elif doing == "sync":
            self.synced = self.steps
            self.version += 1
            if self.case.noise:
                self._slow(self._noise())
            if self.roles.lends(self.setting.trigger):
                self._busy("lend", ACTIVATE_S)
            else:
                self._next_version()
        elif doing == "lend":
            self._switch(True)
            self._next_version()
        elif doing == "validate":
            self.doing, self.wait_from, self.room = "wait", None, True
        else:
            self.doing, self.wait_from = "wait", None

    def _train(self) -> None:
        for place, group in enumerate(self.batch):
            step = self.steps + place // MINI_BATCH
            worth = group not in self.nulls
            self.useful += worth
            self.nulls.discard(group)
            for made, tokens in self.spans.pop(group).items():
                self.tokens += tokens
                self.fresh += worth * tokens * math.exp((made - step) / self.case.age_scale)
                self.aged += tokens * (step - made)
                self.trained_tokens += tokens
        self.steps += math.ceil(len(self.batch) / MINI_BATCH)
        self.trained += len(self.batch)

    def _switch(self, lend: bool) -> None:
        """The trainer's device joins the replicas, or leaves them; its requests go elsewhere."""
        self.roles.switched += ACTIVATE_S if lend else DEACTIVATE_S
        moved = list(self.where.items()) if lend else [item for item in self.where.items() if item[1][0] == REPLICAS]
        for place in self._active:
            self.replicas[place].advance(self.now)
        held = [(run.sample, self.replicas[place].take(run)) for _, (place, run) in moved]
        self.roles.lent = lend
        for sample, tokens in held:
            self._submit(sample, tokens)
        self._look(range(len(self.replicas)))

    def _next_version(self) -> None:
        version_groups = self.setting.trigger
        if self.controller is not None:
            seconds = self.now - self.mark
            decoded = sum(replica.decoded + sum(replica.tokens_of(run) - run.base for run in replica.running.values())
                          for replica in self.replicas)
            rollout = (None,) * 3 if self.disturbed else (  # as algo/overlap_signals.py has it
                seconds, decoded - self.decoded - self.left_out_tokens, self.inflight_s / seconds)
            change = self.controller.observe(Window(
                self.version, *rollout, self.finished_tokens / self.finished if self.finished else None,
                self.trained_tokens, self.train_s, self.case.sync_s + self.roles.switched,
                *pace_of(vars(replica.pace) for replica in self.replicas), self.pause_s, self.waited_s,
                self.aged / self.trained_tokens,
                null_share=spare_share(self.case.null_groups, self.judged_nulls, self.judged)))
            self.decoded_next = decoded
            if change is not None:
                self.changes.append(change)
                self.setting = change.after
        self.roles.adapt(version_groups)
        self._window()
        self.begun, self.room = len(self.missing) + len(self.queue), True
        self.doing, self.wait_from = "wait", None
        self.disturbed = self.case.validation_s > 0 and self.version % VALIDATED == 0
        if self.disturbed:
            self._busy("validate", self.case.validation_s)

    def _window(self) -> None:
        self.mark, self.inflight_s, self.finished, self.finished_tokens = self.now, 0.0, 0, 0
        self.train_s = self.aged = self.trained_tokens = self.left_out_tokens = 0.0
        self.judged = self.judged_nulls = 0
        self.decoded = getattr(self, "decoded_next", 0)
        for replica in self.replicas:
            replica.pace = Pace()
