"""A trainer that waits for samples before it takes its devices back stops waiting once no sample can come."""

from __future__ import annotations

from esgrpo.engine import Hook

_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"

HOOK = Hook(
    slug="lent-wait-ends-with-data",
    target=f"{_ROLLOUTER}.wait_for_enough_samples",
    process=("rollouter",),
    kind="wrap",
    why="it waits without a deadline until the queue holds a share of a batch: a run whose data ends while the "
        "trainer's replicas are lent never comes to its end (verl issue 7937)",
    remove_when="verl's wait_for_enough_samples returns once the rollouter has sent the end of the data",
    features=("observe",),
    relies_on=(f"{_ROLLOUTER}._streaming_generation_main",),
    without=(("<0.9", "it has no dynamic resources"),),
)


async def around(call):
    import asyncio

    from esgrpo.errors import say

    rollouter, poll_s, waiting = call.owner, call.argument("poll_interval"), asyncio.ensure_future(call())
    try:
        while not waiting.done():
            over = not rollouter.running  # set after the end of the data went into the queue
            await asyncio.wait([waiting], timeout=0 if over else poll_s)
            if over and not waiting.done():
                say("esgrpo: the data is at its end: the trainer takes its devices back with what the queue holds")
                return await rollouter.message_queue_client.get_queue_size()
        return waiting.result()
    finally:
        waiting.cancel()
