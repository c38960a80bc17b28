"""What both sides of the fully async loop spend their time on: rows of kind `events`. No hook.

Called by rollouter-windows and by stop-after-step, which see the end of a weight version and of a step. verl's own idle
ratios do not sum to the wall time: its rollouter counts one pause of a version, its trainer adds up timers of steps.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping

from esgrpo import records
from esgrpo.algo import accounting
from esgrpo.algo.rows import LoopEvent

SIGNALS = {"loss": ("actor/pg_loss", "actor/loss"), "grad_norm": ("actor/grad_norm",), "entropy": ("actor/entropy",),
           "kl": ("actor/ppo_kl", "actor/kl_loss")}  # ours -> verl's, the first that is there
_trained: list[Mapping] = []  # rows of the batch in hand


def note(rows: Iterable[Mapping]) -> None:
    """Rows of the batch that was trained in this step."""
    _trained[:] = rows


def history_of(rollouter) -> list[tuple[float, int, int]]:
    """(time, groups in flight, their limit) since the last weight version; verl begins it anew in reset_staleness."""
    return list(getattr(rollouter, "_active_count_history", ()))


def of_rollouter(rollouter, history: list[tuple[float, int, int]], generated: int | None) -> LoopEvent | None:
    """Right after reset_staleness; `history` from before it. The engines know the version, so it is not written yet."""
    if not history:
        return None
    now = time.time()
    start, active = history[0][0], len(rollouter.active_tasks)
    idle, flying = accounting.in_flight(history, now)
    return LoopEvent(
        side="rollout", version=0, start=start, seconds=now - start,
        spent=accounting.spent_on(now - start, {"idle": idle}, "busy"), groups=generated, in_flight=flying,
        limit=rollouter.max_concurrent_samples, queue=max(0, rollouter.staleness_samples - active),
        queue_limit=rollouter.max_queue_size)


def write_rollout(rollouter, event: LoopEvent | None, windows: list[Mapping]) -> None:
    """`windows` of the engines that the version ended in."""
    from esgrpo.hooks.verl import owned

    if event is not None:
        version = max((window["version"] for window in windows), default=event.version)
        records.write(dataclasses.replace(event, version=version))
    signals = owned.of(rollouter, owned.RolloutSignals)
    signals.event, signals.windows = event, windows


def of_trainer(trainer) -> None:
    """At the end of a step, when its metrics are whole."""
    from esgrpo.hooks.verl import owned

    steps, now = owned.of(trainer, owned.Steps), time.time()
    timing, metrics = trainer.timing_raw, trainer.metrics
    start = steps.ended or now - timing.get("step", 0.0)
    steps.ended = now
    synced = trainer.local_trigger_step == 1
    spent = accounting.spent_on(now - start, {
        "wait": metrics.get("fully_async/total_wait_time"), "sync": timing.get("timing_s/param_sync"),
        "train": sum(timing.get(key, 0.0) for key in getattr(trainer, "_TRAIN_COMPUTE_TIMING_KEYS", ()))}, "other")
    found = {ours: next((_number(metrics[key]) for key in keys if key in metrics), None)
             for ours, keys in SIGNALS.items()}
    event = LoopEvent(
        side="train", version=trainer.current_param_version, start=start, seconds=now - start, spent=spent,
        groups=trainer.required_samples, tokens=sum(row["tokens"] for row in _trained if not row["pruned"]),
        age=accounting.mean_age(_trained, trainer.current_param_version - synced),
        queued_s=accounting.mean_wait(_trained, start + spent["wait"]), **found)
    records.write(event)
    steps.of_version.append(event)
    _trained.clear()


def _number(value) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None
