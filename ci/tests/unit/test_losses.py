"""POIS, SAIS and DMMPTs against a reference that is written token by token, and through verl's own ppo_loss."""

import importlib
import json
import math
import pickle

import pytest
import torch

from esgrpo import losses
from esgrpo.call import wrapped

pytest.importorskip("verl")  # a module that verl moves is an error
from verl.trainer.ppo import core_algos  # noqa: E402

torch.set_num_threads(1)

ROWS, LENGTH, VOCABULARY = 6, 7, 5
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
SEEDS = tuple(range(8))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Both losses registered as the engine does it, default settings, and upstream's registry restored afterwards."""
    hook = importlib.import_module("esgrpo.hooks.verl.losses.policy_losses")
    monkeypatch.delenv("ESGRPO_SEGMENT", raising=False)
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))
    hook.apply(core_algos)
    return hook


def segment(monkeypatch, **values):
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps(values))


def actor_config(rows=ROWS, tokens=None, **values):
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=2,
                         **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **values})
    config.global_batch_info.update(dp_size=1, batch_num_tokens=tokens, global_batch_size=rows, loss_scale_factor=None)
    return config


class Batch:
    """A random ragged batch of a tabular softmax policy: the logits of every position are parameters, float64."""

    def __init__(self, seed, drift=0.3):
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        self.logits = normal(ROWS, LENGTH, VOCABULARY).requires_grad_()
        self.tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=rng)
        lengths = torch.randint(1, LENGTH + 1, (ROWS,), generator=rng)
        lengths[seed % ROWS] = 0  # one pruned row
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        self.advantages = normal(ROWS, 1).expand(ROWS, LENGTH) * self.mask
        self.old = (self.log_prob() + drift * normal(ROWS, LENGTH)).detach()

    def log_prob(self, logits=None):
        distribution = torch.log_softmax(self.logits if logits is None else logits, dim=-1)
        return distribution.gather(-1, self.tokens[..., None])[..., 0]

    def loss(self, name, mode="token-mean", config=None, old=None, weights=None):
        config = config or actor_config(tokens=int(self.mask.sum()))
        return core_algos.get_policy_loss_fn(name)(
            old_log_prob=self.old if old is None else old, log_prob=self.log_prob(), advantages=self.advantages,
            response_mask=self.mask.bool(), loss_agg_mode=mode, config=config, rollout_is_weights=weights,
        )


def by_hand(batch, mode, term, logits=None):
    """Aggregate `term(row, position, log-probability)` over the response tokens with Python loops."""
    log_prob = batch.log_prob(logits)
    total, tokens = torch.zeros((), dtype=torch.float64), int(batch.mask.sum())
    for i in range(ROWS):
        length = int(batch.mask[i].sum())
        for t in range(length):
            share = {"token-mean": 1 / tokens, "token-sum": 1.0, "seq-mean-token-sum": 1 / ROWS,
                     "seq-mean-token-mean": 1 / ROWS / length}[mode]
            total = total + share * term(i, t, log_prob[i, t])
    return total


def reinforce(batch):
    return lambda i, t, log_prob: -float(batch.advantages[i, t]) * log_prob


def clipped(batch, old, low=0.2, high=0.28, dual=3.0):
    """-min(r A, clip(r) A), bounded below by the dual clip, as branches on numbers."""

    def constant(value):
        return torch.tensor(value, dtype=torch.float64)

    def term(i, t, log_prob):
        advantage, ratio = float(batch.advantages[i, t]), torch.exp(log_prob - float(old[i, t]))
        if advantage >= 0:
            return constant(-(1 + high) * advantage) if ratio > 1 + high else -ratio * advantage
        if ratio < 1 - low:
            return constant(-(1 - low) * advantage)
        return constant(-dual * advantage) if ratio > dual else -ratio * advantage

    return term


