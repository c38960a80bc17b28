"""What the overlap controller is given in a run: limits, a window of two sides, and the end of the data."""

from __future__ import annotations

import pytest

from esgrpo.algo.accounting import lent_back
from esgrpo.algo.null_groups import spare_share
from esgrpo.algo.overlap import Window
from esgrpo.algo.overlap_law import Setting
from esgrpo.algo.overlap_signals import (
    Rollout,
    Run,
    at_the_end,
    begun_at_most,
    decoding,
    limits_of,
    measured,
    more_ahead,
    most_ahead,
    pause,
    start_of,
    threshold_for,
    to_begin,
    validation,
    window,
)

START = Setting(32, 0.5, 8)
RUN = Run(mini_batch=8, triggers_per_version=2, replicas=2, capacity=64, max_staleness=4.0, max_batches=4)
ROLLOUT = Rollout(concurrency=32, left=1000, seconds=10.0, in_flight=20.0, tokens=5000, step_s=0.02,
                  decode_level=0.8, pause_s=0.5, surprisal=0.9)


def step(groups=8, tokens=800, age=0.5, entropy=None, **spent):
    return {"groups": groups, "tokens": tokens, "age": age, "entropy": entropy, "loss": 0.1, "kl": None,
            "grad_norm": 2.0, "spent": {"wait": 1.0, "sync": 0.0, "train": 3.0, "other": 0.5, **spent}}


@pytest.mark.parametrize("staleness, begun", [(0.1, 17), (0.0, 16), (0.5, 24), (1.99, 47)])
def test_the_start_setting_begins_as_many_groups_as_verl_does(staleness, begun):
    start = start_of(ROLLOUT, staleness, 8, 2)
    assert begun_at_most(start, 2) == begun == int(8 * (staleness + 1) * 2)
    limits = limits_of(RUN, start)
    assert limits.within(start.concurrency, limits.in_process(start), start.trigger) == start


def test_every_whole_number_in_process_is_begun():
    """8 x 3 x (1 + 7 / 24) is 30.999... in floats."""
    for groups in range(1, 60):
        for waiting in range(groups * 3):
            assert begun_at_most(Setting(1, waiting / groups, groups), 1) == groups + waiting


@pytest.mark.parametrize("fixed", [(), ("concurrency",), ("staleness", "trigger")])
def test_limits_hold_the_start_and_nothing_else_of_what_is_fixed(fixed):
    start = Setting(100, 5.0, 64)  # beyond all of them
    limits = limits_of(Run(**{**vars(RUN), "fixed": fixed}), start)
    for name, free in (("concurrency", (2, 100)), ("staleness", (0.0, 5.0)), ("trigger", (8, 64))):
        value = getattr(start, name)
        assert getattr(limits, name) == ((value, value) if name in fixed else free)


def test_a_window_adds_up_the_batches_of_a_version():
    found = window(7, ROLLOUT, [step(sync=0.0), step(tokens=2400, age=1.5, sync=2.0)], mini_batch=8)
    assert found == Window(
        version=7, seconds=10.0, tokens=5000, in_flight=20.0, step_s=0.02, decode_level=0.8, pause_s=0.5,
        group_tokens=200.0, trained_tokens=3200,
        train_s=6.0, sync_s=3.0, wait_s=2.0, age=1.25 * 2 + 0.5, entropy=0.9, loss=0.1, kl=None, grad_norm=2.0)
    assert window(7, ROLLOUT, [step(entropy=0.3)], 8).entropy == 0.3  # the trainer's own is exact


def test_a_validation_is_no_weight_sync_and_no_rate_of_rollout():
    steps = [step(validation=40.0), step()]
    found = window(7, ROLLOUT, steps, 8)
    assert validation(steps) == 40.0 and found.sync_s == 1.0 and found.seconds == 10.0
    after = window(8, ROLLOUT, [step()], 8, validation(steps))
    assert (after.seconds, after.tokens, after.in_flight, after.step_s, after.null_share) == (None,) * 5
    assert after.train_s == 3.0 and after.trained_tokens == 800
    # but not what follows verl's timer in every step
    whole = window(8, ROLLOUT, [step()], 8)
    assert window(8, ROLLOUT, [step()], 8, 2.0) == whole != window(8, ROLLOUT, [step()], 8, 2.1)


def test_tokens_of_groups_that_nobody_trains_are_not_rollouts():
    engines = [{"version": 3, "tokens": tokens, "surprisal": 0.0, "surprisal_tokens": 0, "capacity": 0}
               for tokens in (300, 200)]
    assert [measured(8, engines, 1.0, 4.0, left_out_tokens=less).tokens for less in (0, 120, 600)] == [500, 380, 0]
    assert measured(8, [], 1.0, 4.0, left_out_tokens=120).tokens is None


@pytest.mark.parametrize("mode, nulls, judged, share", [
    ("spare", 3, 4, 0.75), ("spare", 0, 4, 0.0), ("spare", 0, 0, None), ("replace", 3, 4, None), ("train", 3, 4, None)])
