"""Where replica time goes: occupancy under an injected clock, and the bubble rates made of its windows."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from esgrpo.algo.accounting import Occupancy, bubble, in_flight, mean_age, spent_on

CAUSES = ("used", "sync", "idle", "tail")


def shares(capacity: int, running: int, waiting: int, paused: bool) -> dict[str, int]:
    """What one second in this state is made of, written down case by case."""
    share = dict.fromkeys(CAUSES, 0)
    if paused:
        share["sync"] = capacity
    elif running == 0:
        share["idle"] = capacity
    elif waiting or running >= capacity:
        share["used"] = capacity
    else:
        share["used"], share["tail"] = running, capacity - running
    return share


class Replica(RuleBasedStateMachine):
    """Time passes in eighths of a second, so that all sums are exact."""

    @initialize(capacity=st.integers(1, 20), start=st.integers(0, 10**6))
    def start(self, capacity, start):
        self.now, self.capacity = start / 8, capacity
        self.occupancy = Occupancy(capacity, lambda: self.now)
        self.running, self.waiting, self.paused = 0, 0, False
        self.expected, self.opened = dict.fromkeys(CAUSES, 0.0), self.now
        self.windows, self.started = [], self.now

    @rule(eighths=st.integers(0, 80))
    def time_passes(self, eighths):
        self.now += eighths / 8
        for cause, share in shares(self.capacity, self.running, self.waiting, self.paused).items():
            self.expected[cause] += share * eighths / 8

    @rule(running=st.integers(0, 30), waiting=st.integers(0, 3))
    def observe(self, running, waiting):
        self.occupancy.observe(running, waiting)
        self.running, self.waiting = running, waiting
        self._compare(self.occupancy.window)

    @rule(paused=st.booleans())
    def pause(self, paused):
        self.occupancy.pause(paused)
        self.paused = paused
        self._compare(self.occupancy.window)

    @rule()
    def close(self):
        window = self.occupancy.close()
        assert window is not self.occupancy.window
        self._compare(window)
        times = [self.opened, *(time for time, _ in window.timeline), self.now]
        assert times == sorted(times)
        self.windows.append(dataclasses.asdict(window))
        self.expected, self.opened = dict.fromkeys(CAUSES, 0.0), self.now
        self._compare(self.occupancy.window)

    def _compare(self, window):
        assert window.start == self.opened
        assert window.seconds == self.now - self.opened
        assert {cause: getattr(window, cause) for cause in CAUSES} == self.expected

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "occupancy"):
            window = self.occupancy.window
            assert window.used + window.sync + window.idle + window.tail == window.capacity * window.seconds
            assert sum(w["seconds"] for w in self.windows) == self.opened - self.started

    def teardown(self):
        if hasattr(self, "occupancy"):
            self.close()
            rates = bubble(self.windows)
            total = self.capacity * (self.now - self.started)
            used = sum(window["used"] for window in self.windows)
            assert rates["bubble_rate"] == pytest.approx(1 - used / total if total else 0.0)


TestReplica = Replica.TestCase


@st.composite
def closed_windows(draw):
    """A window as a replica hands it out: its causes are parts of capacity * seconds."""
    capacity, seconds = draw(st.integers(1, 512)), draw(st.floats(0, 1e4))
    cuts = sorted(draw(st.lists(st.floats(0, 1), min_size=3, max_size=3)))
    parts = [high - low for low, high in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
    return {"capacity": capacity, "seconds": seconds, "start": 0.0,
            **{cause: part * capacity * seconds for cause, part in zip(CAUSES, parts, strict=True)}}


@given(st.lists(closed_windows(), max_size=6), st.floats(0, 1e4))
def test_causes_sum_to_the_bubble_rate(windows, paused_s):
    rates = bubble(windows, paused_s)
    causes = {cause: rate for cause, rate in rates.items() if cause != "bubble_rate"}
    assert sorted(causes) == ["paused", "starved", "sync", "tail"]
    assert rates["bubble_rate"] == pytest.approx(sum(causes.values()))
    assert all(-1e-9 <= rate <= 1 + 1e-9 for rate in rates.values())
    total = sum(w["capacity"] * w["seconds"] for w in windows)
    if total > 0:
        assert rates["bubble_rate"] == pytest.approx(1 - sum(w["used"] for w in windows) / total, abs=1e-9)
        assert rates["paused"] + rates["starved"] == pytest.approx(sum(w["idle"] for w in windows) / total, abs=1e-9)


@given(st.lists(closed_windows(), min_size=1, max_size=3), st.integers(2, 5), st.floats(0, 1e4))
def test_windows_may_be_cut_without_changing_the_rates(windows, pieces, paused_s):
    """Replicas run side by side, pieces of a replica one after the other: a pause is not counted once per piece."""
    windows = [{**window, "seconds": windows[0]["seconds"],
                **{cause: window[cause] / max(window["seconds"], 1e-9) * windows[0]["seconds"] for cause in CAUSES}}
               for window in windows]
    cut = [{**{key: value / pieces for key, value in window.items()}, "capacity": window["capacity"],
            "start": piece * window["seconds"] / pieces} for window in windows for piece in range(pieces)]
    assert bubble(cut, paused_s) == pytest.approx(bubble(windows, paused_s), abs=1e-9)


@given(st.lists(closed_windows(), min_size=1, max_size=4), st.floats(0, 100), st.floats(0, 100))
def test_a_longer_rollouter_pause_moves_idle_time_from_starved_to_paused(windows, first, second):
    low, high = sorted((first, second))
    short, long = bubble(windows, low), bubble(windows, high)
    assert short["paused"] <= long["paused"] + 1e-12
    assert short["starved"] >= long["starved"] - 1e-12
    assert short["bubble_rate"] == pytest.approx(long["bubble_rate"])
    assert bubble(windows, 0.0)["paused"] == 0.0


@given(st.floats(0, 1e6), st.dictionaries(st.sampled_from("abcd"), st.none() | st.floats(-10, 1e6)))
def test_what_time_was_spent_on_sums_to_the_time(seconds, parts):
    found = spent_on(seconds, parts, "other")
    assert sum(found.values()) == pytest.approx(seconds) and min(found.values()) >= 0
    assert set(found) == {*parts, "other"}
    if sum(max(0.0, part or 0.0) for part in parts.values()) <= seconds:
        assert all(found[name] == pytest.approx(max(0.0, part or 0.0)) for name, part in parts.items())


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 9)), min_size=1, max_size=20), st.integers(0, 80))
def test_groups_in_flight_second_by_second(steps, more):
    history = [(time / 8, count, 9) for time, count in sorted(steps, key=lambda step: step[0])]
    until = history[-1][0] + more / 8
    ticks = range(int(history[0][0] * 8), int(until * 8))
    counts = [[count for time, count, _ in history if time * 8 <= tick][-1] for tick in ticks]
    idle, mean = in_flight(history, until)
    assert idle == pytest.approx(counts.count(0) / 8)
    assert mean == pytest.approx(sum(counts) / len(counts) if counts else 0.0)


def test_nothing_known_of_groups_in_flight():
    assert in_flight([], 5.0) == (0.0, 0.0) and mean_age([], 3) is None


def test_surprisal_of_attempts_that_ended():
    occupancy = Occupancy(4, lambda: 0.0)
    for logprob_sum, tokens in ((-3.0, 6), (-math.inf, 5), (math.nan, 5), (0.0, 0), (-1.0, 2)):
        occupancy.ended(logprob_sum, tokens)
    window = occupancy.close()
    assert (window.surprisal, window.surprisal_tokens) == (4.0, 8)
    assert occupancy.window.surprisal_tokens == 0
