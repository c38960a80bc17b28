"""The rules, the bound, the calibration and the checkpoints of a group, on small cases worked out by hand."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from esgrpo import config, losses
from esgrpo.algo import audit, pruning, treatment
from esgrpo.algo.group_pruning import Finished, GroupPruner
from esgrpo.algo.terms import Rule

SURE = {"tokens": 100.0, "low": 50.0, "high": 200.0, "known": True, "length_class": "body", "alpha": 400.0,
        "beta": 0.5}
GROUP = 8


def settings(**prune):
    base = {"audit": {"enable": True, "min_candidates": 1, "window": 200, "max_false_rate": 0.3}}
    return config.parse({"enable": True, "prune": {"treatment": "masked", **base, **prune}})


def pruner(seed=0, budget=1000, **prune):
    chosen = settings(**prune)
    return GroupPruner(chosen, audit.Audit(chosen.prune.audit, random.Random(seed)), budget)


def test_wilson_bound_of_known_cases():
    assert audit.wilson_upper(0, 0) == 1.0
    assert audit.wilson_upper(0, 73) <= 0.05 < audit.wilson_upper(0, 72)
    assert audit.wilson_upper(5, 100) == pytest.approx(0.11175, abs=1e-5)  # R: prop.test(5, 100, correct = FALSE)
    assert audit.wilson_upper(10, 10) == pytest.approx(1.0)


def test_evidence_that_the_bound_needs_at_all():
    assert audit.outcomes_needed(config.Audit()) == 73  # min_candidates alone would be 50: a bound of 7.1 %
    assert audit.outcomes_needed(config.Audit(min_candidates=300)) == 300
    assert audit.outcomes_needed(config.Audit(max_false_rate=0.0)) == config.Audit().window


@pytest.mark.parametrize("acc", [None, True, False, 0.0, 1.0, float("nan"), torch.tensor(0.75)])
@pytest.mark.parametrize("score", [0.0, 0.4, 0.5, 1.0, -1.0])
def test_correctness_is_the_one_that_the_losses_use(acc, score):
    wanted = losses.correct_rows(torch.tensor([score], dtype=torch.float64), 0.5, None if acc is None else [acc])
    assert pruning.is_correct(score, acc, 0.5) == bool(wanted[0])


def test_enough_falls_with_every_member_that_finished():
    answers = [True, False, True, True, False, True, True, True]
    assert pruning.enough(answers[:3], GROUP, 0) is None and pruning.enough(answers[:3], GROUP, 4) is None
    assert [pruning.enough(answers[:k], GROUP, 4) for k in (4, 6, 8)] == [1.0, 0.5, 0.0]
    for answer in (True, False):  # whoever counts heads only would stop here, with no gradient in the group
        assert pruning.enough([answer] * 6, GROUP, 4) is None
        assert pruning.enough([answer] * 6 + [not answer], GROUP, 4) == 0.25


def test_the_posterior_is_that_of_the_prompt_and_its_finished_members():
    assert pruning.differs(None, [True, True]) == 1 / 4  # uniform prior, two agree
    assert pruning.differs({**SURE, "alpha": 3.0, "beta": 1.0}, [True] * 4) == 1 / 8
    assert pruning.differs({**SURE, "alpha": 3.0, "beta": 1.0}, [False] * 4) == 3 / 8


def test_longer_responses_differ_more_often_and_the_calibration_starts_conservative():
    calibration = pruning.LengthCalibration()
    assert calibration.doublings(50, [100, 100, 100]) == 0.0
    assert calibration.doublings(400, [100, 100, 900]) == 2.0
    at = [calibration.probability(0.1, doublings) for doublings in (0.0, 1.0, 3.0)]
    assert 0.1 < at[0] < at[1] < at[2]
    assert calibration.probability(0.0, 500.0) <= 1.0


def test_the_calibration_learns_but_never_that_long_answers_differ_less():
    """Simulated truth: logit = logit(0.1) - 1 + 0.5 * doublings; the conservative start is left behind."""
    rng, calibration = random.Random(1), pruning.LengthCalibration()
    for _ in range(20_000):
        doublings = rng.uniform(0, 4)
        truth = 1 / (1 + math.exp(-(math.log(0.1 / 0.9) - 1 + 0.5 * doublings)))
        calibration.learn(0.1, doublings, rng.random() < truth, 1.0)
    assert calibration.intercept == pytest.approx(-1, abs=0.5) and calibration.slope == pytest.approx(0.5, abs=0.3)
    for _ in range(500):
        calibration.learn(0.5, 3.0, False, 10.0)
    assert calibration.slope >= 0


@pytest.mark.parametrize("prior", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("doublings", [0.0, 1.5, 6.0])
def test_the_calibration_is_a_logistic_regression(prior, doublings):
    calibration = pruning.LengthCalibration()
    calibration.restore(-0.5, 0.75)
    odds = prior / (1 - prior) * math.exp(-0.5 + 0.75 * doublings)
    assert calibration.probability(prior, doublings) == pytest.approx(odds / (1 + odds))
    assert calibration.doublings(100, [20, 50, 30, 9]) == math.log2(100 / 30)  # the upper median
    calibration.restore(0.0, 0.0)
    calibration.learn(prior, doublings, False, 10.0)
    assert calibration.slope == 0.0 and calibration.intercept < 0


@pytest.mark.parametrize("known", [(math.nan, 1.0), (math.inf, 1.0), (0.0, math.nan), (0.0, math.inf), (0.0, -0.1)])
def test_a_damaged_calibration_is_refused_and_changes_nothing(known):
    calibration = pruning.LengthCalibration()
    before = vars(calibration).copy()
    with pytest.raises(ValueError, match="calibration"):
        calibration.restore(*known)
    assert vars(calibration) == before


def test_any_differs_is_an_upper_bound_of_the_beta_binomial():
    """P(one of m differs) = 1 - prod (a + i) / (a + b + i); members of a prompt share p, so independence says more."""
    for alpha, beta, unfinished in ((1.0, 1.0, 3), (20.0, 0.5, 6), (0.5, 9.0, 2)):
        none = math.prod((alpha + i) / (alpha + beta + i) for i in range(unfinished))
        each = beta / (alpha + beta)
        assert pruning.any_differs([each] * unfinished) >= 1 - none


def finish(chosen, group, members, correct=True, tokens=100, score=None):
    for member in members:
        chosen.ended(group, member, Finished(tokens, correct, float(correct) if score is None else score))


def warmed_up(**options):
    """A pruner whose resolved rule has seen enough candidates that agreed."""
    chosen = pruner(resolved={"enable": True}, **options)
    for number in range(20):
        group = f"warm{number}"
        chosen.watch(group, GROUP, SURE)
        finish(chosen, group, range(4))
        decided = chosen.checkpoint(group, dict.fromkeys(range(4, 8), 50))
        assert len(decided) == 4
        finish(chosen, group, [member for member, item in decided.items() if item.verdict.exempt])
        chosen.close(group)
    return chosen


def test_no_group_rule_prunes_before_the_evidence_is_there():
    chosen = pruner(resolved={"enable": True})
    chosen.watch("g", GROUP, SURE)
    finish(chosen, "g", range(4))
    decided = chosen.checkpoint("g", dict.fromkeys(range(4, 8), 50))
    assert [item.verdict.pi for item in decided.values()] == [1.0] * 4
    assert all(item.verdict.exempt for item in decided.values())


def test_a_resolved_group_is_pruned_up_to_the_cap_and_never_asked_twice():
    chosen = warmed_up()
    chosen.watch("g", GROUP, SURE)
    finish(chosen, "g", range(2))
    decided = chosen.checkpoint("g", dict.fromkeys(range(2, 8), 50))
    reasons = [item.verdict.reason for item in decided.values()]
    assert sum(item.verdict.prune for item in decided.values()) <= GROUP // 2
    assert set(reasons) <= {audit.COIN, audit.CAP} and audit.COIN in reasons
    assert chosen.checkpoint("g", dict.fromkeys(range(2, 8), 60)) == {}
    assert {item.pivot for item in decided.values()} == {1.0}


def test_finished_members_that_disagree_are_no_candidates_case():
    chosen = warmed_up()
    chosen.watch("g", GROUP, SURE)
    finish(chosen, "g", [0, 1])
    finish(chosen, "g", [2], correct=False)
    assert chosen.checkpoint("g", {3: 50}) == {} and not chosen.wants_progress("g")


def test_one_finished_member_agrees_with_itself_and_says_nothing():
    chosen = warmed_up()
    chosen.watch("g", GROUP, SURE)
    for members, says in (([0], False), ([1], True)):
        finish(chosen, "g", members)
        assert chosen.wants_progress("g") == says and bool(chosen.checkpoint("g", {7: 50})) == says


@pytest.mark.parametrize(("ending", "by_rule"), [(None, False), (Finished(50, False, 0.0), True)])
def test_who_failed_or_looped_is_neither_a_sibling_that_finished_nor_waited_for(ending, by_rule):
    chosen = warmed_up()
    chosen.watch("g", GROUP, SURE)
    finish(chosen, "g", range(3))
    alone = chosen._resolved(chosen.groups["g"], {7: 50}, {})
    for member in range(3, 7):
        chosen.ended("g", member, ending, by_rule)
    watched = chosen.groups["g"]
    assert watched.answers == [True] * 3 and watched.agreed()
    assert chosen._resolved(watched, {7: 50}, {}) < alone / 3  # one that may differ instead of five
    assert chosen.wants_progress("g")
    chosen.ended("g", 7, ending, by_rule)
    assert not chosen.wants_progress("g")


def test_who_has_finished_is_no_candidate_though_an_engine_still_names_it():
    chosen = warmed_up()
    chosen.watch("g", GROUP, SURE)
    finish(chosen, "g", range(4))
    assert set(chosen.checkpoint("g", dict.fromkeys(range(3, 6), 50))) == {4, 5}


def test_a_forecast_that_is_known_stays_and_one_that_comes_later_counts():
    chosen = pruner(resolved={"enable": True})
    for first, then, kept in ((None, SURE, SURE), (SURE, None, SURE), (SURE, {**SURE, "beta": 9.0}, SURE)):
        chosen.watch("g", GROUP, first)
        assert chosen.watch("g", GROUP, then).forecast == kept
        chosen.close("g")


def test_an_uncertain_prompt_and_a_long_straggler_are_no_candidates():
    chosen = warmed_up()
    for group, forecast, tokens in (("unsure", {**SURE, "beta": 40.0}, 50), ("long", SURE, 100 * 2**20),
                                    ("unknown", None, 50)):
        chosen.watch(group, GROUP, forecast)
        finish(chosen, group, range(4))
        assert chosen.checkpoint(group, {4: tokens}) == {}, group


@pytest.mark.parametrize("differs", [False, True])
def test_a_differing_exempted_candidate_is_a_false_prune_and_the_first_of_a_group_is_its_witness(differs):
    """Siblings share their prompt: what the others come to tells nothing new, whoever ends first."""
    chosen = pruner(resolved={"enable": True})
    chosen.watch("g", GROUP, SURE)
    finish(chosen, "g", range(4))
    assert len(chosen.checkpoint("g", {4: 50, 5: 50})) == 2
    finish(chosen, "g", [5], correct=differs)
    finish(chosen, "g", [4], correct=not differs)
    (_, false), = chosen.audit._windows[Rule.RESOLVED]
    assert false is differs


def test_many_false_prunes_stop_the_rule():
    chosen = warmed_up()
    for number in range(30):
        chosen.watch(f"g{number}", GROUP, SURE)
        finish(chosen, f"g{number}", range(4))
        for member, item in chosen.checkpoint(f"g{number}", dict.fromkeys(range(4, 8), 50)).items():
            if item.verdict.exempt:
                finish(chosen, f"g{number}", [member], correct=False)
        chosen.close(f"g{number}")
    assert chosen.audit.scale(Rule.RESOLVED) < 1
    assert chosen.audit.evidence(Rule.RESOLVED)[1] < 200


def test_equally_correct_under_an_overlong_penalty():
    """Rewards differ, correctness does not: a candidate all the same, but not null, so the group is put."""
    chosen = warmed_up()
    chosen.watch("g", GROUP, SURE)
    finish(chosen, "g", [0], score=1.0)
    finish(chosen, "g", [1], score=0.25)
    decided = chosen.checkpoint("g", dict.fromkeys(range(2, 8), 50))
    assert decided and next(iter(decided.values())).pivot == pytest.approx(0.625)
    rows = [row(score=1.0), row(score=0.25), row(outcome="prune", rule="resolved", keep_probability=0.1, pivot=0.625)]
    assert not treatment.is_resolved_null(rows, [True, True, False])


def row(**changes):
    return {"outcome": "finish", "rule": "", "keep_probability": 1.0, "pivot": None, "score": 1.0, **changes}


def test_another_measure_judges_a_group_in_which_no_coin_was_tossed():
    """verl's filter_groups.metric; where advantages are measured from a pivot, of rewards, only these can tell."""
    rows, kept, alike = [row(score=1.0), row(score=0.0)], [True, True], [0.5, 0.5]
    assert not treatment.is_null(rows, kept) and treatment.is_null(rows, kept, alike)
    tossed = [row(score=1.0), row(score=0.0, keep_probability=0.1, pivot=0.5)]
    assert not treatment.is_null(tossed, kept, alike)
    assert treatment.is_null([row(score=1.0), row(score=1.0, keep_probability=0.1, pivot=1.0)], kept, [0.0, 1.0])


