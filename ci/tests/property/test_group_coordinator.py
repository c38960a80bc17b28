"""GroupCoordinator as a state machine against a model that keeps one list per group."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esgrpo.algo.grouping import FAILED, FINISHED, PRUNED, GroupCollision, GroupCoordinator

GROUPS = ["a", "b", "c"]
RUNNING = "running"


class Groups(RuleBasedStateMachine):
    @initialize(finish_after=st.integers(0, 4), sizes=st.lists(st.integers(1, 5), min_size=3, max_size=3))
    def start(self, finish_after, sizes):
        self.coordinator = GroupCoordinator(finish_after)
        self.finish_after = finish_after
        self.sizes = dict(zip(GROUPS, sizes, strict=True))
        self.states = {group: [] for group in GROUPS}  # by member number; empty when the group does not run
        self.asked = {group: set() for group in GROUPS}

    @rule(group=st.sampled_from(GROUPS))
    def join(self, group):
        states = self.states[group]
        if len(states) == self.sizes[group]:
            with pytest.raises(GroupCollision):
                self.coordinator.join(group, self.sizes[group])
            return
        assert self.coordinator.join(group, self.sizes[group]) == len(states)
        states.append(RUNNING)

    def _members(self, running: bool):
        return [(group, member) for group, states in self.states.items() for member, state in enumerate(states)
                if (state == RUNNING) is running]

    @precondition(lambda self: self._members(True))
    @rule(data=st.data(), outcome=st.sampled_from([FINISHED, PRUNED, FAILED]))
    def leave(self, data, outcome):
        group, member = data.draw(st.sampled_from(self._members(True)))
        states = self.states[group]
        ask = self.coordinator.leave(group, member, outcome)
        states[member] = outcome
        if len(states) == self.sizes[group] and RUNNING not in states:
            assert ask == []
            self.states[group], self.asked[group] = [], set()
            return
        assert not self.asked[group] & set(ask), "asked twice"
        assert all(states[other] == RUNNING for other in ask)
        running = {other for other, state in enumerate(states) if state == RUNNING}
        enough = 0 < self.finish_after <= states.count(FINISHED)
        assert set(ask) == (running - self.asked[group] if enough else set())
        self.asked[group].update(ask)

    @precondition(lambda self: self._members(False))
    @rule(data=st.data(), outcome=st.sampled_from([FINISHED, PRUNED, FAILED]))
    def leave_twice(self, data, outcome):
        group, member = data.draw(st.sampled_from(self._members(False)))
        with pytest.raises(ValueError, match="twice"):
            self.coordinator.leave(group, member, outcome)

    @invariant()
    def only_groups_with_somebody_left_are_kept(self):
        if hasattr(self, "coordinator"):
            assert set(self.coordinator.groups) == {group for group, states in self.states.items() if states}

    @invariant()
    def is_asked_says_who_was_asked(self):
        if hasattr(self, "coordinator"):
            for group in GROUPS:
                said = {member for member in range(6) if self.coordinator.is_asked(group, member)}
                assert said == self.asked[group]
                assert self.finish_after or not said


TestGroups = Groups.TestCase
