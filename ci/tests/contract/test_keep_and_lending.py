"""Kept requests while verl lends the trainer's replicas: its real controller, managers, balancer, client and gate.

Ray's calls are answered in this process, and the engines make a token per step.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from types import SimpleNamespace
from typing import Any, Optional

import pytest

pytest.importorskip("verl")
pytest.importorskip("ray")

from ci.tests.contract import patch_tree  # noqa: E402
from ci.tests.contract.test_kept_requests import METHODS  # noqa: E402
from esgrpo.algo.routing import cheapest_to_move  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl.fixes import resume_without_sleep  # noqa: E402
from esgrpo.hooks.verl.server import control_methods  # noqa: E402
from esgrpo.hooks.verl.sync import kept_requests, lent_replicas, lent_wait, rebalance_moves, standalone_cache  # noqa: E402

STEP_S, LENGTH, PROMPT, REQUESTS = 0.002, 80, 5, 9
CALLS = ("abort_all_requests", "resume_engine_generation", "open_submission_gate", "wait_for_requests_to_drain",
         "sleep", "generate", "esgrpo_hand_back")


def remote(function):
    """`method.remote(...)` as something to await, with a value for `ray.get` at once where it is not async."""
    def call(*args, **kwargs):
        answer = function(*args, **kwargs)
        if inspect.isawaitable(answer):
            return asyncio.ensure_future(answer)
        done = asyncio.get_running_loop().create_future()
        done.set_result(answer)
        return done
    return SimpleNamespace(remote=call)


class Handle:
    def __init__(self, actor, names=None):
        self._actor, self._names = actor, names

    def __getattr__(self, name):
        if self._names is not None and name not in self._names:
            raise AttributeError(name)
        return remote(getattr(self._actor, name))


class Engine:
    """Makes a token per request and step; pauses as vLLM does in both of its modes."""

    def __init__(self):
        self.paused, self.aborts = False, []
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = SimpleNamespace(core_engines=[b"0"], call_utility_async=self.hand_back)

    async def hand_back(self, name, count):
        """The scheduler's answer: these requests are of no group, so that their client has to end them."""
        assert name == "esgrpo_hand_back"
        states = self.output_processor.request_states
        leaving = cheapest_to_move({key: state.prompt_len + len(state.tokens) for key, state in states.items()}, count)
        return len(leaving), leaving

    async def pause_generation(self, *, mode="abort", wait_for_inflight_requests=None, clear_cache=True):
        self.paused = True
        if mode == "abort":
            await self.abort([state.external_req_id for state in self.output_processor.request_states.values()])

    async def resume_generation(self):
        self.paused = False

    async def wait_for_requests_to_drain(self):
        pass

    async def sleep(self, level):
        assert not self.output_processor.request_states

    async def abort(self, ids):
        states = self.output_processor.request_states
        for state in [state for state in states.values() if state.external_req_id in ids]:
            state.aborted = True
            self.aborts.append(state.external_req_id)
            del states[state.request_id]


class State:
    def __init__(self, request_id, prompt_len):
        self.request_id, self.external_req_id, self.prompt_len = f"{request_id}-1a2b", request_id, prompt_len
        self.tokens, self.aborted = [], False


class Generating:
    """verl's server around its gate, the part that asks vLLM."""

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        parked = await self._park_until_admitted(request_id)
        if parked is not None:
            return parked
        state = State(request_id, len(prompt_ids))
        self.engine.output_processor.request_states[state.request_id] = state
        self._admitting -= 1
        self.prefilled.append(len(prompt_ids))
        while len(state.tokens) < sampling_params["max_tokens"]:
            await asyncio.sleep(STEP_S)
            if state.aborted:
                return self.output(state, "aborted")
            if not self.engine.paused:
                state.tokens.append(len(prompt_ids) + len(state.tokens))  # its place in the sequence
        del self.engine.output_processor.request_states[state.request_id]
        return self.output(state, "completed")

    def output(self, state, reason):
        from verl.workers.rollout.replica import TokenOutput

        return TokenOutput(token_ids=list(state.tokens), log_probs=[0.0] * len(state.tokens), stop_reason=reason,
                           extra_fields={"global_steps": self.global_steps})

    async def wait_for_requests_to_drain(self):
        await self.engine.wait_for_requests_to_drain()

    async def _sleep_hybrid(self):
        await self.engine.sleep(level=2)


