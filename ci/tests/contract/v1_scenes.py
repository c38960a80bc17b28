"""What the tests of the hooks on verl's v1 trainers share: rows in the stub queue, and a trainer that samples them."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace

import numpy as np
import torch
from transfer_queue import KVBatchMeta

from esgrpo.call import wrapped
from esgrpo.hooks.verl.v1.prompts import carried_groups


def summary(group: str, member: int, outcome: str = "finish", rule: str = "", tokens: int = 3) -> dict:
    return {"group": group, "member": member, "outcome": outcome, "rule": rule, "tokens": tokens, "attempts": 1,
            "reprefill": 0, "boundaries": 0, "spans": [[0, tokens]], "started": 1.0, "ended": 2.0,
            "treatment": "masked" if outcome == "prune" else ""}


def put(queue, key: str, tokens: int, padding: bool = False, **fields) -> None:
    ones = torch.ones(tokens, dtype=torch.int64)
    group, member, _ = key.rsplit("_", 2)
    queue.rows[key] = {"response_mask": ones, "loss_mask": ones.clone(), "advantages": torch.ones(tokens),
                       "rm_scores": torch.zeros(tokens), "extra_fields": {
                           "reward_extra_info": {"acc": True}, "esgrpo": summary(group, int(member), tokens=tokens,
                                                                                 **fields)}}
    queue.tags[key] = {"is_padding": padding}


def batch_of(queue, *keys):
    return KVBatchMeta(keys=list(keys), tags=[queue.tags[key] for key in keys], partition_id="train")


def separate_async(queue, hooks=(), *, mode: str = "separate_async", mini_batch: int, triggers: int = 1, size: int,
                   ahead: int, threshold: int, warmup: float = 0.0, metric: str | None = None):
    """verl's own trainer with its replay buffer, before its first step, with these hooks on what it draws; generation
    is the queue's dictionary, and `wait` of it is what happens while verl waits. `ahead`: prompts begun; `warmup`: of
    its configuration, where they came out of a checkpoint; `metric`: of verl's group filter."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import replay_buffer, trainer_separate_async

    kind, batch = trainer_separate_async.PPOTrainerSeparateAsync, mini_batch * triggers
    method = inspect.getattr_static(kind, "_next_train_batch")
    for hook in hooks:
        method = wrapped(hook, method)
    made = object.__new__(type("Trainer", (kind,), {"_next_train_batch": method}))
    made.queue, made.trainer_mode, made.global_steps = queue, mode, 1
    made.config = OmegaConf.create({
        "data": {"train_batch_size": batch, "gen_batch_size": 1}, "skip": {"rollout_tq": {"enable": False}},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": mini_batch},
                              "rollout": {"n": size, "max_num_seqs": 256}},
        "trainer": {"default_local_dir": ".", "resume_mode": "disable",
                    "v1": {"separate_async": {"num_warmup_batches": warmup or ahead / batch}}}})
    made.parameter_sync_step, made.current_mode = triggers, trainer_separate_async.HybridEngineMode.TRAINER
    made.train_dataloader_it = iter({"raw_prompt": np.array([number], dtype=object)} for number in itertools.count())
    made.agent_loop_manager = SimpleNamespace(generate_sequences=lambda batch: None)
    made.replay_buffer = replay_buffer.ReplayBufferAsync(
        mode, {}, threshold, "drop", {}, poll_interval=0.0, refill_fn=made._add_prompts_to_generate,
        filter_groups_metric=metric)
    made.replay_buffer._wait_for_next_poll = lambda partition, last: made.wait() or last
    made._restored_tq_prompt_count = 0
    made._add_async_warmup_batches(ahead / batch)
    return made


class Trainer:
    """A trainer with verl's real replay buffer; prompts come and go in the stub queue."""

    global_steps = 1
    train_dataloader = range(3)  # verl's has a length

    def __init__(self, queue, directory, threshold=2, strategy="drop", mode="disable", trainer_mode="colocate_async",
                 **more):
        from verl.trainer.ppo.v1 import replay_buffer

        self.queue, self.number, self.trainer_mode = queue, 0, trainer_mode
        kind = replay_buffer.ReplayBuffer if trainer_mode == "sync" else replay_buffer.ReplayBufferAsync
        self.replay_buffer = kind(trainer_mode, {}, threshold, strategy, {}, poll_interval=0.0, refill_fn=self.submit,
                                  **more)
        self.config = SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=2)),
            trainer=SimpleNamespace(default_local_dir=str(directory), resume_mode=mode, resume_from_path=None))

    def submit(self, count: int) -> list[str]:
        names = [f"g{self.number + i}" for i in range(count)]
        self.number += count
        for name in names:
            self.queue.tags[name] = {"is_prompt": True, "status": "running", "global_steps": self.global_steps}
        return names

    def complete(self, *names: str) -> None:
        for name in names:
            self.queue.tags[name]["status"] = "finished"
            for member in range(2):
                self.queue.tags[f"{name}_{member}_0"] = {"status": "success"}

    def end_without_rows(self, *names: str, status: str) -> None:
        """As the agent loop says it: `failure` when sessions raised, `finished` when one gave no output."""
        for name in names:
            self.queue.tags[name]["status"] = status

    def _step_once(self, metrics, timing_raw, sample_batch_size):
        batch, found = self.replay_buffer.sample(self.global_steps, "train", sample_batch_size)
        metrics.update(found)
        return batch

    def step(self, count: int) -> dict:
        metrics = {}
        batch = wrapped(carried_groups, Trainer._step_once)(self, metrics, {}, sample_batch_size=count)
        self.queue.kv_clear(batch.keys, "train")
        self.global_steps += 1
        return {name.rpartition("/")[2]: value for name, value in carried_groups.take_metrics(self).items()}
