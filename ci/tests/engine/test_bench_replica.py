"""The benchmark's replicas on vLLM's real scheduler classes with the hook, sync and async, without weights: the books
of engines, driver and ledger agree while requests are aborted, kept, moved, pruned and preempted."""

from __future__ import annotations

import gc
import importlib.util
import math
import random
from itertools import islice

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from bench.common import workload  # noqa: E402
from bench.engine import tau  # noqa: E402
from bench.engine.driver import Course, Driver  # noqa: E402
from bench.policies import ASYNC, SYNC, Limits, policies  # noqa: E402
from ci.tests.engine.scripted_core import LocalFleet  # noqa: E402
from ci.tests.engine.test_bench_driver import Cutting, CuttingKept  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.slow]
REPLICAS, SEQUENCES, GROUPS, MEMBERS, CAP, LENGTH = 2, 6, 4, 4, 200, 1024
ROOMY, TIGHT = 4000, 45  # KV blocks of 16 tokens; a request of 256 + 200 tokens needs 29, of which 16 are its group's


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def fleets(request):
    made = {blocks: LocalFleet(REPLICAS, request.param, SEQUENCES, LENGTH, blocks) for blocks in (ROOMY, TIGHT)}
    gc.freeze()  # every run begins with a collection, which would walk all of torch and vLLM
    return made


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("bench.engine.driver.ABORT_WAIT_S", 0.003)


def drive(fleet, kind, scenario, updates=2) -> Driver:
    limits = Limits(REPLICAS, SEQUENCES, SEQUENCES, CAP, MEMBERS, GROUPS, scenario, fleet.blocks * fleet.block_size)
    policy, count = kind(limits, random.Random(1)), GROUPS * updates
    stream = workload.stream("math", count, MEMBERS, CAP, 1, scale=0.03, spare=math.ceil(kind.spare * MEMBERS))
    policy.remember(list(islice(stream, count)))
    driver = Driver(fleet, policy, limits, Course(updates, 0.0, 0.002, 0.5, 1000, 1),
                    lambda n: list(islice(stream, n)), 1e12)
    driver.record = driver.run()
    return driver


@pytest.mark.parametrize("kind, scenario", [
    pytest.param(kind, scenario, id=f"{kind.name}-{scenario}")
    for kind in (*policies().values(), Cutting, CuttingKept)
    for scenario in (SYNC, ASYNC) if scenario in kind.scenarios])
def test_engines_and_driver_count_the_same(fleets, kind, scenario):
    record = drive(fleets[TIGHT], kind, scenario).record
    assert record["decoded"] == sum(engine["decoded"] for engine in record["engines"]) > 0
    for replica in fleets[TIGHT].replicas:
        assert (len(replica.open), len(replica.current), len(replica.scheduler.requests)) == (0, 0, 0)


@pytest.mark.parametrize("scenario", [SYNC, ASYNC])
def test_only_a_tight_cache_preempts(fleets, scenario):
    roomy, tight = (drive(fleets[blocks], policies()["verl"], scenario).record for blocks in (ROOMY, TIGHT))
    assert (roomy["preemptions"], roomy["preempted_tokens"]) == (0, 0)
    assert tight["preemptions"] > 0 and tight["preempted_tokens"] > 0
    assert roomy["trained_samples"] == tight["trained_samples"] == 2 * GROUPS * MEMBERS


def test_yields_are_the_hooks_own_moves(fleets):
    driver = drive(fleets[ROOMY], CuttingKept, ASYNC, updates=4)
    rows = [row for about in driver.trace.values() for row in about["attempts"]]
    ended = [row for about in driver.trace.values() for row in about["attempts"][:-1]]  # the end of the run aborts
    assert sum(row["outcome"] == "yield" for row in rows) > 20
    assert sum(row["outcome"] == "prune" for row in rows) > 5
    assert len(driver.update_times) > 1
    assert not any(row["outcome"] == "abort" for row in ended)  # kept over every sync


def test_tau_is_what_the_simulator_reads(fleets):
    from bench.sim.device import Device

    fleet = fleets[ROOMY]
    points, left = tau.measure(fleet, SEQUENCES, [64, 256], 4, 1e12, lambda _: None)
    assert {(row["batch"], row["context"], row["replicas"]) for row in points} == {
        (batch, context, replicas) for batch in (1, 2, 4, 6) for context in (64, 256) for replicas in (1, 2)}
    assert left == []
    options = type("Options", (), {"sync_s": 1.0})
    facts = {"device": "none", "model": "none", "devices": 0, "kv_tokens": 1000}
    device = Device.from_record(tau.record(points, facts, options))
    assert [batch for batch, _ in device.steps] == [1, 2, 4, 6]
    assert tau.capacity(points, 5) <= 5
