"""CarryOver against a model of verl's v1 replay buffer: every group ends once, oldest first, within the bound."""

from __future__ import annotations

import json

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esgrpo.algo.carry_over import CarryOver, CarryOverError, Waiting

RUNNING, DONE, FAILED = "running", "done", "failed"


class Buffer(RuleBasedStateMachine):
    """What the buffer does in one step: submit a batch, generate, evict, take the oldest complete groups."""

    @initialize(threshold=st.one_of(st.none(), st.integers(1, 4)), drops=st.booleans(), batch=st.integers(1, 3),
                warmup=st.integers(0, 3))
    def start(self, threshold, drops, batch, warmup):
        self.rules, self.batch, self.warmup = (threshold, drops), batch, warmup
        self.pool = CarryOver(threshold, drops)
        self.version, self.number, self.excused = 1, 0, 0
        self.groups: dict[str, list] = {}  # group -> [version of submission, status]
        self.seen, self.fates = [], {"trained": [], "stale": [], "failed": []}
        self.submit(warmup * batch)
        self.submit(batch)

    def submit(self, count: int) -> None:
        for _ in range(count):
            self.groups[f"g{self.number}"] = [self.version, RUNNING]
            self.seen.append(f"g{self.number}")
            self.number += 1

    @precondition(lambda self: any(status == RUNNING for _, status in self.groups.values()))
    @rule(data=st.data(), status=st.sampled_from([DONE, DONE, DONE, FAILED]))
    def end(self, data, status):
        running = sorted(group for group, (_, now) in self.groups.items() if now == RUNNING)
        self.groups[data.draw(st.sampled_from(running))][1] = status

    def age(self, group: str) -> int:
        return self.version - self.groups[group][0] + 1

    def evict(self) -> None:
        threshold, drops = self.rules
        for group, (_, status) in list(self.groups.items()):
            stale = drops and threshold is not None and status == DONE and self.age(group) > threshold
            if stale or status == FAILED:
                self.excused += status == FAILED
                self.fates["stale" if stale else "failed"].append(group)
                del self.groups[group]
                self.submit(1)

    def blocked(self) -> bool:
        threshold, drops = self.rules
        return not drops and threshold is not None and any(
            status == RUNNING and self.age(group) >= threshold for group, (_, status) in self.groups.items())

    @rule()
    def step(self):
        self.evict()
        done = sorted((born, group) for group, (born, status) in self.groups.items() if status == DONE)
        if len(done) < self.batch or self.blocked():
            return
        trained = {group: born for born, group in done[:self.batch]}
        waiting = {group: Waiting(born, status != RUNNING) for group, (born, status) in self.groups.items()
                   if group not in trained}
        before = set(self.pool.carried)
        seen = self.pool.settle(self.version, trained, waiting, self.excused)
        self.excused = 0
        assert seen.trained == self.batch and seen.carried == len(waiting)
        assert seen.trained_carried == len(before & set(trained))
        threshold, drops = self.rules
        if threshold is not None:
            assert seen.age_max <= threshold + (0 if drops else self.warmup)
        self.fates["trained"] += trained
        for group in trained:
            del self.groups[group]
        self.version += 1
        self.submit(self.batch)

    @precondition(lambda self: self.version > 1)
    @rule()
    def restart(self):
        """From a checkpoint right after a step: what was unfinished is generated anew, what was complete is there."""
        state = json.loads(json.dumps(self.pool.to_state()))
        self.pool = CarryOver.from_state(state, *self.rules)
        assert self.pool.to_state() == state
        for entry in self.groups.values():
            if entry[1] == RUNNING:
                entry[0] = self.version

    @invariant()
    def every_group_has_one_fate(self):
        if hasattr(self, "pool"):
            ended = [group for groups in self.fates.values() for group in groups]
            assert len(set(ended)) == len(ended) and sorted([*ended, *self.groups]) == sorted(self.seen)


TestBuffer = Buffer.TestCase


def pool(**carried: int) -> CarryOver:
    machine = CarryOver(2, True)
    machine.settle(1, {}, {group: Waiting(born, False) for group, born in carried.items()})
    return machine


def test_a_lost_group_is_an_error_unless_it_was_stale_or_excused():
    with pytest.raises(CarryOverError, match="1 carried groups are gone.*a"):
        pool(a=1).settle(2, {}, {})
    assert pool(a=1).settle(2, {}, {}, excused=1).excused == 1
    assert pool(a=1).settle(3, {}, {}).dropped == 1  # three versions old, two are allowed
    with pytest.raises(CarryOverError, match="gone"):  # where nothing is dropped, old age is no reason to vanish
        machine = pool(a=1)
        machine.drops = False
        machine.settle(9, {}, {})


def test_a_group_that_comes_back_is_an_error_also_after_a_restart():
    machine = pool(a=1)
    machine.settle(1, {"a": 1}, {})
    for again in (machine, CarryOver.from_state(machine.to_state(), 2, True)):
        with pytest.raises(CarryOverError, match="trained twice"):
            again.settle(2, {"a": 1}, {})
    with pytest.raises(CarryOverError, match="trained twice"):
        pool(b=1).settle(2, {"b": 1}, {"b": Waiting(1, True)})


def test_a_group_that_did_not_come_back_after_a_restart_is_an_error():
    state = pool(a=1, b=1).to_state()
    with pytest.raises(CarryOverError, match="gone.*b"):
        CarryOver.from_state(state, 2, True).settle(2, {"a": 2}, {})


def test_carried_first_and_the_bound():
    with pytest.raises(CarryOverError, match="carried groups come first"):
        pool(a=1).settle(2, {"b": 2}, {"a": Waiting(1, True)})
    assert pool(a=1).settle(2, {"b": 2}, {"a": Waiting(1, False)}).trained == 1  # unfinished: it cannot be trained yet
    with pytest.raises(CarryOverError, match="3 weight versions"):
        pool(a=1).settle(3, {"a": 1}, {})
