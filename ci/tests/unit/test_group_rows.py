"""Rows of a training batch: which are masked, and what each is recorded as."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from esgrpo import config
from esgrpo.hooks.verl.groups.masked_rows import mask_pruned
from esgrpo.hooks.verl.metrics.trained_rows import metrics, rows_of


def agent_row(group=None, outcome="finish", mask=(1, 1, 0)):
    fields = {} if group is None else {"esgrpo": {
        "group": group, "outcome": outcome, "rule": "", "treatment": "masked" if outcome == "prune" else ""}}
    return SimpleNamespace(extra_fields=fields, response_mask=torch.tensor([mask]))


@pytest.mark.parametrize("seed", range(20))
def test_only_pruned_rows_with_a_sibling_left_are_masked(seed):
    rng = random.Random(seed)
    rows = [agent_row(rng.choice(["a", "b", "c", None]), rng.choice(["finish", "prune", "abort"]),
                      [rng.randint(0, 1) for _ in range(4)] + [1]) for _ in range(12)]
    before = [row.response_mask.clone() for row in rows]
    left = {row.extra_fields["esgrpo"]["group"] for row in rows
            if row.extra_fields and row.extra_fields["esgrpo"]["outcome"] != "prune"}
    mask_pruned(rows)
    for row, mask in zip(rows, before, strict=True):
        summary = row.extra_fields.get("esgrpo")
        masked = summary is not None and summary["outcome"] == "prune" and summary["group"] in left
        assert torch.equal(row.response_mask, torch.zeros_like(mask) if masked else mask)


def test_a_group_that_was_pruned_whole_stays():
    rows = [agent_row("a", "prune"), agent_row("a", "prune"), agent_row("b", "prune"), agent_row("b")]
    mask_pruned(rows)
    assert [int(row.response_mask.sum()) for row in rows] == [2, 2, 0, 2]


def test_no_rows_and_foreign_rows():
    mask_pruned([])
    row = agent_row()
    mask_pruned([row])
    assert row.response_mask.tolist() == [[1, 1, 0]]


def summary(**changes):
    return {"group": "g", "member": 0, "outcome": "finish", "rule": "", "tokens": 3, "attempts": 1, "reprefill": 0,
            "boundaries": 2, "spans": [[0, 3]], "started": 10.0, "ended": 12.0, **changes}


def train_batch(scores, advantages, masks, summaries=None, acc=None):
    fields = np.empty(len(scores), dtype=object)
    fields[:] = summaries or [summary(member=i) for i in range(len(scores))]
    extra = {} if acc is None else {"acc": np.array(acc, dtype=object)}
    return SimpleNamespace(non_tensor_batch={"esgrpo": fields, **extra}, batch={
        "response_mask": torch.tensor(masks), "advantages": torch.tensor(advantages),
        "token_level_scores": torch.tensor(scores)})


@pytest.fixture(autouse=True)
def threshold(monkeypatch):
    monkeypatch.setenv(config.ENV_SEGMENT, '{"success_threshold": 0.75}')
    monkeypatch.setenv(config.ENV_FACTS, '{"devices": 4, "optimizer_steps_per_version": 2}')
    monkeypatch.delenv(config.ENV_FEATURES, raising=False)


def test_acc_beats_the_threshold():
    scores, zeros, ones = [[0.5, 0.25], [0.5, 0.0], [9.0, 0.0]], [[0.0, 0.0]] * 3, [[1, 1]] * 3
    assert [row["correct"] for row in rows_of(train_batch(scores, zeros, ones))] == [True, False, True]
    rows = rows_of(train_batch(scores, zeros, ones, acc=[False, True, False]))
    assert [row["correct"] for row in rows] == [False, True, False]
    assert [row["score"] for row in rows] == [0.75, 0.5, 9.0]


def test_gradient_needs_an_advantage_under_the_mask():
    batch = train_batch([[0.0, 0.0]] * 4, [[1.0, 0.0], [0.0, -1.0], [0.0, 0.0], [1.0, 1.0]],
                        [[0, 1], [0, 1], [1, 1], [0, 0]])
    rows = rows_of(batch)
    assert [row["gradient"] for row in rows] == [False, True, False, False]
    assert [row["rejected"] for row in rows] == [False, False, False, True]
    assert all(row["trained"] for row in rows)
    assert [row["member"] for row in rows] == [0, 1, 2, 3]


def test_rows_that_verl_rejects_are_not_pruned():
    """One of each by verl's own rejection sampling: its tokens became e times as likely since they were made."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    summaries = [summary(tokens=5), summary(tokens=3), summary(tokens=2, outcome="prune", treatment="masked")]
    batch = train_batch([[1.0, 0.0]] * 3, [[1.0, 0.0]] * 3, [[1, 1], [1, 1], [0, 0]], summaries)
    made = torch.zeros(3, 2)
    corrected, _ = compute_rollout_correction_and_add_to_batch(
        DataProto.from_dict({"response_mask": batch.batch["response_mask"], "rollout_log_probs": made,
                             "old_log_probs": torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])}),
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"})
    batch.batch["response_mask"] = corrected.batch["response_mask"]
    rows = rows_of(batch)
    assert [(row["pruned"], row["rejected"]) for row in rows] == [(False, False), (False, True), (True, False)]
    values = metrics(rows)
    assert values["esgrpo/prune/rate"] == 1 / 3
    assert (values["esgrpo/waste/pruned"], values["esgrpo/waste/rejected"]) == (2, 3)


