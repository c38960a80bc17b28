"""Learned verdicts in a run: looks of an engine, one model for all workers, a driver that carries out what it says."""

from __future__ import annotations

import asyncio
import json
import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.tests.property.rollout_fakes import seat_of
from esgrpo import config, records
from esgrpo.algo import rollout
from esgrpo.algo.looks import LOOKS_IN_BUDGET, Looks, distance
from esgrpo.algo.segments import CONTINUE, SegmentBook
from esgrpo.algo.verdict import Lessons, VerdictPool, Verdicts, verdicts_of
from esgrpo.algo.verdict_features import READ_TOKENS, Look
from esgrpo.algo.verdict_gate import FIRST, Outcome, Settings
from esgrpo.errors import ConfigError
from esgrpo.hooks.verl.groups import audit_pool, rollout_driver

BUDGET = 512
SEGMENT = {"enable": True, "prune": {"verdict": {"enable": True}, "audit": {"enable": True, "exempt_prob": 0.01}}}


# Looks

def test_a_distance_scales_with_the_budget_unless_it_is_set():
    assert distance(0, BUDGET) == BUDGET // LOOKS_IN_BUDGET and distance(48, BUDGET) == distance(48, 0) == 48
    assert distance(0, 3) == 1 and distance(0, 0) > 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(1, 40), st.integers(0, 70))
def test_a_book_looks_at_multiples_of_the_distance_of_the_whole_response(tokens, interval, before):
    settings = config.parse({**SEGMENT, "prune": {**SEGMENT["prune"], "verdict": {"enable": True,
                                                                                 "check_interval": interval}}})
    book = SegmentBook(settings, budget=BUDGET)
    book.add("k", "g", 3, before)
    seen, last = [], 0
    for count in range(1, len(tokens) + 1):
        for key in book.advance():
            assert book.look(key, tokens[:count], (-0.5 * count, count)).outcome == CONTINUE
            seen.append((before + count, tokens[max(last, count - READ_TOKENS):count], 0.5, 0.5))
            last = count
    assert [total for total, *_ in seen] == [total for total in range(before + 1, before + len(tokens) + 1)
                                             if total % interval == 0]
    assert book.looks.take(["g"]) == ({"g": {3: [list(glance) for glance in seen]}} if seen else {})
    book.close("k", len(tokens))
    assert (book.looks._last, book.looks._kept) == ({}, {})


def test_nobody_looks_where_verdicts_are_off():
    book = SegmentBook(config.parse({"enable": True}), budget=BUDGET)
    book.add("k", "g", 0, 0)
    assert not any(book.advance() for _ in range(BUDGET)) and book.looks.take(["g"]) == {}


def test_what_has_no_log_prob_says_so():
    looks = Looks()
    looks.look("k", "g", 0, 10, list(range(10)), (0.0, 0))
    assert all(map(math.isnan, looks.take(["g"])["g"][0][0][2:]))


def test_looks_wait_until_they_are_asked_for_and_go_with_their_group():
    looks, tokens = Looks(), list(range(3 * READ_TOKENS))
    for count in (10, 20):
        looks.look("k", "g", 0, count, tokens[:count], (-0.05 * count * count, count))
    looks.look("sibling", "g", 1, 10, tokens[:10], (-10.0, 10))
    assert looks.take(["g", "nobody"]) == {"g": {
        0: [[10, tokens[:10], 0.5, 0.5], [20, tokens[10:20], 1.0, 1.5]], 1: [[10, tokens[:10], 1.0, 1.0]]}}
    assert looks.take(["g"]) == {}
    looks.look("k", "g", 0, 70, tokens[:70], (-70.0, 70))
    looks.ended("k", "g", was_last=False)
    assert list(looks._kept) == ["g"]  # siblings are still here, so somebody may ask
    looks.ended("sibling", "g", was_last=True)
    assert looks.take(["g"]) == {} and (looks._last, looks._kept) == ({}, {})


# One model

def seen_by(verdicts: Verdicts, seed: int, count: int = 30) -> list:
    """What a worker saw: the more surprising a response, the less often it is right."""
    rng = random.Random(seed)
    for index in range(count):
        group = f"{seed}-{index}"
        verdicts.watch(group, 2)
        for member in range(2):
            right = rng.random() < 0.5
            verdicts.look(group, {member: Look(100, 0.05 if right else 0.5, 0.1, 1.0, 1.0, 0.0, 0.0)})
            verdicts.ended(group, member, 100, right)
        verdicts.close(group)
    return json.loads(json.dumps(verdicts.take().to_plain()))


