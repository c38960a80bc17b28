"""Registers the collective group "hccl" in ray's registry of backends, in every process that imports it."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.errors import HookError

BACKEND = "HCCL"

HOOK = Hook(
    slug="add-hccl-collective-group",
    target="ray.util.collective.backend_registry:register_collective_backend",
    process=("driver", "task-runner", "rollouter", "trainer", "actor-worker", "rollout-worker"),
    kind="add",
    why="create_collective_group(backend='hccl') raises RuntimeError: Backend HCCL is not registered; the registry is "
        "the supported route, but has to be used in the driver and in every actor. Ray 2.51.1 has no registry, there "
        "the patch of the same slug does it",
    remove_when="ray registers HCCL itself",
    features=("npu",),
    # what the group inherits, and how the registry constructs and asks it
    relies_on=(
        "ray.util.collective.backend_registry:BackendRegistry",
        "ray.util.collective.collective_group.base_collective_group:BaseGroup",
        "ray.util.collective.collective:GroupManager.create_collective_group",
        "ray.util.collective.types:Backend",
        "ray.util.collective.types:ReduceOp",
    ),
)


def apply(module) -> None:
    from esgrpo.platforms.torch_collective import HCCLGroup

    registry = module.BackendRegistry()
    if registry.is_registered(BACKEND):
        raise HookError(HOOK.slug, f"ray has {registry.get(BACKEND).__module__} for {BACKEND}", "no such backend",
                        "nothing was registered", f"ESGRPO_DISABLE={HOOK.slug}, or use a ray without it")
    module.register_collective_backend(BACKEND, HCCLGroup)


def installed(module) -> bool:
    from esgrpo.platforms.torch_collective import HCCLGroup

    registry = module.BackendRegistry()
    return registry.is_registered(BACKEND) and registry.get(BACKEND) is HCCLGroup
