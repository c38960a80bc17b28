"""GroupCoordinator as a state machine against a model that keeps one list per group."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esgrpo.algo.grouping import FAILED, FINISHED, PRUNED, GroupCollision, GroupCoordinator

GROUPS = ["a", "b", "c"]
RUNNING = "running"


class Groups(RuleBasedStateMachine):
    @initialize(sizes=st.lists(st.integers(1, 5), min_size=3, max_size=3))
    def start(self, sizes):
        self.coordinator = GroupCoordinator()
        self.sizes = dict(zip(GROUPS, sizes, strict=True))
        self.states = {group: [] for group in GROUPS}  # by member number; empty when the group does not run

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
        self.coordinator.leave(group, member, outcome)
        states[member] = outcome
        if len(states) == self.sizes[group] and RUNNING not in states:
            self.states[group] = []

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


TestGroups = Groups.TestCase
