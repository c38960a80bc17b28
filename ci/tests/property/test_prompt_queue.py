"""Order, queue and router as state machines: nothing lost, nothing twice, nobody starves, loads never negative."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from esgrpo.algo.routing import CLASSES, TAIL, ClassLoad, PromptQueue, TailShare, choose_replica, tail_set
from esgrpo.hooks.verl.prompts.prompt_queue import OrderedQueue

AGEING = 3


class Order(RuleBasedStateMachine):
    """Against a list of (arrival, tokens) and the arrivals that went before each."""

    queue_class, ageing = PromptQueue, AGEING

    def __init__(self):
        super().__init__()
        self.queue = self.queue_class(self.ageing)
        self.waiting: dict[int, float] = {}
        self.overtaken: dict[int, int] = {}
        self.count = self.total = 0

    @rule(tokens=st.integers(0, 4))
    def push(self, tokens):
        self.queue.push(self.count, tokens)
        self.waiting[self.count], self.overtaken[self.count] = tokens, 0
        self.count += 1

    @precondition(lambda self: self.waiting)
    @rule()
    def pop(self):
        item = self.queue.pop()
        tokens = self.waiting.pop(item)  # KeyError: twice, or never pushed
        older = [other for other in self.waiting if other < item]
        for other in older:
            self.overtaken[other] += 1
            assert self.overtaken[other] <= AGEING
            assert self.waiting[other] < tokens  # overtaken by longer ones only: equals leave in order
        self.total += len(older)
        starved = self.overtaken[item] >= AGEING
        assert starved or all(tokens >= other for other in self.waiting.values()) or not older

    @invariant()
    def nothing_is_lost(self):
        assert len(self.queue) == len(self.waiting) and self.queue.overtakes == self.total


def test_the_order():
    run_state_machine_as_test(Order)


def test_the_machine_notices_starving_loss_and_unfairness():
    """Negative controls: three broken queues."""
    class Starving(PromptQueue):
        def __init__(self, ageing):
            super().__init__(ageing * 1000)

    class Lossy(PromptQueue):
        def push(self, item, tokens):
            if item % 7 != 6:
                super().push(item, tokens)

    class Unfair(PromptQueue):
        def push(self, item, tokens):
            super().push(item, -tokens)

    for broken in (Starving, Lossy, Unfair):
        machine = type("Broken", (Order,), {"queue_class": broken})
        with pytest.raises((AssertionError, IndexError)):
            run_state_machine_as_test(machine, settings=settings(report_multiple_bugs=False, phases=[Phase.generate]))


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9), st.integers(1, 5), st.randoms())
def test_a_feeder_and_a_processor_pass_everything_on(tokens, bound, ageing, rng):
    """The way verl uses it: one feeder with an end signal, one consumer that marks every item done, and a join."""
    async def scene():
        queue = OrderedQueue(PromptQueue(ageing), lambda item: item[1], lambda: bound)
        got = []

        async def feed():
            for number, length in enumerate(tokens):
                await queue.put((number, length))
                assert queue.qsize() <= bound
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            await queue.put(None)

        async def consume():
            while True:
                item = await queue.get()
                queue.task_done()
                if item is None:
                    return
                got.append(item)
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)

        await asyncio.wait_for(asyncio.gather(feed(), consume()), 10)
        await asyncio.wait_for(queue.join(), 1)
        assert sorted(got) == list(enumerate(tokens)) and queue.empty()

    asyncio.run(scene())


class Router(RuleBasedStateMachine):
    """Replicas come and go, requests start, yield and end; counts are those of the requests alive."""

    def __init__(self):
        super().__init__()
        self.now, self.rng = 0.0, random.Random(0)
        self.pool = {f"r{i}": 0 for i in range(3)}
        self.share, self.load = TailShare(0.5, lambda: self.now), ClassLoad(lambda: self.now)
        self.alive: dict[str, tuple[str, str]] = {}
        self.count, self.answer = 0, 0

    def ask(self):
        before, pool = self.answer, len(self.pool)
        self.answer = self.share.observe(pool, *self.load.tail_and_rest())
        assert 0 <= self.answer <= max(0, pool - 1) and (pool >= 2 or self.answer == 0)
        assert self.answer <= max(1, pool // 2) and self.answer - before <= 1
        return tail_set(self.pool, self.answer)

    def put(self, name, length, sticky):
        tail = self.ask()
        chosen = choose_replica(length, self.pool, tail, self.rng, sticky)
        assert chosen in self.pool
        if sticky in self.pool and length != TAIL:
            assert chosen == sticky
        if chosen != sticky and sticky in self.pool:
            assert length == TAIL and chosen in tail and self.pool[chosen] < self.pool[sticky]
        self.load.start(name, length, chosen in tail, False)
        self.pool[chosen] += 1
        self.alive[name] = (length, chosen)

    def take(self, name):
        length, server = self.alive.pop(name)
        self.load.end(name)
        if server in self.pool:
            self.pool[server] = max(0, self.pool[server] - 1)  # verl's rule: a replica may have come back empty
        return server

    @precondition(lambda self: self.pool)
    @rule(length=st.sampled_from(CLASSES))
    def start(self, length):
        self.put(f"q{self.count}", length, None)
        self.count += 1

    @precondition(lambda self: self.pool and self.alive)
    @rule(data=st.data(), length=st.sampled_from(CLASSES))
    def resubmit(self, data, length):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.put(name, length, self.take(name))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def end(self, data):
        self.take(data.draw(st.sampled_from(sorted(self.alive))))

    @rule(seconds=st.sampled_from([0.1, 3.0, 30.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(name=st.sampled_from(["r0", "r1", "r2", "r3"]))
    def replica_comes_or_goes(self, name):
        if name in self.pool:
            del self.pool[name]
        else:
            self.pool[name] = 0
        self.ask()

    @invariant()
    def counts_are_those_of_the_living(self):
        for length in CLASSES:
            assert self.load.in_flight[length] == sum(kind == length for kind, _ in self.alive.values())
        assert all(count >= 0 for count in self.pool.values())


def test_the_router():
    run_state_machine_as_test(Router)
