"""The ablation's arms are valid settings, and its table says how many seeds a number rests on."""

import argparse
import json
import os

import pytest

from bench import ablation
from bench.common import modules, training
from esgrpo import config


def settings_of(lines):
    values = {}
    for override in lines:
        path, _, value = override.removeprefix(modules.SEGMENT + ".").partition("=")
        *groups, key = path.split(".")
        place = values
        for group in groups:
            place = place.setdefault(group, {})
        place[key] = {"True": True, "False": False}.get(value, int(value) if value.isdigit() else value)
    return config.parse(values, 512)


@pytest.mark.parametrize("arm", modules.ARMS)
def test_every_arm_composes(arm):
    settings = settings_of(modules.ARMS[arm])
    decides = arm not in ("off", "token outputs")
    assert settings.enable == decides and settings.observe != decides


def test_each_module_is_one_switch_away_from_the_arm_before():
    base = config.features(settings_of(modules.ARMS["B soft"]), "vanilla")
    own = {arm: config.features(settings_of(modules.ARMS[arm]), "vanilla") - base for arm in modules.ARMS}
    assert own["A routing"] == {"history", "routing"}
    assert own["C pruning"] == {"history", "prune"} and own["C sampler"] == {"history", "sampler"}
    assert own["C verdicts"] == own["C loops"] == {"prune"}
    assert own["keep"] == {"keep"} and own["B yield"] == {"yield"}
    assert own["all"] == set().union(*own.values()) - {"yield"}
    assert own["all without sampler"] == own["all"] - {"sampler"}


def test_everything_on_is_what_ships():
    assert settings_of(modules.ARMS["all"]) == config.parse({"profile": "elastic", "segment_length": 64}, 512)


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_reach_the_command(replicas, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(training, "prepare_data", lambda *_: None)
    monkeypatch.setattr(training.compare, "load", lambda _run_dir, _target:
                        argparse.Namespace(curves={}, first_rewards={}))
    monkeypatch.setattr(training, "measures", lambda *_: {"effective tokens/s": 1.0, "decoded tokens/s": 1.0})
    monkeypatch.setattr(training.arm, "run", lambda _name, overrides, run_dir, *_args, **_kwargs: started.append(
        (overrides, run_dir.name)))
    assert ablation.main(["--arms", "off", "--seeds", "1", "--replicas", str(replicas), "--out", str(tmp_path)]) == 0
    ((overrides, name),) = started
    assert f"rollout.n_gpus_per_node={replicas}" in overrides
    assert name == ("search-1-off" if replicas == 1 else "x2-search-1-off")


def test_a_number_says_how_many_seeds_it_rests_on():
    assert training.spread([3.0, 1.0, 2.0]) == "2 [1, 3]"
    assert training.spread([3.0, None, 2.0]) == "2.5 [2, 3] (2 of 3)"
    assert training.spread([None, None]) == "-"


def test_ratios_are_taken_within_a_seed():
    def measured(value):
        return {"effective tokens/s": value, "decoded tokens/s": value}

    rows = training.table({"off": {1: measured(10.0), 2: measured(100.0)},
                           "all": {1: measured(20.0), 2: measured(300.0)}})
    assert rows[0] == ["", "off", "all"]
    assert ["effective tokens/s, ratio to off", "1 [1, 1]", "2.5 [2, 3]"] in rows


def test_no_ratio_stands_without_the_decisions_behind_it():
    def measured(value):
        return {"decisions: routing": 3, "time to 0.50, s": value, "time to 0.90, s": None, "bubble rate": 0.1}

    rows = training.table({"plain": {1: measured(20.0), 2: measured(40.0)},
                           "all": {1: measured(10.0), 2: measured(30.0)}})
    names = [row[0] for row in rows]
    assert ["time to 0.50, s, ratio to plain", "1 [1, 1]", "0.625 [0.5, 0.75]"] in rows
    assert "time to 0.90, s, ratio to plain" not in names  # plain did not come so far
    assert names[-1] == "decisions: routing" and names.count("decisions: routing") == 1


@pytest.mark.parametrize("record, done", [
    ({"return_code": 0, "stopped_at_budget": False}, True), ({"return_code": -15, "stopped_at_budget": True}, True),
    ({"return_code": 1, "stopped_at_budget": False}, False), ({"return_code": 0, "overrides": ["other"]}, False)])
def test_only_a_run_that_ended_well_is_not_run_again(tmp_path, record, done):
    path = tmp_path / "arm.json"
    assert not training.is_done(path, ["a"])
    path.write_text(json.dumps({"overrides": ["a"], "stopped_at_budget": False, **record}))
    assert training.is_done(path, ["a"]) is done


def test_runs_side_by_side_have_cores_of_their_own_and_each_runs_once_where_the_user_is(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/bash
        echo "$4 $6 $(taskset -pc $$ | sed "s/.*: //") $(pwd)" >> {tmp_path}/seen
        for poll in $(seq 1500); do  # the first waits for the second: a crowded machine may start them far apart
            [ "$(wc -l < {tmp_path}/seen)" -ge 2 ] && break
            sleep 0.02
        done
        """)
    python.chmod(0o755)
    monkeypatch.setattr(training.sys, "executable", str(python))
    monkeypatch.setattr(training, "POLL_S", 0.05)
    monkeypatch.chdir(tmp_path)
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    options = argparse.Namespace(jobs=2, cores=1, task="search", budget=1.0, prompts=8, out=tmp_path, replicas=1,
                                 target=0.6)
    try:
        os.sched_setaffinity(0, cores)
        training.run_side_by_side([("off", 1), ("all", 1), ("off", 2)], options, ablation.own_command)
        assert os.sched_getaffinity(0) == set(cores)  # the next ones have the same cores
    finally:
        os.sched_setaffinity(0, before)
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert sorted(line[:2] for line in seen) == [["all", "1"], ["off", "1"], ["off", "2"]]
    assert {line[2] for line in seen[:2]} == {str(core) for core in cores}
    assert {line[3] for line in seen} == {str(tmp_path)}
