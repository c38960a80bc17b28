"""The overlap controller: bounds, rest on constant input, lost and late signals, shifts, and falling back."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.tests.property.overlap_loops import AGE_SCALE, LIMITS, RATES, settings_of_users
from esgrpo.algo.overlap import (
    BASE,
    DEAD_BAND,
    HOLD,
    LEAST_TRUST,
    LOST,
    MEMORY,
    PATIENCE,
    SMOOTH,
    TIGHTEN,
    TRAIN_LEVEL,
    WATCHED,
    Cause,
    Controller,
    Decoding,
    Training,
    Watch,
    Window,
    line,
)
from esgrpo.algo.overlap_law import Limits, Rates, Setting, flow, forecast, reachable

START, MEMBERS = Setting(32, 0.5, 32), 4
MEASURED = [field.name for field in fields(Window) if field.name != "version"]
VALUES = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.floats(1e-3, 1e6))
WINDOWS = st.builds(lambda row: row, st.fixed_dictionaries({name: VALUES for name in MEASURED}))


def controller(start: Setting = START, limits: Limits = LIMITS) -> Controller:
    ticks = itertools.count()
    return Controller(start, limits, AGE_SCALE, lambda: float(next(ticks)))


def played(version: int, setting: Setting, rates: Rates, limits: Limits = LIMITS) -> Window:
    """What a loop that obeys the law would measure."""
    seen = forecast(setting, rates, limits, AGE_SCALE)
    rollout, train, inflight, _ = flow(setting, rates, limits)
    tokens = limits.groups(setting) * rates.group_tokens
    decoding = tokens * (rates.decode[0] / inflight + rates.decode[1])
    mean_inflight = inflight * decoding / max(seen.seconds - rates.pause, decoding)
    cost = rates.decode[0] + rates.decode[1] * mean_inflight
    return Window(version, seen.seconds, tokens, mean_inflight, rates.group_tokens, tokens,
                  train - rates.sync, rates.sync, MEMBERS * cost, rates.decode[0] / cost, rates.pause,
                  max(0.0, seen.seconds - train), seen.age)


def run(control: Controller, rates: Rates, versions: range) -> list:
    return [control.observe(played(version, control.setting, rates)) for version in versions]


def best_of_all(rates: Rates, limits: Limits = LIMITS) -> float:
    grid = itertools.product((8, 16, 24, 32, 48, 64, 96, 128), (0, 8, 16, 24, 32, 48, 64, 96, 128, 256),
                             range(16, 129, 16))
    return max(forecast(limits.within(*each), rates, limits, AGE_SCALE).fresh for each in grid)


@settings(max_examples=25)  # a run of versions each
@given(settings_of_users, st.lists(WINDOWS, max_size=20))
def test_stays_within_its_limits_whatever_is_measured(start, rows):
    control = controller(start)
    for version, row in enumerate(rows):
        before = control.setting
        change = control.observe(Window(version, **row))
        now = control.setting
        assert LIMITS.concurrency[0] <= now.concurrency <= LIMITS.concurrency[1]
        assert LIMITS.staleness[0] <= now.staleness <= LIMITS.staleness[1]
        assert now.trigger % 16 == 0 and LIMITS.trigger[0] <= now.trigger <= LIMITS.trigger[1]
        assert LEAST_TRUST <= control.trust <= 1.0
        assert (change is None) == (now == before)
        if change is not None:
            assert (change.before, change.after, change.version) == (before, now, version)
            assert now == control.start or now in set(reachable(before, LIMITS))


@settings(max_examples=10)  # a run of versions each
@given(settings_of_users, st.fixed_dictionaries({name: st.floats(0.01, 1e5) for name in MEASURED}))
def test_rests_on_constant_input(start, row):
    control = controller(start)
    changes = [control.observe(Window(version, **row)) for version in range(100)]
    assert sum(change is not None for change in changes[:60]) <= 40
    assert not [change for change in changes[60:] if change is not None and change.cause != Cause.NO_GAIN
                and change.before != control.start]


def test_comes_near_the_best_setting_and_rests():
    """Of 40 loops; a few stay at a setting from which no single step is worth the dead band."""
    rng = random.Random(1)
    near = resting = 0
    for _ in range(40):
        rates = Rates(_log(rng, 500, 20000), (_log(rng, 1e-4, 1e-2), _log(rng, 1e-5, 3e-4)),
                      (rng.uniform(0, 5), _log(rng, 1e-5, 5e-4)), rng.uniform(0, 10), rng.uniform(0, 10))
        control = controller(LIMITS.within(rng.randint(4, 128), rng.uniform(0, 256), rng.randint(16, 128)))
        changes = run(control, rates, range(60))
        near += forecast(control.setting, rates, LIMITS, AGE_SCALE).fresh >= 0.9 * best_of_all(rates)
        resting += all(change is None for change in changes[45:])
    assert near >= 34 and resting >= 38


def _log(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


@functools.cache
def undisturbed() -> Setting:
    """Where the same run ends with every signal there."""
    whole = controller()
    run(whole, RATES, range(60))
    return whole.setting


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -1.0])
def test_recovers_from_each_missing_signal(name, value):
    holed = controller()
    for version in range(60):
        window = played(version, holed.setting, RATES)
        holed.observe(replace(window, **{name: value}) if 3 <= version < 20 else window)
    reached = forecast(holed.setting, RATES, LIMITS, AGE_SCALE).fresh
    assert reached >= (1 - 2 * DEAD_BAND) * forecast(undisturbed(), RATES, LIMITS, AGE_SCALE).fresh


def test_without_rates_the_start_setting_comes_back():
    control = controller()
    run(control, RATES, range(20))
    assert control.setting != START
    lost = [control.observe(Window(version)) for version in range(20, 20 + LOST)]
    assert [change.cause for change in lost if change] == [Cause.LOST] and control.setting == START
    run(control, RATES, range(30, 50))
    assert control.setting != START


def test_a_version_that_was_seen_changes_nothing():
    once, twice = controller(), controller()
    for version in range(30):
        once.observe(played(version, once.setting, RATES))
        twice.observe(played(version, twice.setting, RATES))
        assert twice.observe(replace(played(version, twice.setting, RATES), tokens=1.0)) is None
        assert twice.observe(Window(version - 1)) is None
    assert once.setting == twice.setting and once.rates == twice.rates


def test_under_a_filter_a_batch_may_wait_where_rollout_has_something_to_spare():
    ends = {}
    for share in (None, 0.0, 0.5):
        for train in (2e-5, 5e-4):
            control, rates = controller(), replace(RATES, train=(1.0, train))
            for version in range(30):
                control.observe(replace(played(version, control.setting, rates), null_share=share))
            ends[share, train] = control.setting
    assert LIMITS.in_process(ends[0.5, 5e-4]) > LIMITS.in_process(ends[None, 5e-4])
    assert ends[0.0, 5e-4] == ends[None, 5e-4]
    assert ends[0.5, 2e-5] == ends[None, 2e-5]  # rollout is slower: it has nothing to spare


@pytest.mark.parametrize("train", [1e-4, 5e-4], ids=["rollout is slower", "training is slower"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_adapts_within_three_versions_when_rollout_changes_its_speed_by_two(factor, train):
    before = replace(RATES, train=(1.0, train))
    shifted = replace(before, decode=(before.decode[0] * factor, before.decode[1] * factor))
    told = controller()
    run(told, shifted, range(60))
    control = controller()
    run(control, before, range(40))
    run(control, shifted, range(40, 43))
    reached = forecast(control.setting, shifted, LIMITS, AGE_SCALE).fresh
    assert reached >= 0.95 * forecast(told.setting, shifted, LIMITS, AGE_SCALE).fresh


def test_versions_of_few_responses_hide_no_speed():
    """Of 20 loops like the one of bench.overlap, in which the tokens of a version are off by 15 % and the time of an
    engine's step by 3 %, and rollout becomes twice as slow. A line through the versions' rates took such noise for
    what a larger batch costs."""
    limits = Limits((1, 32), (0.0, 8.0), (8, 64), mini_batch=8)
    before = Rates(250.0, (7e-3, 3e-4), (0.2, 1.8e-3), sync=0.2, pause=0.5)
    after = replace(before, decode=(14e-3, 6e-4))
    near, moved = [0, 0], 0
    for seed in range(20):
        rng = random.Random(seed)
        control = controller(Setting(8, 0.5, 8), limits)
        for half, (rates, versions) in enumerate(((before, range(15)), (after, range(15, 25)))):
            changes = []
            for version in versions:
                window = played(version, control.setting, rates, limits)
                changes.append(control.observe(replace(window, tokens=window.tokens * math.exp(rng.gauss(0, 0.15)),
                                                       step_s=window.step_s * math.exp(rng.gauss(0, 0.03)))))
            reached = forecast(control.setting, rates, limits, AGE_SCALE).fresh
            near[half] += reached >= 0.95 * best_of_all(rates, limits)
        moved += any(changes[:3])
    assert min(near) >= 18 and moved >= 18


def test_what_a_larger_batch_costs_is_known_before_any_move():
    control = controller()
    control.observe(played(0, START, RATES))
    level, slope = control.rates.decode
    assert slope / level == pytest.approx(RATES.decode[1] / RATES.decode[0])
    assert level == pytest.approx(RATES.decode[0], rel=0.1)


def one_line(training: Training) -> float:
    """What would be a trigger's own."""
    return line([batch[1:] for batch in training.batches], TRAIN_LEVEL)[0]


