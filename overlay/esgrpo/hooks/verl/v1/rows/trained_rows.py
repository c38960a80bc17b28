"""Adds the esgrpo/ metrics of a step to those of verl's v1 trainers, and records what every row became."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-trained-rows",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_metrics",
    process=("v1-task-runner",),
    kind="wrap",
    why="called once per weight version with all batches trained in it, while their rows are still in the "
        "TransferQueue; what it puts into `metrics` goes to verl's Tracking. compute_data_metrics sees no extra fields "
        "here",
    remove_when="verl's trainers accept metric functions from the config",
    features=("v1",),
    relies_on=("verl.trainer.ppo.v1.trainer_base:PPOTrainer.fit",
               "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage"),
    without=(("==0.7.0", "no v1 trainers"),),
)


def around(call):
    trainer = call.owner
    batch, metrics = call.arguments["batch"], call.arguments["metrics"]
    result = call()
    metrics.update(record(trainer, batch, call.arguments["timing_raw"], metrics))
    return result


def record(trainer, batch, timing, logged) -> dict[str, float]:
    """Write one record per trained response and per closed engine window, and one of the step; returns the metrics of
    all. `timing`, `logged`: verl's of this step."""
    from esgrpo import config
    from esgrpo.hooks.verl.metrics import decision_counts, loop_events, prune_metrics
    from esgrpo.hooks.verl.metrics.trained_rows import metrics, rows_of, write
    from esgrpo.hooks.verl.v1.prompts import carried_groups

    batch = padded(batch)
    rows = rows_of(batch) if len(batch.non_tensor_batch["esgrpo"]) else []  # none: all made without the overlay
    write(rows)
    report = prune_metrics.take(trainer.replay_buffer, rows) if rows and config.current().audited else {}
    found = {**(metrics(rows) if rows else {}), **report, **windows(trainer), **carried_groups.take_metrics(trainer),
             **loop_events.of_v1(trainer, rows, timing, logged), **loop_events.take_metrics()}
    return {**found, **decision_counts.of_v1(trainer, rows)}


def padded(batch):
    """The final rows of the batch in the shape that rows_of reads."""
    from types import SimpleNamespace

    import numpy as np
    from torch.nn.utils.rnn import pad_sequence

    from esgrpo.hooks.verl.v1.rows.queue_rows import final_keys, real_keys, with_summaries

    names = ("response_mask", "advantages", "rm_scores")
    found = with_summaries(final_keys(real_keys(batch)), batch.partition_id, *names)
    summaries, acc = np.empty(len(found), dtype=object), np.empty(len(found), dtype=object)
    summaries[:] = [row.extra_fields["esgrpo"] for row in found]
    acc[:] = [row.extra_fields.get("reward_extra_info", {}).get("acc") for row in found]
    columns = {name: pad_sequence([getattr(row, name) for row in found], batch_first=True) if found else None
               for name in names}
    columns["token_level_scores"] = columns.pop("rm_scores")
    known = {"acc": acc} if len(found) and all(value is not None for value in acc) else {}
    return SimpleNamespace(batch=columns, non_tensor_batch={"esgrpo": summaries, **known})


def servers_of(trainer) -> list:
    """Handles of every vLLM server that rolls out for this trainer."""
    return [server for manager in trainer._rollout_server_managers() for replica in manager.get_replicas()
            for server in replica.servers]


def windows(trainer) -> dict[str, float]:
    """Metrics of the engine windows that closed since the last call. Nobody holds prompts back under v1."""
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.metrics import engine_windows
    from esgrpo.hooks.verl.server.calls_with_deadline import fetched_if_any
    from esgrpo.hooks.verl.server.control_methods import methods

    calls = [call.remote() for call in methods(servers_of(trainer), "esgrpo_take_windows")]
    answers = fetched_if_any(calls, "take_windows", "esgrpo/bubble_rate lacks this version")
    closed = [window for answer in answers for window in answer]
    owned.of(trainer, owned.RolloutSignals).windows = closed
    return engine_windows.told(closed)
