"""verl builds the backend string "cpu:gloo,cpu:gloo" when the device itself is the CPU; torch wants "gloo"."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="cpu-process-group",
    target="torch.distributed.distributed_c10d:init_process_group",
    process=("actor-worker", "rollout-worker"),
    kind="wrap",
    why="ValueError: Duplicate device type cpu in backend string; verl composes it in code, without a config key",
    unguarded="torch.distributed is called by its documented signature only",
    remove_when="verl composes the backend string per distinct device",
    features=("cpu",),
    rebinds=("torch.distributed:init_process_group",),
)


def around(call):
    backend = call.arguments.get("backend")
    if isinstance(backend, str) and "," in backend and len(set(backend.split(","))) == 1:
        call.arguments["backend"] = backend.split(",")[0].partition(":")[2]
    return call()
