"""Complementary order on verl's real classes: submitted by predicted length, returned as plain verl returns it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from ci.tests.contract import prompt_owners as owners

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

GROUPS = 5
TOKENS = [11.0, 3.0, 29.0, 3.0, 17.0]  # predicted, by group


@pytest.fixture
def prepared(monkeypatch):
    owners.provide_history(monkeypatch)
    owners.switched_on(monkeypatch, routing={"enable": True})
    return monkeypatch


def batch_of(step: int, forecasts: bool = True, **meta):
    """A worker's piece: GROUPS prompts, each RESPONSES times, as fit() sends them."""
    import numpy as np
    import torch
    from verl.protocol import DataProto

    def column(values):
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array

    rows = [group for group in range(GROUPS) for _ in range(owners.RESPONSES)]
    columns = {"uid": column([f"uid-{group}" for group in rows]), "index": column(rows),
               "raw_prompt": column([owners.Prompts.raw(group) for group in rows]), "row": np.arange(len(rows))}
    if forecasts:
        columns["esgrpo_forecast"] = column([{"tokens": TOKENS[group]} for group in rows])
    return DataProto.from_dict({"dummy_tensor": torch.zeros(len(rows), 1)}, non_tensors=columns,
                               meta_info={"global_steps": step, **meta})


def generated(patch, batch, hook: bool):
    """(rows in the order they were submitted, verl's output) of the real generate_sequences and _postprocess."""
    from verl.experimental.agent_loop import agent_loop

    if hook:
        owners.hooked(patch, agent_loop.AgentLoopWorker, "generate_sequences", "row_order")
    submitted = []

    async def run(self, sampling_params, trajectory, *, agent_name, trace=True, **kwargs):
        submitted.append(kwargs["row"])
        await asyncio.sleep(0.001 * (kwargs["row"] % 3))  # responses end in another order than they start
        return response_of(agent_loop, kwargs)

    patch.setattr(agent_loop.AgentLoopWorker, "_run_agent_loop", run)
    rollout = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, calculate_log_probs=False, prompt_length=4,
                              response_length=owners.BUDGET, agent=SimpleNamespace(default_agent_loop="single"),
                              val_kwargs=SimpleNamespace(top_p=1.0, top_k=-1, temperature=1.0))
    worker = owners.bare(agent_loop.AgentLoopWorker, rollout_config=rollout, reward_loop_worker_handles=None)
    output = asyncio.run(worker.generate_sequences(batch))
    patch.undo()
    return submitted, output


def response_of(agent_loop, kwargs):
    """One padded response whose every part names the row it belongs to."""
    import torch

    row, width, budget = int(kwargs["row"]), 4, owners.BUDGET
    response = torch.full((1, budget), row, dtype=torch.int64)
    ids = torch.cat([torch.full((1, width), row, dtype=torch.int64), response], dim=1)
    mask = torch.ones_like(ids)
    return agent_loop._InternalAgentLoopOutput(
        prompt_ids=ids[:, :width], response_ids=response, input_ids=ids, position_ids=ids.clone(),
        response_mask=mask[:, width:], attention_mask=mask, response_logprobs=None, routed_experts=None,
        multi_modal_inputs=None, multi_modal_data=None, reward_score=float(row), num_turns=2,
        metrics=agent_loop.AgentLoopMetrics(generate_sequences=float(row)),
        extra_fields={"raw_prompt": kwargs["raw_prompt"], "reward_extra_info": {"acc": row}})


def plain(output) -> dict:
    """All of a DataProto in plain values."""
    tensors = {name: value.tolist() for name, value in output.batch.items()}
    return {**tensors, **{name: list(value) for name, value in output.non_tensor_batch.items()}, **output.meta_info}


@pytest.mark.parametrize("step", [4, 7])
def test_submitted_by_length_and_returned_as_verl_returns_it(prepared, step):
    with pytest.MonkeyPatch.context() as patch:
        verls_order, verls = generated(patch, batch_of(step), hook=False)
    with pytest.MonkeyPatch.context() as patch:
        ours_order, ours = generated(patch, batch_of(step), hook=True)
    assert verls_order == list(range(GROUPS * owners.RESPONSES))  # negative control: plain verl orders nothing
    groups = [row // owners.RESPONSES for row in ours_order[::owners.RESPONSES]]
    assert groups == ([2, 4, 0, 1, 3] if step % 2 == 0 else [1, 3, 0, 4, 2])
    assert plain(ours) == plain(verls)
    assert [row[0] for row in ours.batch["responses"].tolist()] == verls_order


@pytest.mark.parametrize("batch", [{"forecasts": False}, {"validate": True}])
def test_without_forecasts_and_in_validation_nothing_is_ordered(prepared, batch):
    with pytest.MonkeyPatch.context() as patch:
        order, output = generated(patch, batch_of(4, **batch), hook=True)
    assert order == list(range(GROUPS * owners.RESPONSES)) and len(output) == len(order)


def test_rows_not_put_back_would_be_seen(prepared):
    """Negative control: the comparison above notices a batch that stays in the order of submission."""
    from esgrpo.hooks.verl.row_order import order_of, rows

    with pytest.MonkeyPatch.context() as patch:
        _, verls = generated(patch, batch_of(4), hook=False)
    assert plain(rows(verls, order_of(batch_of(4)))) != plain(verls)


def legacy_trainer(patch, **attributes):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    owners.hooked(patch, RayPPOTrainer, "_get_gen_batch", "legacy_prompt_forecasts")
    return owners.bare(RayPPOTrainer, config=owners.settings(), global_steps=3, **attributes)


def test_the_legacy_trainer_forecasts_and_learns(prepared):
    import numpy as np
    import torch
    from verl.protocol import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer, seen = legacy_trainer(prepared), []
    prepared.setattr(RayPPOTrainer, "_update_actor", lambda self, batch: seen.append(len(batch)))
    owners.hooked(prepared, RayPPOTrainer, "_update_actor", "legacy_prompt_outcomes")
    batch = batch_of(3, forecasts=False, temperature=1.0)
    prompts = trainer._get_gen_batch(batch)
    assert not any(forecast["known"] for forecast in prompts.non_tensor_batch["esgrpo_forecast"])
    rows = len(batch)
    trained = DataProto.from_dict(
        {"token_level_scores": torch.tensor([[float(row % 2)] * 1 for row in range(rows)]),
         "responses": torch.zeros(rows, 6, dtype=torch.int64), "attention_mask": torch.ones(rows, 8)},
        non_tensors={"uid": np.array([f"uid-{row // owners.RESPONSES}" for row in range(rows)], dtype=object),
                     "raw_prompt": prompts.non_tensor_batch["raw_prompt"]})
    trainer._update_actor(trained)
    assert seen == [rows]
    again = trainer._get_gen_batch(batch_of(4, forecasts=False, temperature=1.0))
    found = again.non_tensor_batch["esgrpo_forecast"][0]
    assert found["known"] and found["alpha"] > 1 and found["beta"] > 1 and 1 < found["tokens"] < owners.BUDGET
    validation = trainer._get_gen_batch(batch_of(4, forecasts=False))
    assert "esgrpo_forecast" not in validation.non_tensor_batch
