"""verl's real v1 trainer, agent-loop manager and replay buffers: order of submission, and what reaches the history."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from ci.tests.contract import prompt_owners as owners
from esgrpo.hooks.verl import owned
from esgrpo.hooks.verl.metrics import decision_counts

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

PROMPTS, WORKERS = 6, 2


@pytest.fixture
def prepared(monkeypatch):
    owners.provide_history(monkeypatch)
    owners.switched_on(monkeypatch, routing={"enable": True})
    return monkeypatch


class Queue:
    """The TransferQueue calls that these classes make, on a dictionary."""

    def __init__(self):
        self.tags, self.values, self.reads = {}, {}, []

    def kv_batch_put(self, keys, partition_id, tags=None, fields=None):
        for key, tag in zip(keys, tags, strict=True):
            self.tags.setdefault(key, {}).update(tag)

    def kv_list(self, partition_id=None):
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_batch_get(self, keys, partition_id, select_fields):
        from tensordict import NonTensorData, NonTensorStack, TensorDict

        self.reads.append((tuple(keys), tuple(select_fields)))
        result = TensorDict({}, batch_size=len(keys))
        for name in select_fields:
            values = [self.values[key][name] for key in keys]
            result[name] = (_stacked(values) if name == "rm_scores"
                            else NonTensorStack.from_list([NonTensorData(value) for value in values]))
        return result

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.tags.pop(key, None)

    def finish(self, uid, number, scores, status="finished", length=8, **extra):
        """A group ends: one output per session, and one session with an earlier output of another turn."""
        self.tags[uid] = {"is_prompt": True, "status": status, "global_steps": 1}
        for session, score in enumerate(scores):
            for index in range(2 if session == 0 else 1):
                key = f"{uid}_{session}_{index}"
                last = session > 0 or index == 1
                self.tags[key] = {"status": "success", "response_len": length if last else 1, "global_steps": 1}
                self.values[key] = {"rm_scores": score, "raw_prompt": owners.Prompts.raw(number),
                                    "extra_fields": dict(extra)}


def _stacked(scores):
    import torch

    rows = [torch.tensor([0.0] * length + [score]) for length, score in enumerate(scores)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def submitted(patch, mode: str, step: int, hook: bool = True) -> tuple[list, list]:
    """(prompts of each worker in its order, uids that were registered) of the real submission path."""
    import numpy as np
    import torch
    from verl.trainer.ppo.v1 import agent_loop_tq, trainer_base
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.utils import tensordict_utils as tu

    queue, pieces = Queue(), []
    if hook and not hasattr(trainer_base.PPOTrainer._submit_batch_to_rollout, "__wrapped__"):
        owners.hooked(patch, trainer_base.PPOTrainer, "_submit_batch_to_rollout", "v1.prompts.prompt_order")
    patch.setattr(trainer_base, "tq", queue)
    patch.setattr(agent_loop_tq.ray, "get", lambda references: references)
    worker = SimpleNamespace(generate_sequences=owners.remote(pieces.append))
    manager = owners.bare(agent_loop_tq.AgentLoopManagerTQ, agent_loop_workers=[worker] * WORKERS)
    trainer = owners.bare(PPOTrainerSync, config=owners.settings(), trainer_mode=mode, global_steps=step,
                          agent_loop_manager=manager)
    history = owners.history_of(trainer)
    for number, length in enumerate([9, 2, 30, 4, 20, 5]):
        for version in range(4):
            history.observe(owners.key(number), [length] * 8, [True] * 8, [False] * 8, version)
    raw = np.empty(PROMPTS, dtype=object)
    raw[:] = [owners.Prompts.raw(number) for number in range(PROMPTS)]
    batch = tu.get_tensordict({"dummy_tensor": torch.zeros(PROMPTS, 1), "raw_prompt": raw, "index": np.arange(PROMPTS),
                               "uid": np.array([f"uid-{number}" for number in range(PROMPTS)], dtype=object)})
    tu.assign_non_tensor_data(batch, "global_steps", step)
    assert trainer._submit_batch_to_rollout(batch) == PROMPTS
    for piece in pieces:
        for row in range(len(piece)):
            assert piece["uid"][row] == f"uid-{int(piece['index'][row])}"  # rows move as a whole
            if hook:
                assert piece["esgrpo_forecast"][row]["known"] and piece["global_steps"] == step
    return [[int(number) for number in piece["index"]] for piece in pieces], list(queue.tags)


@pytest.mark.hook("v1-prompt-order")
@pytest.mark.parametrize("step", [4, 5])
def test_a_synchronous_step_is_submitted_longest_first(prepared, step):
    prepared.setattr(decision_counts, "counts", Counter())
    order, uids = submitted(prepared, "sync", step)
    assert decision_counts.counts == {"routing/pops": 6, "routing/choices": 5, "routing/known": 6,
                                      "routing/inversions": 4}
    assert order == [[2, 0, 3], [4, 5, 1]]  # 30 and 20 first, then 9 and 5, then 4 and 2
    assert sorted(uids) == [f"uid-{number}" for number in range(PROMPTS)]


def test_plain_verl_and_the_asynchronous_modes_submit_in_order(prepared):
    """Negative control."""
    with pytest.MonkeyPatch.context() as patch:
        assert submitted(patch, "sync", 4, hook=False)[0] == [[0, 1, 2], [3, 4, 5]]
    assert submitted(prepared, "colocate_async", 4)[0] == [[0, 1, 2], [3, 4, 5]]


def buffer_of(patch, cls_name: str, hook: bool = True, rewarded: bool = True, **more):
    """(queue, trainer, buffer): a real replay buffer whose refill function is a method of its trainer, as in verl."""
    from verl.trainer.ppo.v1 import replay_buffer, trainer_base
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    if hook:
        owners.hooked(patch, replay_buffer.ReplayBuffer, "_sync_metadata_from_transfer_queue",
                      "v1.prompts.prompt_outcomes")
    queue, refills = Queue(), []
    patch.setattr(replay_buffer, "tq", queue)
    patch.setattr(trainer_base.PPOTrainer, "_add_prompts_to_generate", lambda self, count: refills.append(count))
    handles = [object()] if rewarded else None
    trainer = owners.bare(PPOTrainerSync, config=owners.settings(), global_steps=7,
                          reward_loop_manager=SimpleNamespace(reward_loop_worker_handles=handles))
    buffer = getattr(replay_buffer, cls_name)(
        trainer_mode="sync", trainer_config={}, max_off_policy_threshold=2, max_off_policy_strategy="drop",
        sampler_kwargs={}, poll_interval=0.0, refill_fn=trainer._add_prompts_to_generate, train_batch_size=1,
        gen_batch_size=1, **more)
    trainer.replay_buffer, trainer.refills = buffer, refills
    seen = []
    history = owners.history_of(trainer)
    observe = history.observe
    history.observe = lambda *args: (seen.append(args), observe(*args))
    return queue, trainer, seen


@pytest.mark.hook("v1-prompt-outcomes")
@pytest.mark.parametrize("cls_name", ["ReplayBuffer", "ReplayBufferAsync"])
def test_groups_without_variance_reach_the_history_before_they_are_evicted(prepared, cls_name):
    queue, trainer, seen = buffer_of(prepared, cls_name, filter_groups_metric="reward")
    queue.finish("a", 1, [1.0, 1.0])
    queue.finish("b", 2, [1.0, 0.0], length=owners.BUDGET)
    queue.finish("c", 3, [0.0, 0.0], status="failure")
    queue.tags["d"] = {"is_prompt": True, "status": "running", "global_steps": 7}
    buffer = trainer.replay_buffer
    reads = len(queue.reads)
    buffer._sync_metadata_from_transfer_queue()
    buffer._sync_metadata_from_transfer_queue()
    assert len(queue.reads) == reads + 1  # one request for all, and only for what is new
    evicted = buffer._evict_terminal_groups(1, "train", buffer._terminal_eviction_reasons(1, "train"))[0]
    assert "a" in evicted and "b" not in evicted  # verl's own filter: plain trainers never see group a again
    found = {key: rest for key, *rest in seen}
    assert found == {owners.key(1): [[8, 8], [True, True], [False, False], 7],
                     owners.key(2): [[32, 32], [True, False], [True, True], 7]}


def test_plain_verl_tells_nobody(prepared):
    """Negative control."""
    queue, trainer, seen = buffer_of(prepared, "ReplayBuffer", hook=False)
    queue.finish("a", 1, [1.0, 1.0])
    trainer.replay_buffer._sync_metadata_from_transfer_queue()
    assert seen == [] and queue.reads == []


def test_the_reward_of_a_pruned_row_says_nothing_nor_does_one_that_comes_later(prepared):
    queue, trainer, seen = buffer_of(prepared, "ReplayBuffer")
    queue.finish("a", 1, [1.0], esgrpo={"outcome": "prune", "rule": "enough", "predicted": 0.5})
    queue.finish("v", 3, [1.0], esgrpo={"outcome": "prune", "rule": "verdict", "predicted": 0.1})
    queue.finish("b", 2, [0.2], reward_extra_info={"acc": True}, esgrpo={"outcome": "finish"})
    trainer.replay_buffer._sync_metadata_from_transfer_queue()
    assert {args[0]: args[2:4] for args in seen} == {owners.key(1): ([None], [True]), owners.key(2): ([True], [False]),
                                                     owners.key(3): ([0.1], [True])}
    queue, trainer, seen = buffer_of(prepared, "ReplayBuffer", hook=False, rewarded=False)
    queue.finish("c", 3, [1.0])
    trainer.replay_buffer._sync_metadata_from_transfer_queue()
    assert [args[2] for args in seen] == [[None]] and "rm_scores" not in queue.reads[-1][1]


@pytest.mark.hook("v1-prompt-steps")
def test_a_step_saves_the_history_and_logs_the_sampler(prepared, tmp_path):
    import json

    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from esgrpo import records

    owners.hooked(prepared, trainer_base.PPOTrainer, "_consume_sync_metrics", "v1.prompts.prompt_steps")
    trainer = owners.bare(PPOTrainerSync, config=owners.settings(), _pending_sync_metrics={"verl": 1.0})
    owners.mixed(owners.history_of(trainer), [1])
    prepared.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    owned.of(trainer, owned.Prompts).order = SimpleNamespace(prompts=SimpleNamespace(metrics=lambda: {"coverage": 0.5}))
    assert trainer._consume_sync_metrics() == {"verl": 1.0, "esgrpo/sampler/coverage": 0.5}
    assert records.flush() and owners.key(1) in str(json.loads((tmp_path / "esgrpo" / "history.json").read_text()))
