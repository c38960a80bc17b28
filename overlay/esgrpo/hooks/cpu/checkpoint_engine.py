"""Registers the checkpoint engine "cpu_zmq": weight sync from the trainer to rollout workers over TCP."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="cpu-checkpoint-engine",
    target="verl.checkpoint_engine.base:CheckpointEngineRegistry",
    process=("trainer", "actor-worker", "rollout-worker"),
    kind="add",
    why="verl's engines (nccl, hccl, nixl, kimi, mooncake) need an accelerator and naive is colocated only; the "
        "registry is the supported route",
    remove_when="verl ships a checkpoint engine for CPU tensors",
    features=("cpu",),
    relies_on=("verl.checkpoint_engine.base:CheckpointEngine",),
)


def apply(module) -> None:
    from esgrpo.platforms import cpu_checkpoint

    cpu_checkpoint.register(module)


def installed(module) -> bool:
    return "cpu_zmq" in module.CheckpointEngineRegistry._registry
