"""Token balance, quantiles, and the windows of one replica by example; the state machine is in the property tests."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esgrpo.algo.accounting import (
    ABORTED_KEPT,
    LEAST_STEPS,
    Occupancy,
    Pace,
    bubble,
    is_left_out,
    lent_back,
    pace_of,
    quantile,
    replica_rates,
    sync_counts,
    token_balance,
)
from esgrpo.algo.pruned_rows import ks_distance, length_bias, prune_report

FATES = ("trained", "pruned", "rejected", "zero_variance", "stale", "rolled_back")


def rows():
    count = st.integers(0, 10**6)
    told = dict.fromkeys(("pruned", "rejected", "trained", "gradient"), st.booleans())
    return st.fixed_dictionaries({"tokens": count, "reprefill": count, **told})


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(rows(), max_size=20))
def test_every_token_is_spent_once(batch):
    balance = token_balance(batch)
    assert balance["spent"] == sum(row["tokens"] + row["reprefill"] for row in batch)
    assert balance["spent"] == sum(balance[fate] for fate in FATES) + balance["reprefill"]
    assert balance["trained"] == sum(
        row["tokens"] for row in batch if row["trained"] and row["gradient"] and not is_left_out(row))


@pytest.mark.parametrize("left_out, trained, gradient, fate", [
    ("pruned", True, True, "pruned"), ("pruned", False, False, "pruned"), ("rejected", True, False, "rejected"),
    ("", False, True, "stale"), ("", True, False, "zero_variance"), ("", True, True, "trained"),
])
def test_fate_of_a_row(left_out, trained, gradient, fate):
    row = {"tokens": 7, "reprefill": 2, "pruned": left_out == "pruned", "rejected": left_out == "rejected",
           "trained": trained, "gradient": gradient}
    assert token_balance([row]) == {**dict.fromkeys(FATES, 0), fate: 7, "reprefill": 2, "spent": 9}


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40), st.floats(0, 1))
def test_quantile_is_numpys(values, q):
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-6)
    assert min(values) <= quantile(values, 0.5) <= max(values)


@pytest.mark.parametrize("q, expected", [(0, 1.0), (0.25, 1.5), (0.5, 2.0), (0.99, 2.98), (1, 3.0)])
def test_quantile_by_example(q, expected):
    assert quantile(iter([3.0, 1.0, 2.0]), q) == pytest.approx(expected)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_window_in_which_everything_happens():
    clock = Clock()
    occupancy = Occupancy(4, clock)
    clock.now = 1.0  # one second with nothing to run
    occupancy.observe(6, 0)
    clock.now = 3.0  # two seconds full
    occupancy.observe(1, 0)
    clock.now = 4.0  # one second of a single straggler
    occupancy.observe(1, 2)
    clock.now = 4.5  # half a second in which the memory is full
    occupancy.pause(True)
    clock.now = 6.5  # two seconds of weight sync
    occupancy.pause(False)
    window = occupancy.close()
    assert (window.used, window.sync, window.idle, window.tail) == (8 + 1 + 2, 8, 4, 3)
    assert window.timeline == [(1.0, 6), (3.0, 1)]
    rates = bubble([dataclasses.asdict(window)], rollouter_paused_s=0.25)
    assert rates == pytest.approx({"bubble_rate": 15 / 26, "paused": 1 / 26, "starved": 3 / 26, "tail": 3 / 26,
                                   "sync": 8 / 26})
    assert occupancy.close().seconds == 0.0


def test_the_timeline_keeps_few_points_and_every_end():
    clock = Clock()
    occupancy = Occupancy(64, clock)
    for step in range(1000):
        clock.now = step * 0.01
        occupancy.observe(1 + step % 7, 0)
    occupancy.observe(0, 0)
    timeline = occupancy.close().timeline
    assert len(timeline) <= 10.0 / 0.25 + 2
    assert timeline[-1] == (clock.now, 0)


def test_the_line_of_a_step_over_its_batch():
    """Two replicas, 20 ms and 0.5 ms a request."""
    paces = [Pace(), Pace()]
    for replica, batch in ((0, 8), (0, 16), (1, 40)):
        paces[replica].add(batch, 0.020 + 0.0005 * batch, steps=10)
    seconds, share = pace_of(map(vars, paces))
    mean = 64 / 3
    assert seconds == pytest.approx(0.020 + 0.0005 * mean) and share == pytest.approx(0.020 / seconds)
    assert pace_of([]) == pace_of([{}]) == (None, None)


@pytest.mark.parametrize("batches, expected", [
    ([8] * 40, (0.03, None)), ([8, 9] * 20, (0.03, None)),  # alike: nothing tells what a larger one costs
    ([8, 16] * (LEAST_STEPS // 2), (0.03, 1.0)), ([8, 16] * (LEAST_STEPS // 2 - 1), (None, None))])
def test_of_few_steps_and_of_batches_alike_there_is_no_line(batches, expected):
    pace = Pace()
    for batch in batches:
        pace.add(batch, 0.03)
    assert pace_of([vars(pace)]) == pytest.approx(expected)


@pytest.mark.parametrize("longer, share", [(-0.002, 1.0), (0.01, 0.0)])
def test_noise_makes_no_share_beyond_what_is_possible(longer, share):
    pace = Pace()
    for batch in (8, 16) * LEAST_STEPS:
        pace.add(batch, 0.03 + longer * (batch - 12))
    assert pace_of([vars(pace)])[1] == share


def test_what_lies_between_steps_is_in_no_step():
    clock = Clock()
    occupancy = Occupancy(4, clock)

    def step(seconds, decodes=True):
        clock.now += seconds
        occupancy.observe(3, 0)
        occupancy.stepped(3, decodes)

    step(0.5)  # nobody knows when it began
    step(0.25)
    step(1.0, decodes=False)
    step(0.25)
    occupancy.observe(0, 0)  # idle
    step(9.0)
    step(0.25)
    for paused in (True, False):  # a weight sync
        occupancy.pause(paused)
    step(9.0)
    window = occupancy.close()
    assert (window.pace.steps, window.pace.batch, window.pace.seconds, window.steps) == (3, 9, 0.75, 7)


def test_an_aborted_request_is_away_until_it_comes_back():
    clock = Clock()
    occupancy = Occupancy(4, clock)
    occupancy.aborted("a")
    clock.now = 1.0
    occupancy.aborted("b")
    assert occupancy.close().away == 0.0
    clock.now = 3.0
    for key in ("a", "b", "a", "c"):
        occupancy.came(key)
    assert occupancy.close().away == 3.0 + 2.0
    for key in range(ABORTED_KEPT + 10):
        occupancy.aborted(key)
    assert len(occupancy._left) == ABORTED_KEPT


def test_rates_of_replicas_are_of_their_own_time():
    def window(replica, seconds, tokens, surprisal=0.0, counted=0):
        return {"replica": replica, "seconds": seconds, "tokens": tokens, "surprisal": surprisal,
                "surprisal_tokens": counted}

    windows = [window("0", 10, 1000, 30.0, 100), window("0", 10, 3000), window("1", 20, 1000, 10.0, 300)]
    assert replica_rates(windows) == {"tokens_per_s_min": 50, "tokens_per_s_mean": 125, "tokens_per_s_max": 200,
                                      "surprisal": 0.1}
    assert replica_rates([window("0", 0, 0)]) == replica_rates([]) == {}


def test_a_replica_that_the_trainer_has_is_no_bubble():
    """Asleep for all of two windows' time but ten seconds, in which it ran at half of its room."""
    clock = Clock()
    occupancy = Occupancy(4, clock)
    occupancy.pause(True)
    clock.now += 100.0
    occupancy.pause(False)
    occupancy.observe(2, 0)
    clock.now += 10.0
    occupancy.window.tokens = 500
    window = {**dataclasses.asdict(occupancy.close()), "replica": "0"}
    assert bubble([window])["bubble_rate"] == pytest.approx(1 - 20 / 440)  # negative control: a weight sync of 100 s
    lent = lent_back(window)
    assert bubble([lent]) == pytest.approx({"bubble_rate": 0.5, "tail": 0.5, "sync": 0, "paused": 0, "starved": 0})
    assert replica_rates([lent])["tokens_per_s_min"] == pytest.approx(50.0)
    assert sum(lent[name] for name in ("used", "sync", "idle", "tail", "lent")) == pytest.approx(4 * 110)
    occupancy.pause(True)
    clock.now += 0.1 * 3
    asleep = lent_back({**dataclasses.asdict(occupancy.close()), "replica": "0"})
    assert replica_rates([asleep]) == {} and bubble([asleep])["bubble_rate"] == pytest.approx(0.0)


