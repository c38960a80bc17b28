"""What verl's client does around one attempt, without verl: the fields and the loop the overlay relies on.

`ResumingClient.generate` follows verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate of verl 0.9.1
line by line, without its one-second sleep.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

from esgrpo.algo import rollout
from esgrpo.call import wrapped
from esgrpo.hooks.verl.groups import attempt_places, client_attempts, rollout_driver

RESPONSE_LENGTH = 32  # of the fake rollout config


@dataclass
class TokenOutput:
    """Same fields and defaults as verl.workers.rollout.replica.TokenOutput."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: object = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict = field(default_factory=dict)


class ResumingClient:
    """`server` has an async generate(prompt_ids, sampling_params) -> TokenOutput, like verl's vLLM server."""

    def __init__(self, server, hooked: bool = True, partial_rollout: bool = True):
        rollout = SimpleNamespace(prompt_length=RESPONSE_LENGTH, response_length=RESPONSE_LENGTH)
        self.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout),
                                      async_training=SimpleNamespace(partial_rollout=partial_rollout))
        self.server, self.hooked = server, hooked

    async def acquire(self, request_id):
        """LLMServerClient._acquire_server."""
        return getattr(self.server, "name", "0"), self.server

    async def single(self, request_id, *, prompt_ids, sampling_params, image_data=None, **kwargs):
        """LLMServerClient.generate, under the hook."""
        _, server = await (hooked_acquire(self, request_id) if self.hooked else self.acquire(request_id))
        output = await server.generate(prompt_ids, dict(sampling_params))
        steps = output.extra_fields.get("global_steps")
        output.extra_fields.setdefault("min_global_steps", steps)
        output.extra_fields.setdefault("max_global_steps", steps)
        return output

    async def attempt(self, **arguments):
        if not self.hooked:
            return await self.single(**arguments)
        return await hooked_single(self, **arguments)

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        """FullyAsyncLLMServerClient.generate."""
        limit_key = next((key for key in ("max_tokens", "max_new_tokens") if key in sampling_params), None)
        budget = sampling_params.get(limit_key) if limit_key else None
        sampling_params = dict(sampling_params)
        if budget is None:
            limit_key, budget = "max_tokens", self.config.actor_rollout_ref.rollout.response_length
            sampling_params[limit_key] = budget
        final = TokenOutput(token_ids=[], log_probs=[], num_preempted=0)
        first_steps = cached = None
        while True:
            output = await self.attempt(request_id=request_id, prompt_ids=prompt_ids + final.token_ids,
                                        sampling_params=sampling_params)
            final.token_ids.extend(output.token_ids)
            if output.log_probs is not None:
                final.log_probs.extend(output.log_probs)
            if output.routed_experts is not None and len(output.token_ids) > 0:
                new = output.routed_experts
                final.routed_experts = new if final.routed_experts is None else [
                    *final.routed_experts, *new[-len(output.token_ids):]]
            if output.num_preempted is not None:
                final.num_preempted += output.num_preempted
            final.stop_reason = output.stop_reason
            if cached is None:
                cached = output.extra_fields.get("num_cached_tokens")
            steps = output.extra_fields.get("global_steps")
            first_steps = steps if first_steps is None else first_steps
            sampling_params[limit_key] = budget - len(final.token_ids)
            if len(final.token_ids) >= budget:
                final.stop_reason = "length"
                break
            if output.stop_reason not in ("aborted", "abort") or not self.config.async_training.partial_rollout:
                break
            await asyncio.sleep(0)
        final.extra_fields.update(global_steps=steps, min_global_steps=first_steps, max_global_steps=steps,
                                  num_cached_tokens=cached)
        return final


hooked_single = wrapped(client_attempts, ResumingClient.single)
hooked_acquire = wrapped(attempt_places, ResumingClient.acquire)


def new_driver(budget: int = RESPONSE_LENGTH) -> rollout_driver.Driver:
    """The driver of a worker, outside Ray; settings are those of the environment."""
    return rollout_driver.Driver(0, budget)


def seat_of(driver, group: str = "g", size: int = 8, number: int | None = None) -> rollout_driver.Seat:
    """A member that has just begun; `number` where it is not the next one."""
    return rollout_driver.join(driver, group, size, **({} if number is None else {"member": number}))


def ended(seat, score=None, now: float = 0.0, **facts) -> dict:
    """The record of a member that ends now."""
    return seat.on(rollout.MemberEnded, now=now, score=score, **facts).row.row()


def run_with_member(seat, coroutine):
    """Runs the coroutine the way an agent-loop worker runs one response: with its member in the context."""
    async def run():
        token = rollout_driver.current.set(seat)
        try:
            return await coroutine
        finally:
            rollout_driver.current.reset(token)

    return asyncio.run(run())
