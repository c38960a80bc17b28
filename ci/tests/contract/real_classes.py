"""Child process: the scenarios on the classes that verl really imports. Last line of stdout: what was seen, as JSON.

`hooked`: with the overlay's hooks, and once more after they were taken away. Else verl as PYTHONPATH has it.
"""

import json
import sys
from types import SimpleNamespace

from ci.tests.contract import patch_scenarios as scenarios

SLUGS = ("pause-without-dropped-argument", "abort-by-external-id", "resume-without-sleep")
SCRIPT = (4, -1, 3)


def with_vllms_own_bookkeeping(server_class) -> dict:
    """abort_request on vLLM's real AsyncLLM.abort and OutputProcessor; only the engine process is a fake."""
    import asyncio

    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    async def scene():
        engine = object.__new__(AsyncLLM)
        engine.log_requests, engine.output_processor = False, OutputProcessor(None, log_stats=False)
        engine.engine_core, queues = scenarios.Engine(), {}
        parameters = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        for name in ("mine", "other"):
            request = EngineCoreRequest(
                request_id=name + "-1a2b", external_req_id=name, prompt_token_ids=[1], mm_features=None,
                sampling_params=parameters, pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
                data_parallel_rank=None)
            queues[name] = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request.request_id)
            engine.output_processor.add_request(request, None, None, 0, queues[name])
        result = await scenarios.server(server_class, engine).abort_request("mine")
        outputs = {name: queue.get_nowait() for name, queue in queues.items()}
        return {"aborted": result["aborted"], "reached": engine.engine_core.aborted,
                "ended": {name: output and output.outputs[0].finish_reason for name, output in outputs.items()}}

    return asyncio.run(scene())


def observe() -> dict:
    import asyncio

    from verl.workers.rollout import llm_server, replica
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    server = vllm_async_server.vLLMHttpServer
    base, sleeps = llm_server.LLMServerClient, []
    kept, real = (base.generate, base.__init__), asyncio.sleep

    async def attempt(self, request_id, **kwargs):
        made = vars(await scenarios.Attempts.generate(self, request_id, **kwargs))
        return replica.TokenOutput(**made)

    async def sleep(seconds):
        sleeps.append(seconds)
        await real(0)

    base.generate = attempt
    try:
        asyncio.sleep = sleep
        response = scenarios.resume(llm_server.FullyAsyncLLMServerClient, SCRIPT, sleeps=())
        limited = scenarios.resume(llm_server.FullyAsyncLLMServerClient, SCRIPT, {"max_new_tokens": 6})
        ended = scenarios.resume(llm_server.FullyAsyncLLMServerClient, SCRIPT, partial=False)
        waits = list(sleeps)
        for why in ("use_dynamic_resource_scheduling", "use_trainer_do_validate"):
            scenarios.resume(llm_server.FullyAsyncLLMServerClient, SCRIPT, **{why: True})
        steady = sleeps[len(waits):]
    finally:
        base.generate, asyncio.sleep = kept[0], real
    return {
        "verl": llm_server.__file__, "vllm": with_vllms_own_bookkeeping(server),
        "one": scenarios.abort_one(server), "one_reset": scenarios.abort_one(server, reset_prefix_cache=True),
        "gone": scenarios.abort_one(server, request_id="gone"), "headless": scenarios.abort_one(server, node_rank=1),
        "all": {name: scenarios.abort_all(server, name, times=2) for name in scenarios.PAUSES},
        "broken": scenarios.abort_all(server, broken=True),
        "response": response, "limited": limited, "ended": ended, "waits": waits, "steady": steady,
    }


def main(hooked: bool) -> None:
    seen = SimpleNamespace(states={}, plain=None)
    if hooked:
        from esgrpo import engine

        engine.boot()
    found = observe()
    if hooked:
        rows = {row["slug"]: row for row in [*engine.states("vllm-server"), *engine.states("agent-loop-worker")]
                if row["state"] != "NOT_NEEDED" or "cured" in row["detail"]}
        seen.states = {slug: [rows[slug]["state"], rows[slug]["detail"]] for slug in SLUGS if slug in rows}
        for slug in reversed(SLUGS):  # two are on one method: the outer one goes first
            if seen.states.get(slug, [""])[0] == "APPLIED":
                engine.revert(slug)
        seen.plain = observe()
    print(json.dumps({"seen": found, "states": seen.states, "plain": seen.plain}))


main(sys.argv[1:] == ["hooked"])
