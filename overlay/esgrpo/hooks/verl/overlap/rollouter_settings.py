"""What the trainer asks of the rollouter and of the queue between them at a weight version. No hook.

Plain functions that Ray runs in the other actor's event loop, between two of its awaits: they await nothing
themselves, so that no lock of verl's is needed.
"""

from __future__ import annotations

import math
from collections import deque

from esgrpo.algo import overlap_signals
from esgrpo.algo.null_groups import spare_share


def report(rollouter) -> overlap_signals.Rollout:
    """What it measured of the version that ended, and its settings in force."""
    from esgrpo import config
    from esgrpo.hooks.verl import owned

    signals = owned.take(rollouter, owned.RolloutSignals)
    event = signals.event
    return overlap_signals.measured(rollouter.max_concurrent_samples, signals.windows, event and event.seconds,
                                    event and event.in_flight, _left(rollouter), signals.left_out_tokens,
                                    spare_share(config.current().null_groups, signals.nulls, signals.judged))


def _left(rollouter) -> int:
    """Groups that are neither trained nor in the trainer's hands; at times one less, as verl does not say whether the
    last one it drew is in its queue already. Once all are fed, that queue also holds verl's end signal."""
    fed = rollouter.feed_task is None or rollouter.feed_task.done()
    waiting = rollouter.pending_queue.qsize() - fed
    unfed = 0 if fed else rollouter.total_rollout_steps - rollouter.global_steps
    return max(0, unfed + waiting + rollouter.staleness_samples)


def grow_queue(queue, size: int) -> tuple[int, int]:
    """Its bound before and after; then it is `size` or more. verl's deque throws away the oldest group when it is
    full; that of queue-drops-nothing takes a new bound as its own. It never shrinks: it may hold what a larger bound
    let in."""
    from esgrpo.hooks.verl import owned

    bound = queue.max_queue_size
    if bound == math.inf:
        bound = owned.of(queue, owned.Queue).overflow.limit
    if size <= bound:
        return bound, bound
    if queue.queue.maxlen is not None:
        queue.queue = deque(queue.queue, maxlen=size)
    queue.max_queue_size = size
    return bound, size


def move(rollouter, concurrency: int, staleness: float, trigger: int, begun: int, queue_size: int) -> bool:
    """`begun`: groups that may be begun in a version, those in process at its start counted. Returns True: done."""
    replicas = max(1, len(rollouter.llm_server_manager.get_replicas()))
    rollouter.staleness_threshold, rollouter.required_samples = staleness, trigger
    rollouter.max_required_samples, rollouter.max_queue_size = begun, queue_size
    # verl computes the limit again from this when replicas come and go
    rollouter.concurrent_samples_per_replica = max(1, round(concurrency / replicas))
    rollouter.max_concurrent_samples = min(concurrency, begun)
    rollouter._record_active_count()
    # as reset_staleness does: under another bound there may be room, and verl itself looks only every 10 s
    rollouter.paused = False
    rollouter._resume_event.set()
    return True
