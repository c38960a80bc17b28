"""A weight sync leaves running requests in the engine; where that cannot be, verl's abort stays and says why."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.errors import say

HOOK = Hook(
    slug="kept-requests",
    target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.abort_all_requests",
    process=("vllm-server",),
    kind="wrap",
    calls="not where requests stay in the engine: the abort is what they are kept from",
    why="verl aborts every request at a weight sync and prefills it again, prompt and response, although vLLM can "
        "freeze requests over it",
    after=("pause-without-dropped-argument",),
    remove_when="verl offers pause_generation(mode=\"keep\") for its weight sync",
    features=("keep",),
    relies_on=("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer._park_until_admitted",
               "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.open_submission_gate",
               "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.clear_kv_cache",
               "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.release_kv_cache",
               "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.resume_kv_cache",
               "verl.checkpoint_engine.base:CheckpointEngineManager.update_weights"),
    without=(("==0.7.0", "its server cancels requests by itself; every sync aborts"),),
)

said: set[str] = set()


async def around(call):
    server = call.owner
    if server.node_rank != 0:
        return await call()
    reason = reason_to_abort(server, bool(call.arguments.get("reject_request")))
    if reason:
        say_aborted(reason)
        return await call()
    return await pause(server)


def say_aborted(reason: str) -> None:
    """Once per process and reason."""
    if reason not in said:
        said.add(reason)
        say(f"esgrpo: sync.requests=keep: requests are aborted instead: {reason}")


def reason_to_abort(server, reject_request: bool) -> str | None:
    """Why this server's requests cannot or must not stay; None when they do."""
    import inspect

    from esgrpo import config, engine

    lost = engine.out_of_action("engine-core-utilities", "segment-scheduler", "segment-scheduler-by-class",
                                "server-weight-version")
    parameters = inspect.signature(server.engine.pause_generation).parameters
    vllm = getattr(server.engine, "vllm_config", None)
    if lost:
        return f"{lost}: nothing would know the version of a token"
    if reject_request:
        return "the replica leaves the rotation"
    if server.rollout_mode.name != "STANDALONE":
        return f"the replica is {server.rollout_mode.name.lower()}, it shares its memory with the trainer"
    if server.config.free_cache_engine:
        return "rollout.free_cache_engine=True frees the KV cache at every sync"
    if "mode" not in parameters:
        return "this vLLM has no pause_generation(mode=\"keep\")"
    if len(getattr(server.engine.engine_core, "core_engines", None) or ()) > 1:
        return "several data-parallel engines in one server"
    if getattr(vllm, "kv_transfer_config", None) is not None:
        return "KV is transferred between engines"
    if config.current().sync.kv == "keep" and not _forgets_single_blocks():
        return "this vLLM cannot take old blocks out of its prefix cache; sync.kv=rebuild would do"
    return None


def _forgets_single_blocks() -> bool:
    """Else new requests would find KV of older weights for ever: the cache is never reset while it is in use."""
    from vllm.v1.core.block_pool import BlockPool

    return hasattr(BlockPool, "evict_blocks")


async def pause(server) -> dict:
    """Close verl's gate and freeze the engine, with what is in flight settled; its resume undoes both.

    verl waits until admitted requests have their first token, so that its abort covers them. Nobody needs that here:
    what arrives late stays in the queue of the paused engine.
    """
    from esgrpo import config
    from esgrpo.hooks.verl.server.calls_with_deadline import answers

    server._submission_paused, server._rejecting = True, False
    server._resume_event.clear()
    kept = len(server.engine.output_processor.request_states)
    pausing = server.engine.pause_generation(mode="keep", clear_cache=config.current().sync.kv == "rebuild")
    await answers([pausing], "pause_generation")
    return {"aborted_count": 0, "request_ids": [], "kept_count": kept}
