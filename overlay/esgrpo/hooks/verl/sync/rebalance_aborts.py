"""Rebalancing requests over replicas gets the abort that it counts on, although weight syncs keep requests."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="rebalance-aborts",
    target="verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter.rebalance_requests",
    process=("rollouter",),
    kind="wrap",
    why="it aborts all requests so that clients send them elsewhere, by the same call as a weight sync, and waits up "
        "to 30 s with paused engines until none is in flight: kept requests would never be",
    remove_when="verl tells its servers why they abort",
    features=("keep",),
    without=(("==0.7.0", "it has no rebalancing"),),
)


async def around(call):
    rollouter = call.owner
    servers = [server for replica in rollouter.llm_server_manager.get_replicas() for server in replica.servers]
    await require(servers, True)
    try:
        return await call()
    finally:
        await require(servers, False)


async def require(servers, required: bool) -> None:
    from esgrpo.hooks.verl.server.calls_with_deadline import answers
    from esgrpo.hooks.verl.server.control_methods import methods

    await answers([call.remote(required) for call in methods(servers, "esgrpo_require_abort")], "require_abort")
