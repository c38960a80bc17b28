"""Audit as a state machine: caps, evidence before pruning, one decision a member, pi before the coin."""

from __future__ import annotations

import copy
import json
import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from esgrpo import config
from esgrpo.algo.audit import AT_LEAST, Audit, Candidate, outcomes_needed, wilson_upper

RULES = ["resolved", "enough"]
SCORES = st.floats(0.0, 1.0)


class Constant(random.Random):
    """A coin that always lands where it was told to."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def random(self):
        return self.value


class Audited(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 10**6), exempt=st.floats(0.05, 1.0), fraction=st.floats(0.0, 1.0),
                window=st.integers(10, 30), least=st.integers(1, 12), allowed=st.floats(0.2, 1.0))
    def start(self, seed, exempt, fraction, window, least, allowed):
        self.settings = config.Audit(enable=True, exempt_prob=exempt, max_fraction=fraction, window=window,
                                     min_candidates=least, max_false_rate=allowed)
        self.audit = Audit(self.settings, random.Random(seed))
        self.groups, self.count = {}, 0
        self.outcomes = {name: [] for name in RULES}

    @rule(size=st.integers(1, 8))
    def open_group(self, size):
        self.groups[f"g{self.count}"] = {"size": size, "verdicts": {}, "ended": set()}
        self.count += 1

    def _undecided(self):
        return [(group, member) for group, item in self.groups.items() for member in range(item["size"])
                if member not in item["verdicts"] and member not in item["ended"]]

    def _running(self):
        return [(group, member) for group, item in self.groups.items() for member, verdict in item["verdicts"].items()
                if verdict.exempt and member not in item["ended"]]

    @precondition(lambda self: self._undecided())
    @rule(data=st.data(), name=st.sampled_from(RULES), score=SCORES)
    def decide(self, data, name, score):
        group, member = data.draw(st.sampled_from(self._undecided()))
        item = self.groups[group]
        pruned = sum(verdict.prune for verdict in item["verdicts"].values())
        candidate = Candidate(group, member, name, item["size"], pruned, item["size"] - pruned - 1, score)
        if score > self.audit.scale(name):
            with pytest.raises(ValueError, match="score"):
                self.audit.decide(candidate)
            self.audit.passed_by(name)
            return
        tails = copy.deepcopy(self.audit)  # pi is the same however the coin falls
        tails._rng = Constant(0.0)
        expected = self.audit.keep_probability(candidate)[0]
        false, trials = self.audit.evidence(name)
        verdict = self.audit.decide(candidate)
        assert verdict.pi == expected == tails.decide(candidate).pi
        assert 0 < verdict.pi <= 1
        assert not verdict.prune or verdict.pi < 1
        if verdict.pi < 1:
            assert trials >= max(self.settings.min_candidates if self.settings.min_candidates <= self.settings.window
                                 else self.settings.window, 1)
            assert wilson_upper(false, trials) <= self.settings.max_false_rate
            assert verdict.pi == self.settings.exempt_prob
        item["verdicts"][member] = verdict

    @precondition(lambda self: self._running())
    @rule(data=st.data(), false=st.booleans())
    def exempted_member_ends(self, data, false):
        group, member = data.draw(st.sampled_from(self._running()))
        name = self.groups[group]["verdicts"][member].rule
        before = self.audit.scale(name)
        self.audit.resolve(group, member, false)
        self.groups[group]["ended"].add(member)
        assert self.audit.scale(name) <= before
        false_, trials = self.audit.evidence(name)
        if self.audit.scale(name) < before:  # tightened as far as needed
            assert trials < outcomes_needed(self.settings) or wilson_upper(
                false_, trials) <= self.settings.max_false_rate or self.audit.scale(name) < before / 100

    @precondition(lambda self: any(item["verdicts"] for item in self.groups.values()))
    @rule(data=st.data())
    def nobody_is_decided_twice(self, data):
        decided = [(g, m) for g, item in self.groups.items() for m in item["verdicts"]]
        group, member = data.draw(st.sampled_from(decided))
        with pytest.raises(ValueError, match="before"):
            self.audit.decide(Candidate(group, member, RULES[0], 8, 0, 7, 0.0))

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def group_ends(self, data):
        group = data.draw(st.sampled_from(sorted(self.groups)))
        del self.groups[group]
        self.audit.forget(group)

    @rule(size=st.integers(2, 8), score=SCORES)
    def restart(self, size, score):
        """The evidence comes back as it was, through a file; groups that ran do not."""
        again = self.reload(Audit(self.settings, random.Random(0)))
        for name in RULES:
            assert again.report(name) == self.audit.report(name)
            if score <= again.scale(name):
                candidate = Candidate("next", 0, name, size, 0, size - 1, score)
                assert again.keep_probability(candidate) == self.audit.keep_probability(candidate)
        assert again.to_state() == self.audit.to_state()
        self.audit, self.groups = again, {}

    def reload(self, fresh):
        fresh.restore(json.loads(json.dumps(self.audit.to_state())))
        return fresh

    @invariant()
    def caps_hold(self):
        for item in getattr(self, "groups", {}).values():
            pruned = sum(verdict.prune for verdict in item["verdicts"].values())
            assert pruned <= self.settings.max_fraction * item["size"]
            assert pruned == 0 or item["size"] - pruned >= AT_LEAST

    @invariant()
    def windows_are_bounded_and_nothing_stays(self):
        if hasattr(self, "audit"):
            assert all(len(window) <= self.settings.window for window in self.audit._windows.values())
            assert set(self.audit._decided) <= set(self.groups)
            assert all(0 < self.audit.scale(name) <= 1 for name in RULES)


TestAudit = Audited.TestCase


def test_the_machine_notices_an_audit_that_starts_empty():
    """Negative control: what a restart was before the state was kept."""
    class Forgets(Audited):
        def reload(self, fresh):
            return fresh

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Forgets, settings=settings(phases=[Phase.generate], max_examples=200))


def test_a_smaller_window_keeps_the_newest_outcomes():
    state = {"windows": {"enough": [[0.5, False]] * 8 + [[0.25, True]] * 7}, "scales": {"enough": 0.5}}
    audit = Audit(config.Audit(window=10), random.Random(0))
    audit.restore(state)
    assert audit.evidence("enough") == (7, 10) and audit.scale("enough") == 0.5


@pytest.mark.parametrize("state", [{}, [], {"windows": {}}, {"windows": {"enough": [[2.0, True]]}, "scales": {}},
                                   {"windows": {"enough": [[0.5, 1]]}, "scales": {}},
                                   {"windows": {}, "scales": {"enough": 0.0}}])
def test_a_damaged_state_is_refused_and_changes_nothing(state):
    audit = Audit(config.Audit(), random.Random(0))
    audit.restore({"windows": {"enough": [[0.5, False]]}, "scales": {}})
    with pytest.raises(ValueError):
        audit.restore(state)
    assert audit.evidence("enough") == (0, 1)
