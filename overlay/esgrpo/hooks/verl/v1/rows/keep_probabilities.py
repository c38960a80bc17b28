"""Fetches the keep probabilities of a batch from the TransferQueue, for the advantage estimator under verl's v1."""

from __future__ import annotations

import contextvars

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-keep-probabilities",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage",
    process=("v1-task-runner",),
    kind="wrap",
    why="it selects the columns that the estimator gets by name, and only here the batch's keys and partition are "
        "known; the columns come back in v1-final-outputs, one call further down",
    remove_when="verl's v1 passes extra fields to registered advantage estimators",
    features=("weighted",),
    without=(("==0.7.0", "no v1 trainers"),),
)

_SUMMARIES: contextvars.ContextVar = contextvars.ContextVar("esgrpo_v1_summaries", default=None)
# a synthetic row of verl's, with an empty mask and in a group of such rows
PADDING = {"group": "", "outcome": "finish", "keep_probability": 1.0, "pivot": None}


def around(call):
    from esgrpo.hooks.verl.v1.rows.queue_rows import real_keys, with_summaries

    batch = call.arguments["batch"]
    real = real_keys(batch)
    found = {row.key: row.extra_fields["esgrpo"] for row in with_summaries(real, batch.partition_id)}
    padding = {key: PADDING for key in set(batch.keys) - set(real)}
    token = _SUMMARIES.set({**padding, **found})
    try:
        return call()
    finally:
        _SUMMARIES.reset(token)


def add_column(data, keys) -> None:
    """Give this DataProto, whose rows have these keys, the column that `weighted_rows` reads."""
    import numpy as np

    summaries = _SUMMARIES.get()
    if summaries is None:
        return
    column = np.empty(len(keys), dtype=object)
    column[:] = [summaries.get(key) for key in keys]
    data.non_tensor_batch["esgrpo"] = column
