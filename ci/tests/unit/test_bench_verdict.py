"""Early verdicts on recorded groups, and how such records are made."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from dataclasses import replace

import pytest

from bench import verdict as bench
from bench.common import recorded_groups
from bench.pretrained import record_groups
from esgrpo.algo.verdict_gate import Settings


@pytest.fixture(scope="module")
def records():
    return {name: bench.load(bench.RESULTS / f"groups_{name}.json.gz") for name in ("search", "learning")}


def replayed(record, shuffled: bool = False, seed: int = 0, columns=bench.ARMS["learned"]) -> dict:
    cap, groups = record
    return bench.Replay(groups, columns, seed, bench.fixed(cap), Settings(), shuffled).run().result()


def test_recorded_search_saves_what_loops_alone_do_not(records):
    ours, loops = replayed(records["search"]), replayed(records["search"], columns=None)
    assert ours["tokens_saved"] > 2 * loops["tokens_saved"] and ours["makespan_saved"] > 2 * loops["makespan_saved"]
    assert ours["false_rate"] <= bench.ALLOWED_FALSE and ours["correct_lost"] <= Settings().max_correct_lost
    assert max(ours["correct_lost_by_length"]) <= Settings().max_lost_of_length


@pytest.mark.parametrize("order", [10, 14])
def test_the_order_of_the_groups_is_no_reason_to_save_nothing(records, order):
    """In the first one steps of the model once grew beyond all measure, and nothing was ever cut."""
    cap, groups = records["search"]
    groups = [[replace(row) for row in group] for group in groups]
    random.Random(order).shuffle(groups)
    for number, group in enumerate(groups):
        for row in group:
            row.group = number
    ours = replayed((cap, groups))
    assert ours["later"]["tokens_saved"] > 0.12 and ours["later"]["false_rate"] <= 2 * bench.ALLOWED_FALSE


@pytest.mark.parametrize("seed", range(2))
def test_false_cuts_stay_below_twice_the_bar_while_the_policy_learns(records, seed):
    ours = replayed(records["learning"], seed=seed)
    assert ours["cut_by_verdict"] and ours["worst_window"] < 2 * Settings().max_false_rate


@pytest.mark.parametrize("name", ["search", "learning"])
def test_recorded_groups_with_shuffled_outcomes_keep_the_gate_shut(records, name):
    ours = replayed(records[name], shuffled=True)
    assert ours["open"] == 0 and ours["cut_by_verdict"] == 0


def test_what_a_worker_takes_is_timed_while_the_rule_decides_as_ever(monkeypatch):
    clock = itertools.count(step=2000)
    monkeypatch.setattr(bench.time, "thread_time_ns", lambda: next(clock))  # whatever is timed takes 2 µs
    path = bench.RESULTS / "groups_search.json.gz"
    cost = bench.worker_cost(path, 0)
    cap, groups = bench.load(path)
    looked = bench.Replay(groups, bench.ARMS["learned"], 0, bench.fixed(cap), bench.Settings()).run().result()
    assert cost["looks_per_response"] == looked["looks_per_response"]
    assert cost["ending"] == cost["update"] == 2.0 and 0 < cost["look"] <= 2.0  # several members are looked at at once
    assert 0 < cost["response"] <= 2.0 * (cost["looks_per_response"] + 1)


def test_what_is_written_is_read(tmp_path):
    row = recorded_groups.response([1, 2], [-0.123, -1e9], True)
    assert row == {"tokens": [1, 2], "surprisal": [12, recorded_groups.LARGEST], "correct": True}
    path = tmp_path / "groups_x.json.gz"
    recorded_groups.write(path, {"cap": 2}, [{"version": 0, "responses": [row]}])
    assert recorded_groups.read(path)["groups"][0]["responses"] == [row]
    recorded_groups.write(path, {}, [])
    with pytest.raises(ValueError):
        recorded_groups.read(path)


def test_a_task_that_is_not_recorded_is_said_in_one_line(capsys):
    assert bench.main(["--task", "none"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


# Samples of a pre-trained model

def kept_file(path):
    sample = {"ids": [5, 6, 7], "logprobs": [-0.1, -0.2, 0.0], "reward": 1.0}
    groups = [{"family": family, "samples": [sample, {**sample, "reward": 0.0}]} for family in "aabb"]
    path.write_bytes(gzip.compress(json.dumps({"prompts": 2, "samples": 2, "cap": 64, "seed": 3, "split": "val",
                                               "groups": groups}).encode()))
    return path


def test_kept_samples_become_a_record_in_which_families_take_turns(tmp_path):
    out = tmp_path / "groups.json.gz"
    arguments = [str(kept_file(tmp_path / "kept.json.gz")), "--model", "M", "--out", str(out)]
    assert record_groups.main(arguments) == 0
    record, first = recorded_groups.read(out), out.read_bytes()
    assert [group["family"] for group in record["groups"]] == ["a", "b", "a", "b"] and record["cap"] == 64
    assert record["groups"][0]["responses"] == [
        {"tokens": [5, 6, 7], "surprisal": [10, 20, 0], "correct": correct} for correct in (True, False)]
    assert record_groups.main(arguments) == 0 and out.read_bytes() == first


def test_samples_without_log_probs_are_refused_in_one_line(tmp_path, capsys):
    kept = tmp_path / "kept.json.gz"
    kept.write_bytes(gzip.compress(json.dumps({"groups": [{"family": "a", "samples": [{"ids": [1]}]}]}).encode()))
    assert record_groups.main([str(kept), "--model", "M", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.count(" | ") == 4 and "logprobs" in said and not (tmp_path / "out").exists()


def test_the_real_model_is_held_out_and_its_score_knows_more_than_length():
    cap, groups = bench.load(bench.RESULTS / "groups_pretrained.json.gz")
    ours, length = (bench.skill(groups, bench.ARMS[arm], 0, cap) for arm in ("learned", "length"))
    assert set(ours) == {"", "gcd", "chain_sum", "lcm", "prime_factorization"}
    assert ours[""] > length[""] and ours["lcm"] > length["lcm"]


@pytest.mark.parametrize("cut_below", [0.1, 0.125, 0.15])
def test_right_responses_of_the_real_model_are_not_lost(cut_below):
    """One of five is right: when 500 outcomes were seen, fewer than a hundred of them tell what would be lost."""
    cap, groups = bench.load(bench.RESULTS / "groups_pretrained.json.gz")
    chosen = Settings(cut_below=cut_below)
    ours = bench.Replay(groups, bench.ARMS["learned"], 3, bench.fixed(cap), chosen).run().result()
    assert ours["correct_lost"] <= chosen.max_correct_lost
    assert max(ours["correct_lost_by_length"]) <= chosen.max_lost_of_length
