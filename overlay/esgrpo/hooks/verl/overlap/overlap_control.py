"""At a weight version the overlap controller sees what was measured, and its setting goes to trainer and rollouter."""

from __future__ import annotations

import dataclasses
import time

from esgrpo.engine import Hook

_POLICY = "verl.experimental.fully_async_policy"
_TRAINER = f"{_POLICY}.fully_async_trainer:FullyAsyncTrainer"
_ROLLOUTER = f"{_POLICY}.fully_async_rollouter:FullyAsyncRollouter"
_QUEUE = f"{_POLICY}.message_queue:MessageQueue"

HOOK = Hook(
    slug="overlap-control",
    target=f"{_TRAINER}._fit_postprocess_step",
    process=("trainer",),
    kind="wrap",
    why="the last thing of a step: all of it was measured, the rollouter has its new weights, and the next batch is "
        "not begun; verl reads concurrency, staleness and trigger from its config once",
    remove_when="verl adapts max_concurrent_samples, staleness_threshold and required_samples to measured rates",
    features=("overlap",),
    after=("stop-after-step",),
    relies_on=(f"{_TRAINER}.fit_step", f"{_TRAINER}._get_samples_from_queue", f"{_TRAINER}._fit_update_local_step",
               f"{_ROLLOUTER}.set_max_required_samples", f"{_ROLLOUTER}.reset_staleness",
               f"{_ROLLOUTER}._feed_samples", f"{_ROLLOUTER}._processor_worker",
               f"{_ROLLOUTER}._should_pause_generation", f"{_ROLLOUTER}._update_max_concurrent_samples",
               f"{_ROLLOUTER}._record_active_count", f"{_QUEUE}.__init__", f"{_QUEUE}.put_sample",
               f"{_QUEUE}.get_sample"),
    without=(("==0.7.0", "the recipe has another trainer, whose settings are not moved"),),
)


def around(call):
    trainer = call.owner
    result = call()
    if trainer.local_trigger_step == 1:  # the weights were synced in this step
        at_weight_version(trainer)
    return result


def at_weight_version(trainer) -> None:
    """Observe, decide, move. Without an answer of the rollouter nothing moves; the next version asks again.

    The first version of a start is not observed: engines and kernels warm up in it. In a real run its rate, a quarter
    of all later ones, made few groups in flight look as fast as many.
    """
    from esgrpo.algo import overlap_signals
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.metrics import decision_counts
    from esgrpo.hooks.verl.overlap import at_version, rollouter_settings

    control, steps = owned.of(trainer, owned.Overlap), owned.of(trainer, owned.Steps)
    events, steps.of_version = steps.of_version, []
    rollout = _asked(trainer.rollouter, rollouter_settings.report)
    if control.controller is None:
        if rollout is not None:
            control.controller = controller_for(trainer, rollout)
            control.applied = control.controller.start
        return
    validated_s, control.validated_s = control.validated_s, overlap_signals.validation(events)
    window = overlap_signals.window(trainer.current_param_version, rollout, events,
                                    control.controller.limits.mini_batch, validated_s)
    at_version.follow(control, window, rollout and rollout.left, lambda setting: _move(trainer, setting))
    decision_counts.write("trainer", decision_counts.counts)


def controller_for(trainer, rollout):
    """From the settings in force and the run's configuration."""
    from esgrpo import config
    from esgrpo.algo.overlap import Controller
    from esgrpo.algo.overlap_signals import Run, limits_of, start_of

    wanted, facts, actor_rollout = config.current().overlap, config.facts(), trainer.config.actor_rollout_ref
    capacity = facts["replicas"] * actor_rollout.rollout.max_num_seqs // actor_rollout.rollout.n
    triggers = trainer.trigger_parameter_sync_step
    start = start_of(rollout, trainer.staleness_threshold, trainer.required_samples, triggers)
    run = Run(actor_rollout.actor.ppo_mini_batch_size, triggers, facts["replicas"], wanted.max_concurrency or capacity,
              wanted.max_staleness, wanted.max_batches, facts["overlap_fixed"])
    return Controller(start, limits_of(run, start), wanted.age_scale, time.time)


def _move(trainer, setting) -> dict | None:
    """The queue first, then who fills it, then who empties it; None where one of the first two did not answer."""
    from esgrpo.algo.overlap_signals import begun_at_most
    from esgrpo.hooks.verl.overlap import rollouter_settings

    begun = begun_at_most(setting, trainer.trigger_parameter_sync_step)
    sizes = _asked(trainer.message_queue_client.queue_actor, rollouter_settings.grow_queue, begun)
    if sizes is None:
        return None
    if not _asked(trainer.rollouter, rollouter_settings.move, *dataclasses.astuple(setting), begun, sizes[1]):
        return None
    trainer.required_samples, trainer.staleness_threshold = setting.trigger, setting.staleness
    return {"max_queue_size": sizes}


def _asked(actor, function, *arguments):
    """What `function` returns in another actor; None, said once, where it does not answer or fails."""
    import ray

    from esgrpo.hooks.verl.server.calls_with_deadline import ANSWER_DEADLINE_S, say_failed

    try:
        return ray.get(actor.__ray_call__.remote(function, *arguments), timeout=ANSWER_DEADLINE_S)
    except ray.exceptions.RayError as error:
        say_failed(f"overlap-control's {function.__name__}", error,
                   "concurrency, staleness and trigger stay as they are")
        return None
