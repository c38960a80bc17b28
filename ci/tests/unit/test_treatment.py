"""What becomes of a response that is cut: its row, its reward and its advantage under each treatment."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from esgrpo import config, losses
from esgrpo.algo import audit
from esgrpo.algo.group_pruning import Finished, GroupPruner
from esgrpo.algo.terms import Rule, Treatment
from esgrpo.algo.treatment import ASSUMED, NEWEST, CutWeights, Rewards, is_resolved_null, masked
from esgrpo.algo.verdict import Verdicts
from esgrpo.algo.verdict_features import Glance
from esgrpo.algo.verdict_gate import FIRST, Settings
from esgrpo.losses import Tossed

SURE = {"alpha": 1.0, "beta": 200.0}  # of a prompt that nobody solves; the other way round: that everybody does
COINS = {"enable": True, "exempt_prob": 1e-9, "min_candidates": 1, "max_false_rate": 1.0, "max_fraction": 0.5}


def row(group="g", outcome="finish", rule="", treatment="", **facts):
    return {"group": group, "outcome": outcome, "rule": rule, "treatment": treatment, "keep_probability": 1.0,
            "pivot": None, "score": 0.0, **facts}


CUT = {"outcome": "prune", "rule": "resolved"}


@pytest.mark.parametrize("rows, expected", [
    ([row(), row(**CUT, treatment="masked"), None], [False, True, False]),
    ([row(**CUT, treatment="masked"), row("h")], [False, False]),  # nobody else in its group
    ([row(**CUT, treatment="masked", keep_probability=0.5)] * 2, [True, True]),  # coins fell against them
    *[([row(), row(**CUT, treatment=other)], [False, False]) for other in ("failed", "value", "doubly_robust")],
    ([row(), row(outcome="abort")], [False, False]), ([], [])])
def test_who_is_masked(rows, expected):
    assert masked(rows) == expected


def let_run(tokens, **facts):
    return row(candidate_rule="verdict", exempted=True, decided_by="coin", tokens=tokens, **facts)


def cut_at(tokens, rule="verdict"):
    return row(outcome="prune", rule=rule, tokens=tokens)


def test_a_cut_row_weighs_what_its_part_of_the_whole_would():
    weights = CutWeights(2048)
    assert weights.of(cut_at(256)) == pytest.approx(256 / 2048)  # nothing seen: it would run to the budget
    assert weights.of(row(tokens=9)) == weights.of(cut_at(2048)) == weights.of(cut_at(0)) == 1.0
    for _ in range(NEWEST):
        weights.learn(let_run(512))
    share = 256 * (NEWEST / 512 + ASSUMED / 2048) / (NEWEST + ASSUMED)
    assert weights.of(cut_at(256)) == pytest.approx(share) and weights.of(cut_at(1024)) == 1.0
    assert weights.of(cut_at(256, "repetition")) == pytest.approx(256 / 2048)  # each rule for itself


@pytest.mark.parametrize("other", [
    let_run(64, outcome="prune", rule="verdict"), let_run(64) | {"decided_by": "cap"}, let_run(0), row(tokens=64),
    let_run(64) | {"exempted": False}, {"outcome": "finish"}])
def test_only_those_that_a_coin_or_a_warm_up_let_run_are_evidence(other):
    weights = CutWeights(2048)
    weights.learn(other)
    assert weights.of(cut_at(256)) == pytest.approx(256 / 2048)


@pytest.mark.parametrize("lengths", [[700, 2048], [300, 300, 2048, 2048, 1500], [2048]])
def test_a_token_of_a_cut_row_weighs_as_in_the_mean_complete_one(lengths):
    """Under a mean over the tokens of each row: factor over c is E(1 / L)."""
    weights, at = CutWeights(2048), 256
    for _ in range(NEWEST // len(lengths)):
        for tokens in lengths:
            weights.learn(let_run(tokens))
    wanted = sum(1 / tokens for tokens in lengths) / len(lengths)
    assert weights.of(cut_at(at)) / at == pytest.approx(wanted, rel=0.1)


def test_a_restart_weighs_cut_rows_as_before():
    before, after = CutWeights(2048), CutWeights(2048)
    assert before.learn(let_run(512)) and before.learn(let_run(1024)) and not before.learn(row(tokens=9))
    after.restore(json.loads(json.dumps(before.state())))
    assert after.of(cut_at(256)) == before.of(cut_at(256)) > CutWeights(2048).of(cut_at(256))


@pytest.mark.parametrize("damaged", [[], {"verdict": 3}, {"verdict": ["x"]}, {"verdict": [0.1, 2.0]},
                                     {"verdict": [float("nan")]}, {"verdict": [None]}])
def test_a_damaged_state_of_cut_weights_is_refused_and_changes_nothing(damaged):
    weights = CutWeights(2048)
    with pytest.raises(ValueError):
        weights.restore(damaged)
    assert weights.state() == {}


def test_rewards_are_put_on_the_scale_of_those_that_were_seen():
    rewards = Rewards()
    assert rewards.predicted(0.5) is rewards.predicted(0.0) is None
    for score in (-1.0, -1.0, -1.0):
        rewards.learn(False, score)
    assert rewards.predicted(0.0) == -1.0 and rewards.predicted(0.5) is None
    rewards.learn(True, 1.0)
    rewards.learn(True, 2.0)
    assert rewards.predicted(0.25) == pytest.approx(0.25 * 1.5 - 0.75)
    other = Rewards()
    for _ in range(3):
        other.learn(True, 0.1)
    assert other.predicted(1.0) == 0.1  # exactly: a float32 reward must meet it


def pruner(treatment, **prune):
    settings = config.parse({"enable": True, "prune": {"treatment": treatment, "audit": COINS, "resolved": {
        "enable": True, "null_prob": 0.5}, "repetition": {"enable": True}, **prune}})
    groups = GroupPruner(settings, audit.Audit(settings.prune.audit, random.Random(0)), 1000)
    groups.audit.learn(Rule.RESOLVED, 0.0, False)  # the one outcome that is needed
    return groups


def decide(treatment, correct, score=None):
    """Two members of eight have ended, both `correct` or not; what is decided about the others."""
    groups = pruner(treatment)
    groups.watch("g", 8, dict(zip(("alpha", "beta"), (200.0, 1.0) if correct else (1.0, 200.0), strict=True)))
    for kind in (True, False):  # the scale
        groups.rewards.learn(kind, float(kind))
    for member in (0, 1):
        groups.ended("g", member, Finished(50, correct, float(correct) if score is None else score))
    return groups, groups.checkpoint("g", dict.fromkeys(range(2, 8), 60))


@pytest.mark.parametrize("treatment", list(Treatment))
@pytest.mark.parametrize("correct", [True, False])
def test_what_the_audit_fixes_for_each_treatment(treatment, correct):
    groups, decided = decide(treatment, correct)
    if treatment == Treatment.FAILED and correct:
        assert not decided, "responses that are most likely right would be trained as failures"
        return
    pruned = [item for item in decided.values() if item.verdict.prune]
    assert len(pruned) == 4, "half of the group, whatever becomes of them"
    weighted = treatment in ("masked", "doubly_robust")
    assert {item.keep_probability for item in pruned} == ({1e-9} if weighted else {1.0})
    assert {item.verdict.pi for item in pruned} == {1e-9}
    assert all((item.pivot is not None) == (treatment == "masked") for item in pruned)
    for item in pruned:
        assert (item.predicted > 0.9) if correct else (item.predicted < 0.1)
        expected = item.predicted if treatment in ("value", "doubly_robust") else None
        assert item.reward == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("treatment", ["value", "doubly_robust"])
def test_nobody_is_cut_before_the_scale_of_rewards_is_known(treatment):
    groups = pruner(treatment)
    groups.watch("g", 8, None)
    assert groups.loop("g", 0, 300, 0.0) is None
    groups.ended("g", 1, Finished(50, False, -1.0))
    assert groups.loop("g", 0, 300, 0.0).reward == -1.0  # the failure that a loop is, on the scale of this reward
    assert pruner("failed").watch("g", 8, None) is not None


@pytest.mark.parametrize(("treatment", "known", "reward"), [
    ("failed", False, None), ("failed", True, None), ("value", False, ...), ("value", True, 0.25)])
def test_a_verdict_brings_the_reward_that_its_treatment_wants(treatment, known, reward):
    """Where what responses get is not known yet, nobody is cut: `...`."""
    verdicts = Verdicts(Settings(audit=1e-9), random.Random(0))
    verdicts.model.weights[0], verdicts.opens_at = -12.0, FIRST  # all are candidates
    groups = pruner(treatment)
    groups.verdicts = verdicts
    groups.watch("g", 4, None)
    for correct, score in ((True, 1.25), (False, 0.25)):
        if known:
            groups.rewards.learn(correct, score)
    found, let_go = groups.looked("g", {2: [Glance(40, [1, 2, 3, 4], 0.1, 0.1), Glance(70, [1, 2, 3, 4], 0.1, 0.1)]})
    assert set(verdicts.report()) == set(groups.report(Rule.VERDICT)) and Rule.VERDICT in groups.reports()
    if reward is ...:
        assert (found, let_go, groups.groups["g"].decided) == ({}, 1, {})
        return
    assert let_go == 0 and found == groups.groups["g"].decided
    decided = found[2]
    assert decided.verdict.prune and decided.verdict.rule == Rule.VERDICT and decided.tokens == 70
    assert decided.reward == (reward if reward is None else pytest.approx(reward, abs=0.01))


@pytest.mark.parametrize(("ending", "by_rule", "teaches"), [
    (None, False, False), (Finished(50, False, 0.0), True, False), (Finished(50, False, 0.0), False, True)])
def test_a_gate_hears_of_those_that_ended_by_themselves(ending, by_rule, teaches):
    groups = pruner("failed")
    groups.verdicts = Verdicts(Settings(), random.Random(0))
    groups.watch("g", 4, None)
    assert (groups.ended("g", 0, ending, by_rule) is not None) == teaches
    assert groups.verdicts.groups["g"].cut == by_rule


def test_which_groups_may_be_replaced():
    failed = row(**CUT, treatment="failed")
    assert is_resolved_null([row(), row(), failed], [True] * 3)
    assert not is_resolved_null([row(score=1.0), row(), failed], [True] * 3)
    assert not is_resolved_null([row(), row()], [True] * 2)  # nobody was cut
    for treatment in ("value", "doubly_robust"):  # a prediction is near the others' reward, not equal to it
        assert not is_resolved_null([row(), row(), row(**CUT, treatment=treatment)], [True] * 3)


# Advantages, in verl's own functions


def verls(monkeypatch):
    pytest.importorskip("verl")
    from verl.trainer.ppo import core_algos

    from esgrpo.hooks.verl.losses import grpo_segment

    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    grpo_segment.apply(core_algos)


def through_verl(estimator, norm, rewards, mask, rows=None):
    """verl's compute_advantage with the hook around it."""
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    from esgrpo.call import wrapped
    from esgrpo.hooks.verl.losses import weighted_rows

    columns = {"uid": np.array(["g"] * len(rewards), dtype=object)}
    if rows is not None:
        columns["esgrpo"] = np.empty(len(rows), dtype=object)
        columns["esgrpo"][:] = rows
    data = DataProto.from_dict(tensors={"token_level_rewards": rewards, "response_mask": mask}, non_tensors=columns)
    function = wrapped(weighted_rows, compute_advantage) if rows is not None else compute_advantage
    config_ = OmegaConf.create({"norm_adv_by_std_in_grpo": norm})
    return function(data, estimator, norm_adv_by_std_in_grpo=norm, config=config_).batch["advantages"]


