"""The weighted estimator: bit for bit verl without coins, unbiased with them, and its controls that are not."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench import estimator_bias
from esgrpo import losses
from esgrpo.call import wrapped
from esgrpo.errors import EsgrpoError
from esgrpo.losses import Tossed

torch.set_num_threads(1)
GROUPS, SEED = 6000, 11
ENOUGH_PRUNED = 0.25  # share of the rows; fewer would not show a bias


def batch(dtype=torch.float32, seed=0, size=8, groups=5):
    rng = np.random.default_rng(seed)
    rewards = torch.tensor(rng.normal(size=(size * groups, 3)), dtype=dtype)
    return rewards, torch.ones(size * groups, 3, dtype=torch.long), [f"g{i // size}" for i in range(size * groups)]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_of_one_change_no_bit(norm, dtype):
    rewards, mask, index = batch(dtype)
    plain = losses.grpo_segment_advantage(rewards, mask, index, norm_by_std=norm)
    ones = Tossed([1.0] * len(index), [None] * len(index))
    assert torch.equal(losses.grpo_segment_advantage(rewards, mask, index, norm_by_std=norm, tossed=ones), plain)


def test_a_tossed_group_changes_no_bit_of_another():
    rewards, mask, index = batch()
    pi, pivot = [1.0] * len(index), [None] * len(index)
    pi[3], pivot[3] = 0.25, 0.5
    plain = losses.grpo_segment_advantage(rewards, mask, index, norm_by_std=False)
    mixed = losses.grpo_segment_advantage(rewards, mask, index, norm_by_std=False, tossed=Tossed(pi, pivot))
    assert torch.equal(mixed[8:], plain[8:]) and not torch.equal(mixed[:8], plain[:8])


def test_the_formula_row_by_row():
    scores, pi, pruned = [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.5, 0.25], {3}
    mask = torch.tensor([[0 if i in pruned else 1] for i in range(4)])
    rewards = torch.tensor([[s] for s in scores], dtype=torch.float64)
    for pivot in (0.0, 1.0, 0.3):
        keep = Tossed(pi, [None, None, pivot, pivot])
        got = losses.grpo_segment_advantage(rewards, mask, ["g"] * 4, norm_by_std=False, tossed=keep)[:, 0].tolist()
        weight = [0.0 if i in pruned else 1 / pi[i] for i in range(4)]
        for i in range(4):
            others = sum(weight[j] * (scores[j] - pivot) for j in range(4) if j != i) / 3
            assert got[i] == pytest.approx(weight[i] * 3 / 4 * (scores[i] - pivot - others), abs=1e-12)


def test_with_nobody_pruned_and_no_weight_it_is_the_mean_baseline():
    scores = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64)
    ours = losses.weighted_advantages(scores, [1.0] * 4, 4, 0.7)
    assert torch.allclose(ours, scores - scores.mean(), atol=1e-15)


def test_a_weighted_row_whose_siblings_failed_gets_the_rule_of_one():
    """verl's v1 may hand on what is left of a group."""
    rewards, mask = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2)
    tossed = Tossed([0.25], [0.0])
    found = losses.grpo_segment_advantage(rewards, mask, ["u"], norm_by_std=False, tossed=tossed)
    assert found.tolist() == [[4.0, 4.0]]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1.0])
def test_a_foreseen_group_has_no_gradient_at_all(reward):
    """float32 rewards against a Python pivot: 0.1 must meet 0.1."""
    mask = torch.tensor([[1], [1], [1], [0]])
    keep = Tossed([1.0, 1.0, 0.1, 0.1], [None, None, reward, reward])
    ours = losses.grpo_segment_advantage(torch.full((4, 1), reward), mask, ["g"] * 4, norm_by_std=False, tossed=keep)
    assert not ours.any()
    without = Tossed(keep.pi, [None, None, 0.0, 0.0])
    other = losses.grpo_segment_advantage(torch.full((4, 1), reward), mask, ["g"] * 4, norm_by_std=False,
                                          tossed=without)
    assert bool(other.any()) == (reward != 0)  # negative control: pivot 0


def test_lengths_are_checked():
    with pytest.raises(ValueError, match="different lengths"):
        Tossed([1.0], [])
    with pytest.raises(ValueError, match="keep probabilities"):
        losses.grpo_segment_advantage(torch.ones(2, 1), torch.ones(2, 1), ["a", "a"],
                                      tossed=Tossed([1.0], [None]))