def test_which_groups_are_null():
    pruned = row(outcome="prune", rule="resolved", keep_probability=0.1, pivot=1.0, score=0.0)
    exempted, loop = row(keep_probability=0.1, pivot=1.0), row(outcome="prune", rule="repetition", score=0.0)

    def null(*rows, loops=False):
        kept = [item["outcome"] != "prune" or (loops and item is loop) for item in rows]
        return treatment.is_resolved_null(rows, kept)

    assert null(row(), row(), pruned, exempted)
    assert not null(row(), row(), pruned, {**exempted, "score": 0.0})
    assert not null(row(), row(), exempted)  # nobody was pruned
    assert not null(row(), row(), {**exempted, "rule": "resolved"})
    assert not null(row(), row(), {**pruned, "rule": "enough"})
    assert null(row(), row(), pruned, loop) and not null(row(), row(), pruned, loop, loops=True)  # a trained loop


def test_the_same_seed_gives_the_same_verdicts():
    verdicts = []
    for seed in (3, 3, 4):
        chosen = warmed_up(seed=seed)
        trail = []
        for number in range(20):
            chosen.watch(f"g{number}", GROUP, SURE)
            finish(chosen, f"g{number}", range(4))
            trail += [item.verdict.prune for item in chosen.checkpoint(f"g{number}", {4: 5, 5: 5, 6: 5}).values()]
        verdicts.append(trail)
    assert verdicts[0] == verdicts[1] != verdicts[2]