def test_no_time_is_no_bubble():
    assert set(bubble([]).values()) == {0.0}
    assert set(bubble([dataclasses.asdict(Occupancy(4, Clock()).close())], 9.0).values()) == {0.0}


def test_a_pause_holds_back_all_replicas():
    """Two replicas idle for ten seconds, prompts held back for four of them."""
    window = {"start": 100.0, "seconds": 10.0, "capacity": 8, "used": 0.0, "sync": 0.0, "tail": 0.0, "idle": 80.0}
    rates = bubble([window, {**window, "capacity": 2, "idle": 20.0}], rollouter_paused_s=4.0)
    assert (rates["paused"], rates["starved"]) == pytest.approx((0.4, 0.6))


def test_what_syncs_did_to_running_requests():
    windows = [{"outcomes": {"abort": 2, "finish": 5}, "kv_ages": []}, {"outcomes": {}, "kv_ages": [[0, 1], [3, 1]]},
               {"outcomes": {"abort": 1}, "kv_ages": [[1, 2]]}]
    assert sync_counts(windows) == {"kept": 4, "aborted": 3, "kv_age": 3, "kv_age_mean": 5 / 4}
    assert sync_counts([]) == {"kept": 0, "aborted": 0, "kv_age": 0, "kv_age_mean": 0.0}


