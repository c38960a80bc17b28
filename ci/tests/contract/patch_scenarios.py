"""Fakes of vLLM's engine and of verl's server, and what is seen when verl's own methods meet them.

Every scenario takes the class to look at and returns plain values, so that it also runs in a child process on the
classes that verl really imports.
"""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace

PROMPT, PROMPT_LENGTH, RESPONSE_LENGTH = [7] * 3, 8, 10


class Processor:
    """vLLM's OutputProcessor: from 0.18.1 on request states have internal ids, before the caller's."""

    def __init__(self, randomised: bool):
        self.randomised = randomised
        self.request_states = {name + "-1a2b" * randomised: SimpleNamespace() for name in ("mine", "other")}
        if randomised:
            self.external_req_ids = {"mine": ["mine-1a2b"], "other": ["other-1a2b"]}

    def abort_requests(self, request_ids, *internal):
        if self.randomised:
            (is_internal,) = internal  # a required argument there
            if not is_internal:
                request_ids = [name for given in request_ids for name in self.external_req_ids.pop(given, [])]
        return [name for name in request_ids if self.request_states.pop(name, None) is not None]


class Engine:
    """Records what reaches the engine. `signature` is that of pause_generation: see PAUSES."""

    def __init__(self, signature="0.12", randomised=True, broken=False):
        self.output_processor, self.engine_core = Processor(randomised), self
        self.aborted, self.paused, self.resets, self.broken = [], [], 0, broken
        self.pause_generation = PAUSES[signature].__get__(self)

    async def abort_requests_async(self, request_ids):
        self.aborted += request_ids

    async def abort(self, request_id):
        internal = (False,) if self.output_processor.randomised else ()
        await self.abort_requests_async(self.output_processor.abort_requests([request_id], *internal))

    async def resume_generation(self):
        self.paused.append("resumed")

    async def reset_prefix_cache(self, **kwargs):
        self.resets += 1

    reset_mm_cache = reset_encoder_cache = lambda self: asyncio.sleep(0)

    def pause(self, mode, clear_cache):
        if self.broken:
            raise ValueError("engine is dead")
        self.paused.append([mode, clear_cache])


async def _pause_012(self, *, wait_for_inflight_requests=False, clear_cache=True):
    self.pause("wait" if wait_for_inflight_requests else "abort", clear_cache)


async def _pause_018(self, *, mode="abort", wait_for_inflight_requests=None, clear_cache=True):
    self.pause("wait" if wait_for_inflight_requests else mode, clear_cache)


async def _pause_032(self, *, mode="abort", clear_cache=True):
    self.pause(mode, clear_cache)


PAUSES = {"0.12": _pause_012, "0.18": _pause_018, "0.32": _pause_032}


def server(server_class, engine, node_rank=0):
    """A server without its constructor, which would want Ray and a model."""
    made = object.__new__(server_class)
    made.node_rank, made.global_steps = node_rank, 3
    if engine is not None:
        made.engine = engine
    made._submission_paused = made._rejecting = False  # 0.9.1's gate
    made._admitting, made._resume_event, made._resumed = 0, asyncio.Event(), asyncio.Event()
    return made


def abort_one(server_class, randomised=True, request_id="mine", node_rank=0, **options) -> dict:
    engine = Engine(randomised=randomised)
    made = server(server_class, engine if node_rank == 0 else None, node_rank)
    result = asyncio.run(made.abort_request(request_id, **options))
    return {"aborted": result["aborted"], "reached": engine.aborted, "resets": engine.resets,
            "left": sorted(engine.output_processor.request_states)}


def abort_all(server_class, signature="0.12", broken=False, node_rank=0, times=1) -> dict:
    engine = Engine(signature, broken=broken)
    made = server(server_class, engine if node_rank == 0 else None, node_rank)
    seen = {"raised": "", "error": "", "count": None}
    try:
        for _ in range(times):
            result = asyncio.run(made.abort_all_requests())
        seen |= {"error": result.get("error", ""), "count": result["aborted_count"]}
    except Exception as error:
        seen["raised"] = f"{type(error).__name__}: {error}"
    return seen | {"paused": engine.paused}


class Attempts:
    """Base class in LLMServerClient's place: each attempt generates `script` tokens and is aborted, the last one runs
    as far as its budget lets it. -1: rejected without a token."""

    script: tuple[int, ...] = ()

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        self.asked = [*getattr(self, "asked", []), dict(sampling_params)]
        parameters, number = dict(sampling_params), len(self.asked) - 1
        rollout = self.config.actor_rollout_ref.rollout
        default = min(rollout.response_length, rollout.prompt_length + rollout.response_length - len(prompt_ids))
        budget = max(1, parameters.pop("max_tokens", parameters.pop("max_new_tokens", default)))
        last = number >= len(self.script)
        count = budget if last else min(budget, max(0, self.script[number]))
        return SimpleNamespace(
            token_ids=[number + 1] * count, log_probs=[-0.5] * count, routed_experts=None, num_preempted=1,
            stop_reason="completed" if last else "aborted",
            extra_fields={"global_steps": number + 5, "num_cached_tokens": number})

    def _configured_response_length(self):
        return self.config.actor_rollout_ref.rollout.response_length


def resume(client_class, script, parameters=None, prompt=PROMPT, partial=True, sleeps=None, **training) -> dict:
    """One response through `client_class` on top of Attempts; `sleeps` is the list its sleeps were recorded in,
    `training` more of async_training."""
    client = object.__new__(client_class)
    rollout = SimpleNamespace(response_length=RESPONSE_LENGTH, prompt_length=PROMPT_LENGTH)
    client.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), async_training=SimpleNamespace(
        partial_rollout=partial, **training))
    client.script = tuple(script)
    parameters = {"temperature": 1.0} if parameters is None else parameters
    before = dict(parameters)
    output = asyncio.run(client.generate("r", prompt_ids=list(prompt), sampling_params=parameters))
    return {"tokens": output.token_ids, "log_probs": len(output.log_probs), "stop": output.stop_reason,
            "fields": output.extra_fields, "preempted": output.num_preempted, "attempts": len(client.asked),
            "untouched": parameters == before, "sleeps": list(sleeps or [])}


def recording_asyncio(sleeps: list):
    """asyncio whose sleep takes no time and is written down."""
    async def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) > 1000:
            raise AssertionError("spins")

    return SimpleNamespace(**{name: getattr(asyncio, name) for name in ("Event", "wait_for", "TimeoutError")},
                           sleep=sleep)


def takes(function) -> list[str]:
    return list(inspect.signature(function).parameters)
