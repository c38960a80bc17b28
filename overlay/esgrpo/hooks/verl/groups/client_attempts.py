"""Tells the scheduler which response an attempt belongs to, brings the outcome back, and re-submits yields."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook

HOOK = Hook(
    slug="client-attempts",
    target="verl.workers.rollout.llm_server:LLMServerClient.generate",
    process=("agent-loop-worker",),
    kind="wrap",  # the original is called once per attempt: a yield is submitted again with what is left
    why="verl's server drops CompletionOutput.stop_reason and its resuming client drops all extra_fields but four; "
        "both clients call this method once per attempt. get_client(client_cls=) would need a change in every caller",
    remove_when="verl's client keeps stop_reason and extra_fields across attempts",
    features=("observe",),
    relies_on=("verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate",
               "verl.workers.rollout.replica:TokenOutput"),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


def build(original):
    @functools.wraps(original)
    async def generate(self, *args, **kwargs):
        from esgrpo.hooks.verl.groups import client_attempts, rollout_driver

        seat = rollout_driver.current.get()
        if seat is None:  # validation, or a caller outside a group
            return await original(self, *args, **kwargs)
        return await client_attempts.generate_member(original, self, seat, args, kwargs)

    return generate


async def generate_member(original, client, seat, args, kwargs):
    from esgrpo.algo.rollout import HandOn
    from esgrpo.hooks.verl.groups import rollout_driver

    call = rollout_driver.Call(original, client, args, kwargs)
    total, fields = None, seat.fields()
    while True:
        done = [] if total is None else total.token_ids
        output = await call.attempt(done, fields)
        action = await call.ended(seat, output, done)
        total = output if total is None else _joined(total, output)
        if isinstance(action, HandOn):
            return total
        fields = action.fields


def _joined(total, output):
    """Append a later attempt to what is there; versions run from the first to the last."""
    total.token_ids = list(total.token_ids) + list(output.token_ids)
    if total.log_probs is not None and output.log_probs is not None:
        total.log_probs = list(total.log_probs) + list(output.log_probs)
    if output.routed_experts is not None and len(output.token_ids):
        import numpy as np

        new = output.routed_experts[-len(output.token_ids):]
        total.routed_experts = new if total.routed_experts is None else np.concatenate([total.routed_experts, new])
    total.num_preempted = (total.num_preempted or 0) + (output.num_preempted or 0)
    total.stop_reason = output.stop_reason
    for key in ("global_steps", "max_global_steps"):
        total.extra_fields[key] = output.extra_fields.get(key)
    return total