def test_time_that_tokens_do_not_explain_is_spread_over_a_larger_trigger_only_once_one_was_seen():
    """Eight groups train in as long whatever their tokens: of a first line that is all level."""
    training, rng = Training(), random.Random(1)
    for _ in range(MEMORY):
        training.add(8, 8e4 * math.exp(rng.gauss(0, 0.4)), 8.0)
    level, slope = training.fit(1e4)
    assert level <= 0.1 * 8.0 * 1.05 and level + slope * 8e4 == pytest.approx(8.0, rel=0.05)
    assert one_line(training) > 4.0  # what would have halved the time of a group at twice the trigger
    for _ in range(3):
        training.add(16, 16e4, 9.0)  # and here it does
    level, slope = training.fit(1e4)
    assert level > 4.0 and level + slope * 16e4 == pytest.approx(9.0, rel=0.1)


def test_triggers_of_two_sizes_whose_time_is_their_groups_save_nothing():
    """One line over tokens takes most of the time for a trigger's own: at one size tokens explain nothing of it."""
    training, rng = Training(), random.Random(1)
    for size in (8,) * 3 + (16,) * 9:
        training.add(size, size * 1e4 * math.exp(rng.gauss(0, 0.4)), size * math.exp(rng.gauss(0, 0.05)))
    assert one_line(training) > 4.0
    level, slope = training.fit(1e4)
    assert level < 2.0
    assert [level + slope * size * 1e4 for size in (8, 16)] == pytest.approx([8.0, 16.0], rel=0.1)


