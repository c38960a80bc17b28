"""Weight sync on verl's real server methods, lifted out of their module, with a fake of vLLM's engine."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import pytest

from ci.tests.contract import patch_tree
from esgrpo.call import wrapped
from esgrpo.hooks.verl.sync import kept_requests

METHODS = ("abort_all_requests", "resume_generation", "resume_engine_generation", "open_submission_gate",
           "_park_until_admitted", "release_kv_cache", "resume_kv_cache")


class Engine:
    """Records what reaches vLLM."""

    def __init__(self):
        self.calls = []
        self.output_processor = SimpleNamespace(request_states={"a": 1, "b": 2})
        self.engine_core = SimpleNamespace(core_engines=[b"0"])

    async def pause_generation(self, *, mode="abort", wait_for_inflight_requests=None, clear_cache=True):
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self):
        self.calls.append(("resume",))

    async def sleep(self, level):
        self.calls.append(("sleep", level))


class OldEngine(Engine):
    async def pause_generation(self, *, wait_for_inflight_requests=False, clear_cache=True):
        self.calls.append(("pause", "abort", clear_cache))


@pytest.fixture(scope="module")
def server_class():
    names = {"asyncio": asyncio, "time": time, "logger": logging.getLogger("verl"), "Any": Any, "Optional": Optional,
             "_GATE_BARRIER_TIMEOUT_S": 0.05, "TokenOutput": SimpleNamespace,
             "RolloutMode": SimpleNamespace(COLOCATED="colocated")}
    path = patch_tree.source("0.9.1") / patch_tree.SERVER
    return patch_tree.lifted(path, "vLLMHttpServer", METHODS, object, names)


@pytest.fixture
def make(server_class, monkeypatch):
    """make(kv, hooked, **changes) -> a server of which requests can be kept, but for `changes`."""
    block_pool = ModuleType("vllm.v1.core.block_pool")
    block_pool.BlockPool = type("BlockPool", (), {"evict_blocks": None})
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, block_pool.__name__, block_pool)
    monkeypatch.setattr(kept_requests, "said", set())

    def new(kv="keep", hooked=True, **changes):
        monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": True, "sync": {"requests": "keep", "kv": kv}}))
        server = object.__new__(type("Server", (server_class,), {}))
        if hooked:
            type(server).abort_all_requests = wrapped(kept_requests, server_class.abort_all_requests)
        vars(server).update(node_rank=0, engine=Engine(), config=SimpleNamespace(free_cache_engine=False),
                            rollout_mode=SimpleNamespace(name="STANDALONE"), global_steps=3, _submission_paused=False,
                            _rejecting=False, _admitting=0, _resume_event=asyncio.Event(), **changes)
        server._resume_event.set()  # verl's gate is open at first
        return server

    new.block_pool = block_pool.BlockPool
    return new


async def sync(server) -> dict:
    """What CheckpointEngineManager.update_weights does with one server."""
    result = await server.abort_all_requests(reject_request=False)
    await server.release_kv_cache()
    await server.resume_kv_cache()
    await server.resume_engine_generation()
    await server.open_submission_gate()
    return result


@pytest.mark.hook("kept-requests")
@pytest.mark.parametrize("kv, clear", [("keep", False), ("rebuild", True)])
def test_requests_stay_in_the_engine(make, kv, clear, capsys):
    server = make(kv)
    assert asyncio.run(sync(server)) == {"aborted_count": 0, "request_ids": [], "kept_count": 2}
    assert server.engine.calls == [("pause", "keep", clear), ("resume",)]
    assert capsys.readouterr().err == ""


def test_plain_verl_aborts(make):
    """Negative control."""
    server = make(hooked=False)
    assert asyncio.run(sync(server))["aborted_count"] == 2
    assert server.engine.calls == [("pause", "abort", True), ("resume",)]


def test_the_gate_parks_what_comes_meanwhile(make):
    server = make()

    async def scene():
        await server.abort_all_requests()
        arrival = asyncio.create_task(server._park_until_admitted("late"))
        await asyncio.sleep(0.01)
        parked = not arrival.done()
        await server.resume_generation()
        return parked, await arrival, server._admitting

    assert asyncio.run(scene()) == (True, None, 1)


def test_nobody_waits_for_first_tokens(make):
    """verl waits for admitted requests that queue in the engine, up to a minute; kept ones need no cover."""
    waits = {}
    for hooked in (False, True):
        server = make(hooked=hooked)
        server._admitting = 1
        begin = time.monotonic()
        asyncio.run(sync(server))
        waits[hooked] = time.monotonic() - begin
    assert waits[False] >= 0.05 > waits[True]


@pytest.mark.parametrize("change, said", [
    (lambda s: vars(s).update(rollout_mode=SimpleNamespace(name="HYBRID")), "the replica is hybrid"),
    (lambda s: vars(s).update(rollout_mode=SimpleNamespace(name="COLOCATED")), "the replica is colocated"),
    (lambda s: vars(s.config).update(free_cache_engine=True), "free_cache_engine=True frees the KV cache"),
    (lambda s: vars(s).update(engine=OldEngine()), "no pause_generation(mode=\"keep\")"),
    (lambda s: vars(s.engine.engine_core).update(core_engines=[b"0", b"1"]), "several data-parallel engines"),
    (lambda s: vars(s.engine).update(vllm_config=SimpleNamespace(kv_transfer_config=1)), "KV is transferred"),
])
def test_elsewhere_verl_aborts_and_one_line_says_why(make, capsys, change, said):
    server = make()
    change(server)
    for _ in range(2):
        assert asyncio.run(server.abort_all_requests())["aborted_count"] == 2
    assert server.engine.calls == [("pause", "abort", True)] * 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]


def test_a_client_that_does_not_name_its_engines_has_one(make):
    for core in (SimpleNamespace(), SimpleNamespace(core_engines=None)):
        server = make()
        server.engine.engine_core = core
        assert asyncio.run(server.abort_all_requests())["kept_count"] == 2


def test_old_blocks_must_leave_the_prefix_cache(make, capsys):
    del make.block_pool.evict_blocks
    for kv, mode in (("keep", "abort"), ("rebuild", "keep")):
        server = make(kv)
        asyncio.run(server.abort_all_requests())
        assert server.engine.calls == [("pause", mode, True)]


def test_a_replica_that_leaves_rotation_hands_its_requests_back(make):
    server = make()
    assert asyncio.run(server.abort_all_requests(reject_request=True))["aborted_count"] == 2
    assert server._rejecting


def test_a_headless_node_has_nothing_to_keep(make):
    server = make()
    server.node_rank, server.engine = 1, None
    assert asyncio.run(server.abort_all_requests()) == {"aborted_count": 0, "request_ids": []}
