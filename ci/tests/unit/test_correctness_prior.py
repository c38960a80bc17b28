"""The prior of correctness: fitted to first visits, whatever their size, and firm only when it has seen enough."""

from __future__ import annotations

import random
import statistics

import pytest

from esgrpo.algo.correctness_prior import LEAST_PARAMETER, WINDOW, CorrectnessPrior, pairs


def fitted(alpha, beta, visits=900, sizes=(8,), seed=3, before=None) -> CorrectnessPrior:
    """After first visits of prompts whose P(correct) is Beta(alpha, beta)."""
    rng, prior = random.Random(seed), before or CorrectnessPrior()
    for _ in range(visits):
        chance, judged = rng.betavariate(alpha, beta), rng.choice(sizes)
        prior.add(sum(rng.random() < chance for _ in range(judged)), judged)
    return prior


def test_it_starts_as_knowing_nothing_and_single_responses_teach_nothing():
    prior = CorrectnessPrior()
    assert prior.parameters() == pytest.approx((1, 1))
    prior.add(1, 1)
    prior.add(0, 0)
    assert prior == CorrectnessPrior()


@pytest.mark.parametrize("alpha, beta", [(0.3, 0.4), (1.0, 3.0), (6.0, 4.0)])
@pytest.mark.parametrize("sizes", [(8,), (2,), (2, 4, 16)])
def test_it_finds_the_prior_of_the_data_set(alpha, beta, sizes):
    found = [fitted(alpha, beta, sizes=sizes, seed=seed).parameters() for seed in range(12)]
    for truth, ours in zip((alpha, beta), zip(*found, strict=True), strict=True):
        # the pull of the blank visits, and twice the error of a median of twelve
        assert abs(statistics.median(ours) - truth) < 0.12 * truth + 2 * statistics.stdev(ours) / 12 ** 0.5


def test_the_share_of_correct_responses_alone_would_spread_too_far():
    """Negative control: squares of k / n instead of pairs take the noise of few responses for differing prompts."""
    rng, chance = random.Random(1), [0.5] * 900  # all prompts alike
    rows = [sum(rng.random() < p for _ in range(2)) for p in chance]
    prior, naive = CorrectnessPrior(), CorrectnessPrior()
    for right in rows:
        prior.add(right, 2)
        naive.add(right, 2)
        naive.square += (right / 2) ** 2 - right * (right - 1) / 2
    assert min(prior.parameters()) > 5 > 2 > max(naive.parameters())


@pytest.mark.parametrize("right", [0, 8])
def test_a_data_set_of_one_kind_stays_within_bounds(right):
    prior = CorrectnessPrior()
    for _ in range(5000):
        prior.add(right, 8)
    alpha, beta = prior.parameters()
    assert min(alpha, beta) >= LEAST_PARAMETER and (alpha > beta) == (right == 8)


def test_old_visits_fade():
    visits = int(3 * WINDOW)
    alpha, beta = fitted(9.0, 1.0, visits, before=fitted(1.0, 9.0)).parameters()
    with_equal_weights = (0.1 * 900 + 0.9 * visits) / (900 + visits)
    assert alpha / (alpha + beta) > 0.86 > with_equal_weights


def test_a_prompt_that_failed_eight_times_is_given_up_sooner_than_under_a_flat_prior():
    alpha, beta = fitted(0.3, 0.4).parameters()
    assert alpha / (alpha + beta + 8) < 0.05 < 1 / (1 + 1 + 8)


def test_pairs_of_predicted_responses_are_what_is_to_be_expected_of_their_outcomes():
    chances = [1.0, 1.0, 0.1, 0.4, 0.0]
    doubt = sum(chance * (1 - chance) for chance in chances)
    every = [a * b for i, a in enumerate(chances) for j, b in enumerate(chances) if i != j]
    assert pairs(sum(chances), len(chances), doubt) == pytest.approx(statistics.mean(every))
    assert pairs(0.3, 3, 3 * 0.1 * 0.9) == pytest.approx(0.01)  # without the doubt it would be below 0