# four members: two ended by themselves, one was cut after 2 tokens, one was spared and went on from there
SCORES, MASK = [1.0, 0.0, 0.0, 1.0], [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
PI, AT, REWARD = 0.25, 2, 0.1


def batch_of(treatment):
    weighed = treatment in ("doubly_robust", "masked")
    predicted = {"predicted_reward": REWARD if treatment in ("value", "doubly_robust") else None}
    tossed = {"keep_probability": PI if weighed else 1.0, "tokens_at_decision": AT, **predicted,
              "pivot": 0.5 if treatment == "masked" else None}
    rows = [row(), row(), row(**CUT, treatment=treatment, **tossed), row(**tossed)]
    mask = torch.tensor(MASK)
    if treatment == "masked":
        mask[2] = 0
    rewards = torch.zeros(4, 4)
    rewards[:, 0] = torch.tensor(SCORES)
    return rewards, mask, rows


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("estimator", ["grpo", "grpo_segment"])
def test_failed_is_grpo_over_the_rewards_as_they_are(monkeypatch, norm, estimator):
    verls(monkeypatch)
    rewards, mask, rows = batch_of("failed")
    scores = torch.tensor(SCORES)
    wanted = (scores - scores.mean()) / (scores.std() + 1e-6 if norm else 1.0)
    got = through_verl(estimator, norm, rewards, mask, rows)
    assert torch.allclose(got, wanted[:, None] * mask) and got[2, 0] < 0 < got[3, 3]
    assert torch.equal(got, through_verl("grpo", norm, rewards, mask))


def test_value_puts_the_prediction_into_the_baseline_and_the_row(monkeypatch):
    verls(monkeypatch)
    rewards, mask, rows = batch_of("value")
    rewards[2, 0] = -7.0  # what the reward function thought of the stump is not looked at
    wanted = torch.tensor([1.0, 0.0, REWARD, 1.0])
    got = through_verl("grpo_segment", False, rewards, mask, rows)
    assert torch.allclose(got, (wanted - wanted.mean())[:, None] * mask)


def test_doubly_robust_corrects_the_prediction_and_weighs_what_follows_it(monkeypatch):
    verls(monkeypatch)
    rewards, mask, rows = batch_of("doubly_robust")
    got = through_verl("grpo_segment", False, rewards, mask, rows)
    reward = [1.0, 0.0, REWARD, REWARD + (1 - REWARD) / PI]
    baseline = [(sum(reward) - one) / 3 for one in reward]
    head = [0.75 * (one - b) for one, b in zip(reward, baseline, strict=True)]
    tail = 0.75 * (1.0 - baseline[3]) / PI
    wanted = [[head[0]] * 4, [head[1]] * 3 + [0], [head[2]] * AT + [0, 0], [head[3]] * AT + [tail] * 2]
    assert torch.allclose(got, torch.tensor(wanted))


def test_masked_leaves_the_row_out_and_weighs_the_spared_one(monkeypatch):
    verls(monkeypatch)
    rewards, mask, rows = batch_of("masked")
    got = through_verl("grpo_segment", False, rewards, mask, rows)
    weight, centred = [1, 1, 0, 1 / PI], [0.5, -0.5, 0.0, 0.5]
    others = [sum(w * c for j, (w, c) in enumerate(zip(weight, centred, strict=True)) if j != i) / 3 for i in range(4)]
    wanted = torch.tensor([w * 0.75 * (c - o) for w, c, o in zip(weight, centred, others, strict=True)])
    assert torch.allclose(got, wanted[:, None] * mask)


@pytest.mark.parametrize("treatment", ["value", "doubly_robust", "masked"])
def test_no_estimated_standard_deviation_divides(monkeypatch, treatment):
    verls(monkeypatch)
    with pytest.raises(ValueError, match="norm_adv_by_std_in_grpo=False"):
        through_verl("grpo_segment", True, *batch_of(treatment))


def test_advantages_stay_bounded_where_all_that_is_left_agrees():
    """All weights are one, the rewards agree and differ from the pivot: a standard deviation of 0 would divide."""
    rewards, mask = torch.ones(6, 1, dtype=torch.float64), torch.tensor([[1]] * 5 + [[0]])
    tossed = Tossed([1.0, 1.0, 1.0, 1.0, 0.25, 0.25], [None] * 4 + [0.0] * 2)
    with pytest.raises(ValueError, match="standard deviation"):
        losses.grpo_segment_advantage(rewards, mask, ["g"] * 6, norm_by_std=True, tossed=tossed)
    assert losses.weighted_advantages(torch.ones(5), [1, 1, 1, 1, 0.25], 8, 0.0).abs().max() <= 4 * (1 + 4)


# What the driver sets, more in test_estimator.py


def test_a_predicted_reward_has_no_kl_penalty():
    from omegaconf import OmegaConf

    from esgrpo.errors import ConfigError
    from esgrpo.hooks.verl.run.pruning_rules import lines

    config_ = OmegaConf.create({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "vanilla"}},
                                                      "rollout": {"n": 8}},
                                "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": True},
                                "data": {"max_response_length": 64}})
    segment = config.parse({"enable": True, "prune": {"treatment": "value", "repetition": {"enable": True},
                                                      "audit": {"enable": True}}})
    with pytest.raises(ConfigError, match="use_kl_in_reward"):
        list(lines(config_, segment))


