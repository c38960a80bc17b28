"""What the audits of all agent-loop workers have learned is one thing: shared while they run, kept over a restart."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from esgrpo import config, records
from esgrpo.algo.group_pruning import Finished
from esgrpo.hooks.verl.groups import audit_pool, rollout_driver

PRUNE = {"treatment": "masked", "finish_group_after": 2,
         "audit": {"enable": True, "min_candidates": 1, "max_false_rate": 1.0}}
FILE, BUDGET = "history-audit.json", 64


def switch(monkeypatch, **prune):
    monkeypatch.setenv(config.ENV_SEGMENT, json.dumps({"enable": True, "prune": {**PRUNE, **prune}}))


@pytest.fixture
def run_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    switch(monkeypatch)
    return tmp_path / "esgrpo"


class Pool:
    """The actor's handle."""

    def __init__(self):
        self.actor = audit_pool.AuditPool(BUDGET)
        self.exchange = SimpleNamespace(remote=self._exchange)

    async def _exchange(self, worker, lessons):
        return self.actor.exchange(worker, json.loads(json.dumps(lessons)))


async def workers(pool, count: int = 1):
    made = [rollout_driver.Driver(index, BUDGET, pool) for index in range(count)]
    await settled()
    return made


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def learn(driver, group: str) -> None:
    """The rule finds two candidates in a group; both are exempted and end, the first of them, the witness, right."""
    pruner = driver.runs.rules.pruner
    pruner.watch(group, 4, None)
    for member, correct in enumerate((True, False)):
        pruner.ended(group, member, Finished(5 + member, correct, float(correct)))
    assert len(pruner.checkpoint(group, {2: 7, 3: 7})) == 2
    for member, correct in ((2, True), (3, False)):
        pruner.ended(group, member, Finished(9, correct, float(correct)))
    pruner.close(group)
    await exchange(driver)


async def exchange(driver) -> None:
    from esgrpo.algo.rollout import Share

    await driver._share(Share(driver.runs.rules.pruner.take_lessons()))
    assert records.flush()


def rate(driver) -> tuple[int, int]:
    return driver.runs.rules.pruner.audit.evidence("enough")


def calibration(driver) -> tuple[float, float]:
    found = driver.runs.rules.pruner.calibration
    return found.intercept, found.slope


def test_what_one_worker_saw_all_workers_know(run_dir):
    """Eight workers needed eight times as many outcomes before all of them pruned; now one window serves all."""
    async def scene():
        first, second = await workers(Pool(), 2)
        await learn(first, "a")
        alone = rate(second)
        await learn(second, "b")
        await exchange(first)
        return alone, rate(first), rate(second)

    assert asyncio.run(scene()) == ((0, 0), (2, 2), (2, 2))


def test_a_worker_that_comes_late_gets_all_of_it(run_dir):
    async def scene():
        pool = Pool()
        first, = await workers(pool)
        first.runs.rules.pruner._learned("length", 0.1, 2.0, True, 1.0)
        await learn(first, "a")
        late = rollout_driver.Driver(7, BUDGET, pool)
        await settled()
        return rate(late), calibration(late) == calibration(first)

    assert asyncio.run(scene()) == ((1, 1), True)


def test_a_restarted_run_goes_on_with_the_window(run_dir):
    async def scene():
        first, = await workers(Pool())
        await learn(first, "a")
        again, = await workers(Pool())
        return rate(again)

    assert asyncio.run(scene()) == (1, 1)
    assert [path.name for path in run_dir.iterdir()] == [FILE]


def test_a_history_of_another_run_brings_no_proof(run_dir, monkeypatch, tmp_path):
    """Its prompts, yes; that a rule is right of this run's policy only this run can tell."""
    async def scene():
        first, = await workers(Pool())
        await learn(first, "a")
        (run_dir / FILE).rename(tmp_path / FILE)
        monkeypatch.setenv(config.ENV_SEGMENT, json.dumps({
            "enable": True, "prune": PRUNE, "history": {"enable": True, "path": str(tmp_path / "history.json")}}))
        other, = await workers(Pool())
        before = rate(other)
        await learn(other, "b")
        return before

    assert asyncio.run(scene()) == (0, 0)
    assert (run_dir / FILE).exists()


def test_nothing_is_written_without_news(run_dir):
    async def scene():
        first, = await workers(Pool())
        await exchange(first)

    asyncio.run(scene())
    assert not (run_dir / FILE).exists()


@pytest.mark.parametrize("damage", [lambda state: {**state, "state_version": 99}, lambda state: {**state, "audit": {}},
                                    lambda state: {**state, "calibration": [0.0]}, lambda state: []])
def test_what_cannot_be_understood_is_set_aside_and_said(run_dir, capsys, damage):
    async def scene():
        first, = await workers(Pool())
        await learn(first, "a")
        file = run_dir / FILE
        file.write_text(json.dumps(damage(json.loads(file.read_text()))))
        again, = await workers(Pool())
        return rate(again)

    assert asyncio.run(scene()) == (0, 0) and (run_dir / (FILE + ".unreadable-1")).exists()
    assert capsys.readouterr().err.startswith("esgrpo: prune-audit: ")


def test_what_cannot_be_read_stops_no_run_and_is_left_alone(run_dir, capsys):
    """In the actor's constructor an error would only cost every worker its answers."""
    (run_dir / FILE).mkdir(parents=True)

    async def scene():
        first, second = await workers(Pool(), 2)
        await learn(first, "a")
        await learn(second, "b")
        return rate(second)

    assert asyncio.run(scene()) == (2, 2) and (run_dir / FILE).is_dir()
    said = capsys.readouterr().err
    assert said.startswith("esgrpo: prune-audit: ") and said.count("\n") == 1 and "goes on without it" in said


def test_outcomes_of_other_rules_prove_nothing(run_dir, monkeypatch, capsys):
    """A score is relative to what the rule allows: with another null_prob the same score is another case."""
    async def scene():
        first, = await workers(Pool())
        await learn(first, "a")
        switch(monkeypatch, resolved={"enable": True, "null_prob": 0.3})
        again, = await workers(Pool())
        return rate(again)

    assert asyncio.run(scene()) == (0, 0) and "null_prob" in capsys.readouterr().err


def test_without_a_run_directory_nothing_is_kept(run_dir, monkeypatch):
    monkeypatch.delenv("ESGRPO_RUN_DIR")

    async def scene():
        first, = await workers(Pool())
        await learn(first, "a")
        again, = await workers(Pool())
        return rate(again)

    assert asyncio.run(scene()) == (0, 0) and not run_dir.exists()


def test_a_pool_that_is_gone_costs_nothing_but_the_sharing(run_dir, capsys):
    class Gone:
        exchange = SimpleNamespace(remote=None)

    async def scene():
        driver = rollout_driver.Driver(0, BUDGET, Gone())
        await settled()
        return driver.decisions["advice/failed"]

    assert asyncio.run(scene()) == 1 and "goes on without it" in capsys.readouterr().err
