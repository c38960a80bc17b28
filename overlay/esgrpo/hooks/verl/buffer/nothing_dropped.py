"""verl's queue of finished samples drops none when it is full, and hands out those of the oldest weights first.

It grows by what is already generated, and no further: verl's rollouter starts nothing while the queue is full.
"""

from __future__ import annotations

import math

from esgrpo.engine import Hook
from esgrpo.errors import say

_QUEUE = "verl.experimental.fully_async_policy.message_queue:MessageQueue"

HOOK = Hook(
    slug="queue-drops-nothing",
    target=f"{_QUEUE}.put_sample",
    process=("task-runner",),  # Ray takes the class where the actor is created
    kind="wrap",
    why="a full queue drops its oldest sample to take the next one, without a trace but a warning in the actor's log: "
        "its responses were generated for nothing and its prompt is never trained; the signal that ends the data also "
        "costs a sample",
    remove_when="verl's MessageQueue refuses or grows instead of dropping",
    features=("observe",),
    relies_on=(f"{_QUEUE}.__init__", f"{_QUEUE}.get_sample", f"{_QUEUE}.clear_queue",
               "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"
               "._should_pause_generation"),
    without=(("==0.7.0", "the recipe has another queue"),),
)


async def around(call):
    from esgrpo import config

    if not config.current().enable:  # observe decides nothing: the baseline of a comparison drops as verl does
        return await call()
    queue = call.owner
    overflow = unbounded(queue)
    result = await call()
    if overflow.put(len(queue.queue) - 1):  # nothing ran since the sample came in
        say(f"esgrpo: queue of finished samples: full at {overflow.limit}: it grows by what is still being generated; "
            "verl would drop the oldest sample")
    return result


def unbounded(queue):
    """The Overflow of this queue, which from now on holds whatever comes; a new bound of it counts."""
    from esgrpo.algo.experience import Backlog
    from esgrpo.hooks.verl import owned

    overflow = owned.of(queue, owned.Queue).overflow
    if queue.max_queue_size != math.inf:
        overflow.limit, queue.max_queue_size = queue.max_queue_size, math.inf
    if not isinstance(queue.queue, Backlog):
        held, queue.queue = queue.queue, Backlog()
        for sample in held:
            queue.queue.append(sample)
    return overflow


def overflow_of(queue) -> dict[str, float]:
    """Metrics of the whole run, without the prefix; runs inside the queue's actor."""
    from esgrpo.hooks.verl import owned

    overflow = owned.of(queue, owned.Queue).overflow
    return {"beyond_limit": float(overflow.kept), "beyond_limit_most": float(overflow.most)}