def test_a_record_says_what_became_of_the_response():
    from esgrpo.algo.attempts import Response
    from esgrpo.algo.terms import Outcome

    plain = Response("g", 0, tokens=4, logprob_sum=-2.5).record(1.0, 0.0, None, "failed")
    assert plain.logprob_sum == -2.5
    by_engine = Response("g", 0, outcome=Outcome.PRUNE, rule="repetition").record(1.0, 0.0, None, "failed")
    spared = {"rule": "resolved", "prune": False, "keep_probability": 0.1, "reason": "coin", "tokens": 5, "pivot": 0.0,
              "coin": 0.1, "predicted": 0.02, "reward": None}
    kept = Response("g", 0, decision=spared).record(1.0, 0.0, None, "masked")
    unweighed = Response("g", 0, decision={**spared, "keep_probability": 1.0}).record(1.0, 0.0, None, "failed")
    assert [item.treatment for item in (plain, by_engine, kept, unweighed)] == ["", "failed", "masked", ""]
    assert (unweighed.coin, unweighed.keep_probability, unweighed.predicted) == (0.1, 1.0, 0.02)


def test_what_was_saved_is_known_without_weights_too():
    from esgrpo.algo.pruned_rows import prune_report

    spared = row(tokens=300, tokens_at_decision=100, coin=0.1, candidate=True, exempted=True, candidate_rule="resolved")
    cut = row(**CUT, treatment="failed", tokens=100, tokens_at_decision=100, coin=0.1, candidate=True, exempted=False,
              candidate_rule="resolved")
    report = prune_report([spared, *[cut] * 9])
    assert report["tokens_saved"] == pytest.approx(9 * 200) and report["variance_inflation"] == 1.0
    assert SimpleNamespace(**report).exempted == 1