def test_acc_may_be_an_array_scalar():
    assert pruning.is_correct(0.0, SimpleNamespace(item=lambda: True), 0.5)


@pytest.mark.parametrize("scores, pivots, expected", [
    ([1.0, 1.0], [], True), ([1.0, 0.0], [], False), ([1.0], [], True),
    ([1.0, 1.0], [1.0], True), ([1.0, 1.0], [0.5], False), ([1.0, 0.0], [1.0], False)])
def test_advantages_of_a_tossed_group_are_measured_from_its_pivot(scores, pivots, expected):
    assert treatment.without_gradient(scores, pivots) is expected


def test_the_bench_of_the_threshold_counts_what_a_cut_would_have_done():
    """Two members agree on wrong; of the two that run one differs. A bold rule cuts both, a careful one nobody."""
    from bench import resolved as bench

    rows = [{"tokens": list(range(length)), "correct": correct} for length, correct in (
        (10, False), (10, False), (30, False), (40, True))]
    record = {"cap": 64, "groups": [{"responses": rows}]}
    assert bench.measured(record, 0.05, "wrong") == {"tokens_saved": 0.0, "cuts": 0, "false_rate": 0.0,
                                                     "gradient_lost": 0.0, "yield": 1.0}
    bold = bench.measured(record, 1.0, "wrong")
    assert (bold["cuts"], bold["false_rate"], bold["gradient_lost"]) == (2, 0.5, 1.0)
    assert bold["tokens_saved"] == (20 + 30) / 90 and bold["yield"] == 0.0
    right = [{**row, "correct": not row["correct"]} for row in rows]
    assert bench.measured({**record, "groups": [{"responses": right}]}, 1.0, "wrong")["cuts"] == 0
    both = {**record, "groups": [{"responses": rows}, {"responses": right}]}  # predicted once both are known
    assert bench.measured(both, 1.0, "both")["cuts"] == 2