def gradient(loss, parameter):
    return torch.autograd.grad(loss, parameter)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_pois_gradient_is_reinforce(seed, mode):
    batch = Batch(seed)
    loss, _ = batch.loss("pois", mode)
    expected = gradient(by_hand(batch, mode, reinforce(batch)), batch.logits)
    torch.testing.assert_close(gradient(loss, batch.logits), expected, rtol=1e-12, atol=1e-14)
    assert expected.abs().max() > 0


def test_pois_ratio_is_exactly_one():
    log_prob = torch.cat([-torch.logspace(-8, 2.9, 500), torch.zeros(1)]).requires_grad_()
    matrix = losses.pois_matrix(log_prob, torch.ones_like(log_prob))
    assert torch.equal(matrix, -torch.ones_like(matrix))
    assert torch.equal(gradient(matrix.sum(), log_prob), -torch.ones_like(log_prob))


def test_pois_reads_no_old_log_probs():
    batch = Batch(3)
    loss, metrics = batch.loss("pois")
    other, other_metrics = batch.loss("pois", old=batch.old - 1.5)
    assert torch.equal(loss, other)
    assert torch.equal(gradient(loss, batch.logits), gradient(other, batch.logits))
    key = "esgrpo/pois/log_kl_rollout_current"
    assert other_metrics[key] == pytest.approx(metrics[key] - 1.5)
    # the same perturbation changes a loss that does read them
    assert not torch.equal(batch.loss("sais")[0], batch.loss("sais", old=batch.old - 1.5)[0])


def test_four_steps_of_two_mini_batches_between_syncs():
    """trigger_parameter_sync_step=4 with two mini-batches: eight optimiser steps on one version's samples."""
    batches = [Batch(seed) for seed in range(8)]
    synced = batches[0].logits.detach()
    logits = {name: synced.clone().requires_grad_() for name in ("pois", "hand", "sais")}
    optimisers = {name: torch.optim.SGD([value], lr=0.7, momentum=0.9) for name, value in logits.items()}
    for batch in batches:
        batch.old = batch.log_prob(synced)  # all of them were sampled by the first weights
        for name, optimiser in optimisers.items():
            batch.logits = logits[name]
            loss = by_hand(batch, "token-mean", reinforce(batch)) if name == "hand" else batch.loss(name)[0]
            if name == "pois":
                by_sum = -(batch.advantages * batch.mask).sum() / batch.mask.sum()
                assert loss.item() == pytest.approx(by_sum.item(), abs=1e-15)  # ratio 1 at this step, too
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    torch.testing.assert_close(logits["pois"], logits["hand"], rtol=1e-11, atol=1e-13)
    assert (logits["sais"] - logits["hand"]).abs().max() > 1e-2  # an anchored ratio has long left 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_sais_gradient_and_value(seed, mode):
    batch = Batch(seed, drift=0.8)
    loss, metrics = batch.loss("sais", mode)
    expected = by_hand(batch, mode, clipped(batch, batch.old))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient(loss, batch.logits), gradient(expected, batch.logits), rtol=1e-12, atol=1e-14)
    assert 0 < metrics["actor/pg_clipfrac"] < 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_sais_is_verls_vanilla(seed, weighted):
    batch = Batch(seed, drift=1.2)
    weights = torch.rand_like(batch.old) if weighted else None
    ours, our_metrics = batch.loss("sais", weights=weights)
    theirs, their_metrics = batch.loss("vanilla", weights=weights)
    assert torch.equal(ours, theirs)
    assert torch.equal(gradient(ours, batch.logits), gradient(theirs, batch.logits))
    for key, value in their_metrics.items():
        assert our_metrics[key] == pytest.approx(value, abs=1e-6)


def test_version_anchor_is_clipped(monkeypatch):
    batch = Batch(1, drift=0.8)
    segment(monkeypatch, pois={"anchor": "version"})
    loss, metrics = batch.loss("pois")
    assert torch.equal(loss, batch.loss("vanilla")[0])
    assert metrics["actor/pg_clipfrac"] > 0