def new_verdicts(seed: int = 0) -> Verdicts:
    return Verdicts(Settings(), random.Random(seed))


def test_workers_of_one_sync_make_one_update():
    """In whatever order: as if one worker had seen all of it."""
    alone, pools = new_verdicts(), [VerdictPool(new_verdicts()) for _ in range(2)]
    lessons = [seen_by(new_verdicts(), seed) for seed in (1, 2)]
    for pool, order in zip(pools, ((0, 1), (1, 0)), strict=True):
        for worker in range(2):
            pool.exchange(worker, None)
        first = pool.exchange(order[0], lessons[order[0]])
        assert first["gate"]["outcomes"] == 0  # waits for the other one
        assert pool.exchange(order[1], lessons[order[1]])["gate"]["outcomes"] == 120
    together = Lessons.from_plain(lessons[0])
    together.add(Lessons.from_plain(lessons[1]))
    alone.update(together)
    for pool in pools:
        assert pool.verdicts.model.weights == pytest.approx(alone.model.weights)
        assert pool.verdicts.length.weights == pytest.approx(alone.length.weights)
    assert alone.length.weights != new_verdicts().length.weights != alone.model.weights


def test_a_silent_worker_is_not_waited_for_twice():
    pool = VerdictPool(new_verdicts())
    for worker in range(2):
        pool.exchange(worker, None)
    outcomes = [pool.exchange(0, seen_by(new_verdicts(), seed))["gate"]["outcomes"] for seed in range(3)]
    assert outcomes == [0, 120, 180]  # the second call ends the first sync; then nobody else is expected


def test_what_is_seen_while_the_pool_answers_is_not_lost():
    verdicts, pool = new_verdicts(), VerdictPool(new_verdicts())
    state = pool.exchange(0, seen_by(verdicts, 1))
    verdicts.watch("late", 1)
    verdicts.look("late", {0: Look(100, 0.1, 0.1, 1.0, 1.0, 0.0, 0.0)})
    verdicts.ended("late", 0, 100, True)
    verdicts.close("late")
    verdicts.adopt(json.loads(json.dumps(state)))
    lessons = verdicts.take()
    assert verdicts.model.weights == pool.verdicts.model.weights and len(lessons.outcomes) == 1
    assert any(lessons.model.gradient)


def test_the_settings_of_a_run_are_those_of_its_verdicts():
    segment = config.parse({**SEGMENT, "prune": {**SEGMENT["prune"], "verdict": {
        "enable": True, "cut_below": 0.2, "min_outcomes": 9}}})
    assert verdicts_of(segment, random.Random(0)).settings == Settings(cut_below=0.2, audit=0.01, min_outcomes=9)


@pytest.mark.parametrize("prune, said", [
    ({"verdict": {"enable": True}}, "prune.audit.enable"),
    ({"verdict": {"enable": True}, "audit": {"enable": True}, "treatment": "masked"}, "treatment=masked")])
def test_what_verdicts_cannot_do_without(prune, said):
    with pytest.raises(ConfigError, match=said):
        config.parse({"enable": True, "prune": prune})


# The driver

class Pool:
    """The actor's handle."""

    def __init__(self):
        self.actor = audit_pool.AuditPool(BUDGET)
        for name in ("exchange", "teach"):
            setattr(self, name, SimpleNamespace(remote=self._method(getattr(self.actor, name))))

    @staticmethod
    def _method(method):
        async def call(worker, lessons):
            return method(worker, json.loads(json.dumps(lessons)))

        return call


class Server:
    """A replica in which everybody repeats the same look, for as long as nobody is told to end."""

    def __init__(self, fails: int = 0):
        self.ended, self.asked, self.fails = [], [], fails
        for name in ("take_looks", "finish_group", "progress"):
            setattr(self, f"esgrpo_{name}", SimpleNamespace(remote=getattr(self, f"_{name}")))

    async def _take_looks(self, groups):
        self.asked.append(groups)
        if len(self.asked) <= self.fails:
            raise ConnectionError("the server is gone")
        return {group: {0: [[64, [1, 2, 3, 4], 0.5, 0.5]]} for group in groups}

    async def _finish_group(self, group, members, rule):
        self.ended.append((group, members, rule))
        return len(members)

    async def _progress(self, group):
        return {}


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setenv(config.ENV_SEGMENT, json.dumps(SEGMENT))
    monkeypatch.setattr(rollout_driver, "ASK_EVERY_S", 0.0)
    return tmp_path / "esgrpo"


async def until(condition) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")


