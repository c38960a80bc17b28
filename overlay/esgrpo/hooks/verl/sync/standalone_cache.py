"""Beside replicas that lend the trainer's memory, a standalone replica keeps its KV cache, and so its requests."""

from __future__ import annotations

from esgrpo.engine import Hook

_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"

HOOK = Hook(
    slug="standalone-cache-stays",
    target=f"{_SERVER}.launch_server",
    process=("vllm-server",),
    kind="wrap",
    why="hybrid replicas need rollout.free_cache_engine=True to hand memory back to the trainer; verl has one setting "
        "for all replicas, so standalone ones would free their cache at every weight sync, and abort",
    remove_when="verl frees the cache of hybrid replicas only",
    features=("keep",),
    relies_on=(f"{_SERVER}.__init__", f"{_SERVER}.sleep", f"{_SERVER}.wake_up", f"{_SERVER}.release_kv_cache",
               f"{_SERVER}.resume_kv_cache"),
    without=(("==0.7.0", "its server cancels requests by itself; every sync aborts"),),
)


async def around(call):
    server = call.owner
    if server.rollout_mode.name == "STANDALONE" and server.config.free_cache_engine:
        object.__setattr__(server.config, "free_cache_engine", False)  # this actor's own copy; the class is frozen
    return await call()
