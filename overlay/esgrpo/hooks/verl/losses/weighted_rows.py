"""Carries what the audit knows of rows to the advantage estimator `grpo_segment`."""

from __future__ import annotations

import contextvars

from esgrpo.engine import Hook

HOOK = Hook(
    slug="keep-probabilities-reach-estimator",
    target="verl.trainer.ppo.ray_trainer:compute_advantage",
    process=("trainer", "v1-task-runner"),
    kind="wrap",
    why="verl hands a registered estimator rewards, mask, config and uid, and no other column; keep probabilities and "
        "predicted rewards are in the rows' extra fields, which arrive as non_tensor_batch",
    remove_when="verl passes non_tensor_batch to registered advantage estimators",
    features=("weighted",),
    relies_on=("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess",
               "verl.experimental.fully_async_policy.detach_utils:assemble_batch_from_rollout_samples"),
    # these modules bind the name at import
    rebinds=("verl.experimental.separation.ray_trainer:compute_advantage",
             "verl.trainer.ppo.v1.utils:compute_advantage"),
    without=(("==0.7.0", "audited pruning is refused"),),
)

_CURRENT: contextvars.ContextVar = contextvars.ContextVar("esgrpo_tossed", default=None)


def around(call):
    data = call.arguments["data"]
    token = _CURRENT.set(tossed_of(data.non_tensor_batch))
    try:
        return call()
    finally:
        _CURRENT.reset(token)


def current():
    """`losses.Tossed` of the batch whose advantages are being computed; None when no row has a weight or prediction."""
    return _CURRENT.get()


def tossed_of(columns):
    """`losses.Tossed` of a batch, or None when its rewards are all that is needed.

    Raises EsgrpoError for rows without a summary: a weight that got lost would bias the gradient unseen.
    """
    from esgrpo.algo.treatment import is_cut
    from esgrpo.errors import EsgrpoError
    from esgrpo.losses import Tossed

    rows = columns.get("esgrpo")
    if rows is None or any(row is None for row in rows):
        raise EsgrpoError("keep-probabilities-reach-estimator", "rows without the overlay's summary",
                          "one per row while pruning is audited", "weights would be lost, the run stops",
                          "report this, or set segment.prune.treatment=failed")
    if all(row["keep_probability"] >= 1 and row.get("predicted_reward") is None for row in rows):
        return None
    return Tossed([row["keep_probability"] for row in rows], [row["pivot"] for row in rows],
                  [row.get("predicted_reward") for row in rows], [is_cut(row) for row in rows],
                  [row.get("tokens_at_decision") for row in rows])
