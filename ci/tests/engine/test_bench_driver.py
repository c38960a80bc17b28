"""The engine benchmark's driver: every policy's books agree, in both scenarios, however late commands take effect."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from bench.common import workload
from bench.engine.driver import Course, Driver, OutOfTime
from bench.policies import ABORT, ASYNC, DECISIONS, KEEP, SYNC, Continue, Limits, Prune, Yield, policies, policy
from bench.policies.order import Verl
from ci.tests.engine.fake_fleet import FakeFleet
from esgrpo.errors import EsgrpoError

REPLICAS, SEQUENCES, GROUPS, MEMBERS, CAP = 2, 6, 4, 4, 120
FOREVER = 1e12


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("bench.engine.driver.ABORT_WAIT_S", 0.003)


def drive(kind, scenario=SYNC, lag=0, updates=3, fleet=None, end=FOREVER, train_s=0.002) -> Driver:
    limits = Limits(REPLICAS, SEQUENCES, SEQUENCES, CAP, MEMBERS, GROUPS, scenario)
    policy = kind(limits, random.Random(1))
    count = GROUPS * updates
    stream = workload.stream("math", count, MEMBERS, CAP, 1, scale=0.02, spare=math.ceil(kind.spare * MEMBERS))
    policy.remember(list(itertools.islice(stream, count)))
    driver = Driver(fleet or FakeFleet(REPLICAS, SEQUENCES, lag), policy, limits,
                    Course(updates, train_s, 0.002, 0.5, 1000, 1), lambda n: list(itertools.islice(stream, n)), end)
    driver.record = driver.run()
    return driver


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("name, scenario", [
    (name, scenario) for name in sorted(policies()) for scenario in (SYNC, ASYNC)
    if scenario in policies()[name].scenarios])
def test_books_agree(name, scenario, lag):
    kind = policies()[name]
    driver = drive(kind, scenario, lag)
    record = driver.record
    assert record["decoded"] == record["trained"] + sum(record["waste"].values())
    assert record["decoded"] == sum(row["decoded"] for about in driver.trace.values() for row in about["attempts"])
    assert len(record["update_times"]) == 3
    assert record["versions_old"]["max"] <= (2 if scenario == ASYNC or kind.carries else 0)
    assert record["trained_samples"] + record["pruned_samples"] >= 3 * GROUPS * MEMBERS - record["pruned_samples"]
    assert sum(rate for cause, rate in record["bubble"].items() if cause != "rate") == pytest.approx(
        record["bubble"]["rate"], abs=1e-3)
    stale, rows, tokens = (record["versions_old"], *(record["versions_old"][what] for what in ("rows", "tokens")))
    assert rows["share"] <= stale["share"] and rows["mean"] <= stale["mean"] and tokens["mean"] <= stale["max"]
    assert (scenario == ASYNC or kind.carries) or tokens["share"] == 0 == rows["share"]
    assert set(record["decisions"]) == set(DECISIONS)


@pytest.mark.parametrize("name, keeps", [("es-grpo", True), ("es-grpo/AB+abort", False), ("colocate_async", False)])
def test_what_is_carried_is_stale_and_what_is_kept_is_counted(name, keeps):
    record = drive(policy(name), updates=6).record
    assert record["versions_old"]["rows"]["share"] > 0 < record["versions_old"]["tokens"]["share"]
    assert (record["decisions"]["keep"] > 0) == keeps and (record["reprefill_tokens"] == 0) == keeps


def test_what_verl_carries_over_comes_before_new_prompts():
    """Its clients wait at the paused engines; behind the new ones they would start late, and short rows be trained."""
    driver = drive(policy("colocate_async"), updates=6)
    syncs = driver.record["update_times"][:-1]
    aborted = resumed_at = 0
    for began, ended in zip(syncs, driver.record["update_times"][1:], strict=True):
        attempts = [(row["submit"], number > 0) for about in driver.trace.values()
                    for number, row in enumerate(about["attempts"]) if began <= row["submit"] < ended]
        resumed, fresh = ([at for at, again in attempts if again is kind] for kind in (True, False))
        aborted, resumed_at = aborted + len(resumed), max(resumed, default=0.0)
        assert resumed_at <= min(fresh, default=math.inf)
    assert aborted > 10


class Cutting(Verl):
    """Yields, prunes and goes on at boundaries, all mixed."""

    name, segment = "cutting", 5

    def __init__(self, limits, rng):
        super().__init__(limits, rng)
        self.back, self.yields, self.prunes = [], 0, 0

    def submit(self, sample, replica, segment=None, done=0):
        return super().submit(sample, replica, self.segment, done)

    def place(self, now, load):
        back, self.back = self.back, []
        return [self.submit(sample, self.pool.least(), done=tokens) for sample, tokens in back] + super().place(
            now, load)

    def boundary(self, sample, replica, tokens):
        dice = self.rng.random()
        if dice < 0.2:
            self.prunes += 1
            self.ended(sample)
            return Prune(sample, "test", 0.5)
        if dice < 0.6:
            self.yields += 1
            self.left(replica)
            self.back.append((sample, tokens))
            return Yield()
        return Continue(self.segment)


class CuttingKept(Cutting):
    name, sync = "cutting-kept", KEEP


@pytest.mark.parametrize("kind", [Cutting, CuttingKept])
@pytest.mark.parametrize("scenario", [SYNC, ASYNC])
@pytest.mark.parametrize("lag", [0, 3])
def test_late_decisions_lose_no_token(kind, scenario, lag):
    driver = drive(kind, scenario, lag, updates=4)
    assert driver.policy.yields > 20 and driver.policy.prunes > 5  # it did happen
    outcomes = {row["outcome"] for about in driver.trace.values() for row in about["attempts"]}
    assert {"finish", "yield", "prune"} <= outcomes
    assert driver.record["waste"]["pruned"] > 0


def test_an_abort_at_a_sync_is_resumed_with_its_tokens():
    assert Verl.sync == ABORT
    driver = drive(Verl, ASYNC, updates=8, train_s=0.0)
    aborted = [about for about in driver.trace.values() if any(row["outcome"] == "abort" and row["decoded"]
                                                               for row in about["attempts"][:-1])]
    assert aborted
    for about in aborted:
        assert [row["done"] for row in about["attempts"]] == list(itertools.accumulate(
            [row["decoded"] for row in about["attempts"][:-1]], initial=0))


def test_a_token_that_an_engine_lost_is_an_error():
    fleet = FakeFleet(REPLICAS, SEQUENCES)
    fleet.replicas[1].lost = 1
    with pytest.raises(EsgrpoError, match="tokens counted by the engines"):
        drive(Verl, fleet=fleet)


def test_the_deadline_leaves_the_engines_empty():
    fleet = FakeFleet(REPLICAS, SEQUENCES)
    with pytest.raises(OutOfTime):
        drive(Verl, fleet=fleet, end=0.0)
    assert [replica.requests for replica in fleet.replicas] == [{}, {}]
    assert drive(Verl, fleet=fleet).record["decoded"] > 0