def test_clip_bound_is_checked():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="clip_c"):
        losses.clipped_matrix(one, one, one, clip_low=0.2, clip_high=0.2, clip_c=1.0)
    with pytest.raises(ValueError, match="shapes differ"):
        losses.pois_matrix(torch.ones(2, 1), torch.ones(2, 3))


def test_drift_metrics():
    batch = Batch(5)
    poisoned = torch.where(batch.mask.bool(), batch.old, torch.nan)
    metrics = losses.drift_metrics(batch.log_prob(), poisoned, batch.mask)
    log_prob = batch.log_prob().detach()
    pairs = [(float(log_prob[i, t]), float(batch.old[i, t])) for i, t in batch.mask.nonzero().tolist()]
    weights = [math.exp(new - old) for new, old in pairs]
    ess = sum(weights) ** 2 / len(weights) / sum(w * w for w in weights)
    assert metrics["log_kl_rollout_current"].item() == pytest.approx(sum(o - n for n, o in pairs) / len(pairs))
    assert metrics["effective_sample_size"].item() == pytest.approx(ess)
    assert not any(value.requires_grad for value in metrics.values())
    far = losses.drift_metrics(batch.old + 2000.0, batch.old, batch.mask)  # exp would overflow; the fraction must not
    assert far["effective_sample_size"].item() == pytest.approx(1.0)
    nothing = losses.drift_metrics(batch.old, batch.old, torch.zeros_like(batch.mask))
    assert [value.item() for value in nothing.values()] == [0.0, 1.0]


def test_dmmpt_masks_exactly_the_mastered_tokens_of_calm_correct_rows():
    probability = torch.tensor([[0.995, 0.5, 0.991, 0.999]] * 5)
    entropy = torch.tensor([[0.1, 0.25, 0.1, 9.0], [0.1, 0.6, 0.1, 9.0], [0.1] * 4, [0.1, 0.1, 0.1, 9.0], [0.0] * 4])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    correct = torch.tensor([True, True, False, True, True])
    masked = losses.dmmpt_mask(probability.log(), entropy, mask, correct, tau=0.99, sigma=0.2)
    expected = torch.zeros(5, 4, dtype=torch.bool)
    # row 0 is calm (0.15); row 1 is not (0.27); row 2 is wrong; row 3 is calm without its padding; row 4 is pruned
    expected[0, [0, 2]] = expected[3, [0, 2]] = True
    assert torch.equal(masked, expected)
    metrics = losses.dmmpt_metrics(masked, mask)
    assert metrics["masked_fraction"].item() == pytest.approx(4 / 13)
    assert metrics["masked_rows"].item() == pytest.approx(2 / 4)


def test_correct_rows():
    scores = torch.tensor([1.0, 0.0, 0.4, 1.0, 0.0])
    assert losses.correct_rows(scores, 0.5).tolist() == [True, False, False, True, False]
    # booleans as they are, -1 is a number and therefore below the threshold, missing values fall back to the score
    acc = [False, True, -1.0, None, float("nan")]
    assert losses.correct_rows(scores, 0.5, acc).tolist() == [False, True, False, True, False]
    assert losses.correct_rows(scores[:1], 0.5, [torch.tensor(True)]).tolist() == [True]
    with pytest.raises(ValueError, match="2 rows"):
        losses.correct_rows(scores, 0.5, [True, False])


@pytest.mark.hook("register-policy-losses")
def test_registration_is_idempotent_and_refuses_a_taken_name(registered):
    registered.apply(core_algos)
    assert registered.installed(core_algos)
    core_algos.POLICY_LOSS_REGISTRY["pois"] = core_algos.compute_policy_loss_vanilla
    assert not registered.installed(core_algos)
    with pytest.raises(RuntimeError, match="pois is verl"):
        registered.apply(core_algos)


def test_dmmpt_outside_ppo_loss_is_an_error(monkeypatch):
    segment(monkeypatch, dmmpt={"enable": True})
    with pytest.raises(RuntimeError, match="calculate_entropy=True"):
        Batch(0).loss("pois")


