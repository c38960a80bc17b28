"""Masks the rows of pruned responses in the TransferQueue, once their whole group has been sampled."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-pruned-rows",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._balance_batch",
    process=("v1-task-runner",),
    kind="wrap",
    why="the first thing after sampling that all v1 trainers share: here the group is complete, and nothing has read "
        "response_mask yet. The worker writes row by row and must not mask a group as a whole",
    remove_when="verl's batches carry a validity mask per row",
    features=("v1",),
    relies_on=("verl.trainer.ppo.v1.trainer_base:PPOTrainer._step_once",
               "verl.trainer.ppo.padding_utils:construct_minimal_padding_template"),
    without=(("==0.7.0", "no v1 trainers"),),
)


def around(call):
    from esgrpo import config

    if config.current().masks:
        mask(call.arguments["batch"])
    return call()


def mask(batch) -> list[str]:
    """Zero the masks of pruned rows of this KVBatchMeta where group_rows says so; returns their keys."""
    import torch
    import transfer_queue
    from tensordict import TensorDict

    from esgrpo.hooks.verl.groups.masked_rows import mask_pruned
    from esgrpo.hooks.verl.v1.rows.queue_rows import real_keys, with_summaries

    rows = with_summaries(real_keys(batch), batch.partition_id, "response_mask")
    for row in rows:
        row.response_mask = row.response_mask.clone()  # a view into the fetched batch
    had = {row.key for row in rows if row.response_mask.any()}
    masked = [row for row in mask_pruned(rows) if row.key in had]
    if masked:
        zeros = torch.nested.as_nested_tensor([row.response_mask for row in masked], layout=torch.jagged)
        # no deadline of ours (queue_rows): a row that is to be masked must not be trained
        transfer_queue.kv_batch_put(keys=[row.key for row in masked], partition_id=batch.partition_id,
                                    fields=TensorDict({"response_mask": zeros, "loss_mask": zeros.clone()},
                                                      batch_size=len(masked)))
    return [row.key for row in masked]