@pytest.fixture(scope="module", params=[("resolved, reckless", 0.0), ("enough", 0.0), ("resolved, reckless", 0.5)],
                ids=["resolved", "enough", "overlong-penalty"])
def table(request):
    return estimator_bias.table(request.param[0], GROUPS, SEED, request.param[1])


def test_unbiased_within_three_standard_errors(table):
    assert table["pruned rows"]["share"] > ENOUGH_PRUNED
    for name in ("masked", "masked, pivot 0"):
        assert abs(table[name]["z"]) <= estimator_bias.LIMIT, (name, table[name])


@pytest.mark.parametrize("control", ["self-normalised mean", "mean including self", "token-mean", "no weights"])
def test_controls_are_biased(table, control):
    row = table[f"control: {control}"]
    assert abs(row["z"]) > estimator_bias.LIMIT, row


def test_the_pivot_takes_variance_away(table):
    assert table["masked"]["variance"] < table["masked, pivot 0"]["variance"]


def test_a_standard_deviation_leaves_a_bias():
    """Where groups of one sign are pruned; with both signs it is a few per cent, too few for this many groups."""
    table = estimator_bias.table("resolved, reckless", GROUPS, SEED)
    assert abs(table["control: divided by std"]["z"]) > estimator_bias.LIMIT


ROW = {"group": "g", "outcome": "finish", "keep_probability": 1.0, "pivot": None}


@pytest.mark.parametrize("audited", [True, False])
def test_rows_that_lost_their_summary_stop_the_run_where_weights_would_be_lost(monkeypatch, audited):
    from esgrpo import config
    from esgrpo.hooks.verl.losses.weighted_rows import tossed_of

    monkeypatch.setattr(config, "current", lambda: SimpleNamespace(weighted=audited))
    row = {**ROW, "keep_probability": 0.5, "pivot": 1.0}
    assert tossed_of({"esgrpo": [row, ROW]}).pi == [0.5, 1.0]
    for columns in ({}, {"esgrpo": [row, None]}):
        if audited:
            with pytest.raises(EsgrpoError, match="summary"):
                tossed_of(columns)
        else:
            assert tossed_of(columns) is None  # those of an agent loop that bypasses verl's client


@pytest.mark.parametrize("norm", [True, False])
def test_a_row_that_verl_rejects_counts_in_its_group_and_one_that_was_cut_does_not(monkeypatch, norm):
    """Both have an empty mask; verl's own grpo, which knows of no cut, decides what is right for the others."""
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import compute_advantage

    from esgrpo.hooks.verl.losses import grpo_segment, weighted_rows

    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    grpo_segment.apply(core_algos)
    scores, mask = torch.tensor([[1.0], [0.0], [0.3], [0.0]]), torch.tensor([[1], [1], [0], [0]])
    rows = [ROW, ROW, ROW, {**ROW, "outcome": "prune", "treatment": "masked"}]  # the third one: rollout_rs

    def run(function, estimator, chosen):
        column = np.empty(len(chosen), dtype=object)
        column[:] = [rows[row] for row in chosen]
        data = DataProto.from_dict(tensors={"token_level_rewards": scores[chosen], "response_mask": mask[chosen]},
                                   non_tensors={"uid": np.array(["g"] * len(chosen), dtype=object), "esgrpo": column})
        config = OmegaConf.create({"norm_adv_by_std_in_grpo": norm})
        return function(data, estimator, config=config, norm_adv_by_std_in_grpo=norm).batch["advantages"]

    hooked = wrapped(weighted_rows, compute_advantage)
    whole, wanted = run(hooked, "grpo_segment", [0, 1, 2, 3]), run(compute_advantage, "grpo", [0, 1, 2])
    assert torch.equal(whole[:3], wanted) and not whole[2:].any()
    plain = run(compute_advantage, "grpo_segment", [0, 1, 2, 3])  # negative control: without the hook
    assert not torch.allclose(plain[:3], wanted)


def all_of_verls_losses():
    pytest.importorskip("verl")
    from verl.trainer.ppo import core_algos

    return sorted(set(core_algos.POLICY_LOSS_REGISTRY) - {"bypass_mode"} | {"pois", "sais"})


