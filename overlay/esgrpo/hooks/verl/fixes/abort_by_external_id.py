"""One request is aborted by the id that its caller knows, and the other requests keep their prefix cache."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="abort-by-external-id",
    target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.abort_request",
    process=("vllm-server",),
    kind="replace",  # nothing in the original can be kept: it looks among ids that its callers never see
    why="vLLM keys its request states by a randomised internal id, so verl's abort_request answers \"Request ... not "
        "found\" to every call and the request decodes on to its end; it also clears the prefix cache of all requests",
    remove_when="verl's abort_request calls AsyncLLM.abort",
    features=("observe",),
    without=(("==0.7.0", "the recipe's servers cancel requests themselves"),),
)


async def around(call):
    server, request_id = call.owner, call.arguments["request_id"]
    if server.node_rank != 0:
        return {"aborted": False, "request_id": request_id}  # a headless node has no engine
    processor = server.engine.output_processor
    # vLLM before the randomisation has no mapping: there the request states are keyed by the caller's id
    known = getattr(processor, "external_req_ids", processor.request_states)
    if request_id not in known:
        return {"aborted": False, "request_id": request_id, "error": f"Request {request_id} not found"}
    try:
        await server.engine.abort(request_id)
        if call.arguments.get("reset_prefix_cache"):  # only where asked for; verl's default is True
            await server.clear_kv_cache()
    except Exception as error:  # the replica asks every server and takes the first that says yes
        return {"aborted": False, "request_id": request_id, "error": f"{type(error).__name__}: {error}"}
    return {"aborted": True, "request_id": request_id}
