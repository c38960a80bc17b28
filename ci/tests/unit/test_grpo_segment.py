"""grpo_segment against verl's own grpo, and its treatment of pruned rows."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from esgrpo import losses

pytest.importorskip("verl")  # a module that verl moves is an error
from verl.trainer.ppo import core_algos  # noqa: E402

torch.set_num_threads(1)

LENGTH = 9


@pytest.fixture
def hook(monkeypatch):
    """The hook file, applied; upstream's registry is restored afterwards."""
    code = importlib.import_module("esgrpo.hooks.verl.losses.grpo_segment")
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    code.apply(core_algos)
    return code


def random_batch(seed, dtype=torch.float32):
    """Groups of 1 to 8 rows in random order; rewards sit on several tokens; every row has a response token."""
    rng = np.random.default_rng(seed)
    uid = np.concatenate([[f"group-{g}"] * rng.integers(1, 9) for g in range(6)]).astype(object)
    rng.shuffle(uid)
    rewards = torch.tensor(rng.normal(size=(len(uid), LENGTH)), dtype=dtype)
    if seed % 2:  # binary outcome reward on one token: groups of equal rewards occur
        rewards = torch.zeros_like(rewards)
        rewards[:, -1] = torch.tensor(rng.integers(0, 2, len(uid)), dtype=dtype)
    lengths = torch.tensor(rng.integers(1, LENGTH + 1, len(uid)))
    return rewards, (torch.arange(LENGTH) < lengths[:, None]).long(), uid


def verl_grpo(rewards, mask, uid, norm):
    return core_algos.compute_grpo_outcome_advantage(rewards.clone(), mask, uid, norm_adv_by_std_in_grpo=norm)[0]


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_equals_verls_grpo_bit_for_bit(hook, seed, dtype, norm):
    rewards, mask, uid = random_batch(seed, dtype)
    estimator = core_algos.get_adv_estimator_fn("grpo_segment")
    ours, returns = estimator(token_level_rewards=rewards, response_mask=mask, index=uid,
                              config={"norm_adv_by_std_in_grpo": norm}, reward_baselines=None)
    theirs = verl_grpo(rewards, mask, uid, norm)
    assert ours.dtype == theirs.dtype
    assert torch.equal(bits(ours), bits(theirs))
    assert returns is ours


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_pruned_rows_are_left_out(hook, seed, norm):
    """The kept rows get what verl gives to a batch that never had the pruned rows; verl's grpo itself does not."""
    rewards, mask, uid = random_batch(2 * seed)
    sizes = {group: int((uid == group).sum()) for group in set(uid)}
    seen, pruned = {}, []
    for row, group in enumerate(uid):
        seen[group] = seen.get(group, 0) + 1
        if sizes[group] >= 3 and seen[group] <= sizes[group] - 2:  # two rows of a group remain
            pruned.append(row)
    kept = [row for row in range(len(uid)) if row not in pruned]
    assert pruned
    mask[pruned] = 0
    ours = losses.grpo_segment_advantage(rewards, mask, uid, norm_by_std=norm)
    assert torch.equal(ours[kept], verl_grpo(rewards[kept], mask[kept], uid[kept], norm))
    assert not ours[pruned].any()
    assert not torch.allclose(verl_grpo(rewards, mask, uid, norm)[kept], ours[kept])  # negative control
    louder = rewards.clone()
    louder[pruned] = 1e6
    assert torch.equal(losses.grpo_segment_advantage(louder, mask, uid, norm_by_std=norm), ours)


def test_no_baseline_no_advantage():
    """One kept row of a pruned group: 0. A group of one: verl's rule, the score itself. A group all pruned: 0."""
    rewards = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 2.0], [0.0, 5.0], [0.0, 7.0]])
    mask = torch.tensor([[1, 1], [0, 0], [1, 1], [0, 0], [0, 0]])
    uid = np.array(["pruned", "pruned", "single", "gone", "gone"], dtype=object)
    ours = losses.grpo_segment_advantage(rewards, mask, uid)
    assert ours[:, 0].tolist() == [0.0, 0.0, pytest.approx(2.0, abs=1e-5), 0.0, 0.0]
    assert torch.equal(ours[2], verl_grpo(rewards[2:3], mask[2:3], uid[2:3], True)[0])


def test_a_pruned_rows_reward_may_be_nan():
    rewards = torch.tensor([[1.0], [0.0], [torch.nan]])
    ours = losses.grpo_segment_advantage(rewards, torch.tensor([[1], [1], [0]]), ["a"] * 3)
    assert torch.equal(ours.isnan(), torch.zeros(3, 1, dtype=torch.bool))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="shapes differ"):
        losses.grpo_segment_advantage(torch.ones(2, 3), torch.ones(2, 1), ["a", "a"])
    with pytest.raises(ValueError, match="index has 1"):
        losses.grpo_segment_advantage(torch.ones(2, 3), torch.ones(2, 3), ["a"])


@pytest.mark.hook("register-grpo-segment")
@pytest.mark.parametrize("norm", [True, False])
def test_through_verls_compute_advantage(hook, norm):
    """verl's generic branch passes the config, not the normalisation flag; both settings must arrive."""
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    rewards, mask, uid = random_batch(4)
    results = {}
    for name in ("grpo", "grpo_segment"):
        data = DataProto.from_dict(tensors={"token_level_rewards": rewards.clone(), "response_mask": mask},
                                   non_tensors={"uid": uid})
        config = OmegaConf.create({"norm_adv_by_std_in_grpo": norm})
        data = compute_advantage(data, name, norm_adv_by_std_in_grpo=norm, config=config)
        results[name] = data.batch["advantages"]
    assert torch.equal(results["grpo"], results["grpo_segment"])


def test_registration(hook):
    hook.apply(core_algos)
    assert hook.installed(core_algos)
    assert not hook.installed(SimpleNamespace(ADV_ESTIMATOR_REGISTRY={"grpo_segment": verl_grpo}))
    core_algos.ADV_ESTIMATOR_REGISTRY["grpo_segment"] = verl_grpo
    with pytest.raises(ValueError, match="already been registered"):
        hook.apply(core_algos)