def test_falls_back_when_the_law_is_wrong():
    """A loop in which every setting but the user's is half as fast as the law says."""
    control = controller()
    causes = []
    for version in range(120):
        window = played(version, control.setting, RATES)
        if control.setting != START:
            window = replace(window, trained_tokens=window.trained_tokens / 2)
        change = control.observe(window)
        causes += [(version, change.cause)] if change else []
    back = [version for version, cause in causes if cause == Cause.NO_GAIN]
    assert back and back[0] <= BASE + 2 * PATIENCE + 4
    assert all(later - earlier >= HOLD * 2**at for at, (earlier, later) in enumerate(itertools.pairwise(back)))


def test_young_tokens_of_a_first_batch_do_not_make_an_old_setting_look_good():
    """From a staleness of 8: a run's first tokens are of the weights that train on them, later ones are not."""
    control = controller(Setting(64, 8.0, 16))
    changes = []
    for version in range(60):
        window = played(version, control.setting, RATES)
        changes.append(control.observe(replace(window, age=min(window.age, version + 0.0))))
    causes = [change.cause for change in changes if change]
    assert causes and Cause.NO_GAIN not in causes and control.setting.staleness < 4


def test_stays_when_the_law_is_right():
    control = controller()
    assert Cause.NO_GAIN not in [change.cause for change in run(control, RATES, range(100)) if change]


