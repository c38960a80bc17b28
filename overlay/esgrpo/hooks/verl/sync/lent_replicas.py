"""A hybrid replica that goes back to the trainer turns late requests away, so that they go on at another one."""

from __future__ import annotations

from esgrpo.engine import Hook

_MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"

HOOK = Hook(
    slug="lent-replicas-turn-away",
    target="verl.experimental.fully_async_policy.dynamic_schedule.dynamic_resource_controller:DynamicResourceController"
           ".deactivate_hybrid_replicas",
    process=("trainer",),
    kind="wrap",
    why="a request that was on its way to the replica when it left the load balancer is parked behind its closed gate "
        "until the replica is lent again, which may be never; verl's v1 trainer passes reject_request here",
    remove_when="verl's DynamicResourceController aborts with reject_request=True",
    features=("observe",),
    relies_on=(f"{_MANAGER}.abort_replicas",
               "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer._park_until_admitted"),
    without=(("<0.9", "it has no dynamic resources"),),
)


async def around(call):
    controller = call.owner
    manager = controller.hybrid_checkpoint_manager
    controller.hybrid_checkpoint_manager = TurningAway(manager)
    try:
        return await call()
    finally:
        controller.hybrid_checkpoint_manager = manager


class TurningAway:
    """verl's checkpoint manager, of which an abort turns late requests away."""

    def __init__(self, manager):
        self._manager = manager

    def __getattr__(self, name):
        return getattr(self._manager, name)

    async def abort_replicas(self):  # verl's runs at once where its caller is not async
        return await self._manager.abort_replicas(reject_request=True)