def gradient_of(name, advantages, tmp):
    """Gradient of a policy loss with respect to log-probs, under verl's config classes."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    from esgrpo.hooks.verl.losses import policy_losses

    config = FSDPActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False,
                             loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=6,
                             policy_loss=PolicyLossConfig(dro_beta=0.1))
    config.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=4, loss_scale_factor=6)
    function = {"pois": policy_losses.pois, "sais": policy_losses.sais}.get(name) or core_algos.get_policy_loss_fn(name)
    log_prob = tmp["new"].clone().requires_grad_(True)
    loss, _ = function(old_log_prob=tmp["old"], log_prob=log_prob, advantages=advantages, response_mask=tmp["mask"],
                       loss_agg_mode="seq-mean-token-sum-norm", config=config)
    return torch.autograd.grad(loss, log_prob)[0]


@pytest.mark.parametrize("name", all_of_verls_losses())
def test_a_weight_in_the_advantage_is_a_weight_of_the_row(name):
    """Row weight w folded into A gives w times the row's gradient; the losses that pruning_rules refuses do not."""
    from esgrpo.hooks.verl.run.pruning_rules import NOT_HOMOGENEOUS

    torch.manual_seed(3)
    rows = {"old": -torch.rand(4, 6, dtype=torch.float64), "mask": torch.ones(4, 6, dtype=torch.float64)}
    rows["new"] = rows["old"] + 0.4 * torch.randn(4, 6, dtype=torch.float64)
    advantages = torch.randn(4, 1, dtype=torch.float64).expand(4, 6) * rows["mask"]
    weights = torch.tensor([1.0, 7.0, 1.0, 20.0], dtype=torch.float64)[:, None]
    plain, folded = (gradient_of(name, a, rows) for a in (advantages, advantages * weights))
    assert plain.any()
    assert torch.allclose(folded, plain * weights, rtol=1e-9, atol=1e-12) is (name not in NOT_HOMOGENEOUS)


@pytest.mark.hook("keep-probabilities-reach-estimator")
def test_through_verls_compute_advantage(monkeypatch):
    """The hook's way: verl's own function hands the estimator no weights; wrapped, it does."""
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.ray_trainer import compute_advantage

    from esgrpo.hooks.verl.losses import grpo_segment, weighted_rows

    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    grpo_segment.apply(core_algos)
    rows = np.empty(4, dtype=object)
    rows[:] = [{**ROW, "keep_probability": pi, "pivot": None if pi == 1 else 1.0,
                "outcome": "finish" if kept else "prune", "treatment": "masked"}
               for pi, kept in ((1.0, True), (1.0, True), (0.5, True), (0.5, False))]
    scores, mask = torch.tensor([[1.0], [1.0], [0.0], [1.0]]), torch.tensor([[1], [1], [1], [0]])
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": False})

    def run(function):
        data = DataProto.from_dict(tensors={"token_level_rewards": scores, "response_mask": mask},
                                   non_tensors={"uid": np.array(["g"] * 4, dtype=object), "esgrpo": rows})
        return function(data, "grpo_segment", config=config).batch["advantages"]

    keep = Tossed([1.0, 1.0, 0.5, 0.5], [None, None, 1.0, 1.0])
    wanted = losses.grpo_segment_advantage(scores, mask, ["g"] * 4, norm_by_std=False, tossed=keep)
    assert torch.equal(run(wrapped(weighted_rows, compute_advantage)), wanted)
    assert not torch.equal(run(compute_advantage), wanted)  # negative control: plain verl
    assert weighted_rows.current() is None


ALIKE = "seq-mean-token-mean"


