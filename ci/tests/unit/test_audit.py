"""The audit at its edges: who may be pruned at all, how much evidence that takes, and how its scale moves."""

from __future__ import annotations

import random

import pytest

from esgrpo import config
from esgrpo.algo.audit import CAP, COIN, RELAX, SMALLEST_SCALE, TOO_FEW, WARM_UP, Audit, Candidate

RULE, PROVEN = "hopeless", "repetition"
NEEDED = 20
SETTINGS = config.Audit(enable=True, exempt_prob=0.25, window=100, min_candidates=NEEDED, max_false_rate=0.3,
                        max_fraction=0.5)


def informed(outcomes: int = NEEDED, false: int = 0, score: float = 0.1, rule: str = RULE) -> Audit:
    audit = Audit(SETTINGS, random.Random(1))
    for number in range(outcomes):
        audit.learn(rule, score, number < false)
    return audit


def candidate(**facts) -> Candidate:
    return Candidate(**{"group": "g", "member": 0, "rule": RULE, "size": 8, "pruned": 0, "others": 4, "score": 0.1,
                        **facts})


@pytest.mark.parametrize("facts, answer", [
    ({}, (0.25, COIN)),
    ({"others": 2}, (0.25, COIN)), ({"others": 1}, (1.0, TOO_FEW)),
    ({"pruned": 3}, (0.25, COIN)), ({"pruned": 4}, (1.0, CAP)),
    # what is proven and trained costs no sibling; what is only one of both does
    ({"others": 0, "pruned": 7, "rule": PROVEN, "trained": True}, (0.25, COIN)),
    ({"pruned": 4, "rule": PROVEN}, (1.0, CAP)), ({"others": 1, "trained": True}, (1.0, TOO_FEW))])
def test_who_may_be_pruned(facts, answer):
    assert informed().keep_probability(candidate(**facts)) == answer


def test_a_forecast_waits_for_its_evidence_and_a_proof_for_evidence_against_it():
    proven = candidate(rule=PROVEN)
    assert informed(NEEDED - 1).keep_probability(candidate()) == (1.0, WARM_UP)
    assert informed(NEEDED).keep_probability(candidate()) == (0.25, COIN)
    assert informed(0).keep_probability(proven) == (0.25, COIN)
    assert informed(6, 2, rule=PROVEN).keep_probability(proven) == (0.25, COIN)  # 0.33 of 6: the lower bound is below
    assert informed(6, 5, rule=PROVEN).keep_probability(proven) == (1.0, WARM_UP)


def test_the_scale_of_a_proof_is_tightened_by_evidence_against_it_alone():
    """6 of 20, as is allowed: the interval holds the limit, which is too much for a forecast."""
    assert informed(NEEDED, 6).scale(RULE) < 1 == informed(NEEDED, 6, rule=PROVEN).scale(PROVEN)
    assert informed(NEEDED, 12, rule=PROVEN).scale(PROVEN) < 1


def test_a_scale_that_was_relaxed_into_bad_evidence_prunes_nobody():
    audit = informed(NEEDED, false=NEEDED, score=0.9)
    assert audit.scale(RULE) == 0.5 and audit.evidence(RULE) == (0, 0)  # one step leaves too little to judge
    for _ in range(NEEDED):
        audit.learn(RULE, 0.2, False)
    assert audit.keep_probability(candidate()) == (0.25, COIN)
    audit.passed_by(RULE)
    assert audit.scale(RULE) == 0.5 * RELAX
    for _ in range(100):
        audit.passed_by(RULE)
    assert audit.scale(RULE) == 1.0 and audit.evidence(RULE) == (NEEDED, 2 * NEEDED)
    assert audit.keep_probability(candidate()) == (1.0, WARM_UP)


def test_tightening_ends():
    audit = informed(NEEDED, false=NEEDED, score=0.0)
    assert audit.scale(RULE) == SMALLEST_SCALE and audit.keep_probability(candidate(score=0.0)) == (1.0, WARM_UP)


def opened(seed: int, each: bool) -> bool:
    """Is a rule let loose that is wrong in a tenth of its candidates, those of a fifth of the groups of 16? `each`:
    every outcome is evidence."""
    audit, rng = Audit(config.Audit(enable=True), random.Random(seed)), random.Random(seed)
    for group in range(80):
        chance = 0.5 * (rng.random() < 0.2)
        for member in range(2, 16):
            audit.decide(candidate(group=group, member=member, size=16, score=0.0))
        for member in range(2, 16):
            false = rng.random() < chance
            if each:
                audit.learn(RULE, 0.0, false)
            else:
                audit.resolve(group, member, false)
            if audit.keep_probability(candidate(group="next", size=16, score=0.0))[0] < 1:
                return True
        audit.forget(group)
    return False


def test_members_of_one_group_are_one_outcome():
    """73 outcomes of them are those of five groups."""
    assert sum(opened(seed, each=False) for seed in range(60)) <= 2 < 10 < sum(opened(seed, True) for seed in range(60))
