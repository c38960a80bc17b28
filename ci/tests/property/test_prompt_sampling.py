"""The prompt sampler as a state machine, its closed forms against simulation, and what it must not do."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from esgrpo import config
from esgrpo.algo.prompt_prior import PromptPrior
from esgrpo.algo.prompt_sampling import (
    MOST_IN_AN_EPOCH,
    PromptSampler,
    expected_gain,
    gain,
    gradient_probability,
    has_gradient,
)

RESPONSES = 8


class Counts:
    """A history without decay: what the contract of algo/history.py promises, and nothing more."""

    def __init__(self, posteriors=None):
        self.seen = dict(posteriors or {})
        self.texts = PromptPrior()

    def posterior(self, key, version, features=()):
        return self.seen.get(key, (1.0, 1.0))

    def forecast(self, key, version):
        return {"known": key in self.seen}

    def observe(self, key, correct):
        alpha, beta = self.seen.get(key, (1.0, 1.0))
        self.seen[key] = alpha + sum(correct), beta + len(correct) - sum(correct)


def sampler(prompts, seed=0, history=None, **settings):
    return PromptSampler(config.Sampler(enable=True, **settings), Counts() if history is None else history,
                         random.Random(seed), prompts, str, RESPONSES)


class Prompts(RuleBasedStateMachine):
    @initialize(prompts=st.integers(1, 24), candidates=st.integers(2, 6), uniform=st.floats(0, 1),
                choice=st.sampled_from(["expected", "thompson"]), seed=st.integers(0, 99))
    def start(self, prompts, candidates, uniform, choice, seed):
        self.history = Counts()
        self.settings = {"candidates": candidates, "uniform": uniform, "choice": choice}
        self.sampler = sampler(prompts, seed, self.history, **self.settings)
        self.prompts, self.taken, self.version = prompts, [], 0

    @rule()
    def take(self):
        number = self.sampler.take(self.version)
        assert 0 <= number < self.prompts
        self.taken.append(number)

    @rule(data=st.data())
    def outcome(self, data):
        key = str(data.draw(st.integers(0, self.prompts - 1)))
        correct = data.draw(st.lists(st.booleans(), max_size=RESPONSES))
        self.history.observe(key, correct)
        self.sampler.outcome(key, correct)

    @rule()
    def restart(self):
        """Through JSON into a new sampler: the sequence goes on as it would have."""
        state = json.loads(json.dumps(self.sampler.to_state()))
        other = sampler(self.prompts, 12345, self.history, **self.settings)
        other.restore(state)
        assert other.to_state() == self.sampler.to_state()
        self.sampler = other

    @invariant()
    def nothing_is_lost_or_twice(self):
        if hasattr(self, "sampler"):
            assert sorted([*self.sampler.eligible, *self.sampler.resting]) == list(range(self.prompts))
            assert self.sampler.eligible and self.sampler.taken == len(self.taken)

    @invariant()
    def not_more_often_in_one_epoch_than_the_rest_allows(self):
        if hasattr(self, "sampler") and self.taken:
            assert max(Counter(self.taken[-self.prompts:]).values()) <= MOST_IN_AN_EPOCH

    @invariant()
    def shares_are_shares(self):
        if hasattr(self, "sampler"):
            assert all(-1e-9 <= value <= 1 + 1e-9 for value in self.sampler.metrics().values())


TestPrompts = Prompts.TestCase


def test_without_resting_the_limit_would_not_hold():
    """Negative control: the same choices without a rest take one prompt more often."""
    history = Counts({str(n): (1.0, 2.0) if n == 0 else (1e7, 1.0) for n in range(40)})
    restless, resting = (sampler(40, history=history, candidates=40, uniform=0.0) for _ in range(2))
    restless.rest = 0
    assert Counter(restless.take(0) for _ in range(40))[0] > MOST_IN_AN_EPOCH
    taken = [resting.take(0) for _ in range(400)]
    assert max(max(Counter(taken[at:at + 40]).values()) for at in range(360)) <= MOST_IN_AN_EPOCH


def test_a_prompt_that_was_just_taken_counts_for_less():
    """Among equals every prompt has its turn before one comes again; without the recovery some come again."""
    def distinct(recovery):
        mine = sampler(40, 4, candidates=40, uniform=0.0)
        mine.recovery = recovery
        return len({mine.take(0) for _ in range(30)})

    assert distinct(30.0) == 30 > distinct(1.0)


def test_a_copy_rests_with_its_prompt():
    """Every second row of the data set is a copy of the one before it."""
    def repeats(key_of):
        history = Counts({"0": (1.0, 2.0), "1": (1.0, 2.0)})  # far better than all others, which are solved
        history.seen.update({str(n): (1e3, 1.0) for n in range(2, 60)})
        mine = PromptSampler(config.Sampler(enable=True, candidates=60, uniform=0.0), history, random.Random(1), 60,
                             key_of, RESPONSES)
        taken = [str(n - n % 2) for n in (mine.take(0) for _ in range(300))]
        return sum(taken[at] in taken[max(0, at - mine.rest):at] for at in range(len(taken)))

    assert repeats(lambda n: str(n - n % 2)) == 0 < repeats(str)  # as rows of their own they come too soon


@given(st.integers(0, 10_000))
def test_one_seed_one_sequence(seed):
    first, second = sampler(7, seed), sampler(7, seed)
    assert [first.take(0) for _ in range(30)] == [second.take(0) for _ in range(30)]


def test_a_restart_is_not_seen():
    history = Counts({str(n): (1.0 + n, 9.0) for n in range(20)})
    whole, cut = sampler(20, 3, history), sampler(20, 3, history)
    expected = [whole.take(0) for _ in range(80)]
    found = [cut.take(0) for _ in range(33)]
    state = cut.to_state()
    fresh = sampler(20, 99, history)
    assert [fresh.take(0) for _ in range(47)] != expected[33:]  # negative control: without the state it is seen
    fresh.restore(state)
    assert found + [fresh.take(0) for _ in range(47)] == expected


@pytest.mark.parametrize("damage", [{"prompts": 6}, {"state_version": 9}, {"eligible": [0, 0, 1, 2, 3]},
                                    {"resting": [0, 1, 2, 3, 4, 5]}, {"last": dict.fromkeys("012345", 0)},
                                    {"last": {"0": 7}}, {"last": {"0": -1}}])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage):
    mine = sampler(5)
    mine.take(0)
    before = mine.to_state()
    with pytest.raises(ValueError, match="prompts"):
        mine.restore({**before, **damage})
    assert mine.to_state() == before


def test_every_prompt_keeps_a_chance():
    """Hopeless and solved prompts are taken at least as often as the uniform share alone would take them."""
    hard, easy = {str(n): (1.0, 4000.0) for n in range(5)}, {str(n): (4000.0, 1.0) for n in range(5, 10)}
    history = Counts({**hard, **easy, **{str(n): (10.0, 20.0) for n in range(10, 40)}})
    settings = {"candidates": 4, "uniform": 0.2}
    mine = sampler(40, 1, history, **settings)
    takes = 20_000
    counts = Counter(mine.take(0) for _ in range(takes))
    least = takes * settings["uniform"] / 40  # at most 40 prompts are eligible
    assert min(counts[n] for n in range(40)) > least / 2
    without = sampler(40, 1, history, candidates=4, uniform=0.0)
    rare = Counter(without.take(0) for _ in range(takes))
    assert sum(rare[n] for n in range(10)) < sum(counts[n] for n in range(10))  # what the uniform share is for


def test_prompts_that_give_a_gradient_are_preferred():
    history = Counts({str(n): (30.0, 60.0) if n % 2 else (5000.0, 1.0) for n in range(40)})
    uniform = sampler(40, 2, history, uniform=1.0)  # negative control: no choice at all
    chosen = sampler(40, 2, history, uniform=0.1)
    share = {name: sum(one.take(0) % 2 for _ in range(4000)) / 4000 for name, one in
             (("chosen", chosen), ("uniform", uniform))}
    assert share["chosen"] > 0.65 and abs(share["uniform"] - 0.5) < 0.05


def test_expected_takes_what_promises_most_and_thompson_what_a_draw_says():
    """Equal means, so that a draw of the uncertain one beats the best expectation now and then."""
    history = Counts({"0": (3.0, 6.0), "1": (300.0, 600.0), "2": (5000.0, 1.0)})
    first = {choice: {sampler(3, seed, history, choice=choice, uniform=0.0, candidates=3).take(0) for seed in range(99)}
             for choice in ("expected", "thompson")}
    best = max(range(3), key=lambda number: expected_gain(*history.seen[str(number)]))
    assert first == {"expected": {best}, "thompson": {0, 1}}


def test_the_features_of_a_prompt_come_back_with_its_outcome_once():
    mine = PromptSampler(config.Sampler(enable=True), Counts(), random.Random(0), 20, str, RESPONSES,
                         lambda number: (number, 7))
    number = mine.take(0)
    assert mine.outcome(str(number), [True]) == (number, 7) and tuple(mine.outcome(str(number), [True])) == ()


@pytest.mark.parametrize("alpha, beta", [(1.0, 1.0), (0.05, 0.3), (40.0, 10.0)])
def test_the_expected_gain_is_what_a_simulation_gives(alpha, beta):
    rng, runs = random.Random(6), 40_000
    drawn = [gain(rng.betavariate(alpha, beta)) for _ in range(runs)]
    mean = sum(drawn) / runs
    error = (sum((value - mean) ** 2 for value in drawn) / runs ** 2) ** 0.5
    assert abs(mean - expected_gain(alpha, beta)) < 3 * error


def test_the_gain_is_largest_at_one_third():
    grid = [n / 3000 for n in range(3001)]
    assert max(grid, key=gain) == 1000 / 3000
    assert gain(0.3) > gain(0.7)  # unlike p (1 - p)


@pytest.mark.parametrize("alpha, beta", [(1.0, 1.0), (0.5, 3.0), (40.0, 10.0)])
def test_the_closed_form_is_what_a_simulation_gives(alpha, beta):
    rng, runs, hits = random.Random(5), 40_000, 0
    for _ in range(runs):
        p = rng.betavariate(alpha, beta)
        hits += has_gradient([rng.random() < p for _ in range(RESPONSES)])
    expected = gradient_probability(alpha, beta, RESPONSES)
    assert abs(hits / runs - expected) < 3 * (expected * (1 - expected) / runs) ** 0.5


def test_reports():
    history = Counts({"0": (1.0, 1.0)})
    mine = sampler(20, 0, history, uniform=1.0)  # two rest: the second take is of another prompt than the first
    assert mine.metrics() == {}
    numbers = [mine.take(0) for _ in range(4)]
    found = mine.metrics()
    assert found["unseen"] == sum(n != 0 for n in numbers) / 4
    assert found["coverage"] == len(set(numbers)) / 4
    mine.outcome(str(numbers[0]), [True, None, False])
    mine.outcome(str(numbers[1]), [True, None, True])
    mine.outcome("never taken", [True, False])
    found = mine.metrics()
    assert found["realised_gradient"] == 0.5
    assert found["expected_gradient"] == pytest.approx(gradient_probability(1.0, 1.0, RESPONSES))


def test_unknown_outcomes_say_nothing():
    assert has_gradient([True, False]) and has_gradient([None, 1, 0]) and has_gradient([True, 0.1])
    assert not has_gradient([False, 0.1])
    assert not has_gradient([]) and not has_gradient([True, None]) and not has_gradient(itertools.repeat(False, 3))