class Fleet:
    """Two standalone replicas and a hybrid one, as verl sets them up with use_dynamic_resource_scheduling."""

    def __init__(self, hooked: bool):
        from verl.checkpoint_engine.base import CheckpointEngineManager
        from verl.experimental.fully_async_policy import fully_async_rollouter as rollouters
        from verl.experimental.fully_async_policy.dynamic_schedule import dynamic_resource_controller as controllers
        from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
        from verl.workers.rollout.replica import TokenOutput
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        modes = SimpleNamespace(COLOCATED="colocated", HYBRID=SimpleNamespace(name="HYBRID"),
                                STANDALONE=SimpleNamespace(name="STANDALONE"))
        names = {"asyncio": asyncio, "time": time, "logger": logging.getLogger("verl"), "Any": Any,
                 "Optional": Optional, "_GATE_BARRIER_TIMEOUT_S": 1.0, "TokenOutput": TokenOutput, "RolloutMode": modes}
        path = patch_tree.source("0.9.1") / patch_tree.SERVER
        lifted = patch_tree.lifted(path, "vLLMHttpServer", (*METHODS, "sleep"), Generating, names)
        replica_class = patch_tree.lifted(path, "vLLMReplica", ("abort_all_requests", "resume_generation", "sleep"),
                                          object, names)
        kind = type("Server", (lifted,), {"esgrpo_hand_back": control_methods.esgrpo_hand_back})
        if hooked:
            kind.abort_all_requests = wrapped(kept_requests, lifted.abort_all_requests)
        self.replicas = {}
        for name, mode in (("h", modes.HYBRID), ("s0", modes.STANDALONE), ("s1", modes.STANDALONE)):
            server, replica = object.__new__(kind), object.__new__(replica_class)
            vars(server).update(
                node_rank=0, engine=Engine(), rollout_mode=mode, global_steps=0, prefilled=[],
                config=SimpleNamespace(free_cache_engine=True), _submission_paused=False, _rejecting=False,
                _admitting=0, _resume_event=asyncio.Event())
            if hooked:
                launch = wrapped(standalone_cache, self.launched)
                asyncio.get_running_loop().create_task(launch(server))
            handle = Handle(server, CALLS)
            vars(replica).update(server=server, servers=[handle], _server_address=name, _server_handle=handle)
            self.replicas[name] = replica
        standalone = [self.replicas[name] for name in ("s0", "s1")]
        balancer = GlobalRequestLoadBalancer({replica._server_address: replica._server_handle
                                              for replica in standalone})
        self.balancer = balancer
        manager = object.__new__(rollouters.FullyAsyncLLMServerManager)
        vars(manager).update(
            hybrid_replicas={"hybrid_0": self.replicas["h"]}, alive_replicas={}, alive_addresses={},
            rollout_replicas=list(standalone), server_addresses=["s0", "s1"], global_load_balancer=Handle(balancer),
            server_handles=[replica._server_handle for replica in standalone])
        rollouter_class = rollouters.FullyAsyncRollouter.__ray_metadata__.modified_class
        if hooked:
            rollouter_class = type("Rollouter", (rollouter_class,), {
                "rebalance_requests": wrapped(rebalance_moves, rollouter_class.rebalance_requests)})
        self.rollouter = object.__new__(rollouter_class)
        vars(self.rollouter).update(llm_server_manager=manager, max_required_samples=None)
        self.weights, self.hybrids = (object.__new__(CheckpointEngineManager) for _ in range(2))
        self.weights.replicas, self.hybrids.replicas = standalone, [self.replicas["h"]]
        controller_class = controllers.DynamicResourceController
        if hooked:
            controller_class = type("Controller", (controller_class,), {
                "deactivate_hybrid_replicas": wrapped(lent_replicas, controller_class.deactivate_hybrid_replicas)})
        self.controller = controller_class(Handle(self.rollouter), self.hybrids, 2, 1, SimpleNamespace())
        client_class = FullyAsyncLLMServerClient
        if hooked:
            client_class = type("Client", (client_class,), {
                "generate": wrapped(resume_without_sleep, FullyAsyncLLMServerClient.generate)})
        rollout = SimpleNamespace(response_length=LENGTH, name="vllm", full_determinism=False)
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), async_training=SimpleNamespace(
            partial_rollout=True, use_dynamic_resource_scheduling=True))
        self.client = client_class(config, Handle(balancer))

    @staticmethod
    async def launched(server):
        """In the place of launch_server."""

    def start(self, count: int):
        return [asyncio.ensure_future(self.client.generate(
            f"r{number}", prompt_ids=list(range(PROMPT)), sampling_params={"max_tokens": LENGTH}))
            for number in range(count)]

    async def sync(self, version: int):
        """CheckpointEngineManager.update_weights, but for the transfer."""
        await self.weights.abort_replicas()
        for replica in self.weights.replicas:
            replica.server.global_steps = version
        await self.weights.resume_generation_replicas()

    async def lend(self, version: int):
        """What FullyAsyncTrainer._fit_update_weights does when it lends the hybrid replicas."""
        await self.hybrids.abort_replicas()
        self.replicas["h"].server.global_steps = version
        await self.hybrids.resume_generation_replicas()
        await self.controller.activate_hybrid_replicas(version)
        await self.rollouter.rebalance_requests()

    def running(self) -> dict[str, int]:
        return {name: len(replica.server.engine.output_processor.request_states)
                for name, replica in self.replicas.items()}

    def aborted(self) -> dict[str, int]:
        return {name: len(replica.server.engine.aborts) for name, replica in self.replicas.items()}


