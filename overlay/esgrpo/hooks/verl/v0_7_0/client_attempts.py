"""verl 0.7.0: tells the scheduler which response an attempt belongs to, takes the outcome, and re-submits yields."""

from __future__ import annotations

from dataclasses import dataclass

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER

HOOK = Hook(
    slug="partial-attempts",
    target="recipe.fully_async_policy.agent_loop.agent_loop:FullyAsyncLLMServerManager._generate_attempt",
    process=("agent-loop-worker",),
    kind="wrap",
    calls="once an attempt: a yield is submitted again with what is left",
    why="the partial server and its client know only cancelled or not. The git patches give this method and honour "
        "max_tokens; what a stop reason means is decided here",
    patches=(("==0.7.0", ("partial-server-honours-response-length", "carry-stop-reason-through-partial-server")),),
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    relies_on=(
        "recipe.fully_async_policy.agent_loop.agent_loop:FullyAsyncLLMServerManager.generate_for_partial",
        "recipe.fully_async_policy.vllm_rollout.vllm_async_server:vLLMHttpServerForPartial._generate_step",
        "recipe.fully_async_policy.vllm_rollout.vllm_async_server:vLLMHttpServerForPartial.generate_for_partial",
        "recipe.fully_async_policy.vllm_rollout.vllm_async_server:vLLMHttpServerForPartial.cancel",
    ),
    without=((LATER, ELSEWHERE),),
)


@dataclass
class Attempt:
    """One answer of the partial server in the shape of verl's TokenOutput."""

    token_ids: list
    stop_reason: str
    extra_fields: dict


async def around(call):
    from esgrpo.hooks.verl.groups import rollout_driver

    seat = rollout_driver.current.get()
    if seat is None:  # a caller outside a group; there is no other client: this release has no teachers
        return await call()
    return await generate_member(call, seat)


async def generate_member(call, seat):
    """All attempts of this call: (token ids, log-probs, interrupted, extra fields of the last attempt)."""
    from esgrpo.algo.rollout import HandOn
    from esgrpo.hooks.verl.groups import rollout_driver

    attempts = rollout_driver.Attempts(call, lambda rollout, prompt_tokens: rollout.response_length)  # as its server
    tokens, log_probs, extra, interrupted, fields = [], [], {}, False, seat.fields()
    while True:
        new_tokens, new_log_probs, interrupted, extra = await attempts.next(tokens, fields)
        if interrupted and not new_tokens:  # paused before a token was made: nothing happened
            break
        attempt = Attempt(list(new_tokens), "aborted" if interrupted else "completed", dict(extra))
        action = await attempts.ended(seat, attempt, tokens)
        tokens += new_tokens
        log_probs += new_log_probs
        if isinstance(action, HandOn):
            break
        fields = action.fields
    return tokens, log_probs, interrupted, extra
