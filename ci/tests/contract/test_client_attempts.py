"""Attempts of a member on verl's own client: their budget is that of verl's own server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any, Optional

import pytest

pytest.importorskip("verl")
pytest.importorskip("ray")

from ci.tests.contract import patch_tree  # noqa: E402
from ci.tests.property.rollout_fakes import ended, new_driver, run_with_member, seat_of  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl.groups import client_attempts  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.hook("client-attempts")]
PROMPT_LENGTH, RESPONSE_LENGTH, CONTEXT = 8, 16, 40
YIELD_AFTER = 5  # tokens of an attempt
FIRST_TURN, LATER_TURN, LAST_TURN = 3, PROMPT_LENGTH + 9, PROMPT_LENGTH + RESPONSE_LENGTH  # tokens of their prompts


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": True}))
    monkeypatch.delenv("ESGRPO_RUN_DIR", raising=False)


class Config(dict):
    __getattr__ = dict.__getitem__


class Method:
    """A method of a Ray actor."""

    def __init__(self, function):
        self.remote = function


class Engine:
    """AsyncLLM.generate: makes as many tokens as it may, and hands back a request of ours after YIELD_AFTER."""

    def __init__(self):
        self.asked = []  # (tokens of the prompt, max_tokens)

    async def generate(self, prompt, sampling_params, request_id, lora_request=None, priority=0):
        limit, ours = sampling_params.max_tokens, "segment" in (sampling_params.extra_args or {})
        self.asked.append((len(prompt["prompt_token_ids"]), limit))
        made = min(limit, YIELD_AFTER) if ours else limit
        payload = {"outcome": "yield" if made < limit else "finish", "rule": "", "spans": [[3, made]], "boundaries": 0,
                   "logprob_sum": 0.0, "replica": "0", "arrived": 0.0}
        yield SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=[7] * made, finish_reason="length", logprobs=None)],
            num_cached_tokens=0, kv_transfer_params={"esgrpo": payload} if ours else None)


class Parameters(SimpleNamespace):
    """vLLM's SamplingParams, as far as verl's server reads them."""

    extra_args = prompt_logprobs = None


def server_of(version: str, engine: Engine):
    """verl's server of this release with its real `generate`."""
    names = {"asyncio": asyncio, "Any": Any, "Optional": Optional, "SamplingParams": Parameters, "TokensPrompt": dict,
             "TokenOutput": token_output(), "RequestOutput": object, "normalize_token_ids": list,
             "RLInsightLogger": SimpleNamespace(trace_state=lambda *_, **__: contextlib.nullcontext()),
             "qwen2_5_vl_dedup_image_tokens": lambda ids, _: ids, "extract_prompt_logprobs": lambda **_: None}
    lifted = patch_tree.lifted(patch_tree.source(version) / patch_tree.SERVER, "vLLMHttpServer", ("generate",), object,
                               names)

    async def admitted(request_id):
        made._admitting += 1

    made = object.__new__(type("Server", (lifted,), {}))
    vars(made).update(
        engine=engine, _disaggregation_role=None, global_steps=3, lora_as_adapter=False, replica_rank=0, _admitting=0,
        _park_until_admitted=admitted, model_config=SimpleNamespace(processor=None),
        config=Config(response_length=RESPONSE_LENGTH, prompt_length=PROMPT_LENGTH, max_model_len=CONTEXT,
                      full_determinism=False, enable_rollout_routing_replay=False, mtp=None))
    return made


def token_output():
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput


def client_of(server, hooked: bool, kind: str = "LLMServerClient"):
    """verl's own client of one server, beside its load balancer."""
    from verl.workers.rollout import llm_server

    async def fields():
        return []

    async def acquire(request_id):
        return "0", SimpleNamespace(generate=Method(server.generate))

    balancer = SimpleNamespace(require_acquire_fields=Method(fields), require_release_fields=Method(fields),
                               acquire_server=Method(acquire), release_server=Method(lambda server_id: None))
    original = getattr(llm_server, kind)
    cls = type("Hooked", (original,), {"generate": wrapped(client_attempts, original.generate)}) if hooked else original
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(
        name="vllm", full_determinism=False, prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH)))
    return cls(config, balancer)


def turn(version: str, prompt_tokens: int, hooked: bool, **parameters):
    """One turn of an agent loop: (tokens of the response, attempts as (prompt, max_tokens), row or None)."""
    engine, seat = Engine(), seat_of(new_driver(RESPONSE_LENGTH), size=1)
    client = client_of(server_of(version, engine), hooked)
    output = run_with_member(seat, client.generate(
        "r", prompt_ids=[1] * prompt_tokens, sampling_params={"temperature": 1.0, **parameters}))
    return len(output.token_ids), engine.asked, ended(seat) if hooked else None


@pytest.mark.parametrize("version", ["0.9.0", "0.9.1"])
@pytest.mark.parametrize("prompt_tokens, budget", [
    (FIRST_TURN, RESPONSE_LENGTH), (LATER_TURN, RESPONSE_LENGTH - 9), (LAST_TURN, 1), (LAST_TURN + 3, 1)])
def test_a_turn_without_a_limit_has_the_budget_of_verls_own_server(version, prompt_tokens, budget):
    tokens, attempts, row = turn(version, prompt_tokens, hooked=True)
    plain, asked, _ = turn(version, prompt_tokens, hooked=False)  # the control: verl alone
    assert tokens == plain == budget == row["tokens"] and asked == [(prompt_tokens, budget)]
    assert row["outcome"] == "finish" and row["attempts"] == len(attempts) == -(-budget // YIELD_AFTER)
    # what is left of the budget of the first attempt, not that of a longer prompt
    assert attempts == [(prompt_tokens + done, budget - done) for done in range(0, budget, YIELD_AFTER)]


@pytest.mark.parametrize("limit", ["max_tokens", "max_new_tokens"])
def test_a_limit_of_the_caller_is_the_budget(limit):
    for hooked in (True, False):
        assert turn("0.9.1", LATER_TURN, hooked, **{limit: 12})[0] == 12
