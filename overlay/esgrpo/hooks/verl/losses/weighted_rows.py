"""Carries what is known of rows to the advantage estimator `grpo_segment`, or weighs cut rows after any."""

from __future__ import annotations

import contextvars

from esgrpo.engine import Hook

HOOK = Hook(
    slug="keep-probabilities-reach-estimator",
    target="verl.trainer.ppo.ray_trainer:compute_advantage",
    process=("trainer", "v1-task-runner"),
    kind="wrap",
    why="verl hands a registered estimator rewards, mask, config and uid, and no other column; keep probabilities, "
        "predicted rewards and what was cut are in the rows' extra fields, which arrive as non_tensor_batch",
    remove_when="verl passes non_tensor_batch to registered advantage estimators",
    features=("weighted",),
    relies_on=("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess",
               "verl.experimental.fully_async_policy.detach_utils:assemble_batch_from_rollout_samples"),
    # these modules bind the name at import
    rebinds=("verl.experimental.separation.ray_trainer:compute_advantage",
             "verl.trainer.ppo.v1.utils:compute_advantage"),
    without=(("==0.7.0", "audited pruning is refused, and a row without a mask counts as cut"),),
)

_CURRENT: contextvars.ContextVar = contextvars.ContextVar("esgrpo_tossed", default=None)


_cut_weights = None  # of this process: what candidates came to that were let run
_file: str | None = None  # beside the audit's, where a restart finds them
_factors: dict[tuple, float] = {}  # group and member of cut rows whose books are not written yet


def around(call):
    from esgrpo import config

    if config.facts()["weighs_cut_rows"]:
        return weigh_cut_rows(call())
    data = call.arguments["data"]
    token = _CURRENT.set(tossed_of(data.non_tensor_batch))
    try:
        return call()
    finally:
        _CURRENT.reset(token)


def weigh_cut_rows(data):
    """A batch with its advantages, those of cut rows multiplied by `algo.treatment.CutWeights`.

    Rows without a summary (of an agent loop that bypasses verl's server client) are not ours, and stay as they are.
    """
    import torch

    from esgrpo import records

    weights = cut_weights()
    rows = data.non_tensor_batch.get("esgrpo")
    rows = [row or {"outcome": "finish"} for row in rows] if rows is not None else []
    if any([weights.learn(row) for row in rows]) and _file is not None:
        state = weights.state()  # now: the writer's thread must not read what the next batch changes
        records.save(_file, lambda: state)
    factors = [weights.of(row) for row in rows]
    cut = {(row["group"], row["member"]): factor for row, factor in zip(rows, factors, strict=True) if factor < 1}
    if not cut:
        return data
    _factors.update(cut)
    advantages = data.batch["advantages"]
    # a new tensor: the returns of an estimator for outcome rewards are the same one
    data.batch["advantages"] = advantages * torch.tensor(factors, dtype=advantages.dtype,
                                                         device=advantages.device).unsqueeze(-1)
    return data


def cut_weights():
    """`algo.treatment.CutWeights` of this process: a restart goes on from what the starts before it saw."""
    from esgrpo import config
    from esgrpo.algo.treatment import CutWeights
    from esgrpo.hooks.verl.groups import audit_pool

    global _cut_weights, _file
    if _cut_weights is None:
        _cut_weights = CutWeights(config.facts()["response_length"])
        _file = audit_pool.taken_over("cut-weights", audit_pool.file("cut-weights"), _cut_weights.restore)
    return _cut_weights


def written(rows) -> list[float]:
    """Factors of the rows with these summaries, whose books are written now: of one batch, under v1 of all batches
    that were trained in a weight version."""
    found = [_factors.get((row["group"], row["member"]), 1.0) for row in rows]
    _factors.clear()
    return found


def current():
    """`losses.Tossed` of the batch whose advantages are being computed; None when its rows are not ours."""
    return _CURRENT.get()


def tossed_of(columns):
    """`losses.Tossed` of a batch; None when it has rows of an agent loop that bypasses verl's server client.

    Raises EsgrpoError for these where rows have weights: one that got lost would bias the gradient unseen.
    """
    from esgrpo import config
    from esgrpo.algo.treatment import is_cut, masked
    from esgrpo.errors import EsgrpoError
    from esgrpo.losses import Tossed

    rows = columns.get("esgrpo")
    if rows is None or any(row is None for row in rows):
        if not config.current().weighted:
            return None
        raise EsgrpoError("keep-probabilities-reach-estimator", "rows without the overlay's summary",
                          "one per row while pruning is audited", "weights would be lost, the run stops",
                          "report this, or set segment.prune.treatment=failed")
    return Tossed([row["keep_probability"] for row in rows], [row["pivot"] for row in rows],
                  [row.get("predicted_reward") for row in rows], [is_cut(row) for row in rows],
                  [row.get("tokens_at_decision") for row in rows], masked(rows))