@pytest.mark.parametrize("name, usual, alarming", [("entropy", 1.0, 0.5), ("loss", 0.1, 0.5), ("kl", 0.01, 0.1),
                                                   ("grad_norm", 1.0, 5.0)])
def test_an_alarm_tightens_and_calm_widens_again(name, usual, alarming):
    control = controller()
    for version in range(30):
        control.observe(replace(played(version, control.setting, RATES), **{name: usual}))
    calm = forecast(control.setting, RATES, LIMITS, AGE_SCALE).age
    control.observe(replace(played(30, control.setting, RATES), **{name: alarming}))
    assert control.trust == 1.0, "one batch proves nothing"
    control.observe(replace(played(31, control.setting, RATES), **{name: alarming}))
    assert control.trust == TIGHTEN
    tight = []
    for version in range(32, 80):
        control.observe(replace(played(version, control.setting, RATES), **{name: usual}))
        tight.append(forecast(control.setting, RATES, LIMITS, AGE_SCALE).age)
    assert min(tight) < calm and control.trust == 1.0
    assert tight[-1] == pytest.approx(calm, rel=0.25)


@given(st.floats(-1e3, 1e3), st.booleans())
def test_a_constant_signal_never_alarms(value, rises):
    watch = Watch(rises, drifts=not rises)
    assert not any(watch.alarms(each) for each in [value, math.nan, None] * 30)


def test_noise_that_is_usual_alarms_nobody_and_hides_no_rise():
    """Twice what is usual is noise; on a steady signal as much and half again is a rise, and alarms twice running."""
    noisy, steady = Watch(True), Watch(True)
    alarms = [noisy.alarms(value) for value in [9.0, 11.0] * 10 + [12.0, 12.0]]
    assert not any(alarms)
    assert [steady.alarms(value) for value in [10.0] * 6 + [13.0] * 2] == [False] * 7 + [True]


def test_a_batch_of_more_tokens_that_takes_as_much_longer_is_as_fast_as_before():
    training = Training()
    for tokens in (1000, 2000, 3000, 1500):
        training.add(8, tokens, 1.0 + 0.001 * tokens)
    for tokens, seconds, is_off in ((9000, 10.0, False), (9000, 4.0, False), (3000, 8.0, True)):  # the mean is 2.9
        training.add(8, tokens, seconds)
        assert (training.doubted is not None) == is_off, (tokens, seconds)


def test_until_sizes_differ_a_tenth_of_the_time_is_a_triggers_own():
    training = Training()
    for _ in range(3):
        training.add(8, 1000, 10.0)
    assert training.fit(125.0) == pytest.approx((TRAIN_LEVEL * 10.0, (1 - TRAIN_LEVEL) * 10.0 / 1000))


def test_what_engines_say_of_their_steps_is_followed():
    decoding = Decoding()
    for share, growth in ((0.5, 0.1), (None, 0.1), (0.25, 0.1 + SMOOTH * 0.2)):  # (1 / share - 1) / 10
        decoding.add(10.0, 1.0, 0.1, share)
        assert decoding.growth == pytest.approx(growth)


@pytest.mark.parametrize("signal", [lambda rng: rng.gauss(0.0, 0.1), lambda rng: rng.expovariate(1.0)])
def test_noise_of_small_batches_seldom_alarms(signal):
    """Loss around 0, and a gradient norm of which most is small; where one value was an alarm it was 1 and 7 %."""
    rng, watch = random.Random(1), Watch(rises=True)
    assert sum(watch.alarms(signal(rng)) for _ in range(2000)) < 0.005 * 2000


def test_a_rise_that_lasts_alarms_in_its_second_version_and_goes_on():
    watch = Watch(rises=True)
    assert not any(watch.alarms(1.0) for _ in range(30))
    assert [watch.alarms(2.0) for _ in range(3)] == [False, True, True]


def test_entropy_that_melts_away_slowly_alarms_once_a_halving():
    watch = Watch(rises=False, drifts=True)
    alarms = sum(watch.alarms(0.99**step) for step in range(WATCHED + 300))
    assert 2 <= alarms <= 5
