"""What a driver's advice to replicas costs where one of them hangs or is gone: that advice, nothing else."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from ci.tests.property.rollout_fakes import ended, new_driver, seat_of
from esgrpo.algo import rollout


def test_a_server_that_does_not_answer_costs_the_advice_and_no_response(monkeypatch, capsys):
    """Finished members hand their output on although every call about their group raises; counted, and said once."""
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({
        "enable": True, "history": {"enable": True}, "segment_length": 8,
        "routing": {"enable": True, "tail_share": 0.5, "tail_fraction": 0.01}}))
    monkeypatch.setenv("ESGRPO_FACTS", json.dumps({"replicas": 2}))

    async def broken(*_):
        raise ConnectionError("the server is gone")

    async def scene():
        driver = new_driver()
        seats = [seat_of(driver) for _ in range(8)]
        for seat in seats:
            seat.placed("r", SimpleNamespace(esgrpo_progress=SimpleNamespace(remote=broken)))
        rows = [ended(seat, 1.0) for seat in seats]
        await asyncio.sleep(0.01)
        return driver, rows

    driver, rows = asyncio.run(scene())
    assert [row["outcome"] for row in rows] == ["finish"] * 8
    assert driver.decisions["advice/failed"] == 7 and capsys.readouterr().err.count("the server is gone") == 1


@pytest.mark.parametrize("order", [("hung", "well"), ("well", "hung")])
def test_a_replica_that_hangs_keeps_nobody_else_from_being_ended(capsys, order):
    """The coin is recorded: whoever is not told decodes on to the end. The second order is the control."""
    told, release = [], asyncio.Event()

    async def hung(*_):
        await release.wait()
        raise ConnectionError("the server is gone")

    async def well(group, members, rule):
        told.append((group, members, rule))
        return len(members)

    async def scene():
        driver, servers = new_driver(), {"hung": hung, "well": well}
        driver.handles = {name: SimpleNamespace(esgrpo_finish_group=SimpleNamespace(remote=server))
                          for name, server in servers.items()}
        driver._carry_out([rollout.Finish("g", "verdict", {name: (number,) for number, name in enumerate(order)})])
        for _ in range(20):
            await asyncio.sleep(0)
        meanwhile = list(told)
        release.set()
        await asyncio.gather(*driver._tasks)
        return driver, meanwhile

    driver, meanwhile = asyncio.run(scene())
    assert meanwhile == told == [("g", [order.index("well")], "verdict")]
    assert driver.decisions["advice/failed"] == 1 and capsys.readouterr().err.count("the server is gone") == 1


def test_a_replica_that_does_not_answer_keeps_the_progress_of_no_other(capsys):
    """A rule that needs to know how far members are goes on with what is known. The first two are the control."""
    async def gone(group):
        raise ConnectionError("the server is gone")

    async def well(group):
        return {"1": 300}

    async def scene(names):
        driver, seen = new_driver(), []
        driver.handles = {name: SimpleNamespace(esgrpo_progress=SimpleNamespace(remote=server))
                          for name, server in {"gone": gone, "well": well}.items()}
        driver.on = seen.append
        driver._carry_out([rollout.Ask("g", names)])
        await asyncio.gather(*driver._tasks)
        return driver.decisions["advice/failed"], [event.tokens for event in seen]

    assert asyncio.run(scene(("well",))) == (0, [{1: 300}]) and asyncio.run(scene(("gone",))) == (1, [{}])
    assert asyncio.run(scene(("gone", "well"))) == asyncio.run(scene(("well", "gone"))) == (1, [{1: 300}])
    assert capsys.readouterr().err.count("the server is gone") == 3
