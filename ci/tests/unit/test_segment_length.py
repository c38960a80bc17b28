"""What a worker tells the engines when members of a group end, with a real coordinator and fake servers."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from esgrpo.algo.grouping import FINISHED, GroupCoordinator
from esgrpo.hooks.verl import attempts, group_members, segment_length

SIZE = 10
BUDGET = 8000
ELASTIC = {"enable": True, "min_length": 128, "max_length": 4096}


class Server:
    """A server with its Ray methods; `progress` is what its engine says."""

    def __init__(self, progress):
        self.progress, self.told = progress, []
        self.esgrpo_progress = SimpleNamespace(remote=self._progress)
        self.esgrpo_set_segment_length = SimpleNamespace(remote=self._set)

    async def _progress(self, group):
        await asyncio.sleep(0)
        return self.progress

    async def _set(self, group, length, tail):
        self.told.append((group, length, tail))


class Group:
    """A worker with one group of SIZE members on two servers, member i with 100 * i tokens so far."""

    def __init__(self, forecast=None):
        self.coordinator = GroupCoordinator()
        self.servers = [Server({i: 100 * i for i in range(place, SIZE, 2)}) for place in (0, 1)]
        self.worker = SimpleNamespace(esgrpo_members={}, rollout_config=SimpleNamespace(response_length=BUDGET))
        for i in range(SIZE):
            assert self.coordinator.join("g", SIZE) == i
            self.worker.esgrpo_members["g", i] = attempts.Member("g", i, forecast=forecast)

    async def leave(self, number, tokens=1000):
        member = self.worker.esgrpo_members.pop(("g", number))
        member.tokens = tokens
        self.coordinator.leave("g", number, FINISHED)
        await segment_length.after_leave(self.worker, "g", self.coordinator, member)

    def told(self):
        first, second = (server.told for server in self.servers)
        assert first == second  # every engine hears the same
        return first


@pytest.fixture
def group(monkeypatch):
    async def servers_of(worker):
        return worker.servers

    def new(elastic=ELASTIC, forecast=None):
        monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": True, "elastic": elastic}))
        made = Group(forecast)
        made.worker.servers = made.servers
        return made

    monkeypatch.setattr(group_members, "servers_of", servers_of)
    return new


def play(made, order):
    async def scene():
        for number in order:
            await made.leave(number)

    asyncio.run(scene())
    return made.told()


def test_lengths_shrink_as_members_finish_and_the_rest_becomes_the_tail(group):
    made = group()
    told = play(made, range(SIZE))
    lengths = [length for _, length, _ in told]
    assert [name for name, *_ in told] == ["g"] * len(told) and 2 <= len(told) < SIZE - 1  # the band keeps some
    # after the first finish: 9 of 10 run, remainders 1000 - 100 i of the finished sibling's 1000 tokens
    assert lengths != sorted(lengths) and lengths[-1] == 128
    assert [tail for *_, tail in told] == [False] * (len(told) - 1) + [True]


def test_the_tail_begins_at_the_configured_share(group):
    made = group()
    play(made, range(7))
    assert {m.fields()["length_class"] for m in made.worker.esgrpo_members.values()} == {"body"}
    before = len(made.told())
    asyncio.run(made.leave(7))
    assert made.told()[before:] == [("g", 128, True)]
    assert [m.fields()["length_class"] for m in made.worker.esgrpo_members.values()] == ["tail", "tail"]
    asyncio.run(made.leave(8))
    assert len(made.told()) == before + 1  # nothing more to say
    asyncio.run(made.leave(9))
    assert made.coordinator.groups == {}
    asyncio.run(segment_length.after_leave(made.worker, "other", made.coordinator))
    assert made.worker.esgrpo_segments == {}


def test_a_forecast_beats_the_sibling(group):
    near = play(group(forecast={"tokens": 1000, "high": 2000, "length_class": "body"}), [0, 1, 2])
    far = play(group(forecast={"tokens": 7000, "high": 8000, "length_class": "body"}), [0, 1, 2])
    assert near == play(group(), [0, 1, 2])  # 1000 is also what the siblings made
    assert far[-1][1] > 2 * near[-1][1]


def test_switched_off_nothing_is_asked(group):
    """Negative control: with the switch on the same leaving does send."""
    assert play(group(elastic={"enable": False}), [0, 1, 2]) == []
    assert play(group(), [0, 1, 2]) != []


def test_of_two_that_leave_at_once_the_later_state_is_told_last(group):
    made = group()

    async def scene():
        await asyncio.gather(*[made.leave(number) for number in range(8)])

    asyncio.run(scene())
    assert made.told()[-1] == ("g", 128, True)
    assert sum(tail for *_, tail in made.told()) == 1