@pytest.mark.hook("keep-probabilities-reach-estimator")
def test_cutting_leaves_the_weight_of_every_token_that_is_left(monkeypatch):
    """verl's compute_advantage and agg_loss: a failure of 8 tokens, whole and cut at 2, under a mean over each row."""
    pytest.importorskip("verl")
    from verl import DataProto
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.trainer.ppo.ray_trainer import compute_advantage

    from esgrpo import config
    from esgrpo.hooks.verl.losses import weighted_rows

    monkeypatch.setattr(weighted_rows, "_cut_weights", None)
    monkeypatch.setenv(config.ENV_FACTS, json.dumps({"response_length": 8, "weighs_cut_rows": True}))
    scores = torch.zeros(3, 8)
    scores[0, 7] = 1.0
    summaries = [{"group": "g", "member": member, "outcome": "finish", "rule": "", "tokens": 8} for member in range(3)]

    def slope(function, tokens):
        """d loss / d log-prob of the last row's first token."""
        mask = torch.ones(3, 8)
        mask[2, tokens:] = 0
        rows = np.empty(3, dtype=object)
        rows[:] = [*summaries[:2], {**summaries[2], **(
            {"outcome": "prune", "rule": "verdict", "tokens": tokens} if tokens < 8 else {})}]
        data = DataProto.from_dict(tensors={"token_level_rewards": scores, "response_mask": mask},
                                   non_tensors={"uid": np.array(["g"] * 3, dtype=object), "esgrpo": rows})
        found = function(data, "grpo").batch
        assert found["returns"][2, 0] < 0  # as verl has them
        log_prob = torch.zeros(3, 8, requires_grad=True)
        agg_loss(-found["advantages"] * log_prob, mask, ALIKE).backward()
        return float(log_prob.grad[2, 0])

    ours = wrapped(weighted_rows, compute_advantage)
    whole = slope(ours, 8)
    assert whole == slope(compute_advantage, 8)
    assert slope(ours, 2) == pytest.approx(whole)
    assert weighted_rows.written(summaries) == [1.0, 1.0, 0.25]
    assert weighted_rows.written(summaries) == [1.0, 1.0, 1.0]  # each once
    assert slope(compute_advantage, 2) == pytest.approx(4 * whole)  # negative control: plain verl


@pytest.mark.parametrize("prune, mode, loss_mode, legacy, weighs, said", [
    ({"repetition": {"enable": True}}, ALIKE, "vanilla", False, True, "weighs as much as"),
    ({"verdict": {"enable": True}, "audit": {"enable": True}}, ALIKE, "pois", False, True, "weighs as much as"),
    ({"repetition": {"enable": True}}, ALIKE, "dro", False, False, "favours short"),
    ({"repetition": {"enable": True}}, ALIKE, "vanilla", True, False, "favours short"),
    ({"repetition": {"enable": True}}, "token-mean", "vanilla", False, False, ""),
    ({"repetition": {"enable": True}, "treatment": "masked"}, ALIKE, "vanilla", False, False, ""),
    ({}, ALIKE, "vanilla", False, False, "")])
def test_when_cut_rows_get_a_factor(prune, mode, loss_mode, legacy, weighs, said):
    from esgrpo.hooks.verl.run.pruning_rules import weighs_cut_rows

    plan, config = planned(prune, mode, loss_mode=loss_mode, **({"compute_prox_log_prob": False} if legacy else {}))
    assert weighs_cut_rows(config, plan.segment) is weighs
    lines = [line for line in plan.lines if ALIKE in line]
    assert len(lines) == bool(said) and said in "".join(lines)


@pytest.mark.parametrize("mode,factor,line", [("token-mean", None, "token-mean -> seq-mean-token-sum-norm"),
                                              ("seq-mean-token-sum-norm", None, "loss_scale_factor: null -> 64"),
                                              ("seq-mean-token-sum-norm", 64, None)])
def test_the_denominator_of_a_weighted_gradient_is_fixed(mode, factor, line):
    plan = adjusted({"treatment": "masked", "resolved": {"enable": True}, "audit": {"enable": True}}, mode, factor)
    said = [text for text in plan.lines if "loss_agg_mode" in text or "loss_scale_factor" in text]
    assert (line is None and not said) or line in said[0]
    changed = {"actor_rollout_ref.actor.loss_scale_factor": 64} if factor is None else {}
    assert {key: value for key, value in plan.settings.items() if "loss_scale_factor" in key} == changed


def adjusted(*args, **values):
    return planned(*args, **values)[0]


def planned(prune, mode="seq-mean-token-sum-norm", factor=64, loss_mode="pois", norm=False, **async_training):
    """What the driver plans, and verl's config."""
    from omegaconf import OmegaConf

    from esgrpo import config as settings
    from esgrpo.hooks.verl.run.config_rules import Plan, features_of, fill

    config = OmegaConf.create({
        "actor_rollout_ref": {"actor": {"loss_agg_mode": mode, "loss_scale_factor": factor, "ppo_epochs": 1,
                                        "policy_loss": {"loss_mode": loss_mode}},
                              "rollout": {"name": "vllm", "n": 8, "calculate_log_probs": True}},
        "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": norm, "use_kl_in_reward": False},
        "async_training": {"require_batches": 1, "trigger_parameter_sync_step": 1, **async_training},
        "data": {"max_response_length": 64}})
    segment = settings.parse({"enable": True, "segment_length": 32, "prune": prune})
    plan = Plan(segment)
    fill(plan, config, features_of(config, segment))
    return plan, config


