"""Advantages under verl's v1 trainers: several outputs of a session, and the weights of audited pruning."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

import torch  # noqa: E402

from ci.tests.contract.v1_scenes import batch_of, put  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl.losses import weighted_rows  # noqa: E402
from esgrpo.hooks.verl.v1.rows import final_outputs, keep_probabilities  # noqa: E402

pytestmark = pytest.mark.slow


def advantages(hooked: bool, keys, rewards):
    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories as original

    from esgrpo.hooks.verl.losses import grpo_segment

    core_algos.ADV_ESTIMATOR_REGISTRY.setdefault("grpo_segment", grpo_segment.grpo_segment)
    data = DataProto.from_dict(
        tensors={"response_mask": torch.ones(len(keys), 2), "token_level_rewards": torch.tensor(rewards),
                 "token_level_scores": torch.tensor(rewards)},
        non_tensors={"uid": np.array([key.split("_")[0] for key in keys], dtype=object)})
    function = wrapped(final_outputs, original) if hooked else original
    result = function(data, batch_keys=keys, adv_estimator="grpo_segment" if hooked is not None else "grpo",
                      num_repeat=2, config={})
    return result.batch["advantages"][:, 0].tolist()


KEYS = ["u_0_0", "u_0_1", "u_0_2", "u_1_0"]  # the first session gave three outputs
REWARDS = [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]


@pytest.mark.hook("v1-final-outputs")
def test_a_session_counts_once_in_its_group():
    assert advantages(True, KEYS, REWARDS) == pytest.approx(advantages(None, KEYS, REWARDS))  # verl's own for grpo
    one_each = advantages(False, [KEYS[2], KEYS[3]], [REWARDS[2], REWARDS[3]])
    assert advantages(True, KEYS, REWARDS) == pytest.approx([one_each[0]] * 3 + [one_each[1]])


def test_a_session_whose_final_output_is_masked_takes_no_part(monkeypatch):
    """Its other outputs may still have their masks: the row of the audit is the final output's."""
    whole = {"u_0": [6], "u_1": [5], "u_2": [6], "u_3": [3]}
    assert predicted(monkeypatch, whole | {"u_3": [3, 0]})["u_3"] == [0.0] * 3
    assert predicted(monkeypatch, whole | {"u_3": [3, 3]})["u_3"] != [0.0] * 6


def test_without_the_hook_it_counts_three_times():
    assert advantages(False, KEYS, REWARDS)[3] != pytest.approx(advantages(True, KEYS, REWARDS)[3])


def predicted(monkeypatch, outputs: dict[str, list[int]]) -> dict[str, list[float]]:
    """Advantages by session over all of its tokens, of a group in which two were predicted after four tokens; of each
    session the tokens of its outputs."""
    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos, ray_trainer
    from verl.trainer.ppo.v1 import utils

    from esgrpo.hooks.verl.losses import grpo_segment

    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "grpo_segment", grpo_segment.grpo_segment)
    monkeypatch.setattr(utils, "compute_advantage", wrapped(weighted_rows, ray_trainer.compute_advantage))
    known = {"u_0": {"keep_probability": 0.5, "predicted_reward": 0.1, "tokens_at_decision": 4},
             "u_1": {"keep_probability": 0.5, "predicted_reward": 0.2, "tokens_at_decision": 4, "outcome": "prune"}}
    score = {"u_0": 1.0, "u_2": 1.0}
    keys = [f"{session}_{number}" for session, lengths in outputs.items() for number in range(len(lengths))]
    lengths = [length for of_session in outputs.values() for length in of_session]
    mask = torch.tensor([[1.0] * length + [0.0] * (8 - length) for length in lengths])
    rewards = torch.zeros_like(mask)
    for row, key in enumerate(keys):
        rewards[row, lengths[row] - 1] = score.get(key.rpartition("_")[0], 0.0)
    plain = {"group": "u", "keep_probability": 1.0, "pivot": None, "outcome": "finish"}
    monkeypatch.setattr(keep_probabilities, "_SUMMARIES", SimpleNamespace(get=lambda: {
        key: plain | known.get(key.rpartition("_")[0], {}) for key in keys}))
    data = DataProto.from_dict(tensors={"response_mask": mask, "token_level_rewards": rewards},
                               non_tensors={"uid": np.array(["u"] * len(keys), dtype=object)})
    function = wrapped(final_outputs, utils.compute_advantage_for_multi_trajectories)
    result = function(data, batch_keys=keys, adv_estimator="grpo_segment", num_repeat=4,
                      config={"norm_adv_by_std_in_grpo": False}).batch["advantages"]
    found: dict[str, list[float]] = {}
    for row, key in enumerate(keys):
        assert not result[row, lengths[row]:].any()
        found.setdefault(key.rpartition("_")[0], []).extend(result[row, :lengths[row]].tolist())
    return found


@pytest.mark.parametrize("split", [{"u_2": [3, 3]}, {"u_0": [3, 3]}, {"u_0": [5, 1]},
                                   {"u_0": [1, 1, 4], "u_1": [2, 3]}])
def test_outputs_of_a_session_are_its_response_cut_in_pieces(monkeypatch, split):
    whole = predicted(monkeypatch, {"u_0": [6], "u_1": [5], "u_2": [6], "u_3": [6]})
    assert whole["u_0"][3] != whole["u_0"][4] and whole["u_1"][4] == 0.0  # the tail has a weight of its own
    assert predicted(monkeypatch, {"u_0": [6], "u_1": [5], "u_2": [6], "u_3": [6]} | split) == whole


