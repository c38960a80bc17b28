"""Order of prompts, classes, the share of tail replicas, the choice of one, and the asyncio queue over the order."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from esgrpo import config, records
from esgrpo.algo import routing
from esgrpo.algo.routing import BODY, SHORT, TAIL, ClassLoad, PromptQueue, TailShare, choose_replica
from esgrpo.hooks.verl.metrics import routing_metrics
from esgrpo.hooks.verl.prompts import prompt_queue
from esgrpo.hooks.verl.prompts.prompt_queue import OrderedQueue
from esgrpo.hooks.verl.server import tail_router


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


# ---- order

def popped(queue):
    return [queue.pop() for _ in range(len(queue))]


def test_what_left_by_age_does_not_pile_up():
    """A stream of long prompts: the short ones go when they are old, and what is left of them lies deep in the heap."""
    queue, rng = PromptQueue(ageing=64), random.Random(1)
    for _ in range(128):
        queue.push(None, rng.random())
    for _ in range(20_000):
        queue.pop()
        queue.push(None, rng.random())
    assert len(queue) == 128 and len(queue._longest) < 3 * 128



def test_longest_first_and_equals_in_order():
    queue = PromptQueue(ageing=100)
    for name, tokens in (("a", 5), ("b", 9), ("c", 5), ("d", 9), ("e", 1)):
        queue.push(name, tokens)
    assert popped(queue) == ["b", "d", "a", "c", "e"]
    assert queue.take_counts() == {"pops": 5, "choices": 4, "inversions": 2, "overtakes": 3}
    assert queue.take_counts() == {"pops": 0, "choices": 0, "inversions": 0, "overtakes": 0}
    with pytest.raises(IndexError):
        queue.pop()


def test_a_short_prompt_among_ever_longer_ones_goes_after_ageing():
    queue = PromptQueue(ageing=3)
    queue.push("short", 1)
    order = []
    for number in range(6):
        queue.push(number, 100 + number)
        order.append(queue.pop())
    assert order == [0, 1, 2, "short", 4, 5]


def test_fifo_without_lengths():
    queue = PromptQueue(ageing=3, by_length=False)
    for number in range(9):
        queue.push(number, random.random())
    assert popped(queue) == list(range(9)) and queue.overtakes == 0


def test_classes():
    assert [routing.length_class(t, (10, 20)) for t in (9, 10, 20, 21)] == [SHORT, BODY, BODY, TAIL]


# ---- share

def settled(share, clock, pool, tail, bulk, periods=40):
    answers = []
    for _ in range(periods):
        answers.append(share.observe(pool, tail, bulk))
        clock.now += share.period
    return answers


@pytest.mark.parametrize("pool, tail, bulk, wanted", [
    (8, 0, 100, 0), (8, 10, 70, 1), (8, 25, 75, 2), (8, 60, 40, 4), (8, 100, 0, 4), (2, 10, 90, 1), (1, 50, 50, 0),
    (0, 0, 0, 0), (8, 0, 0, 0)])
def test_the_share_follows_the_load_up_to_its_bound(pool, tail, bulk, wanted):
    clock = Clock()
    answers = settled(TailShare(0.5, clock), clock, pool, tail, bulk)
    assert answers[-1] == wanted
    assert all(abs(a - b) <= 1 for a, b in zip(answers, answers[1:], strict=False))


def test_a_share_of_zero_switches_it_off():
    clock = Clock()
    assert set(settled(TailShare(0.0, clock), clock, 8, 90, 10)) == {0}


def test_the_share_shrinks_with_the_pool_at_once_and_with_the_load_slowly():
    clock = Clock()
    share = TailShare(0.5, clock)
    assert settled(share, clock, 8, 60, 40)[-1] == 4
    assert share.observe(4, 60, 40) == 2 and share.observe(1, 60, 40) == 0
    assert settled(share, clock, 8, 60, 40)[-1] == 4
    down = settled(share, clock, 8, 0, 100)
    assert down[-1] == 0 and down[1] == 4


def test_a_share_between_two_values_does_not_flap():
    clock, rng = Clock(), random.Random(0)
    share = TailShare(0.9, clock)
    answers = []
    for _ in range(400):
        answers += settled(share, clock, 8, 25 + rng.choice([-1, 0, 1]), 75, 1)
    assert len(set(answers[50:])) == 1


def test_the_last_tail_replica_goes_only_where_there_is_next_to_no_tail():
    """Between half the dead band and all of it: who has one keeps it, who has none gets none."""
    clock = Clock()
    share, other = TailShare(0.5, clock), TailShare(0.5, clock)
    assert settled(share, clock, 8, 1, 99, 40)[-1] == 0  # 0.08 replicas
    assert settled(other, clock, 8, 3, 97, 40)[-1] == 1
    assert set(settled(other, clock, 8, 1, 99, 40)) == {1}
    assert settled(other, clock, 8, 0, 100, 40)[-1] == 0


def test_never_all_replicas_serve_the_tail():
    clock = Clock()
    assert settled(TailShare(1.0, clock), clock, 4, 100, 0, 40)[-1] == 3


# ---- choice

LOAD = {"a": 2, "b": 6, "c": 7, "d": 7}
POOL_TAIL = frozenset("a")


@pytest.mark.parametrize("length, load, sticky, wanted", [
    (TAIL, LOAD, None, "a"), (TAIL, LOAD, "b", "a"), (TAIL, LOAD | {"a": 6}, "b", "b"), (TAIL, LOAD, "a", "a"),
    (TAIL, LOAD | {"a": 9}, None, "b"), (BODY, LOAD, None, "b"), (SHORT, LOAD | {"a": 1}, None, "a"),
    (BODY, LOAD, "a", "a"), (BODY, LOAD, "d", "d"), (TAIL, LOAD, "gone", "a"), (BODY, LOAD, "gone", "b"),
    (TAIL, {"a": 3}, None, "a"), (BODY, {"a": 3}, None, "a")])
def test_the_replica_of_a_request(length, load, sticky, wanted):
    assert choose_replica(length, load, POOL_TAIL, random.Random(0), sticky) == wanted


def test_without_tail_replicas_it_is_verls_rule():
    assert choose_replica(TAIL, LOAD, frozenset(), random.Random(0)) == "a"
    assert choose_replica(TAIL, LOAD, frozenset(), random.Random(0), "c") == "c"
    assert choose_replica(BODY, LOAD, frozenset(["gone"]), random.Random(0)) == "a"
    with pytest.raises(ValueError, match="no replica"):
        choose_replica(BODY, {}, frozenset(), random.Random(0))
    seeds = {choose_replica(BODY, {"a": 1, "b": 1}, frozenset(), random.Random(seed)) for seed in range(20)}
    assert seeds == {"a", "b"}


def test_a_tail_set_grows_and_shrinks_at_one_end():
    sets = [routing.tail_set(["r2", "r0", "r1"], count) for count in range(4)]
    assert sets == [frozenset(), {"r0"}, {"r0", "r1"}, {"r0", "r1", "r2"}]


def test_load_per_class_is_a_mean_over_time():
    clock = Clock()
    load = ClassLoad(clock)
    load.start("x", TAIL, True, True)
    load.start("y", BODY, True, False)
    clock.now = 2.0
    load.end("y")
    load.end("y")
    load.end("never")
    clock.now = 4.0
    assert load.take_metrics() == {"in_flight/short": 0, "in_flight/body": 0.5, "in_flight/tail": 1, "moves": 1,
                                   "spills": 1}
    assert load.take_metrics()["in_flight/tail"] == 0  # no time has passed
    load.start("x", SHORT, False, False)  # again without an end: counted once, in its new class
    assert load.in_flight == {SHORT: 1, BODY: 0, TAIL: 0} and load.tail_and_rest() == (0, 1)


# ---- the queue that the rollouter gets

def ordered(bound=4, **settings):
    limit = SimpleNamespace(value=bound)
    queue = OrderedQueue(PromptQueue(settings.pop("ageing", 100)), lambda item: item, lambda: limit.value)
    return queue, limit


def test_the_end_signal_leaves_last_and_join_sees_every_item():
    async def scene():
        queue, _ = ordered(bound=9)
        for item in (3, None, 8, 5):
            await queue.put(item)
        assert queue.qsize() == 4 and not queue.empty() and queue.maxsize == 9
        joined = asyncio.ensure_future(queue.join())
        got = []
        while got[-1:] != [None]:
            assert not joined.done()
            got.append(await queue.get())
            queue.task_done()
            await asyncio.sleep(0)
        await joined
        assert got == [8, 5, 3, None] and queue.empty()
        with pytest.raises(asyncio.QueueEmpty):
            queue.get_nowait()

    asyncio.run(scene())


def test_put_waits_for_room_also_when_the_bound_changes():
    async def scene():
        queue, limit = ordered(bound=1)
        await queue.put(1)
        waiting = asyncio.ensure_future(queue.put(2))
        await asyncio.sleep(0)
        assert not waiting.done() and queue.full()
        with pytest.raises(asyncio.QueueFull):
            queue.put_nowait(3)
        assert await queue.get() == 1
        await waiting
        limit.value = 3
        await asyncio.wait_for(queue.put(9), 1)
        assert [await queue.get(), await queue.get()] == [9, 2]

    asyncio.run(scene())


def test_a_cancelled_put_or_get_loses_nothing():
    async def scene():
        queue, _ = ordered(bound=1)
        getter = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        getter.cancel()
        await asyncio.sleep(0)
        await queue.put(1)
        putter = asyncio.ensure_future(queue.put(2))
        await asyncio.sleep(0)
        putter.cancel()
        await asyncio.sleep(0)
        assert await queue.get() == 1 and queue.empty()

    asyncio.run(scene())


@pytest.mark.parametrize("lookahead, concurrent, wanted", [(0, None, 128), (0, 32, 32), (5, 32, 5), (0, 0, 128)])
def test_the_bound_is_what_runs_at_once(monkeypatch, lookahead, concurrent, wanted):
    monkeypatch.setenv(config.ENV_SEGMENT, f'{{"routing": {{"lookahead": {lookahead}}}}}')
    rollouter = SimpleNamespace(pending_queue=asyncio.Queue(maxsize=128), max_concurrent_samples=concurrent)
    assert prompt_queue.queue_for(rollouter).maxsize == wanted


# ---- the router's surroundings

@pytest.mark.parametrize("parameters, wanted", [
    (None, BODY), ({}, BODY), ({"extra_args": None}, BODY), ({"extra_args": {"segment": {}}}, BODY),
    ({"extra_args": {"segment": {"length_class": None}}}, BODY),
    ({"extra_args": {"segment": {"length_class": "huge"}}}, BODY),
    ({"extra_args": {"segment": {"length_class": "tail"}}}, TAIL)])
def test_the_class_of_a_request(parameters, wanted):
    assert tail_router.class_of(parameters) == wanted


def test_one_replica_is_said_and_left_alone(capsys):
    class Base:
        def __init__(self, servers):
            self._inflight_requests, self._request_id_to_server = dict.fromkeys(servers, 0), {}

    tail_router.router_class.__wrapped__(Base)({"only": 1}, {"tail_share": 0.5})
    assert capsys.readouterr().err.count("\n") == 1
    tail_router.router_class.__wrapped__(Base)({"one": 1, "two": 2})
    tail_router.router_class.__wrapped__(Base)({})
    assert capsys.readouterr().err == ""


def test_metrics_at_a_weight_version(monkeypatch, tmp_path):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setenv(config.ENV_SEGMENT, '{"enable": true, "history": {"enable": true}}')

    class Remote:
        async def remote(self):
            return {"moves": 2}

    queue, _ = ordered()
    balancer = SimpleNamespace(esgrpo_take_metrics=Remote())
    rollouter = SimpleNamespace(pending_queue=queue, llm_server_manager=SimpleNamespace(global_load_balancer=balancer))

    def found(features):
        monkeypatch.setenv(config.ENV_FEATURES, features)
        return asyncio.run(routing_metrics.at_weight_version(rollouter))

    assert found("observe,history,routing") == {
        "esgrpo/history/prompts": 0, "esgrpo/routing/pops": 0, "esgrpo/routing/choices": 0,
        "esgrpo/routing/inversions": 0, "esgrpo/routing/overtakes": 0, "esgrpo/routing/moves": 2}
    assert records.flush() and (tmp_path / "esgrpo" / "history.json").is_file()
    rollouter.pending_queue = asyncio.Queue()
    assert found("observe") == {}