def test_metrics_of_a_small_batch():
    summaries = [summary(tokens=5, reprefill=7, attempts=2, spans=[[0, 3], [1, 2]], ended=20.0),
                 summary(tokens=3), summary(tokens=2, outcome="prune", treatment="masked", boundaries=0),
                 summary(tokens=4)]
    batch = train_batch([[1.0, 0.0]] * 4, [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]],
                        [[1, 1], [1, 1], [0, 0], [1, 1]], summaries)
    values = metrics(rows_of(batch))
    assert values["esgrpo/prune/rate"] == 0.25
    assert (values["esgrpo/waste/pruned"], values["esgrpo/waste/zero_variance"]) == (2, 3)
    assert values["esgrpo/waste/reprefill"] == 7
    assert (values["esgrpo/version_span/mean"], values["esgrpo/version_span/max"]) == (1.25, 2)
    assert (values["esgrpo/partial_rate"], values["esgrpo/boundaries/mean"]) == (0.25, 1.5)
    assert values["esgrpo/tail_ratio"] == pytest.approx(np.quantile([10, 2, 2, 2], 0.99) / 2)


def test_rounding_is_no_gradient(monkeypatch):
    """verl's GRPO of eight rewards of 0.9 is -0.06 in every row: their deviation is what rounding leaves."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    scores = torch.full((8, 1), 0.9)
    advantages, _ = compute_grpo_outcome_advantage(scores, torch.ones(8, 1), np.array(["g"] * 8))
    assert abs(float(advantages[0])) > 0.01
    batch = train_batch(scores.tolist(), advantages.tolist(), [[1]] * 8)
    assert all(row["gradient"] for row in rows_of(batch))  # negative control: an estimator of which nobody knows
    monkeypatch.setenv(config.ENV_FACTS, '{"devices": 4, "alike_is_null": true}')
    assert not any(row["gradient"] for row in rows_of(batch))
    batch.batch["token_level_scores"][3] = 0.1
    assert all(row["gradient"] for row in rows_of(batch))
    assert rows_of(train_batch([[1.0]], [[1.0]], [[1]]))[0]["gradient"]  # a group of one


@pytest.mark.parametrize("outcome, gradient", [("finish", True), ("prune", False)])
def test_a_rejected_row_gives_its_siblings_a_gradient_and_a_masked_one_does_not(monkeypatch, outcome, gradient):
    monkeypatch.setenv(config.ENV_FACTS, '{"devices": 4, "alike_is_null": true}')
    summaries = [*(summary(member=member) for member in range(3)),
                 summary(member=3, outcome=outcome, treatment="masked")]
    batch = train_batch([[0.9], [0.9], [0.9], [0.1]], [[0.5]] * 4, [[1]] * 3 + [[0]], summaries)
    assert [row["gradient"] for row in rows_of(batch)] == [gradient] * 3 + [False]


@pytest.fixture
def clock(monkeypatch):
    """The clock of the trainer's metrics, ten seconds after its last throughput."""
    from esgrpo.hooks.verl.metrics import trained_rows

    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(trained_rows, "time", SimpleNamespace(time=lambda: clock.now))
    monkeypatch.setattr(trained_rows, "_started", 990.0)
    monkeypatch.setattr(trained_rows, "_useful", 0)
    return clock


THROUGHPUT = "esgrpo/effective_token_throughput"


def test_throughput_of_a_version_is_that_of_all_its_batches(clock):
    """verl logs the mean of what batches bring: of 10, 10 and 130 s with 80 tokens each that were 5.5 a second."""
    rows = rows_of(train_batch([[1.0]], [[1.0]], [[1]], [summary(tokens=80)]))
    for seconds, last in ((0, False), (10, False), (130, True)):
        clock.now += seconds
        found = metrics(rows, last)
        assert (THROUGHPUT in found) is last
    assert found[THROUGHPUT] == 3 * 80 / (150 * 4)


def test_throughput_is_per_device_second(clock):
    rows = rows_of(train_batch([[1.0]], [[1.0]], [[1]], [summary(tokens=80)]))
    assert metrics(rows)[THROUGHPUT] == 80 / (10 * 4)
    assert metrics(rows)[THROUGHPUT] == 0.0  # no time since the batch before
    clock.now += 5
    assert metrics(rows)[THROUGHPUT] == 80 / (5 * 4)
