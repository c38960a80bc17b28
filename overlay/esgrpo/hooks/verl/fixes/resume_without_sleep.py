"""A response that a weight sync interrupted is generated on as soon as its server accepts it again."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook

HOOK = Hook(
    slug="resume-without-sleep",
    target="verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate",
    process=("agent-loop-worker",),
    kind="replace",  # a wrap cannot reach a sleep inside the loop, and the module's asyncio serves other waits too
    why="verl's client sleeps a second before it resumes an aborted response: at every weight sync each replica idles "
        "that long although it has resumed. verl 0.9.1's server parks what arrives too early; 0.9.0's does not, "
        "there only the git patch helps",
    remove_when="verl's client no longer sleeps after an abort",
    features=("segment",),
    without=(("==0.7.0", "the recipe's client does not sleep"),),
    relies_on=("verl.workers.rollout.llm_server:FullyAsyncLLMServerClient._configured_response_length",
               "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer._park_until_admitted"),
)

LIMITS = ("max_tokens", "max_new_tokens")


def build(original):  # verl's tracing wraps a method of the client, so there has to be one
    @functools.wraps(original)
    async def resuming(self, request_id, **kwargs):
        from esgrpo.hooks.verl.fixes.resume_without_sleep import generate_resuming

        return await generate_resuming(self, request_id, **kwargs)

    @functools.wraps(original)
    async def generate(self, *args, **kwargs):
        from verl.utils.rollout_trace import rollout_trace_op  # the original is traced in the same way

        return await rollout_trace_op(resuming)(self, *args, **kwargs)

    return generate


async def generate_resuming(client, request_id, *, prompt_ids, sampling_params, **more):
    """All attempts of one response as one TokenOutput; together they stay within one budget of tokens."""
    import asyncio

    from verl.utils import normalize_token_ids
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    from esgrpo import config as settings
    from esgrpo.algo.resuming import ResumeWait
    from esgrpo.hooks.verl.groups.rollout_driver import ABORTED

    attempt = super(FullyAsyncLLMServerClient, client).generate
    prompt = normalize_token_ids(prompt_ids)
    parameters = dict(sampling_params)
    limit = next((name for name in LIMITS if parameters.get(name) is not None), LIMITS[0])
    budget = parameters.get(limit)
    if budget is None:
        budget = client._configured_response_length()
    training = getattr(client.config, "async_training", None)
    resumes = training is None or training.partial_rollout  # verl's v1 trainers have no such section and always resume
    # verl's rebalancing among hybrid replicas polls until no request is in flight; with kept requests ours does not
    lends = bool(getattr(training, "use_dynamic_resource_scheduling", False))
    # after validation on the trainer's devices verl puts hybrid replicas to sleep, and opens their gates
    validates = bool(getattr(training, "use_trainer_do_validate", False))
    wait = ResumeWait(steady=validates or (lends and not settings.current().keeps))
    total = TokenOutput(token_ids=[], log_probs=[], num_preempted=0)
    while True:
        if budget is not None:
            parameters[limit] = budget - len(total.token_ids)
        output = await attempt(request_id=request_id, prompt_ids=prompt + total.token_ids,
                               sampling_params=parameters, **more)
        _append(total, output)
        if budget is not None and len(total.token_ids) >= budget:
            total.stop_reason = "length"
            return total
        if output.stop_reason not in ABORTED or not resumes:
            return total
        await asyncio.sleep(wait.after(len(output.token_ids)))


def _append(total, output) -> None:
    """Add one attempt. Versions run from the first attempt to the last; the cache hit of the first prefill counts."""
    from esgrpo.hooks.verl.server import joined_outputs

    joined_outputs.append(total, output)
    fields, version = total.extra_fields, output.extra_fields.get("global_steps")
    if fields.get("min_global_steps") is None:
        fields["min_global_steps"] = version
    fields["global_steps"] = fields["max_global_steps"] = version
    if fields.get("num_cached_tokens") is None:
        fields["num_cached_tokens"] = output.extra_fields.get("num_cached_tokens")
