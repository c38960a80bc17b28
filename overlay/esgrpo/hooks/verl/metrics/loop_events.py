"""What both sides of the loop spend their time on: rows of kind `events`, and esgrpo/overlap/* for Tracking. No hook.

Called by rollouter-windows and stop-after-step (fully async), which see the end of a weight version and of a step, and
by v1-trained-rows. verl's own idle ratios do not sum to the wall time: its rollouter counts one pause of a version, its
trainer adds up timers of steps.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping

from esgrpo import engine, records, utilisation
from esgrpo.algo import accounting
from esgrpo.algo.rows import LoopEvent

SIGNALS = {"loss": ("actor/pg_loss", "actor/loss"), "grad_norm": ("actor/grad_norm",), "entropy": ("actor/entropy",),
           "kl": ("actor/ppo_kl", "actor/kl_loss")}  # ours -> verl's, the first that is there
V1_TRAINS = ("reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")  # verl's timers
V1_SYNCS = ("update_weights", "switch_to_rollout", "switch_to_trainer")
V1_WAITS = ("gen", "switch_wait")  # the latter while the trainer's replicas are lent to rollout
LENT_WAIT = "wait_for_enough_samples"  # fully async: verl's timer of the same
_trained: list[Mapping] = []  # rows of the batch in hand
_untold: dict[str, float] = {}  # metrics that came after verl had logged their step
_of_version: list[LoopEvent] = []  # of the trainer, since the last weight version


def note(rows: Iterable[Mapping]) -> None:
    """Rows of the batch that was trained in this step."""
    _trained[:] = rows


def tell(setting: Mapping[str, float]) -> None:
    """What the overlap controller has in force."""
    _untold.update({f"esgrpo/overlap/{name}": value for name, value in setting.items()})


def take_metrics() -> dict[str, float]:
    """Of the trainer's step before this one, and what was told since."""
    taken = dict(_untold)
    _untold.clear()
    return taken


def metrics_of(event: LoopEvent | None) -> dict[str, float]:
    """Shares of the side's time, which sum to 1, and what else was measured."""
    if event is None:
        return {}
    side = {"train": "trainer", "rollout": "rollouter"}[event.side]
    found = {f"esgrpo/overlap/{side}/{name}": seconds / event.seconds
             for name, seconds in event.spent.items() if event.seconds > 0}
    if event.devices:
        found[f"esgrpo/overlap/{side}/devices"] = sum(busy for busy, _ in event.devices.values()) / len(event.devices)
    fill = event.queue / event.queue_limit if event.queue is not None and event.queue_limit else None
    measured = {"in_flight": event.in_flight, "queue_fill": fill, "age": event.age, "queued_s": event.queued_s}
    return {**found, **{f"esgrpo/overlap/{name}": value for name, value in measured.items() if value is not None}}


def of_v1(trainer, rows: list[Mapping], timing: Mapping[str, float], metrics: Mapping) -> dict[str, float]:
    """At the end of a step of a v1 trainer; `rows` were trained in it, `timing` and `metrics` are verl's of it.

    The step trains under the weights of the version before its own. What waits for groups is `gen`, under
    `trainer_mode=sync` all of generation.
    """
    from esgrpo.hooks.verl import owned

    steps, now = owned.of(trainer, owned.Steps), time.time()
    start = steps.ended or now - timing.get("step", 0.0) - timing.get("testing", 0.0)
    steps.ended = now
    spent = accounting.spent_on(now - start, {
        "wait": sum(timing.get(key, 0.0) for key in V1_WAITS), "sync": sum(timing.get(key, 0.0) for key in V1_SYNCS),
        "train": sum(timing.get(key, 0.0) for key in V1_TRAINS),
        "checkpoint": timing.get("save_checkpoint"), "validation": timing.get("testing")}, "other")
    once = getattr(trainer, "parameter_sync_step", 1) == 1  # else nobody knows when each batch was taken
    event = LoopEvent(
        side="train", version=trainer.global_steps, start=start, seconds=now - start, spent=spent,
        groups=len({row["group"] for row in rows}), tokens=accounting.tokens_of(rows),
        age=accounting.mean_age(rows, trainer.global_steps - 1),
        queued_s=accounting.mean_wait(rows, start + spent["wait"]) if once else None, **_signals(metrics),
        **utilisation.of_node())
    records.write(event)
    if "overlap" in engine.active_features():  # whose controller takes it
        steps.of_version = [event]
    return metrics_of(event)


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
    """At the end of a step, when its metrics are whole. After verl's timer of it come the checkpoint, which has one of
    its own, and validation and metrics, which have none."""
    from esgrpo.hooks.verl import owned

    steps, now = owned.of(trainer, owned.Steps), time.time()
    timing, metrics = trainer.timing_raw, trainer.metrics
    start = steps.ended or now - timing.get("step", 0.0)
    steps.ended = now
    synced = trainer.local_trigger_step == 1
    spent = accounting.spent_on(now - start, {
        "wait": metrics.get("fully_async/total_wait_time", 0.0) + timing.get(LENT_WAIT, 0.0),
        "sync": timing.get("timing_s/param_sync"),
        "train": sum(timing.get(key, 0.0) for key in getattr(trainer, "_TRAIN_COMPUTE_TIMING_KEYS", ())),
        "checkpoint": timing.get("save_checkpoint", 0.0),
        "validation": now - start - timing.get("step", now - start) - timing.get("save_checkpoint", 0.0)}, "other")
    event = LoopEvent(
        side="train", version=trainer.current_param_version, start=start, seconds=now - start, spent=spent,
        groups=trainer.required_samples, tokens=accounting.tokens_of(_trained),
        age=accounting.mean_age(_trained, trainer.current_param_version - synced),
        queued_s=accounting.mean_wait(_trained, start + spent["wait"]), **_signals(metrics),
        **utilisation.of_node())
    records.write(event)
    if "overlap" in engine.active_features():  # whose controller takes them
        steps.of_version.append(event)
    _of_version.append(event)
    if synced:  # else verl would log the mean of the shares of batches, of which one may have taken most of the time
        _untold.update(metrics_of(accounting.of_version(_of_version)))
        _of_version.clear()
    _trained.clear()


def _signals(metrics: Mapping) -> dict[str, float | None]:
    return {ours: next((_number(metrics[key]) for key in keys if key in metrics), None)
            for ours, keys in SIGNALS.items()}


def _number(value) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None
