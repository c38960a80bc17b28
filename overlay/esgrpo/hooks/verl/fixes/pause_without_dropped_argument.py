"""verl's abort of all requests works with vLLM releases whose pause_generation knows `mode` only."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook

DROPPED = "wait_for_inflight_requests"

HOOK = Hook(
    slug="pause-without-dropped-argument",
    target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.abort_all_requests",
    process=("vllm-server",),
    kind="wrap",
    why="vLLM 0.32.0 dropped wait_for_inflight_requests: TypeError \"unexpected keyword argument "
        "'wait_for_inflight_requests'\" at the first weight sync, which verl 0.9.0 swallows",
    remove_when="verl passes mode to pause_generation",
    features=("observe",),
    without=(("==0.7.0", "nothing in it calls pause_generation"),),
)


async def around(call):
    server = call.owner
    if server.node_rank == 0:
        teach(server.engine)
    return await call()


def teach(engine) -> None:
    """Let this engine's pause_generation take the old argument again; an engine that takes it stays as it is."""
    import inspect

    pause = engine.pause_generation
    if DROPPED in inspect.signature(pause, follow_wrapped=False).parameters:
        return

    @functools.wraps(pause)
    async def pause_generation(*args, wait_for_inflight_requests=None, **kwargs):
        if wait_for_inflight_requests is not None:
            kwargs.setdefault("mode", "wait" if wait_for_inflight_requests else "abort")
        return await pause(*args, **kwargs)

    engine.pause_generation = pause_generation
