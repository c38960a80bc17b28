"""Registers the platform "cpu" (VERL_PLATFORM=cpu) in verl's platform registry."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="cpu-platform",
    target="verl.plugin.platform.platform_manager:PlatformRegistry",
    process=("driver", "task-runner", "rollouter", "trainer", "actor-worker", "rollout-worker", "agent-loop-worker",
             "reward-loop-worker", "vllm-server"),
    kind="add",
    why="verl registers nvidia, amd and npu only; its registry is the supported route, but get_platform() is called "
        "while verl/__init__ is imported, before VERL_USE_EXTERNAL_MODULES is read",
    remove_when="verl ships a CPU platform",
    features=("cpu",),
)


def apply(module) -> None:
    from esgrpo.platforms import cpu

    cpu.register(module)


def installed(module) -> bool:
    return module.PlatformRegistry.get("cpu") is not None
