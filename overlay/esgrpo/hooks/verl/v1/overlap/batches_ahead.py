"""Before a step of v1's separate_async begins its prompts, the overlap controller sees what was measured of the last
version, and more or fewer prompts than a batch are begun."""

from __future__ import annotations

import time

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v1.rows.queue_rows import TRAIN

_BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_SEPARATE = "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync"

HOOK = Hook(
    slug="v1-batches-ahead",
    target=f"{_BASE}._next_train_batch",
    process=("v1-task-runner",),
    kind="wrap",
    why="verl begins num_warmup_batches of prompts before the first step and one batch in every step, so that as many "
        "are in process at every weight sync of a run, whatever the rates are; a step asks here for its prompts, "
        "without a number",
    remove_when="verl's separate_async adapts the prompts in process to measured rates",
    features=("overlap",),
    after=("v1-drawn-prompts", "v1-refill-ahead"),
    relies_on=(f"{_BASE}.prepare_step", f"{_BASE}._add_batch_to_generate", f"{_BASE}._add_prompts_to_generate",
               f"{_BASE}._add_async_warmup_batches", f"{_BASE}.step", f"{_SEPARATE}.__init__",
               f"{_SEPARATE}.prepare_step", f"{_SEPARATE}.on_step_end", f"{_BUFFER}._stale_terminal_keys",
               f"{_BUFFER}._has_enough_samples", f"{_BUFFER}.wait_for_sampleable"),
    without=(("<0.9.1", "seen under verl 0.9.1 alone"),),
)

MODE = "separate_async"


def around(call):
    from esgrpo import config
    from esgrpo.algo import overlap_signals
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.v1.prompts import refill_ahead

    trainer = call.owner
    if (trainer.trainer_mode != MODE or call.arguments.get("num_prompts") is not None
            or overlap_signals.STALENESS in config.facts()["overlap_fixed"]):
        return call()
    ahead = owned.of(trainer, owned.Ahead)
    if ahead.threshold is None and movable_threshold(trainer):  # a checkpoint may bring back more than the warm-up
        ahead.threshold = trainer.replay_buffer.max_off_policy_threshold
        make_room(trainer, in_process(trainer) / trainer.config.data.train_batch_size)
    at_weight_version(trainer)
    if refill_ahead.counts(trainer):  # it begins what is missing, which a move adds to
        if ahead.in_process is not None:
            ahead.in_process, ahead.owed = ahead.in_process + ahead.owed, 0
        return call()
    number, ahead.owed = overlap_signals.to_begin(trainer.config.data.train_batch_size, ahead.owed)
    return call(num_prompts=number)


def at_weight_version(trainer) -> None:
    """As overlap-control's; the first version of a start is not observed, for its reason."""
    from esgrpo.algo import overlap_signals
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.overlap import at_version

    control, steps = owned.of(trainer, owned.Overlap), owned.of(trainer, owned.Steps)
    events, steps.of_version = steps.of_version, []
    windows, groups = owned.take(trainer, owned.RolloutSignals).windows, owned.of(trainer.replay_buffer, owned.Groups)
    evicted, groups.evicted_tokens = groups.evicted_tokens, 0
    if not events:  # nothing was trained in this start
        return
    if control.controller is None:
        control.controller = controller_for(trainer)
        control.applied = control.controller.start
        return
    event, limits = events[-1], control.controller.limits
    validated_s, control.validated_s = control.validated_s, overlap_signals.validation(events)
    seconds = event.seconds - control.validated_s  # the engines' windows end before it
    in_flight = overlap_signals.decoding(windows, seconds, trainer.config.actor_rollout_ref.rollout.n)
    rollout = overlap_signals.measured(control.applied.concurrency, windows, seconds, in_flight,
                                       left_out_tokens=evicted)
    window = overlap_signals.window(trainer.global_steps - 1, rollout, events, limits.mini_batch, validated_s)
    at_version.follow(control, window, None, lambda setting: _move(trainer, control.applied, setting, limits))


def controller_for(trainer):
    """From what is in process now and the run's configuration."""
    from esgrpo import config
    from esgrpo.algo.overlap import Controller
    from esgrpo.algo.overlap_signals import Rollout, Run, limits_of, most_ahead, start_of

    wanted, facts, actor_rollout = config.current().overlap, config.facts(), trainer.config.actor_rollout_ref
    mini_batch, triggers = actor_rollout.actor.ppo_mini_batch_size, trainer.parameter_sync_step
    version = mini_batch * triggers
    ahead = in_process(trainer) / version
    given = None if movable_threshold(trainer) else trainer.replay_buffer.max_off_policy_threshold
    most = most_ahead(wanted.max_staleness, given, ahead)
    capacity = facts["replicas"] * actor_rollout.rollout.max_num_seqs // actor_rollout.rollout.n
    start = start_of(Rollout(capacity, 0), ahead, mini_batch, triggers)
    run = Run(mini_batch, triggers, facts["replicas"], capacity, most, 1, facts["overlap_fixed"])
    return Controller(start, limits_of(run, start), wanted.age_scale, time.time)


def in_process(trainer) -> int:
    """Groups that are neither trained nor given up, running or complete."""
    trainer.replay_buffer._sync_metadata_from_transfer_queue()
    return len(trainer.replay_buffer.prompt_global_steps[TRAIN])


def movable_threshold(trainer) -> bool:
    from esgrpo import config
    from esgrpo.algo import overlap_signals

    return (trainer.replay_buffer.max_off_policy_threshold is not None
            and overlap_signals.THRESHOLD not in config.facts()["overlap_fixed"])


def make_room(trainer, staleness: float) -> dict:
    """For so many batches in process, or verl would drop as too old what was begun on purpose."""
    from esgrpo.algo import overlap_signals
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.v1.prompts import carried_groups

    buffer, warmup = trainer.replay_buffer, trainer.config.trainer.v1.separate_async.num_warmup_batches
    before = buffer.max_off_policy_threshold
    # what was begun under a larger one may still be that old
    buffer.max_off_policy_threshold = max(before, overlap_signals.threshold_for(
        owned.of(trainer, owned.Ahead).threshold, warmup, staleness))
    pool = carried_groups.pool_of(trainer)
    if pool is not None:
        pool.threshold = buffer.max_off_policy_threshold
    return {"max_off_policy_threshold": (before, buffer.max_off_policy_threshold)}


def _move(trainer, before, setting, limits) -> dict:
    """The room first."""
    from esgrpo.algo import overlap_signals
    from esgrpo.hooks.verl import owned

    also = make_room(trainer, setting.staleness) if movable_threshold(trainer) else {}
    owned.of(trainer, owned.Ahead).owed += overlap_signals.more_ahead(before, setting, limits)
    return also
