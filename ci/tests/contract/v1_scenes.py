"""What the tests of the hooks on verl's v1 trainers share: rows in the stub queue, and a trainer that samples them."""

from __future__ import annotations

from types import SimpleNamespace

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