@pytest.mark.parametrize("treatment", ["failed", "value", "doubly_robust", "masked"])
def test_no_setting_that_is_known_to_bias_stays(treatment):
    """verl's defaults: normalised by the standard deviation, averaged over tokens, its own grpo."""
    plan = adjusted({"treatment": treatment, "resolved": {"enable": True}, "audit": {"enable": True}},
                    mode="token-mean", factor=None, norm=True)
    changed = {key.rpartition(".")[2]: value for key, value in plan.settings.items()}
    if treatment == "failed":
        assert not changed
    else:
        assert changed == {"adv_estimator": "grpo_segment", "norm_adv_by_std_in_grpo": False,
                           "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 64}
    assert all(any(line.startswith(key) for line in plan.lines) for key in plan.settings)


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov", "dro"])
def test_losses_that_are_not_proportional_are_refused(loss_mode):
    from esgrpo.errors import ConfigError

    with pytest.raises(ConfigError, match=loss_mode):
        adjusted({"treatment": "masked", "finish_group_after": 4, "audit": {"enable": True}}, loss_mode=loss_mode)


def test_verl_0_7_0_is_refused_and_optional_stopping_without_audit_everywhere():
    from esgrpo.errors import ConfigError

    with pytest.raises(ConfigError, match="0.7.0"):
        adjusted({"treatment": "masked", "finish_group_after": 4, "audit": {"enable": True}},
                 compute_prox_log_prob=False)
    with pytest.raises(ConfigError, match="finish_group_after.*audit.enable"):
        adjusted({"treatment": "masked", "finish_group_after": 4})
    adjusted({"treatment": "masked", "finish_group_after": 4, "audit": {"enable": True}})


def test_masked_rows_never_reach_a_weighted_gradient():
    """A row that the coin fell against ended by itself before the engine heard of it: complete, and still masked."""
    from esgrpo.hooks.verl.groups.masked_rows import mask_pruned

    def agent_row(**fields):
        return SimpleNamespace(extra_fields={"esgrpo": {"group": "g", "outcome": "finish", "rule": "", **fields}},
                               response_mask=torch.ones(1, 3))

    loops = [agent_row(outcome="prune", rule="repetition", keep_probability=1.0, treatment="masked") for _ in range(2)]
    tossed = agent_row(outcome="prune", rule="resolved", keep_probability=0.1, treatment="masked")
    mask_pruned([*loops, tossed])
    assert [bool(row.response_mask.any()) for row in (*loops, tossed)] == [True, True, False]


def test_what_a_response_says_up_to_a_decision_sums_to_nothing():
    """The score function of what is seen at a time has the mean 0 over all that may be seen, up to the last token."""
    longest = max(high for _, high in estimator_bias.LENGTHS.values())
    for shift in (-2.0, 0.0, 1.0):
        for tokens in (5, 25, 50, 120, longest):
            running = sum(estimator_bias.survivors(shift, tokens).values())
            ended = sum((float(kind == estimator_bias.PARAMETER) - estimator_bias.probabilities(shift)[
                estimator_bias.PARAMETER]) * (chance - estimator_bias.survivors(shift, tokens)[kind])
                for kind, chance in estimator_bias.probabilities(shift).items())
            assert ended + running * estimator_bias.head_gradient(shift, tokens) == pytest.approx(0.0, abs=1e-12)


def test_parts_of_a_record_are_measured_one_after_another(tmp_path):
    path = tmp_path / "record.json"
    same = {"commit": "a", "seeds": [1], "device": "d", "versions": {}, "seconds": 2}
    parts = [{**same, "commands": ["one"], "simulated": {"groups": 3, "scenarios": {"s": 1}}, "recorded": {}},
             {**same, "commands": ["two"], "simulated": {}, "recorded": {"prompts": 4, "tasks": {"t": 2}}}]
    for part in parts:
        estimator_bias.write(path, dict(part))
    found = json.loads(path.read_text())
    assert found["commands"] == ["one", "two"] and found["seconds"] == 4
    assert (found["simulated"]["scenarios"], found["recorded"]["tasks"]) == ({"s": 1}, {"t": 2})
    estimator_bias.write(path, {**parts[1], "commit": "b"})  # of other code: the old parts go
    assert json.loads(path.read_text())["simulated"] == {}
