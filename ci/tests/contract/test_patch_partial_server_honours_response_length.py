"""verl v0.7.0, partial rollout: a response is decoded up to its budget, cancelled and resumed or not."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from ci.tests.contract import patched

SLUG = "partial-server-honours-response-length"
RECIPE = "recipe/fully_async_policy"
SERVER = f"{RECIPE}/vllm_rollout/vllm_async_server.py"
SINGLE = f"{RECIPE}/agent_loop/partial_single_turn_agent_loop.py"
TOOL = f"{RECIPE}/agent_loop/partial_tool_agent_loop.py"
PROMPT = [1, 2, 3]
RESPONSE_LENGTH, MAX_MODEL_LEN = 10, 64
END = 0


class Engine:
    """Counts the tokens it decodes; every step gives one, and never the end-of-sequence token by itself."""

    def __init__(self):
        self.decoded, self.params = 0, []
        self.cancel_after, self.cancel = None, None

    async def generate(self, prompt, sampling_params, request_id):
        self.params.append(sampling_params)
        tokens = []
        while len(tokens) < sampling_params.max_tokens:
            tokens.append(100 + self.decoded)
            self.decoded += 1
            output = SimpleNamespace(token_ids=list(tokens), logprobs=[{t: SimpleNamespace(logprob=-1.0)}
                                                                       for t in tokens])
            yield SimpleNamespace(outputs=[output])
            await asyncio.sleep(0)
            if self.cancel and self.decoded == self.cancel_after:
                await self.cancel()
                await asyncio.sleep(1)  # the task is cancelled here


class Base:
    def __init__(self, *_args, **_kwargs):
        pass


@pytest.fixture(params=[True, False], ids=["patched", "pristine"])
def is_patched(request):
    return request.param


@pytest.fixture
def recipe(is_patched, tmp_path):
    slugs = [SLUG] if is_patched else []
    return patched.tree("verl", "v0.7.0", slugs, tmp_path, also=(SERVER, SINGLE, TOOL))


@pytest.fixture
def server(recipe):
    """The real server class around a scripted engine."""

    def sampling_params(max_tokens, **others):
        if max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        return SimpleNamespace(max_tokens=max_tokens, **others)

    module = patched.load(recipe / SERVER, "server", {
        "ray": patched.Upstream(remote=patched.identity_decorator), "ray.actor": patched.Upstream(),
        "vllm": patched.Upstream(SamplingParams=sampling_params), "vllm.outputs": patched.Upstream(),
        "vllm.inputs": patched.Upstream(TokensPrompt=dict), "verl.workers.config": patched.Upstream(),
        "verl.workers.rollout.replica": patched.Upstream(),
        "verl.workers.rollout.vllm_rollout.vllm_async_server": patched.Upstream(
            vLLMHttpServerBase=Base, vLLMReplica=Base, _qwen2_5_vl_dedup_image_tokens=lambda ids, _processor: ids)})
    server = module.vLLMHttpServerForPartial(*[None] * 8)
    server.config = patched.Upstream(max_model_len=MAX_MODEL_LEN, response_length=RESPONSE_LENGTH,
                                     get=lambda _key, default: default)
    server.model_config = SimpleNamespace(processor=None)
    server.engine = Engine()
    server.engine.cancel = server.cancel
    return server


class Tokenizer:
    def apply_chat_template(self, *_args, **_kwargs):
        return list(PROMPT)


@pytest.fixture
def single_turn(recipe, server):
    """Runs the real agent loop until the sample is whole; returns its output and the number of attempts."""
    module = patched.load(recipe / SINGLE, "single", {
        "verl.experimental.agent_loop": patched.Upstream(AgentLoopBase=Base),
        "verl.experimental.agent_loop.agent_loop": patched.Upstream(
            AgentLoopOutput=SimpleNamespace, register=patched.identity_decorator),
        "verl.utils.profiler": patched.Upstream(simple_timer=lambda *_a: contextlib.nullcontext())})

    async def run(**sampling_params):
        loop = module.PartialSingleTurnAgentLoop.__new__(module.PartialSingleTurnAgentLoop)
        loop.response_length, loop.apply_chat_template_kwargs = RESPONSE_LENGTH, {}
        loop.processor, loop.tokenizer, loop.loop = None, Tokenizer(), asyncio.get_running_loop()
        loop.server_manager = SimpleNamespace(generate_for_partial=lambda request_id, **kwargs: (
            server.generate_for_partial(request_id=request_id, **kwargs)))
        output, attempts = None, 0
        while output is None or output.extra_fields["is_cancel"]:
            await server.resume()
            output = await loop.run(dict(sampling_params), raw_prompt=[], output=output)
            output.metrics = SimpleNamespace(generate_sequences=0.0)
            attempts += 1
        return output, attempts

    return run


def test_the_server_stops_at_the_budget(server, is_patched):
    tokens, logprobs, is_cancel = asyncio.run(server.generate_for_partial(list(PROMPT), {"top_p": 1.0}, "r"))
    assert len(tokens) == len(logprobs) == (RESPONSE_LENGTH if is_patched else MAX_MODEL_LEN - len(PROMPT))
    assert not is_cancel and server.engine.params[0].top_p == 1.0


@pytest.mark.parametrize("asked, given", [(4, 4), (RESPONSE_LENGTH + 1, RESPONSE_LENGTH + 1), (10**6, None)])
def test_the_server_honours_max_tokens_of_the_caller(server, is_patched, asked, given):
    call = server.generate_for_partial(list(PROMPT), {"max_tokens": asked}, "r")
    if not is_patched:
        with pytest.raises(TypeError, match="max_tokens"):
            asyncio.run(call)
        return
    assert len(asyncio.run(call)[0]) == (given or MAX_MODEL_LEN - len(PROMPT))


def test_a_long_prompt_leaves_less_than_the_budget(server, is_patched):
    prompt = [1] * (MAX_MODEL_LEN - 2)
    assert len(asyncio.run(server.generate_for_partial(prompt, {}, "r"))[0]) == 2


@pytest.mark.parametrize("cancel_after", [None, 1, RESPONSE_LENGTH // 2, RESPONSE_LENGTH - 1])
def test_a_resumed_sample_decodes_its_budget_once(server, single_turn, is_patched, cancel_after):
    server.engine.cancel_after = cancel_after
    output, attempts = asyncio.run(single_turn(temperature=1.0))
    assert attempts == (1 if cancel_after is None else 2)
    assert len(output.response_ids) == len(output.response_logprobs) == RESPONSE_LENGTH
    assert output.response_ids == list(range(100, 100 + RESPONSE_LENGTH))  # no token twice, none lost
    if is_patched:
        assert server.engine.decoded == RESPONSE_LENGTH
    else:  # what the patch saves
        assert server.engine.decoded >= MAX_MODEL_LEN - len(PROMPT) - RESPONSE_LENGTH


@pytest.mark.parametrize("generated", [0, 3, RESPONSE_LENGTH - 1])
def test_the_tool_loop_asks_for_what_is_left(recipe, is_patched, generated):
    module = patched.load(recipe / TOOL, "tool", {
        "verl.experimental.agent_loop.agent_loop": patched.Upstream(register=patched.identity_decorator),
        "verl.experimental.agent_loop.tool_agent_loop": patched.Upstream(
            ToolAgentLoop=Base, AgentState=SimpleNamespace(TERMINATED="over", GENERATING="go on")),
        "verl.utils.profiler": patched.Upstream(simple_timer=lambda *_a: contextlib.nullcontext())})
    asked = []

    async def generate_for_partial(sampling_params, **_others):
        asked.append(sampling_params)
        return [7], [-1.0], True

    loop = module.AsyncPartialToolAgentLoop.__new__(module.AsyncPartialToolAgentLoop)
    loop.enable_partial_rollout, loop.response_length = True, RESPONSE_LENGTH
    loop.server_manager = SimpleNamespace(generate_for_partial=generate_for_partial)
    data = SimpleNamespace(request_id="r", prompt_ids=[1] * (3 + generated), image_data=None, assistant_turns=0,
                           response_mask=[1] * generated, response_logprobs=[], metrics={})
    given = {"top_p": 1.0}
    state = asyncio.run(loop._handle_generating_state_partial(data, given))
    assert state == ("over" if generated == RESPONSE_LENGTH - 1 else "go on") and given == {"top_p": 1.0}
    left = {"max_tokens": RESPONSE_LENGTH - generated} if is_patched else {}
    assert asked == [{"top_p": 1.0, **left}]