PROMPT = 3


def micro_batches(batch, acc, size=3, rollout=True, v1=False):
    """What the actor worker's engine hands to ppo_loss: the trainer's batch through verl's own conversions. `v1`: rows
    come out of the TransferQueue as its reward loop left them."""
    import numpy as np
    from verl import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.utils.seqlen_balancing import rearrange_micro_batches
    from verl.workers.utils.padding import left_right_2_no_padding

    kept = batch.mask.clone()
    kept[:, 0] = 1  # a pruned row keeps its tokens and only loses its response mask
    attention = torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.long), kept], dim=1)
    ids = torch.cat([torch.zeros(ROWS, PROMPT, dtype=torch.long), batch.tokens], dim=1) * attention
    scores = torch.zeros(ROWS, LENGTH)
    scores[:, 0] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    columns = {
        "input_ids": ids, "attention_mask": attention, "position_ids": attention.cumsum(-1) - 1,
        "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "response_mask": batch.mask,
        "advantages": batch.advantages, "old_log_probs": batch.old - 1.0, "token_level_scores": scores,
        "row": torch.arange(ROWS),
    }
    if rollout:
        columns["rollout_log_probs"] = batch.old
    others = {"uid": np.array(list("aabbcc"), dtype=object)}
    if acc is not None and v1:
        others["extra_fields"] = np.array([{"reward_extra_info": {"acc": value}} for value in acc], dtype=object)
    elif acc is not None:
        others["acc"] = np.array(acc)
    data = DataProto.from_dict(tensors=columns, non_tensors=others, meta_info={"temperature": 1.0})
    data = left_right_2_no_padding(data.to_tensordict())
    data = pickle.loads(pickle.dumps(data))  # the way to the worker
    for mini in tu.make_iterator(data, mini_batch_size=ROWS, epochs=1, seed=1, dataloader_kwargs={"shuffle": True}):
        tu.assign_non_tensor(mini, dp_size=1, batch_num_tokens=int(batch.mask.sum()), global_batch_size=ROWS)
        if size == "dynamic":
            yield from rearrange_micro_batches(mini, max_token_len=2 * (PROMPT + LENGTH))[0]
        else:
            yield from tu.chunk_tensordict(mini, ROWS // size)


def model_output(batch, micro):
    """Nested log-probs and entropies of whole sequences, shifted by one as a language model's outputs are."""
    rows, lengths = micro["row"].tolist(), micro["input_ids"].offsets().diff().tolist()
    entropy = torch.distributions.Categorical(logits=batch.logits).entropy() * batch.calm[:, None]
    flat = {"log_probs": [], "entropy": []}
    for row, length in zip(rows, lengths, strict=True):
        for key, values in (("log_probs", batch.log_prob()), ("entropy", entropy)):
            head = torch.full((PROMPT - 1,), 77.0, dtype=torch.float64)
            tail = torch.full((1,), 77.0, dtype=torch.float64)
            flat[key].append(torch.cat([head, values[row, : length - PROMPT], tail]))
    return {key: torch.nested.as_nested_tensor(parts, layout=torch.jagged) for key, parts in flat.items()}


def through_ppo_loss(batch, loss_mode, acc, size=3, mode="token-mean", entropy=True, rollout=True, v1=False):
    from verl.workers.utils import losses as verl_losses

    hook = importlib.import_module("esgrpo.hooks.verl.losses.loss_context")
    ppo_loss = wrapped(hook, verl_losses.ppo_loss)
    config = actor_config(loss_agg_mode=mode)
    object.__setattr__(config.policy_loss, "loss_mode", loss_mode)
    total, metrics = 0.0, []
    for micro in micro_batches(batch, acc, size, rollout, v1):
        output = model_output(batch, micro)
        if not entropy:
            output.pop("entropy")
        loss, metric = ppo_loss(config=config, model_output=output, data=micro)
        total, _ = total + loss, metrics.append(metric)
        assert hook.current() is None
    return total, metrics


@pytest.mark.parametrize("v1", [False, True])
def test_micro_batch_columns(v1):
    """Entropy is aligned with the response tokens, and every column follows its row through shuffling."""
    batch, hook = Batch(4), importlib.import_module("esgrpo.hooks.verl.losses.loss_context")
    batch.calm = torch.arange(1, ROWS + 1, dtype=torch.float64)
    entropy = torch.distributions.Categorical(logits=batch.logits.detach()).entropy() * batch.calm[:, None]
    order, acc = [], [True, False, False, True, True, False]
    for micro in micro_batches(batch, acc, size=1, v1=v1):
        seen, row = hook.MicroBatch(model_output(batch, micro), micro), micro["row"].item()
        length = int(seen.data["attention_mask"].sum()) - PROMPT
        assert torch.equal(seen.entropy()[0, :length], entropy[row, :length])
        assert not seen.entropy()[0, length:].any() and not seen.entropy().requires_grad
        assert torch.equal(seen.column("absent", "rollout_log_probs")[0], batch.old[row])
        assert seen.column("absent") is None
        assert seen.scores().item() == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0][row]
        assert seen.acc() == [acc[row]]
        order.append(row)
    assert sorted(order) == list(range(ROWS)) != order