@pytest.fixture
def scene(monkeypatch):
    """scene(story, hooked): the story with a fleet in a loop, with verl's pauses taken out."""
    import ray

    from esgrpo import engine

    monkeypatch.setattr(ray, "get", lambda reference: reference.result())
    monkeypatch.setattr(engine, "out_of_action", lambda *slugs: "")
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": True, "sync": {"requests": "keep", "kv": "rebuild"}}))
    monkeypatch.setattr(kept_requests, "said", set())

    def run(story, hooked):
        async def whole():
            fleet = Fleet(hooked)
            await asyncio.sleep(0)
            return await story(fleet)

        return asyncio.run(asyncio.wait_for(whole(), 60))

    return run


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(STEP_S)


async def lent_and_taken_back(fleet) -> dict:
    responses = fleet.start(REQUESTS)
    await until(lambda: sum(fleet.running().values()) == REQUESTS)
    await asyncio.sleep(3 * STEP_S)  # some tokens
    await fleet.sync(1)
    at_sync = fleet.aborted()
    await fleet.lend(1)
    at_lending = fleet.aborted()
    await until(lambda: sum(fleet.running().values()) == REQUESTS)
    running = fleet.running()
    await fleet.controller.deactivate_hybrid_replicas(1)
    at_return = fleet.aborted()
    outputs = await asyncio.gather(*responses)
    return {"sync": at_sync, "lending": at_lending, "running": running, "return": at_return,
            "tokens": [output.token_ids for output in outputs], "stops": {output.stop_reason for output in outputs},
            "prefills": sum(len(replica.server.prefilled) for replica in fleet.replicas.values()),
            "in flight": fleet.balancer.get_total_inflight(), "hybrid left": fleet.running()["h"]}


WHOLE = list(range(PROMPT, PROMPT + LENGTH))


