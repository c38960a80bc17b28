"""What makes a comparison fair: how stale rows are, what was decided, one target for all arms. Toy sizes, no times."""

from __future__ import annotations

import json

import pytest

from bench.common.ledger import Ledger
from bench.common.workload import Sample
from bench.policies import ASYNC, DECISIONS, SYNC, policy
from bench.sim.__main__ import main
from bench.sim.device import Device
from bench.sim.experiment import Setting, run
from ci.tests.property.test_simulation import Reckless, simulate

SMALL = Setting(replicas=2, groups=8, members=4, cap=256, scale=0.1, updates=6, sequences=16)


def test_a_token_is_as_old_as_the_weights_that_decoded_it():
    ledger = Ledger(2)
    old, new = Sample(0, 0, 0, 0, 100, True), Sample(1, 0, 1, 0, 60, False)
    ledger.resumes(old, 0)
    ledger.resumes(new, 0)
    ledger.reached(old, 30)
    ledger.version = 1
    ledger.stopped(old, 40, True)  # ten more
    ledger.version = 2
    ledger.resumes(old, 40)
    ledger.finished(old)
    ledger.finished(new)
    ledger.train([0])
    assert ledger.stale() == {
        "mean": 2.0, "max": 2, "share": 1.0, "rows": {"mean": 1.0, "share": 0.5},
        "tokens": {"mean": (2 * 30 + 1 * 10) / 160, "share": 40 / 160}}
    assert not ledger.spans


def test_what_is_thrown_away_does_not_age_its_next_attempt():
    ledger = Ledger(1)
    first = Sample(0, 0, 0, 0, 50, True)
    ledger.resumes(first, 0)
    ledger.stopped(first, 20, False)
    ledger.version = 3
    ledger.resumes(first, 0)
    ledger.finished(first)
    ledger.train([0])
    assert ledger.stale()["rows"] == ledger.stale()["tokens"] == {"mean": 0.0, "share": 0.0}


@pytest.mark.parametrize("name", ["colocate_async", "ulorl", "april", "es-grpo"])
def test_who_carries_over_says_how_stale_its_rows_are(name):
    found, plain = (run(SMALL, one, Device.load())["staleness"] for one in (name, "verl"))
    assert plain["rows"]["share"] == plain["tokens"]["share"] == 0.0
    assert 0 < found["tokens"]["mean"] <= found["tokens"]["share"] * found["max"]
    assert 0 < found["rows"]["share"] <= found["share"] + 1e-9, "a stale row makes its group stale"


def test_the_command_says_what_every_module_decided(capsys):
    assert main(["--replicas", "4", "--groups", "16", "--cap", "512", "--scale", "0.1", "--policy", "es-grpo,verl",
                 "--json"]) == 0
    found = {name: one["decisions"] for name, one in json.loads(capsys.readouterr().out)["policies"].items()}
    assert set(found["es-grpo"]) == set(DECISIONS) and found["es-grpo"]["keep"] > 0
    assert not any(found["verl"].values())


@pytest.mark.parametrize("scenario, name, deciding", [
    (SYNC, "es-grpo/AB", {"keep"}), (SYNC, "es-grpo/AB+abort", set()), (SYNC, "es-grpo/A", {"routing"}),
    (SYNC, "es-grpo/AB+barrier", {"routing"}), (ASYNC, "es-grpo/AB", {"routing", "keep"}),
    (ASYNC, "es-grpo/S", {"sampler"}), (ASYNC, "es-grpo/", set()),
    (ASYNC, "es-grpo/AB+tails", {"routing", "keep", "segments"})])
def test_only_what_changed_something_is_counted(scenario, name, deciding):
    large = {"members": 8, "cap": 4096, "scale": 1.0} if "tails" in name else {}  # else no group has a tail
    setting = Setting(**{**vars(SMALL), "scenario": scenario, **large})
    counts = run(setting, name, Device.load())["decisions"]
    assert {module for module, count in counts.items() if count} == deciding, counts


def test_a_pruned_response_is_a_decision():
    found = simulate(Reckless, 30, SYNC)
    assert found["decisions"]["pruning"] == found["pruned_samples"] > 0


@pytest.mark.parametrize("replicas, said", [(2, "1 of 2 replicas is its tail pool, 1 of 8 in the paper"), (8, "")])
def test_tailsieve_says_when_it_is_not_played_at_its_papers_size(replicas, said, capsys):
    sizes = ["--groups", "8", "--members", "4", "--cap", "128", "--scale", "0.02", "--updates", "2"]
    assert main([*sizes, "--replicas", str(replicas), "--policy", "colocate_async,tailsieve"]) == 0
    shown = capsys.readouterr().out
    assert ("tailsieve: not at its paper's size" in shown) == bool(said) and said in shown


def test_the_default_under_a_barrier_is_a_comparison_with_verls_own_carry_over(capsys):
    assert main(["--groups", "4", "--members", "4", "--cap", "128", "--scale", "0.02", "--updates", "3"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["colocate_async", "es-grpo"] and rows[1][-2] == "keep"


def test_names_of_older_records_are_still_played():
    assert policy("static") is policy("ulorl")