async def scene(open_gate: bool, fails: int = 0):
    driver, server = rollout_driver.Driver(0, BUDGET, Pool()), Server(fails)
    await until(lambda: not driver._tasks)
    verdicts = driver.runs.rules.pruner.verdicts
    verdicts.model.weights[0], verdicts.opens_at = -9.0, FIRST if open_gate else None
    seats = [seat_of(driver, size=2) for _ in range(2)]
    for seat in seats:
        seat.placed("r", server)
    await until(lambda: len(server.asked) > fails + 2)
    ends = {"now": 1.0, "tokens": 70, "left": 9, "version": 1}
    rows = []
    for seat in seats:
        seat.on(rollout.AttemptEnded, **ends)
        rows.append(seat.on(rollout.MemberEnded, now=2.0, score=0.0).row.row())
    await until(lambda: driver._looks.done())
    return driver, server, rows


def test_a_worker_asks_for_looks_and_ends_whom_they_speak_against(run):
    driver, server, rows = asyncio.run(scene(open_gate=True))
    assert server.ended == [("g", [0], "verdict")] and all(groups == ["g"] for groups in server.asked)
    assert [(row["outcome"], row["rule"]) for row in rows] == [("prune", "verdict"), ("finish", "")]
    assert rows[0]["tokens_at_decision"] == 64 and rows[0]["audit"]["open"] and not rows[0]["audit"]["shut"]
    assert driver.decisions["verdicts/pruned"] == 1 and driver.decisions["verdicts/looks"] >= 1


def test_a_shut_gate_ends_nobody(run):
    driver, server, rows = asyncio.run(scene(open_gate=False))
    assert server.ended == [] and [row["outcome"] for row in rows] == ["finish"] * 2
    assert (driver.decisions["verdicts/let_go"], driver.decisions["verdicts/pruned"]) == (1, 0)


@pytest.mark.parametrize("open_gate, heard", [(False, [0, 1]), (True, [1])])
def test_a_row_holds_what_the_gate_hears_of_it(run, open_gate, heard):
    """So that another gate can be played over a run (bench.gate). Nothing is heard of what is cut."""
    driver, _, rows = asyncio.run(scene(open_gate))
    assert [number for number, row in enumerate(rows) if row["for_gate"]] == heard
    driver.runs.rules.pruner.verdicts.close("g")
    assert [Outcome(rows[number]["tokens"], False, **rows[number]["for_gate"]) for number in heard] \
        == driver.runs.rules.pruner.verdicts.take().outcomes


def test_a_server_that_does_not_answer_costs_looks_only(run, capsys):
    driver, server, rows = asyncio.run(scene(open_gate=True, fails=2))
    assert driver.decisions["advice/failed"] == 2 and server.ended == [("g", [0], "verdict")]
    assert capsys.readouterr().err.count("the server is gone") == 1


def test_what_was_learned_outlives_a_restart(run, capsys):
    async def first_run():
        driver = rollout_driver.Driver(0, BUDGET, Pool())
        await until(lambda: not driver._tasks)
        seen_by_lessons = seen_by(driver.runs.rules.pruner.verdicts, 1)
        await driver._teach(rollout.Teach(seen_by_lessons))
        assert records.flush()
        return driver.runs.rules.pruner.verdicts.to_state()

    async def again():
        driver = rollout_driver.Driver(3, BUDGET, Pool())
        await until(lambda: not driver._tasks)
        return driver.runs.rules.pruner.verdicts.to_state(), driver.decisions

    known = asyncio.run(first_run())
    assert known["gate"]["outcomes"] == 60 and (run / "history-verdict.json").exists()
    state, decisions = asyncio.run(again())
    assert state == known and decisions["verdicts/gate_shut"] == 1
    (run / "history-verdict.json").write_text("{}")
    state, _ = asyncio.run(again())
    assert state["gate"]["outcomes"] == 0 and capsys.readouterr().err.startswith("esgrpo: prune-verdict: ")


def test_a_server_that_hangs_keeps_no_looks_of_others(run):
    async def scene():
        driver, server, hangs = rollout_driver.Driver(0, BUDGET, Pool()), Server(), Server()

        async def never(groups):
            hangs.asked.append(groups)
            await asyncio.Event().wait()

        hangs.esgrpo_take_looks = SimpleNamespace(remote=never)
        for name, replica in (("r", server), ("hangs", hangs)):
            seat_of(driver, size=2).placed(name, replica)
        await until(lambda: len(server.asked) > 3)
        assert len(hangs.asked) == 1 and driver.decisions["advice/failed"] == 0

    asyncio.run(scene())
