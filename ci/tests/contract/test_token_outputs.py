"""A response without text: verl's real server method on vLLM's real output processor; the engine is a script."""

from __future__ import annotations

import asyncio
import importlib.util
from types import SimpleNamespace
from typing import Any, Optional

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from bench.common import TESTBED  # noqa: E402
from ci.tests.contract import patch_tree  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl.server import token_outputs  # noqa: E402
from esgrpo.hooks.vllm import first_and_last_output  # noqa: E402

pytestmark = [pytest.mark.real]
SCRIPT = tuple(range(40, 60))  # token ids of the response
ABORTED_AFTER = 7


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TESTBED / "model")


class Engine:
    """AsyncLLM.generate with SCRIPT for a model; `seen` are the outputs that its caller is handed."""

    def __init__(self, tokenizer, abort_after=None):
        from vllm.v1.engine.output_processor import OutputProcessor

        self.output_processor, self.abort_after = OutputProcessor(tokenizer, log_stats=False), abort_after
        self.seen = []

    def lines(self, request_id: str):
        """What the engine process sends, one token a step."""
        import numpy as np
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists

        for index, token in enumerate(SCRIPT):
            last = index == len(SCRIPT) - 1
            yield EngineCoreOutput(
                request_id=request_id, new_token_ids=[token], finish_reason=FinishReason.LENGTH if last else None,
                new_logprobs=LogprobsLists(np.array([[token]]), np.array([[-index / 8]]), np.array([1])))

    async def generate(self, prompt, sampling_params, request_id, lora_request=None, priority=0):
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector

        request = EngineCoreRequest(
            request_id=request_id, external_req_id=request_id, prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None, sampling_params=sampling_params, pooling_params=None, arrival_time=0.0, lora_request=None,
            cache_salt=None, data_parallel_rank=None)
        queue = RequestOutputCollector(sampling_params.output_kind, request_id)
        self.output_processor.add_request(request, None, None, 0, queue)
        for index, line in enumerate(self.lines(request_id)):
            if index == self.abort_after:
                self.output_processor.abort_requests([request_id], internal=True)
            else:
                self.output_processor.process_outputs([line])
            output = queue.get_nowait()
            if output is not None:
                self.seen.append((len(output.outputs[0].token_ids), output.outputs[0].text))
                yield output
            if index == self.abort_after:
                return


@pytest.fixture
def server(tokenizer, monkeypatch):
    """server(hooked, **engine) -> verl's server with its real `generate`."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.output_processor import RequestState

    class Trace:
        @staticmethod
        def trace_state(*_, **__):
            import contextlib

            return contextlib.nullcontext()

    names = {"asyncio": asyncio, "Any": Any, "Optional": Optional, "SamplingParams": SamplingParams,
             "TokensPrompt": TokensPrompt, "TokenOutput": SimpleNamespace, "RLInsightLogger": Trace,
             "normalize_token_ids": list, "qwen2_5_vl_dedup_image_tokens": lambda ids, _: ids,
             "extract_prompt_logprobs": lambda **_: None}
    path = patch_tree.source("0.9.1") / patch_tree.SERVER
    lifted = patch_tree.lifted(path, "vLLMHttpServer", ("generate", "_park_until_admitted"), object, names)

    class Config(dict):
        __getattr__ = dict.__getitem__

    def new(hooked=True, **engine):
        server = object.__new__(type("Server", (lifted,), {}))
        if hooked:
            type(server).generate = wrapped(token_outputs, lifted.generate)
            monkeypatch.setattr(RequestState, "make_request_output",
                                wrapped(first_and_last_output, RequestState.make_request_output))
        gate = asyncio.Event()
        gate.set()
        vars(server).update(
            engine=Engine(tokenizer, **engine), _disaggregation_role=None, global_steps=3, lora_as_adapter=False,
            replica_rank=0, _admitting=0,
            _submission_paused=False, _rejecting=False, _resume_event=gate,
            model_config=SimpleNamespace(processor=None),
            config=Config(response_length=64, prompt_length=8, max_model_len=72, full_determinism=False,
                          enable_rollout_routing_replay=False, mtp=None))
        return server

    return new


def ask(server, **parameters):
    parameters = {"logprobs": True, "temperature": 1.0, **parameters}
    return asyncio.run(server.generate(prompt_ids=[1, 2, 3], sampling_params=parameters, request_id="r"))


def test_verl_gets_the_same_tokens_and_log_probs(server):
    plain, ours = ask(server(hooked=False)), ask(server())
    assert list(ours.token_ids) == list(plain.token_ids) == list(SCRIPT)
    assert ours.log_probs == plain.log_probs == [-index / 8 for index in range(len(SCRIPT))]
    assert ours.stop_reason == plain.stop_reason and ours.extra_fields == plain.extra_fields


@pytest.mark.hook("token-outputs", "first-and-last-output")
def test_two_outputs_without_text(server):
    ours = server()
    ask(ours)
    assert ours.engine.seen == [(1, ""), (len(SCRIPT), "")]
    assert ours._admitting == 0


def test_plain_verl_makes_an_output_and_text_for_every_token(server):
    """Negative control."""
    plain = server(hooked=False)
    ask(plain)
    assert [tokens for tokens, _ in plain.engine.seen] == list(range(1, len(SCRIPT) + 1))
    assert all(text for _, text in plain.engine.seen)


@pytest.mark.parametrize("hooked", [False, True])
def test_an_aborted_response_comes_with_its_tokens(server, hooked):
    found = ask(server(hooked=hooked, abort_after=ABORTED_AFTER))
    assert list(found.token_ids) == list(SCRIPT[:ABORTED_AFTER]) and len(found.log_probs) == ABORTED_AFTER
    assert found.stop_reason == "aborted"


@pytest.mark.parametrize("wish", [{"stop": ["never"]}, {"detokenize": True}])
def test_who_reads_text_gets_it(server, wish):
    ours = server()
    ask(ours, **wish)
    assert len(ours.engine.seen) == len(SCRIPT) and ours.engine.seen[-1][1]  # a stop string holds the first back


def test_a_stream_of_deltas_stays_one(server):
    from vllm.sampling_params import RequestOutputKind

    ours = server()
    ask(ours, output_kind=RequestOutputKind.DELTA)
    assert [tokens for tokens, _ in ours.engine.seen] == [1] * len(SCRIPT)


def test_the_callers_parameters_are_left_alone():
    given = {"logprobs": True, "flat_logprobs": False}
    assert token_outputs.without_text(given) == {"logprobs": True, "flat_logprobs": False, "detokenize": False}
    assert given == {"logprobs": True, "flat_logprobs": False}


@pytest.mark.parametrize("number", [0, 5])
def test_prompt_log_probs_are_asked_for_as_verl_asks(number):
    """verl's distillation; 0 is the log-prob of the prompt's own tokens, not none of them."""
    given = {"logprobs": True, "prompt_logprobs": number}
    assert token_outputs.without_text(given) == {"logprobs": True, "prompt_logprobs": number}


def test_the_benchmark_counts_outputs(tokenizer):
    """bench.output_cost at toy size: what it counts, not how long it takes."""
    import random

    from bench import output_cost

    requests, tokens, rounds = 3, 18, 2
    found = asyncio.run(output_cost.compare(requests, tokens, rounds, tokenizer, random.Random(1)))
    assert found["outputs_a_response"] == {"verl": tokens, "verl_again": tokens, "token_outputs": 1}
    assert {len(values) for values in found["us_a_token"].values()} == {rounds}
