"""The history as a state machine: bounded, never backwards, always a sane forecast, and the file says it all."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from esgrpo.algo.history import PromptHistory
from esgrpo.algo.routing import CLASSES
from esgrpo.config import History

KEYS, BUDGET, MOST = "abcdef", 4096, 4
KEY = st.sampled_from(KEYS)
SHORT = settings(stateful_step_count=15)
ROW = st.tuples(st.integers(0, BUDGET), st.sampled_from([True, False, None]), st.booleans())


def check(forecast, budget) -> None:
    assert 0 < forecast["low"] <= forecast["tokens"] <= forecast["high"] <= (budget or math.inf)
    assert all(math.isfinite(forecast[name]) for name in ("low", "tokens", "high", "alpha", "beta"))
    assert forecast["alpha"] > 0 and forecast["beta"] > 0 and forecast["length_class"] in CLASSES


class Memory(RuleBasedStateMachine):
    budget = BUDGET

    def __init__(self):
        super().__init__()
        self.settings = History(enable=True, max_prompts=MOST, half_life=5)
        self.history, self.clock, self.seen = PromptHistory(self.settings, budget=self.budget), 0, []

    @rule(key=KEY, rows=st.lists(ROW, max_size=6), version=st.integers(-1, 60))
    def observe(self, key, rows, version):
        rows = [(length, correct, cut or (self.budget and length >= BUDGET)) for length, correct, cut in rows]
        before = self.counted(key, version)
        self.history.observe(key, *([row[i] for row in rows] for i in range(3)), version)
        if rows:
            self.seen = [k for k in self.seen if k != key] + [key]
            after, right = self.counted(key, version), sum(row[1] is True for row in rows)
            wrong = sum(row[1] is False for row in rows)
            assert after == pytest.approx((0.8 * before[0] + right, 0.8 * before[1] + wrong), abs=1e-9)

    def counted(self, key, version):
        """The posterior less the prior: correct and wrong responses, decayed."""
        prior = self.history.correctness.parameters()
        return tuple(now - blank for now, blank in zip(self.history.posterior(key, version), prior, strict=True))

    @rule(key=KEY, version=st.integers(-1, 80))
    def look(self, key, version):
        state = json.dumps(self.history.to_state())
        forecast = self.history.forecast(key, version)
        check(forecast, self.budget)
        assert (forecast["alpha"], forecast["beta"]) == self.history.posterior(key, version)
        assert json.dumps(self.history.to_state()) == state  # looking changes nothing

    @rule(key=KEY)
    def forget(self, key):
        near, far = (self.history.posterior(key, version) for version in (self.clock + 1, self.clock + 50))
        blank = self.history.posterior("never seen")
        assert all(never <= late <= early for never, late, early in zip(blank, far, near, strict=True))

    @rule()
    def restart(self):
        state = json.loads(json.dumps(self.history.to_state()))
        again = PromptHistory.from_state(self.settings, state, budget=self.budget)
        for key in KEYS:
            left, right = self.history.forecast(key), again.forecast(key)
            assert left["tokens"] == pytest.approx(right["tokens"], rel=5e-3)
            assert left["alpha"] == pytest.approx(right["alpha"], abs=1e-3)
        self.history = again

    @invariant()
    def bounded_and_forward(self):
        assert len(self.history) <= MOST
        assert list(self.history._prompts) == self.seen[-MOST:]  # the least recently observed have gone
        assert self.history._clock >= self.clock
        self.clock = self.history._clock


def test_the_history():
    run_state_machine_as_test(Memory, settings=SHORT)


def test_the_history_without_a_budget():
    run_state_machine_as_test(type("Unbounded", (Memory,), {"budget": 0}), settings=SHORT)


def test_the_machine_notices_a_history_that_forgets_the_wrong_prompt():
    """Negative control."""
    class Newest(PromptHistory):
        def observe(self, key, *arguments):
            super().observe(key, *arguments)
            self._prompts.move_to_end(key, last=False) if key in self._prompts else None

    class Broken(Memory):
        def __init__(self):
            super().__init__()
            self.history = Newest(self.settings, budget=self.budget)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=settings(SHORT, phases=[Phase.generate]))
