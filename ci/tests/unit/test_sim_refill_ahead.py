"""The simulator of what a step of v1's separate_async begins ahead of verl's filter."""

from __future__ import annotations

import json

import pytest

from bench.sim import refill_ahead
from bench.sim.refill_ahead import BATCH, OURS, Loop


@pytest.mark.parametrize("median_s", [3.0, 6.0])
def test_where_nothing_is_left_out_a_run_is_verls(median_s):
    ours, verl = (Loop(0.0, median_s, 1, chosen, seed=1).run(60) for chosen in (True, False))
    assert ours == verl


def test_ahead_of_the_filter_fewer_steps_wait():
    ours, verl = (Loop(0.65, 3.0, 1, chosen, seed=1) for chosen in (True, False))
    found = ours.run(60), verl.run(60)
    assert found[0]["waited"] < 0.3 and found[1]["waited"] > 0.9
    assert found[0]["groups/s"] > 1.5 * found[1]["groups/s"]
    assert len(ours.ages) == len(verl.ages) == 60 * BATCH and min(ours.ages) >= 0


def test_verl_keeps_its_warm_up_in_process():
    loop = Loop(0.65, 3.0, 2, False, seed=1)
    loop.run(60)
    assert len(loop.groups) == 2 * BATCH


def test_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(refill_ahead, "SHARES", (0.65,))
    record = tmp_path / "record.json"
    assert refill_ahead.main(["--json", "--steps", "20", "--seeds", "1", "--results", str(record)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["simulated"] and told["cases"] == json.loads(record.read_text())["cases"]
    assert all(case[OURS]["groups/s"] > case["verl, 1"]["groups/s"] for case in told["cases"])
    assert refill_ahead.main(["--steps", "20", "--seeds", "1"]) == 0
    assert "ahead of the filter" in capsys.readouterr().out
