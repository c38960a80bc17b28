"""An interrupted response goes on at once, without spinning at a server that rejects and without crowding an engine
that drains; plain verl sleeps a second each time."""

import asyncio
import contextlib
import logging
import time
from types import SimpleNamespace

import pytest

from ci.tests.contract import patch_scenarios as scenarios
from ci.tests.contract import patch_tree
from ci.tests.contract.test_patch_resume_keeps_response_budget import token_output

SLUG = "resume-without-sleep"
VERSIONS = ("0.9.0", "0.9.1")
REJECTIONS = 30
SHORT = 0.05  # seconds; far from the second that is waited at most


class Concatenate:
    concatenate = staticmethod(lambda parts: sum(parts, []))


def client_class(version, directory, slugs):
    tree = patch_tree.tree(version, directory, slugs)
    sleeps = []
    names = {"TokenOutput": token_output, "normalize_token_ids": list, "np": Concatenate,
             "asyncio": scenarios.recording_asyncio(sleeps)}
    return patch_tree.lifted(tree / patch_tree.CLIENT[version], "FullyAsyncLLMServerClient", ("generate",),
                             scenarios.Attempts, names), sleeps


plain, patched = patch_tree.fixtures(SLUG, VERSIONS, client_class)


@pytest.fixture
def plain_twin(patched, request, tmp_path_factory):
    """Plain verl of the release that `patched` is made of."""
    return client_class(request.node.callspec.params["patched"][0], tmp_path_factory.mktemp("plain"), ())


def run(client, script, **options):
    client_class, sleeps = client
    seen = scenarios.resume(client_class, script, sleeps=sleeps, **options)
    return {**seen, "sleeps": list(sleeps)}


def test_plain_verl_sleeps_a_second(plain):
    assert run(plain, (4, 3))["sleeps"] == [1, 1]


def test_an_attempt_with_tokens_is_resumed_at_once(patched, plain_twin):
    seen, before = run(patched, (4, 3)), run(plain_twin, (4, 3))
    assert sum(seen["sleeps"]) == 0
    assert {**seen, "sleeps": 0} == {**before, "sleeps": 0}  # the same response otherwise


def test_a_rejecting_server_is_not_pestered(patched):
    """Bounded from both sides: seldom asked, and asked soon again after it accepts."""
    sleeps = run(patched, (4, *[-1] * REJECTIONS))["sleeps"]
    assert sleeps[0] == 0 and 0 < sleeps[1] <= 0.01 and sleeps[-1] == 1 == max(sleeps)
    assert sleeps[1:] == sorted(sleeps[1:]) and sum(sleeps) > REJECTIONS - 8


def test_progress_starts_the_waits_again(patched):
    sleeps = run(patched, (1, -1, -1, 2, -1))["sleeps"]
    assert sleeps[0] == sleeps[3] == 0 and sleeps[1] == sleeps[4] < sleeps[2]


@pytest.mark.parametrize("why", ["use_dynamic_resource_scheduling", "use_trainer_do_validate"])
def test_where_replicas_leave_the_load_balancer_the_second_stays(patched, why):
    assert run(patched, (4, -1, 3), **{why: True})["sleeps"] == [1, 1, 1]


# verl 0.9.0 has no gate of its own: the server side of the patch

SERVER_METHODS = ("generate", "abort_all_requests", "resume_generation")


@pytest.fixture(params=["plain", "alone", "series"])
def server_class(request, tmp_path):
    slugs = {"plain": (), "alone": (SLUG,), "series": patch_tree.series("0.9.0")}[request.param]
    tree = patch_tree.tree("0.9.0", tmp_path, slugs)
    import inspect

    names = {"logger": logging.getLogger("verl"), "inspect": inspect, "asyncio": asyncio, "TokenOutput": token_output,
             "normalize_token_ids": list, "SamplingParams": lambda **fields: SimpleNamespace(**fields),
             "qwen2_5_vl_dedup_image_tokens": lambda ids, _: ids, "TokensPrompt": dict,
             "RLInsightLogger": SimpleNamespace(trace_state=lambda *a, **k: contextlib.nullcontext())}
    methods = SERVER_METHODS if request.param == "plain" else (*SERVER_METHODS, "_wait_until_resumed")
    lifted = patch_tree.lifted(tree / patch_tree.SERVER, "vLLMHttpServer", methods, object, names)
    lifted.holds = request.param != "plain"
    return lifted


class Config(SimpleNamespace):
    def get(self, name, default):
        return default


def serving(server_class):
    """A server whose engine notes when a request reaches it, and then ends."""
    engine = scenarios.Engine()
    server = scenarios.server(server_class, engine)
    server._resumed.set()
    server._disaggregation_role, server.lora_as_adapter, server.replica_rank = "null", False, 0
    server.model_config = SimpleNamespace(processor=None)
    server.config = Config(max_model_len=64, response_length=10, prompt_length=10, full_determinism=False)
    engine.reached = []

    async def generate(**request):
        engine.reached.append(time.monotonic())
        yield SimpleNamespace(outputs=[])

    engine.generate = generate
    return server, engine


def ask(server):
    return asyncio.create_task(server.generate([1, 2], {"max_tokens": 4}, "id"))


def test_a_paused_server_holds_what_is_resumed(server_class):
    async def scene():
        server, engine = serving(server_class)
        await server.abort_all_requests()
        task = ask(server)
        await asyncio.sleep(SHORT)
        early = len(engine.reached)
        await server.resume_generation()
        await task
        return early, len(engine.reached)

    assert asyncio.run(scene()) == (0 if server_class.holds else 1, 1)


def test_a_running_server_and_one_that_never_resumes_hold_nobody_long(server_class):
    async def scene():
        server, engine = serving(server_class)
        started = time.monotonic()
        await ask(server)
        await server.abort_all_requests()
        await ask(server)  # a replica that left the rotation: the engine takes over after the second
        return [reached - started for reached in engine.reached]

    first, second = asyncio.run(scene())
    assert first < SHORT and (0.9 < second < 3 if server_class.holds else second < SHORT)
