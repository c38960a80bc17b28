"""Rebalancing requests over replicas moves those above a replica's share; the others stay in their engine."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.errors import say

_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"

HOOK = Hook(
    slug="rebalance-moves-the-surplus",
    target=f"{_ROLLOUTER}.rebalance_requests",
    process=("rollouter",),
    kind="replace",  # the original aborts every request of every replica, and waits until none is in flight
    why="each time the trainer's replicas are lent, it aborts all requests so that clients spread them anew, right "
        "after a weight sync that kept them: everything would be prefilled again, and nothing be gained by keeping",
    remove_when="verl moves only what a replica has above its share",
    features=("keep",),
    relies_on=("verl.workers.rollout.router:GlobalRequestLoadBalancer.clear_sticky_cache",
               "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncLLMServerManager.add_replicas",
               "verl.experimental.fully_async_policy.dynamic_schedule.default_policy:DefaultDynamicSchedulePolicy"
               ".request_rebalance"),
    without=(("==0.7.0", "it has no rebalancing"),),
)


async def around(call):
    from esgrpo.algo.routing import surplus
    from esgrpo.hooks.verl.server.calls_with_deadline import answers_if_any
    from esgrpo.hooks.verl.server.control_methods import methods

    manager = call.owner.llm_server_manager
    servers = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
    # from now on a response that is submitted again goes to the replica with the fewest
    results = await answers_if_any([manager.global_load_balancer.clear_sticky_cache.remote()], "clear_sticky_cache",
                                   "no request moves, lent replicas get new ones only")
    if not results:
        return {}
    result, = results
    loads = {address: result["server_loads"].get(address, 0) for address in servers}
    moving = [method.remote(count) for address, count in surplus(loads).items()
              for method in methods([servers[address]], "esgrpo_hand_back")]
    moved = await answers_if_any(moving, "hand_back", "requests stay where they are, lent replicas get new ones only")
    say(f"esgrpo: rebalanced: {sum(moved)} of {sum(loads.values())} requests go on elsewhere, the others stay")
    return result