def weighted(queue, monkeypatch, hooked: bool):
    """verl's own _compute_advantage over two kept rows, the second one an exempted candidate with pi 0.5."""
    from verl.trainer.ppo import core_algos, ray_trainer
    from verl.trainer.ppo.v1 import trainer_base, utils

    from esgrpo.hooks.verl.losses import grpo_segment

    core_algos.ADV_ESTIMATOR_REGISTRY.setdefault("grpo_segment", grpo_segment.grpo_segment)
    for session, (score, keep) in enumerate([(1.0, 1.0), (0.0, 0.5), (0.0, 1.0)]):
        key = f"u_{session}_0"
        put(queue, key, 2 + session)  # of different lengths, or the queue would stack instead of nesting
        queue.rows[key]["extra_fields"]["esgrpo"] |= {"keep_probability": keep, "pivot": 0.0 if keep < 1 else None}
        queue.rows[key] |= {"uid": "u", "rm_scores": torch.tensor([0.0] * (1 + session) + [score])}
    trainer = SimpleNamespace(config=SimpleNamespace(
        algorithm=SimpleNamespace(use_kl_in_reward=False, gamma=1.0, lam=1.0, adv_estimator="grpo_segment",
                                  get=lambda name, default=None: {"norm_adv_by_std_in_grpo": False}.get(name, default)),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=3))))
    original = trainer_base.PPOTrainer._compute_advantage
    if hooked:
        monkeypatch.setattr(utils, "compute_advantage", wrapped(weighted_rows, ray_trainer.compute_advantage))
        monkeypatch.setattr(trainer_base, "compute_advantage_for_multi_trajectories",
                            wrapped(final_outputs, utils.compute_advantage_for_multi_trajectories))
        original = wrapped(keep_probabilities, original)
    keys = [f"u_{session}_0" for session in range(3)]
    original(trainer, batch_of(queue, *keys), {})
    return [float(queue.rows[key]["advantages"][0]) for key in keys]


@pytest.mark.hook("v1-keep-probabilities", "keep-probabilities-reach-estimator")
def test_keep_probabilities_reach_the_estimator(queue, monkeypatch):
    """A_i = R_i - 1/(n-1) sum of w_j R_j over the others, times w_i (n-1)/n; only the first has a reward."""
    assert weighted(queue, monkeypatch, True) == pytest.approx([2 / 3, -2 / 3, -1 / 3])


def test_without_the_hooks_every_row_weighs_one(queue, monkeypatch):
    assert weighted(queue, monkeypatch, False) == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def with_factors(monkeypatch, hooked: bool) -> list[float]:
    """First advantage of each session of a group in which the last one was cut at 2 of 8 tokens."""

    from verl.protocol import DataProto
    from verl.trainer.ppo import ray_trainer
    from verl.trainer.ppo.v1 import utils

    from esgrpo import config

    monkeypatch.setenv(config.ENV_FACTS, json.dumps({"response_length": 8, "weighs_cut_rows": True}))
    monkeypatch.setattr(weighted_rows, "_cut_weights", None)
    if hooked:
        monkeypatch.setattr(utils, "compute_advantage", wrapped(weighted_rows, ray_trainer.compute_advantage))
    keys, lengths = ["u_0_0", "u_1_0", "u_2_0"], [3, 8, 2]
    mask = torch.tensor([[1.0] * length + [0.0] * (8 - length) for length in lengths])
    rewards = torch.zeros_like(mask)
    rewards[0, 2] = 1.0
    rows = {key: {"group": "u", "member": member, "outcome": "finish", "rule": "", "tokens": lengths[member]}
            for member, key in enumerate(keys)}
    rows["u_2_0"] |= {"outcome": "prune", "rule": "verdict"}
    monkeypatch.setattr(keep_probabilities, "_SUMMARIES", SimpleNamespace(get=lambda: rows))
    data = DataProto.from_dict(tensors={"response_mask": mask, "token_level_rewards": rewards},
                               non_tensors={"uid": np.array(["u"] * 3, dtype=object)})
    function = wrapped(final_outputs, utils.compute_advantage_for_multi_trajectories)
    found = function(data, batch_keys=keys, adv_estimator="grpo", num_repeat=3, config=None).batch["advantages"]
    return found[:, 0].tolist()


@pytest.mark.hook("keep-probabilities-reach-estimator")
def test_a_cut_row_weighs_what_its_part_of_the_whole_would(monkeypatch):
    from verl.protocol import DataProto

    right, whole, cut = with_factors(monkeypatch, True)
    assert cut == pytest.approx(whole / 4) and right > 0 > whole
    weighted_rows.weigh_cut_rows(DataProto.from_dict(  # the next batch of the same weight version
        tensors={"advantages": torch.ones(1, 8)}, non_tensors={"esgrpo": np.array(
            [{"group": "v", "member": 0, "outcome": "finish", "tokens": 8}], dtype=object)}))
    assert weighted_rows.written([{"group": "u", "member": 2}, {"group": "v", "member": 0}]) == [0.25, 1.0]


def test_without_the_hook_it_weighs_as_the_whole(monkeypatch):
    _, whole, cut = with_factors(monkeypatch, False)
    assert cut == pytest.approx(whole)