def _row(tokens, **changes):
    return {"outcome": "finish", "rule": "", "candidate_rule": "", "candidate": False, "exempted": False,
            "keep_probability": 1.0, "tokens": tokens, "tokens_at_decision": None, **changes}


def test_ks_distance_of_known_samples():
    rng = random.Random(5)
    for _ in range(20):
        one = [rng.randint(0, 30) for _ in range(rng.randint(1, 40))]
        other = [rng.randint(5, 40) for _ in range(rng.randint(1, 40))]
        wanted = max(abs(np.mean(np.array(one) <= at) - np.mean(np.array(other) <= at)) for at in one + other)
        assert ks_distance([(v, 1.0) for v in one], [(v, 2.5) for v in other]) == pytest.approx(wanted)
    assert ks_distance([], [(1, 1.0)]) == ks_distance([], []) == 0.0
    assert ks_distance([(1, 3.0), (9, 1.0)], [(1, 1.0), (1, 1.0), (1, 1.0), (9, 1.0)]) == 0.0  # weights are counts


def test_length_bias_is_seen_through_the_weights():
    """20 short rows; of 20 long ones 4 were kept with pi 0.2. Trained: 4 of 24 are long, sampled: half."""
    kept = [_row(100, keep_probability=0.2, candidate_rule="enough", candidate=True, exempted=True,
                 tokens_at_decision=10) for _ in range(4)]
    gone = [_row(10, outcome="prune", rule="enough", keep_probability=0.2, candidate_rule="enough", candidate=True,
                 tokens_at_decision=10) for _ in range(16)]
    rows = [_row(10) for _ in range(20)] + kept + gone
    assert length_bias(rows) == {"enough": pytest.approx(20 / 24 - 20 / 40)}
    report = prune_report(rows)
    assert (report["candidates"], report["exempted"]) == (20, 4)
    assert report["tokens_saved"] == 4 * 4 * 90  # 16 pruned rows would have made 90 more each
    assert report["variance_inflation"] == pytest.approx(40 * (20 + 4 * 25) / 40**2)
    assert "false_rate" not in report


def test_length_bias_of_a_rule_without_a_coin_is_a_lower_bound():
    rows = [_row(10) for _ in range(6)] + [_row(50, outcome="prune", rule="repetition") for _ in range(2)]
    assert length_bias(rows) == {"repetition": 0.25}
    assert length_bias([_row(10)]) == {}
    assert prune_report(rows)["variance_inflation"] == 1.0


def test_replaced_groups_are_zero_variance_and_no_saving():
    fate = {"trained": False, "gradient": False, "reprefill": 0}
    rows = [{**fate, "tokens": 10, "pruned": False, "replaced": True}, {**fate, "tokens": 3, "pruned": True,
                                                                        "replaced": True},
            {**fate, "tokens": 5, "pruned": False}]
    balance = token_balance(rows)
    assert (balance["zero_variance"], balance["pruned"], balance["stale"]) == (10, 3, 5)
    assert balance["spent"] == 18


def test_tokens_of_an_update_that_a_restart_threw_away_are_no_training():
    row = {"tokens": 7, "reprefill": 0, "pruned": False, "trained": False, "gradient": False, "rolled_back": True}
    assert token_balance([row]) == {**dict.fromkeys(FATES, 0), "rolled_back": 7, "reprefill": 0, "spent": 7}