@pytest.mark.hook("standalone-cache-stays", "rebalance-moves-the-surplus", "kept-requests")
def test_standalone_replicas_keep_while_the_hybrid_one_aborts(scene, capfd):
    """Nothing is aborted at the sync, only the hybrid's share moves to it and back, and no token is lost."""
    seen = scene(lent_and_taken_back, hooked=True)
    assert seen["sync"] == {"h": 0, "s0": 0, "s1": 0}
    assert seen["lending"]["h"] == 0 and seen["lending"]["s0"] + seen["lending"]["s1"] == REQUESTS // 3
    assert seen["running"] == {"h": 3, "s0": 3, "s1": 3}
    assert seen["return"] == {**seen["lending"], "h": REQUESTS // 3}
    assert seen["tokens"] == [WHOLE] * REQUESTS and seen["stops"] <= {"completed", "length"}
    assert seen["hybrid left"] == seen["in flight"] == 0
    assert f"rebalanced: {REQUESTS // 3} of {REQUESTS} requests go on elsewhere" in capfd.readouterr().err


def test_plain_verl_aborts_all_of_them(scene):
    """Negative control: at the sync, and what is back by then at the rebalance; each response is prefilled again."""
    plain, hooked = (scene(lent_and_taken_back, hooked) for hooked in (False, True))
    assert plain["sync"]["s0"] + plain["sync"]["s1"] == REQUESTS
    assert sum(plain["lending"].values()) >= REQUESTS
    assert plain["tokens"] == hooked["tokens"] == [WHOLE] * REQUESTS  # verl loses none either: it computes them again
    assert plain["prefills"] >= 2 * REQUESTS > hooked["prefills"] == REQUESTS + 2 * (REQUESTS // 3)


async def late(fleet) -> bool:
    """A request takes the hybrid replica from the balancer and arrives there after it went back. Is it parked?"""
    await fleet.lend(1)
    _, server = fleet.balancer.acquire_server("late")
    while server is not fleet.replicas["h"]._server_handle:
        _, server = fleet.balancer.acquire_server(f"late{time.monotonic()}")
    await fleet.controller.deactivate_hybrid_replicas(1)
    assert fleet.controller.hybrid_checkpoint_manager is fleet.hybrids
    arrived = server.generate.remote("late", list(range(PROMPT)), {"max_tokens": LENGTH})
    done, _ = await asyncio.wait([arrived], timeout=20 * STEP_S)
    if not done:
        arrived.cancel()
        return True
    assert (arrived.result().stop_reason, arrived.result().token_ids) == ("aborted", [])
    await fleet.lend(2)  # lent again, it takes requests
    taken = await asyncio.wait_for(server.generate.remote("next", list(range(PROMPT)), {"max_tokens": 2}), 10)
    assert len(taken.token_ids) == 2
    return False


@pytest.mark.hook("lent-replicas-turn-away")
@pytest.mark.parametrize("hooked", [True, False])
def test_a_late_request_is_turned_away(scene, hooked):
    """Without the hook (the negative control) it waits behind the gate until the replica is lent again."""
    assert scene(late, hooked) is (not hooked)


def test_the_cache_of_a_hybrid_replica_is_freed(scene):
    """verl's config classes are frozen, and only the standalone replicas' own copy changes."""
    from verl.workers.config import RolloutConfig

    async def story(fleet):
        found = {}
        for name in ("h", "s0"):
            server = fleet.replicas[name].server
            server.config = RolloutConfig(name="vllm")
            await wrapped(standalone_cache, fleet.launched)(server)
            found[name] = server.config.free_cache_engine
        return found

    assert scene(story, True) == {"h": True, "s0": False}


async def waited(rollouter, running: bool, queue: list[int], count: int):
    """What verl's wait for `count` samples answers, None where it still waits; `queue`: its sizes, the last stays."""
    async def get_queue_size():
        return queue.pop(0) if len(queue) > 1 else queue[0]

    vars(rollouter).update(running=running, message_queue_client=SimpleNamespace(get_queue_size=get_queue_size))
    own = {"poll_interval": STEP_S} if running else {}  # verl's trainer gives none
    waiting = asyncio.ensure_future(rollouter.wait_for_enough_samples(count, **own))
    done, _ = await asyncio.wait([waiting], timeout=50 * STEP_S)
    waiting.cancel()
    return waiting.result() if done else None


@pytest.mark.hook("lent-wait-ends-with-data")
@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("running, queue, answer", [
    (True, [1, 3, 8], 8),  # samples come
    (True, [3], None),  # they may still come: nobody may stop this wait
    (False, [9], 9),  # enough of them, and the end
    (False, [1], 1)])  # the end alone: without the hook (the negative control) the trainer waits forever
def test_the_wait_for_samples_ends_with_the_data(hooked, running, queue, answer):
    from verl.experimental.fully_async_policy import fully_async_rollouter as rollouters

    plain = rollouters.FullyAsyncRollouter.__ray_metadata__.modified_class
    kind = type("Rollouter", (plain,), {"wait_for_enough_samples": wrapped(lent_wait, plain.wait_for_enough_samples)
                                        if hooked else plain.wait_for_enough_samples})
    found = asyncio.run(waited(object.__new__(kind), running, list(queue), 8))
    assert found == (None if queue == [1] and not hooked else answer)
