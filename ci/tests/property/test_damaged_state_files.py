"""State files with one value replaced by another: set aside with one line, or what they give is still possible."""

from __future__ import annotations

import copy
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esgrpo import config
from esgrpo.algo.audit import Audit, Candidate
from esgrpo.algo.carry_over import CarryOver
from esgrpo.algo.history import PromptHistory
from esgrpo.algo.routing import CLASSES
from esgrpo.hooks.verl import state_files

BUDGET = 4096
NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, -1e-9, 1e6, 1e18, 1e300, -1e300, 10**30, 2**63, math.inf, -math.inf, math.nan]),
    st.floats(), st.integers(), st.floats(0, 1e4))
VALUES = st.one_of(NUMBERS, NUMBERS, st.sampled_from([None, True, "", "x", "7", [], {}, [1], {"a": 1}]))


def made_history(budget: int) -> dict:
    """What a run of 40 prompts saves."""
    history, rng = PromptHistory(config.History(enable=True), budget=budget), random.Random(1)
    for version in range(30):
        for _ in range(8):
            lengths = [min(BUDGET, int(rng.lognormvariate(5, 1))) for _ in range(8)]
            history.observe(f"{rng.randrange(40):016x}", lengths, [rng.random() < 0.4 for _ in lengths],
                            [length >= BUDGET for length in lengths], version)
    return history.to_state()


def made_audit() -> dict:
    audit, rng = Audit(config.Audit(enable=True, min_candidates=1), random.Random(2)), random.Random(1)
    for group in range(60):
        audit.decide(Candidate(f"g{group}", 0, "resolved", 8, 0, 7, rng.random() * audit.scale("resolved")))
        if not audit._decided[f"g{group}"][0][1].prune:
            audit.resolve(f"g{group}", 0, rng.random() < 0.1)
    return audit.to_state()


def places(state, path=()):
    """Paths of all values, containers too."""
    if path:
        yield path
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def mutated(state: dict, data) -> dict:
    state = copy.deepcopy(state)
    found = list(places(state))
    # the few numbers of the whole run count as much as the many of its prompts
    few = [path for path in found if path[0] != "prompts"]
    *parents, last = data.draw(st.one_of(st.sampled_from(found), st.sampled_from(few)))
    node = state
    for key in parents:
        node = node[key]
    node[last] = data.draw(VALUES)
    return state


def read(tmp_path_factory, state: dict, parse, capsys):
    """Through the file, as a restart reads it; None when it was set aside."""
    file = tmp_path_factory.mktemp("state") / "state.json"
    file.write_text(json.dumps(state))
    result = state_files.restored("who", str(file), parse)
    said = capsys.readouterr().err
    assert (result is None) == (not file.exists()) == (said.count("\n") == 1 and said.count(" | ") == 3), said
    return result


@pytest.mark.parametrize("budget", [0, BUDGET])
def test_a_history_with_one_other_value(budget, tmp_path_factory, capsys):
    state = made_history(budget)

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def check(data):
        damaged = mutated(state, data)
        history = read(tmp_path_factory, damaged,
                       lambda s: PromptHistory.from_state(config.History(enable=True), s, budget=budget), capsys)
        if history is None:
            return
        for key in (*list(history._prompts)[:50], "a prompt never seen"):
            forecast = history.forecast(key, 31)
            assert all(math.isfinite(forecast[name]) for name in ("low", "tokens", "high", "alpha", "beta"))
            assert 0 < forecast["low"] <= forecast["tokens"] <= forecast["high"] <= (budget or math.inf), forecast
            assert forecast["alpha"] > 0 and forecast["beta"] > 0 and forecast["length_class"] in CLASSES
        history.observe("new", [10] * 8, [True] * 8, [False] * 8, 32)
        json.dumps(history.to_state(), allow_nan=False)

    check()


def test_a_real_history_is_not_refused(tmp_path_factory, capsys):
    """Negative control: nothing changed, nothing set aside."""
    state = made_history(BUDGET)
    history = read(tmp_path_factory, state, lambda s: PromptHistory.from_state(config.History(), s), capsys)
    assert history.to_state() == state and len(history) == 40


def test_an_audit_with_one_other_value(tmp_path_factory, capsys):
    state = made_audit()
    assert state["windows"]["resolved"]

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def check(data):
        audit = Audit(config.Audit(enable=True, min_candidates=1), random.Random(2))

        def restore(damaged):
            audit.restore(damaged)
            return audit

        if read(tmp_path_factory, mutated(state, data), restore, capsys) is None:
            return
        report = audit.report("resolved")
        assert 0 <= report["false_rate"] <= report["false_rate_bound"] <= 1 and 0 < report["scale"] <= 1
        assert 0 < audit.keep_probability(Candidate("h", 0, "resolved", 8, 0, 7, 0.0))[0] <= 1

    check()


def test_a_pool_of_carried_groups_with_one_other_value(tmp_path_factory, capsys):
    state = {"carried": {"a": 3, "b": 4}, "trained": ["c"], "ended": ["d"]}

    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def check(data):
        pool = read(tmp_path_factory, mutated(state, data), lambda s: CarryOver.from_state(s, 2, True), capsys)
        if pool is not None:
            assert all(isinstance(born, int) for born in pool.carried.values())
            json.dumps(pool.to_state(), allow_nan=False)

    check()


def test_a_file_that_is_too_deep(tmp_path_factory, capsys):
    file = tmp_path_factory.mktemp("state") / "state.json"
    file.write_text("[" * 200_000)
    assert state_files.restored("who", str(file), dict) is None and not file.exists()
    assert capsys.readouterr().err.count("\n") == 1
