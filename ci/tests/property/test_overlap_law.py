"""The overlap law: its closed form against its lines, moves within reach, monotony."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.tests.property.overlap_loops import AGE_SCALE, LIMITS, rates_of_loops, settings_of_users
from esgrpo.algo.overlap_law import STEP, Limits, Rates, Setting, best, flow, forecast, reachable


@settings(max_examples=25)
@given(settings_of_users)
def test_a_move_is_one_step(start):
    held = LIMITS.in_process(start)
    for there in reachable(start, LIMITS):
        assert there.concurrency <= math.ceil(STEP * start.concurrency)
        assert there.concurrency >= start.concurrency / STEP - 1
        assert LIMITS.in_process(there) <= max(STEP * held, held + start.trigger / 2) + 1
        assert start.trigger / 2 - LIMITS.mini_batch < there.trigger <= 2 * start.trigger


@given(st.integers(1, 12), st.floats(-1e4, 1e4))
def test_a_trigger_is_whole_mini_batches(mini, wanted):
    found = Limits((1, 8), (0.0, 4.0), (1, 500), mini).within(1.0, 1.0, wanted).trigger
    assert 0 < found <= 500 and found % mini == 0


def in_flight_of_the_law(setting: Setting, rates: Rates, train: float, limit: float) -> float:
    """f of the law's lines for R, f, w and q, by halving; `limit`: what c stands for in them."""
    version, bound, (a, b) = LIMITS.groups(setting), LIMITS.in_process(setting), rates.decode
    low, high = 1e-6, 1e6
    for _ in range(100):
        half = math.sqrt(low * high)
        rollout = version * rates.group_tokens * (a / half + b) + rates.pause
        q = rates.stock * setting.trigger * min(1.0, train / rollout)
        w = max(1.0, bound + 0.4 * (version - q))
        low, high = (half, high) if (limit**-4 + w**-4) ** -0.25 > half else (low, half)
    return low


@given(settings_of_users, rates_of_loops, st.floats(0.5, 1.5))
def test_the_point_at_which_the_lines_of_the_law_hold_is_found_at_once(setting, rates, stock):
    rates = replace(rates, stock=stock)
    rollout, train, inflight, q = flow(setting, rates, LIMITS)
    begun = LIMITS.groups(setting) + LIMITS.in_process(setting)
    law = in_flight_of_the_law(setting, rates, train, min(setting.concurrency, begun))
    assert inflight == pytest.approx(law, rel=0.2)  # near the limit: its R is that of w, f is down to 2**-0.25 of that
    a, b = rates.decode
    assert rollout == pytest.approx(LIMITS.groups(setting) * rates.group_tokens * (a / inflight + b) + rates.pause)
    assert train == pytest.approx(rates.train[0] + rates.train[1] * rates.group_tokens * setting.trigger + rates.sync)
    assert q == pytest.approx(stock * setting.trigger * min(1.0, train / rollout))


@given(settings_of_users, rates_of_loops, st.floats(0.5, 1.5))
def test_what_the_bound_leaves_is_exactly_the_laws(setting, rates, stock):
    """The limit c comes in last: what would be in flight without it."""
    setting, rates = replace(setting, concurrency=128), replace(rates, stock=stock)
    _, train, inflight, _ = flow(setting, rates, LIMITS)
    begun = LIMITS.groups(setting) + LIMITS.in_process(setting)
    found = in_flight_of_the_law(setting, rates, train, 1e9)  # w
    assert inflight == pytest.approx((min(128, begun)**-4 + found**-4) ** -0.25, rel=1e-6)


@given(settings_of_users, rates_of_loops, st.floats(0, 0.9), st.floats(0.5, 10))
def test_a_forecast_is_the_law_in_its_letters(setting, rates, nu, age_scale):
    rates = replace(rates, null_share=nu)
    R, T, f, q = flow(setting, rates, LIMITS)
    N, W, B, m = LIMITS.groups(setting), LIMITS.in_process(setting), setting.trigger, LIMITS.mini_batch
    g, (a, b), p = rates.group_tokens, rates.decode, rates.pause
    spare = T - p - N * g * b
    keeps_up = N * g * a / spare if spare > 0 else math.inf  # R = T at so many in flight
    o = min(1.0, W / (min(f, keeps_up) + q)) ** (2 / 3)
    V = max(R, T) + (1 - o) * min(R, T)
    P = min(W, f + q + T / (2 * (R - T))) if R > T else W
    A = (P + (N - m) / 2) / m
    k = min(max(1.0, T / R), 1 / (1 - nu))
    u = 1 + min(1.0, max(0.0, W - 1.5 * min(f, k * keeps_up)) / B) * (k - 1)
    found = forecast(setting, rates, LIMITS, age_scale)
    assert (found.seconds, found.age, found.overlap, found.useful) == pytest.approx((V, A, o, u))
    assert found.fresh == pytest.approx(N * u / V * math.exp(-A / age_scale))


@given(settings_of_users, rates_of_loops, st.floats(0.5, 10), st.floats(1, 4))
def test_more_trust_never_asks_for_fresher_tokens(now, rates, scale, factor):
    less, more = (best(now, rates, LIMITS, each) for each in (scale, scale * factor))
    ages = [forecast(each, rates, LIMITS, scale).age for each in (less, more)]
    assert ages[0] <= ages[1] + 1e-9


@given(settings_of_users, rates_of_loops, st.floats(1, 4))
def test_slower_is_never_forecast_faster(setting, rates, factor):
    now = forecast(setting, rates, LIMITS, AGE_SCALE).seconds
    slow_rollout = replace(rates, decode=(rates.decode[0] * factor, rates.decode[1] * factor))
    assert forecast(setting, slow_rollout, LIMITS, AGE_SCALE).seconds >= now * (1 - 1e-9)
    slow_training = replace(rates, train=(rates.train[0] * factor, rates.train[1] * factor))
    rollout, alone = (flow(setting, each, LIMITS)[0] for each in (rates, replace(rates, decode=(0.0, rates.decode[1]))))
    if alone <= rollout / 3:  # else the law lets fewer groups in flight keep up with a slower trainer, and overlap more
        assert forecast(setting, slow_training, LIMITS, AGE_SCALE).seconds >= now * (1 - 1e-9)


@given(settings_of_users, rates_of_loops, st.floats(0, 4))
def test_a_larger_bound_never_makes_a_version_longer_or_tokens_fresher(setting, rates, more):
    now, then = (forecast(each, rates, LIMITS, AGE_SCALE)
                 for each in (setting, replace(setting, staleness=setting.staleness + more)))
    assert then.overlap >= now.overlap - 1e-9 and then.age >= now.age - 1e-9
    assert then.seconds <= now.seconds * (1 + 1e-9)


@given(settings_of_users, rates_of_loops, st.floats(0, 0.9))
def test_a_filter_is_worth_what_rollout_has_to_spare_and_no_more(setting, rates, share):
    rollout, train, _, _ = flow(setting, rates, LIMITS)
    plain, found = (forecast(setting, replace(rates, null_share=each), LIMITS, AGE_SCALE) for each in (0.0, share))
    assert plain.useful == 1.0 <= found.useful <= min(max(1.0, train / rollout), 1 / (1 - share)) + 1e-9
    assert found.fresh == pytest.approx(plain.fresh * found.useful)
