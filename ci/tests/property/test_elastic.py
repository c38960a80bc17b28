"""The elastic segment length: bounds, monotony, hysteresis, and the tail class."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from esgrpo.algo.elastic import Segments, ideal_length, next_segments, remaining_tokens
from esgrpo.config import Elastic

TOKENS = st.floats(0, 1e6)
SHARES = st.floats(0, 1)


@st.composite
def elastics(draw):
    low = draw(st.integers(2, 4096))
    return Elastic(True, low, draw(st.integers(low, 65536)), draw(st.floats(0, 0.9)), draw(st.floats(0, 1)))


@given(elastics(), SHARES, TOKENS)
def test_within_the_bounds(settings, unfinished, remaining):
    length = ideal_length(settings, unfinished, remaining)
    assert isinstance(length, int) and settings.min_length <= length <= settings.max_length


@given(elastics(), st.lists(SHARES, min_size=2, max_size=2), st.lists(TOKENS, min_size=2, max_size=2))
def test_never_falls_when_more_is_unfinished_or_remains(settings, shares, remainders):
    (less, more), (near, far) = sorted(shares), sorted(remainders)
    assert ideal_length(settings, less, near) <= ideal_length(settings, more, near)
    assert ideal_length(settings, less, near) <= ideal_length(settings, less, far)


def test_the_ends_of_the_range():
    settings = Elastic(True, 128, 8192)
    assert ideal_length(settings, 1.0, 0) == 8192  # nobody has finished: nothing to decide
    assert ideal_length(settings, 0.5, 0) == 128
    assert ideal_length(settings, 0.19, 1e6) == 128  # more than 80 % have finished
    assert 128 < ideal_length(settings, 0.5, 2000) < ideal_length(settings, 0.9, 2000) < 8192
    assert ideal_length(Elastic(True, 128, 8192, tail_fraction=0.0), 1.0, 5000) == 8192  # the tail of nobody


@pytest.mark.parametrize("finished", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("remaining", [500, 4000])
def test_it_is_the_cheapest_length(finished, remaining):
    """Against the cost in the module's docstring, on every length within the bounds."""
    settings = Elastic(True, 128, 8192)
    look, rate = settings.min_length / 2, finished / remaining

    def cost(length):
        return look / length + rate * length / 2

    best = min(range(128, 8193), key=cost)
    assert ideal_length(settings, 1 - finished, remaining) == pytest.approx(best, abs=1)


@given(elastics(), st.integers(2, 65536), st.booleans(), SHARES, TOKENS)
def test_what_a_group_is_told(settings, length, tail, unfinished, remaining):
    now = Segments(length, tail)
    told = next_segments(settings, now, unfinished, remaining)
    ideal = ideal_length(settings, unfinished, remaining)
    assert told.tail or not now.tail  # the tail class is for good
    inside = settings.min_length <= length <= settings.max_length
    if told.tail:
        assert told.length == settings.min_length
    elif inside and abs(ideal - length) <= settings.hysteresis * length:
        assert told == now
    else:
        assert told.length == ideal
    assert next_segments(settings, told, unfinished, remaining) == told  # asked twice, told once


@given(elastics(), st.floats(0.01, 0.99), st.floats(1, 1e5), st.lists(st.floats(-1, 1), max_size=30))
def test_inputs_that_wander_inside_the_band_cause_no_message(settings, unfinished, remaining, wander):
    """Negative control: without the band the same inputs do flap, see below."""
    now = next_segments(settings, Segments(settings.max_length, False), unfinished, remaining)
    assume(not now.tail)
    ideal = ideal_length(settings, unfinished, remaining)
    band = settings.hysteresis * now.length - abs(ideal - now.length)
    root = math.sqrt((1 - unfinished) / settings.min_length)  # of the remainder, per token of length
    for step in wander:
        shifted = max(math.sqrt(remaining) + step * max(band - 1, 0) * root, 0)
        changed = next_segments(settings, now, unfinished, shifted ** 2)
        assert changed == now


def test_without_the_band_they_flap():
    inputs = [1900, 2100] * 10
    told = {}
    for hysteresis in (0.0, 0.25):
        settings = Elastic(True, 128, 8192, hysteresis)
        now, changes = next_segments(settings, Segments(1024, False), 0.5, 2000), 0
        for remaining in inputs:
            after = next_segments(settings, now, 0.5, remaining)
            changes += after != now
            now = after
        told[hysteresis] = changes
    assert told == {0.0: 20, 0.25: 0}


FORECAST = {"tokens": 1000, "low": 500, "high": 2000}


@pytest.mark.parametrize("tokens, forecast, finished, expected", [
    (0, FORECAST, [], 1000), (999, FORECAST, [], 1), (1000, FORECAST, [], 1000), (1500, FORECAST, [], 500),
    (2500, FORECAST, [], 2500), (2500, FORECAST, [9000], 2500), (7000, FORECAST, [], 1000),
    (0, None, [], 8000), (100, None, [300, 700], 600), (700, None, [300, 700], 700), (8000, None, [], 1)])
def test_the_predicted_remainder(tokens, forecast, finished, expected):
    assert remaining_tokens(tokens, forecast, finished, 8000) == expected


@given(st.integers(0, 9000), st.none() | st.just(FORECAST), st.lists(st.integers(1, 8000), max_size=4))
def test_the_remainder_is_something_and_fits_the_budget(tokens, forecast, finished):
    assert 1 <= remaining_tokens(tokens, forecast, finished, 8000) <= max(8000 - tokens, 1)
