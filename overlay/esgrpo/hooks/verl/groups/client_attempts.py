"""Tells the scheduler which response an attempt belongs to, brings the outcome back, and re-submits yields."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="client-attempts",
    target="verl.workers.rollout.llm_server:LLMServerClient.generate",
    process=("agent-loop-worker",),
    kind="wrap",
    calls="once an attempt: a yield is submitted again with what is left",
    why="verl's server drops CompletionOutput.stop_reason and its resuming client drops all extra_fields but four; "
        "both clients call this method once per attempt. get_client(client_cls=) would need a change in every caller",
    remove_when="verl's client keeps stop_reason and extra_fields across attempts",
    features=("observe",),
    relies_on=("verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate",
               "verl.workers.rollout.replica:TokenOutput",
               # whose budget of a call without a limit becomes that of all attempts
               "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate"),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


async def around(call):
    from esgrpo.hooks.verl.groups import rollout_driver

    seat = rollout_driver.current.get()
    if seat is None or not seat.follows(call.owner):  # validation, a caller outside a group, or a teacher's client
        return await call()
    return await generate_member(call, seat)


def unlimited(rollout, prompt_tokens: int) -> int:
    from esgrpo.algo.resuming import unlimited_budget

    return unlimited_budget(prompt_tokens, rollout.prompt_length, rollout.response_length)


async def generate_member(call, seat):
    from esgrpo.algo.rollout import HandOn
    from esgrpo.hooks.verl.groups import rollout_driver

    attempts = rollout_driver.Attempts(call, unlimited)
    total, fields = None, seat.fields()
    while True:
        done = [] if total is None else total.token_ids
        output = await attempts.next(done, fields)
        action = await attempts.ended(seat, output, done)
        total = output if total is None else _joined(total, output)
        if isinstance(action, HandOn):
            return total
        fields = action.fields


def _joined(total, output):
    """Append a later attempt to what is there; versions run from the first to the last."""
    from esgrpo.hooks.verl.server import joined_outputs

    joined_outputs.append(total, output)
    for key in ("global_steps", "max_global_steps"):
        total.extra_fields[key] = output.extra_fields.get(key)
    return total
