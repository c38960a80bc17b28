"""Adds the esgrpo/ metrics of a training batch to verl's own, and records what every row became."""

from __future__ import annotations

import time

from esgrpo.engine import Hook

HOOK = Hook(
    slug="trained-rows",
    target="verl.trainer.ppo.metric_utils:compute_data_metrics",
    process=("trainer",),
    kind="wrap",
    why="all trainers call it with the finished batch (advantages, masks, extra fields) and log its result; verl's "
        "metrics know neither pruned rows nor weight versions per token",
    remove_when="verl's trainers accept metric functions from the config",
    features=("observe",),
    rebinds=("verl.experimental.separation.ray_trainer:compute_data_metrics",
             "verl.trainer.ppo.ray_trainer:compute_data_metrics",
             "recipe.fully_async_policy.ray_trainer:compute_data_metrics"),
)

update: dict = {}  # of the batch in hand, for its rows; empty where the trainer does not say
_dropped: dict[tuple, int] = {}  # records lost by the workers that made the responses, by node and pid
_started = time.time()  # of the interval that the next throughput is measured over
_useful = 0  # trained tokens with a gradient since then
_batches = 0  # of this process


def around(call):
    from esgrpo import config
    from esgrpo.hooks.verl.metrics import decision_counts, loop_events

    global _batches
    result = call()
    batch = call.arguments["batch"]
    if "esgrpo" in batch.non_tensor_batch:
        rows = rows_of(batch)
        write(rows)
        loop_events.note(rows)
        _batches += 1
        last = _batches % config.facts()["batches_per_version"] == 0
        result.update({**metrics(rows, last), **decision_counts.of_trainer(rows, last), **loop_events.take_metrics()})
    return result


def begin(groups: list[str], step: int) -> None:
    """A trainer has a batch. `step`: number of the first checkpoint that will hold its update.

    Recorded before the update: the rows follow after the checkpoint, which a crash may come before.
    """
    from esgrpo import records
    from esgrpo.algo.rows import Batch

    update.update(trained_in=records.identity()["restart"], step=step)
    records.write(Batch(step=step, groups=groups))


def write(rows: list[dict]) -> None:
    """One record a row of the batch in hand."""
    from esgrpo import records
    from esgrpo.algo.rows import Trained

    for row in rows:
        records.write_told(Trained, {**row, **update})


def rows_of(batch) -> list[dict]:
    """One plain dict per row: what it cost, whether it was pruned, and whether it carries gradient."""
    from esgrpo import config
    from esgrpo.algo.treatment import masked, may_be_masked
    from esgrpo.hooks.verl.losses import weighted_rows
    from esgrpo.losses import correct_rows

    mask = batch.batch["response_mask"].bool()
    gradient = ((batch.batch["advantages"] != 0) & mask).any(dim=-1).tolist()
    scores = batch.batch["token_level_scores"].sum(dim=-1).tolist()
    correct = correct_rows(batch.batch["token_level_scores"].sum(dim=-1), config.current().success_threshold,
                           batch.non_tensor_batch.get("acc")).tolist()
    rows, summaries = [], batch.non_tensor_batch["esgrpo"]
    kept = mask.any(dim=-1).tolist()
    nulls = _null_groups(summaries, scores, [not gone for gone in masked(summaries)])
    factors = weighted_rows.written(summaries)
    for index, summary in enumerate(summaries):
        rows.append({**summary, "score": scores[index], "correct": correct[index], "trained": True,
                     "pruned": not kept[index] and may_be_masked(summary),
                     "rejected": not kept[index] and not may_be_masked(summary),
                     "gradient": gradient[index] and summary["group"] not in nulls,
                     "cut_weight": factors[index]})
    return rows


def _null_groups(summaries, scores: list[float], kept: list[bool]) -> set[str]:
    """Groups whose rewards are all alike, where that leaves no gradient: verl's advantages of them are what rounding
    leaves over its rounding, -0.06 of eight rewards of 0.9."""
    from esgrpo import config
    from esgrpo.algo.treatment import is_null

    if not config.facts()["alike_is_null"]:
        return set()
    groups: dict[str, list[int]] = {}
    for index, summary in enumerate(summaries):
        groups.setdefault(summary["group"], []).append(index)
    return {group for group, members in groups.items()  # of a group of one verl takes the reward for the advantage
            if len(members) > 1 and is_null([{**summaries[i], "score": scores[i]} for i in members],
                                            [kept[i] for i in members])}


def metrics(rows: list[dict], last: bool = True) -> dict[str, float]:
    """`last`: batch of a weight version. It brings the throughput of all of them: verl logs the mean of what its
    batches bring, and the rates of those that were ready and of the one that was waited for have another mean."""
    from esgrpo import config, engine, records
    from esgrpo.algo.accounting import batch_metrics, token_balance

    global _started, _useful
    facts = config.facts()
    _useful += token_balance(rows)["trained"]
    for row in rows:
        worker = row.get("node"), row.get("pid")
        _dropped[worker] = max(_dropped.get(worker, 0), row.get("records_dropped", 0))
    found = {"records/dropped": records.dropped() + sum(_dropped.values()),
             **batch_metrics(rows)}
    if last:
        now = time.time()
        seconds, useful, _started, _useful = now - _started, _useful, now, 0
        found["effective_token_throughput"] = useful / seconds / facts["devices"] if seconds > 0 else 0.0
    if "pois" in engine.active_features():
        found["pois/optimizer_steps_per_version"] = facts["optimizer_steps_per_version"]
    return {f"esgrpo/{name}": value for name, value in found.items()}
