"""CarryOver against a model of verl's v1 replay buffer: every group ends once and nothing of that looks odd."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esgrpo.algo.carry_over import (
    EMPTY,
    ENDED_KEPT,
    ENDINGS,
    FAILED,
    STALE,
    CarryOver,
    CarryOverError,
    Waiting,
    remember,
)

RUNNING, DONE = "running", "done"


class Buffer(RuleBasedStateMachine):
    """What the buffer does in one step: submit a batch, generate, evict, take the oldest complete groups."""

    @initialize(threshold=st.one_of(st.none(), st.integers(1, 4)), drops=st.booleans(), batch=st.integers(1, 3),
                warmup=st.integers(0, 3))
    def start(self, threshold, drops, batch, warmup):
        self.rules, self.batch, self.warmup = (threshold, drops), batch, warmup
        self.pool = CarryOver(threshold, drops)
        self.version, self.number, self.evicted = 1, 0, {}
        self.groups: dict[str, list] = {}  # group -> [version of submission, status]
        self.seen, self.fates = [], {"trained": [], STALE: [], FAILED: [], EMPTY: []}
        self.submit(warmup * batch)
        self.submit(batch)

    def submit(self, count: int) -> None:
        for _ in range(count):
            self.groups[f"g{self.number}"] = [self.version, RUNNING]
            self.seen.append(f"g{self.number}")
            self.number += 1

    @precondition(lambda self: any(status == RUNNING for _, status in self.groups.values()))
    @rule(data=st.data(), status=st.sampled_from([DONE, DONE, DONE, FAILED, EMPTY]))
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
                self.evicted[group] = STALE if stale else FAILED
                self.fates[self.evicted[group]].append(group)
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
        empty = {group: EMPTY for group, (_, status) in self.groups.items() if status == EMPTY}
        waiting = {group: Waiting(born, status != RUNNING) for group, (born, status) in self.groups.items()
                   if group not in trained and group not in empty}
        before = set(self.pool.carried)
        seen = self.pool.settle(self.version, trained, waiting, {**self.evicted, **empty})
        assert seen.trained == self.batch and seen.carried == len(waiting) and not any(self.pool.oddities.values())
        for why, count in {**dict.fromkeys(ENDINGS, 0), **Counter(self.evicted.values())}.items():
            assert getattr(seen, why) == (count if why != EMPTY else len(empty.keys() - set(self.fates[EMPTY])))
        self.fates[EMPTY] += empty.keys() - set(self.fates[EMPTY])
        self.evicted = {}
        assert seen.trained_carried == len(before & set(trained))
        threshold, drops = self.rules
        if threshold is not None:
            assert seen.age_max <= threshold + (0 if drops else self.warmup)
        self.fates["trained"] += trained
        for group in [*trained, *sorted(empty)[::2]]:  # verl samples some of the empty ones, others stay
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
            assert len(set(ended)) == len(ended) and {*ended, *self.groups} == set(self.seen)


TestBuffer = Buffer.TestCase


def pool(**carried: int) -> CarryOver:
    machine = CarryOver(2, True)
    machine.settle(1, {}, {group: Waiting(born, False) for group, born in carried.items()})
    return machine


def test_a_group_that_is_gone_is_counted_once_unless_there_is_a_reason():
    machine = pool(a=1)
    assert machine.settle(2, {}, {}).gone == 1 and machine.oddities["gone"] == ["a"]
    assert machine.settle(3, {}, {}).gone == 0
    for why in ENDINGS:
        machine = pool(a=1)
        seen = machine.settle(2, {}, {}, {"a": why})
        assert getattr(seen, why) == 1 and not any(machine.oddities.values())
        assert getattr(machine.settle(3, {}, {}, {"a": why}), why) == 0


def test_a_group_that_is_trained_twice_is_an_error_also_after_a_restart():
    machine = pool(a=1)
    machine.settle(1, {"a": 1}, {})
    for again in (machine, CarryOver.from_state(machine.to_state(), 2, True)):
        with pytest.raises(CarryOverError, match="a was trained twice"):
            again.settle(2, {"a": 1}, {})


def test_rows_of_a_group_that_nobody_submitted_are_an_error():
    with pytest.raises(CarryOverError, match="b was trained and nobody submitted it"):
        pool(a=1).settle(2, {"a": 1, "b": None}, {})


def test_a_checkpoint_of_before_does_not_accuse():
    """It named trained and otherwise ended groups alike: one that failed there and comes back proves nothing."""
    assert CarryOver.from_state({"carried": {}, "ended": ["a"]}, 2, True).settle(2, {"a": 2}, {}).trained == 1


def test_a_group_that_did_not_come_back_after_a_restart_is_counted():
    state = pool(a=1, b=1).to_state()
    machine = CarryOver.from_state(state, 2, True)
    assert machine.settle(2, {"a": 2}, {}).gone == 1 and machine.oddities["gone"] == ["b"]


def test_order_and_bound_are_counted():
    machine = pool(a=1)
    assert machine.settle(2, {"b": 2}, {"a": Waiting(1, True)}).early == 1 and machine.oddities["early"] == ["b"]
    assert pool(a=1).settle(2, {"b": 2}, {"a": Waiting(1, True), "c": Waiting(2, True)}).early == 1
    assert pool(a=1).settle(2, {"b": 2}, {"a": Waiting(1, False)}).early == 0  # unfinished: it cannot be trained yet
    assert pool(a=1).settle(3, {"a": 1}, {}).overdue == 1


def test_ages_are_weight_versions_the_one_of_submission_counted():
    step = pool(a=1, b=2, c=3).settle(3, {"a": 1, "c": 3}, {"b": Waiting(2, False), "d": Waiting(3, True)})
    assert (step.age_max, step.carried_age_max) == (3, 2)
    nobody = pool().settle(3, {}, {})
    assert (nobody.age_max, nobody.carried_age_max) == (0, 0)


def test_the_oldest_endings_are_forgotten():
    known = {}
    for number in range(ENDED_KEPT):
        known[str(number)] = None
    remember(known, {})
    assert len(known) == ENDED_KEPT
    remember(known, {"a": None, "b": None})
    assert len(known) == ENDED_KEPT and "1" not in known and "2" in known and "b" in known
