"""Carries keep probabilities from the rows to the advantage estimator `grpo_segment`."""

from __future__ import annotations

import contextvars

from esgrpo.engine import Hook

HOOK = Hook(
    slug="keep-probabilities-reach-estimator",
    target="verl.trainer.ppo.ray_trainer:compute_advantage",
    process=("trainer", "v1-task-runner"),
    kind="wrap",
    why="verl hands a registered estimator rewards, mask, config and uid, and no other column; the audit's keep "
        "probabilities are in the rows' extra fields, which arrive as non_tensor_batch",
    remove_when="verl passes non_tensor_batch to registered advantage estimators",
    features=("weighted",),
    relies_on=("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess",
               "verl.experimental.fully_async_policy.detach_utils:assemble_batch_from_rollout_samples"),
    # these modules bind the name at import
    rebinds=("verl.experimental.separation.ray_trainer:compute_advantage",
             "verl.trainer.ppo.v1.utils:compute_advantage"),
    without=(("==0.7.0", "audited pruning is refused"),),
)

_CURRENT: contextvars.ContextVar = contextvars.ContextVar("esgrpo_keep_probabilities", default=None)


def around(call):
    data = call.arguments["data"]
    token = _CURRENT.set(keep_of(data.non_tensor_batch))
    try:
        return call()
    finally:
        _CURRENT.reset(token)


def current():
    """Keep probabilities of the batch whose advantages are being computed; None when no row has any."""
    return _CURRENT.get()


def keep_of(columns):
    """`losses.KeepProbabilities` of a batch, or None when no coin was tossed in it.

    Raises EsgrpoError for rows without a summary: a weight that got lost would bias the gradient unseen.
    """
    from esgrpo.errors import EsgrpoError
    from esgrpo.losses import KeepProbabilities

    rows = columns.get("esgrpo")
    if rows is None or any(row is None for row in rows):
        raise EsgrpoError("keep-probabilities-reach-estimator", "rows without the overlay's summary",
                          "one per row while pruning is audited", "weights would be lost, the run stops",
                          "report this, or switch segment.prune.audit and the group rules off")
    if all(row["keep_probability"] >= 1 for row in rows):
        return None
    return KeepProbabilities([row["keep_probability"] for row in rows], [row["pivot"] for row in rows])
