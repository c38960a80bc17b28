"""kv_headroom: who waits for memory, in the decision, in the simulated replica, and in the benchmark's policy names."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policies import policy
from bench.sim.device import Device
from bench.sim.experiment import Setting, run
from esgrpo.algo.admission import held_back
from esgrpo.tools.report import load, policy_tables

SCARCE = Device("made up", ((1, 0.01), (16, 0.02)), 1e5, 12_000, 0.1)
SETTING = Setting(replicas=1, groups=8, members=4, cap=2048, sequences=32, scale=0.5, updates=4)
AMOUNTS = st.integers(0, 1000)


@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_only_what_would_fit_is_held_back_and_it_leaves_the_headroom(free, need, headroom):
    held = held_back(free, need, headroom)
    assert not (held and need > free), "what does not fit is upstream's own business"
    assert held == (need <= free and free - need < headroom)
    assert not held_back(free, need, 0)


@pytest.mark.parametrize("name", ["verl", "april", "es-grpo"])
def test_fewer_are_preempted_and_no_token_is_lost(name):
    without, with_it = (run(SETTING, f"{name}{share}", SCARCE) for share in ("", "@0.1"))
    assert 0 < with_it["preemptions"] < without["preemptions"] / 2
    for found in (without, with_it):
        assert found["decoded"] == found["trained"] + sum(found["waste"].values())


def test_where_memory_is_ample_nothing_changes():
    ample = Device("made up", SCARCE.steps, SCARCE.prefill_rate, 10**7, SCARCE.weight_sync)
    assert run(SETTING, "april", ample) == run(SETTING, "april@0.1", ample)


@pytest.mark.parametrize("name", ["verl@0.05", "es-grpo/AB@.2", "april/1.5@0.1"])
def test_a_policys_name_may_end_in_its_headroom(name):
    base, _, share = name.partition("@")
    kind = policy(name)
    assert (kind.name, kind.headroom) == (name, float(share)) and policy(base).headroom == 0.0


@pytest.mark.parametrize("name", ["verl@", "verl@x", "verl@1.0", "verl@5", "nobody@0.1"])
def test_a_share_that_is_none_is_refused(name):
    with pytest.raises(KeyError):
        policy(name)


def test_the_report_compares_equal_headroom_only(tmp_path):
    played = {"es-grpo@0.05": 10.0, "april@0.05": 12.0, "es-grpo": 11.0}
    common = {"kind": "run", "scenario": "sync", "workload": "math", "seed": 1}
    (tmp_path / "engine.json").write_text("".join(
        json.dumps({**common, "policy": name, "s_per_update": seconds}) + "\n" for name, seconds in played.items()))
    record, = load.records(tmp_path)
    found = {dict(work).get("kv_headroom"): {name: policy_tables.makespan(runs) for name, runs in policies.items()}
             for work, policies in policy_tables.by_work(record.data["runs"]).items()}
    assert found == {0.05: {"es-grpo": 10.0, "april": 12.0}, None: {"es-grpo": 11.0}}