@pytest.mark.hook("policy-loss-context")
@pytest.mark.parametrize("loss_mode", ["pois", "sais"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("size", [1, 3, "dynamic"])
@pytest.mark.parametrize(
    "acc", [None, [True, False, True, True, False, False], [1.0, -1.0, 1.0, 0.0, 1.0, 1.0], [True] * ROWS]
)
@pytest.mark.parametrize("v1", [False, True])
def test_dmmpt_through_verls_batch_path(monkeypatch, loss_mode, mode, size, acc, v1):
    """Entropy, correctness and rollout log-probs reach the loss; masked tokens stay in the denominator."""
    batch = Batch(2)
    batch.calm = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 1.0], dtype=torch.float64)
    tau, sigma = 0.3, 0.2
    segment(monkeypatch, dmmpt={"enable": True, "tau": tau, "sigma": sigma})
    loss, metrics = through_ppo_loss(batch, loss_mode, acc, size, mode, v1=v1)
    right = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0] if acc is None else acc
    entropy = torch.distributions.Categorical(logits=batch.logits.detach()).entropy() * batch.calm[:, None]
    plain = reinforce(batch) if loss_mode == "pois" else clipped(batch, batch.old)
    dropped = []

    def term(i, t, log_prob):
        mean = sum(float(e) for e in entropy[i, : int(batch.mask[i].sum())]) / int(batch.mask[i].sum())
        if right[i] == 1 and mean < sigma and log_prob.item() >= math.log(tau):
            dropped.append((i, t))
            return torch.zeros(())
        return plain(i, t, log_prob)

    expected = by_hand(batch, mode, term)
    torch.testing.assert_close(gradient(loss, batch.logits), gradient(expected, batch.logits), rtol=1e-9, atol=1e-12)
    assert 0 < len(dropped) < int(batch.mask.sum())
    fractions = [metric["esgrpo/dmmpt/masked_fraction"].aggregate() for metric in metrics]
    assert len(metrics) > 1 and 0 < max(fractions) <= 1


def test_missing_inputs_are_named(monkeypatch):
    batch = Batch(2)
    batch.calm = torch.ones(ROWS, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="calculate_log_probs=True"):
        through_ppo_loss(batch, "sais", None, rollout=False)
    through_ppo_loss(batch, "pois", None, rollout=False, entropy=False)  # pois needs neither
    segment(monkeypatch, dmmpt={"enable": True})
    with pytest.raises(RuntimeError, match="without entropy"):
        through_ppo_loss(batch, "pois", None, entropy=False)