def test_only_what_spare_may_leave_out_is_told_to_the_law(mode, nulls, judged, share):
    told = measured(8, [], 1.0, 4.0, null_share=spare_share(mode, nulls, judged))
    assert told.null_share == share and window(3, told, [], 8).null_share == share


def test_what_was_not_measured_stays_open():
    assert window(3, None, [], 8) == Window(version=3)
    found = window(3, None, [step(tokens=0, age=None)], 8)
    assert (found.group_tokens, found.trained_tokens, found.age, found.train_s) == (None, None, None, 3.0)
    aged = window(3, None, [step(age=4.0), step(tokens=None, age=9.0), step(age=None)], 8)
    assert (aged.age, aged.trained_tokens) == (4.0 * 3 + 1.0, 1600)  # of the tokens whose age is known
    assert pause([]) is None and pause([{"sync": 3.0, "capacity": 0}]) is None
    assert pause([{"sync": 3.0, "capacity": 2}, {"sync": 1.0, "capacity": 2}]) == 1.0


def test_a_response_that_comes_back_late_is_part_of_the_syncs_pause():
    """Of 4 s with 12 request-seconds: 4 more were lost by requests that were away."""
    slept = {"sync": 0.8, "capacity": 8, "seconds": 4.0, "used": 12.0, "away": 4.0}
    assert pause([slept]) == 1.0
    assert pause([slept, {**slept, "away": 0.0}]) == pytest.approx((1.0 + 0.1) / 2)
    assert pause([{**slept, "sync": 16.0}]) == 2.0  # what was away in it was held up by nothing else


@pytest.mark.parametrize("trigger, left, after", [
    (32, 64, 32), (32, 63, 24), (32, 32, 16), (32, 15, 8), (32, 0, 8), (8, 3, 8), (16, 31, 8)])
def test_at_the_end_of_the_data_no_finished_group_is_left_in_a_batch_that_is_never_full(trigger, left, after):
    setting = Setting(48, 1.0, trigger)
    found = at_the_end(setting, START, limits_of(RUN, START), left)
    assert found == Setting(48, 1.0, after)
    assert found.trigger == setting.trigger or found.trigger * RUN.triggers_per_version <= max(left, 16)


def test_a_trigger_that_was_not_raised_is_the_users_to_the_end():
    start = Setting(32, 0.5, 16)
    assert at_the_end(start, start, limits_of(RUN, start), left=20) == start


@pytest.mark.parametrize("wanted, threshold, start, found", [
    (6.0, None, 1.0, 6.0), (6.0, 8, 1.0, 6.0), (6.0, 5, 1.0, 3.0), (6.0, 2, 1.0, 1.0)])
def test_a_threshold_that_stays_bounds_the_staleness_but_never_below_the_users(wanted, threshold, start, found):
    assert most_ahead(wanted, threshold, start) == found


@pytest.mark.parametrize("staleness, found", [(1.0, 4), (1.2, 5), (3.0, 6), (0.0, 4)])
def test_a_threshold_goes_along_in_whole_versions_and_never_below_the_users(staleness, found):
    assert threshold_for(4, 0.5, staleness) == found  # the user's 4 left room for 3 more than its 0.5, rounded up


def test_groups_ahead_are_those_of_the_settings():
    limits = limits_of(RUN, START)
    assert more_ahead(Setting(32, 0.0, 8), Setting(32, 0.5, 8), limits) == 8
    assert more_ahead(Setting(32, 0.5, 8), Setting(64, 0.25, 8), limits) == -4


def test_groups_in_the_engines_are_those_of_the_responses_that_decode():
    windows = [{"version": 3, "used": 40.0}, {"version": 3, "used": 20.0}]  # request-seconds of two replicas
    assert decoding(windows, 5.0, 4) == 3.0
    assert decoding([], 5.0, 4) is None and decoding(windows, 0.0, 4) is None


def test_a_window_of_many_versions_says_nothing_of_this_one():
    """Under verl's separate_async the trainer's own replicas are asleep between two validations, and their window ends
    with the next one."""
    def one(version, tokens, sync):
        return {"version": version, "tokens": tokens, "sync": sync, "seconds": 60.0, "used": 60.0, "capacity": 2,
                "surprisal": 1.0, "surprisal_tokens": 10}

    ours, theirs = one(9, 300, 4.0), lent_back(one(4, 5000, 1200.0))
    assert measured(8, [ours, theirs], 60.0, 4.0) == measured(8, [ours], 60.0, 4.0)
    assert decoding([ours, theirs], 60.0, 1) == decoding([ours], 60.0, 1) == 1.0
    lent = lent_back(one(9, 200, 80.0))  # in this version: what it made counts, and that it slept is no weight sync
    found = measured(8, [ours, lent], 60.0, 4.0)
    assert found.tokens == 500 and found.pause_s == 1.0


@pytest.mark.parametrize("owed, found", [(0, (8, 0)), (5, (13, 0)), (-3, (5, 0)), (-8, (1, -1)), (-20, (1, -13))])
def test_what_a_step_begins_is_a_prompt_at_least_and_the_rest_is_owed(owed, found):
    assert to_begin(8, owed) == found
