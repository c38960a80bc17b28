"""Several questions about one group, asked before the first answer: what they find is one case, not several."""

from __future__ import annotations

import random

import pytest

from esgrpo import config
from esgrpo.algo import rollout
from esgrpo.algo.audit import RELAX, Audit
from esgrpo.algo.group_pruning import GroupPruner
from esgrpo.algo.terms import Rule

SIZE, NARROW = 6, 1e-6  # a scale that no candidate fits under
SETTINGS = config.parse({"enable": True, "prune": {
    "repetition": {"enable": False}, "resolved": {"enable": True, "null_prob": 1.0}, "audit": {"enable": True}}})


@pytest.fixture
def group():
    """All members at replica "r"; the rule `resolved` has been tightened."""
    audit = Audit(SETTINGS.prune.audit, random.Random(1))
    audit._scales[Rule.RESOLVED] = NARROW
    runs = rollout.GroupRuns(rollout.Rules(SETTINGS, 100, pruner=GroupPruner(SETTINGS, audit, 100)))
    for member in range(SIZE):
        runs.on(rollout.Submitted("g", SIZE, 0.0))
        runs.on(rollout.Placed("g", member, "r"))
    return runs, audit


def end(runs, member: int) -> bool:
    """It was wrong; returns whether the others are asked about."""
    runs.on(rollout.AttemptEnded("g", member, 1.0, 10, 90))
    return any(isinstance(action, rollout.Ask) for action in runs.on(rollout.MemberEnded("g", member, 1.0, 0.0)))


def answer(runs, *running: int) -> None:
    runs.on(rollout.Progress("g", dict.fromkeys(running, 10)))


def test_answers_that_come_after_the_same_ending_relax_a_rule_once(group):
    runs, audit = group
    asked = [end(runs, member) for member in range(3)]
    questions = sum(asked)
    assert questions > 1, "the scene needs several questions under way"
    for _ in range(questions):
        answer(runs, 3, 4, 5)
    assert audit.scale(Rule.RESOLVED) == pytest.approx(NARROW * RELAX)


def test_each_ending_is_a_case_of_its_own(group):
    runs, audit = group
    cases = 0
    for member in range(4):
        if end(runs, member):
            answer(runs, *range(member + 1, SIZE))
            cases += 1
    assert cases > 1 and audit.scale(Rule.RESOLVED) == pytest.approx(NARROW * RELAX ** cases)
