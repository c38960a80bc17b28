"""What prompts' texts say of correctness: learned where they say something, never believed where they say nothing."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import prompt_sampling
from esgrpo import config
from esgrpo.algo.correctness_prior import CorrectnessPrior
from esgrpo.algo.history import PromptHistory
from esgrpo.algo.prompt_prior import BUCKETS, KEPT, OPENS_AT, PromptPrior, features_of, log_likelihood

JUDGED = 8


def played(explained: float, visits: int, seed: int = 0):
    """(priors, squared errors of the predicted mean by text and by all prompts) after first visits."""
    population = prompt_sampling.Population(visits, seed, explained=explained or 1e-9)
    rng, base, prior, errors = random.Random(seed), CorrectnessPrior(), PromptPrior(), []
    for prompt, text in enumerate(population.texts.texts):
        features = features_of(*text)
        chance = 1 / (1 + math.exp(-population.odds[prompt]))
        ours, theirs = prior.parameters(features, base), base.parameters()
        errors.append(tuple((alpha / (alpha + beta) - chance) ** 2 for alpha, beta in (ours, theirs)))
        right = sum(population.group(prompt, rng))
        prior.learn(features, right, JUDGED, base)
        base.add(right, JUDGED)
    return prior, base, errors


def test_texts_that_say_something_are_believed_soon_and_predict_better():
    prior, base, errors = played(0.6, 1500)
    assert prior.open
    ours, theirs = (sum(error[side] for error in errors[-700:]) for side in (0, 1))
    assert ours < 0.8 * theirs
    assert sum(prior.parameters(features_of("a"), base)) > sum(base.parameters())  # less is left to chance


@pytest.mark.parametrize("seed", range(8))
def test_texts_that_say_nothing_are_never_believed(seed):
    """Half of all responses are right, as in the prior before any visit: what follows at once errs at first."""
    population = prompt_sampling.Population(1200, seed, explained=1e-9)
    rng, base, prior = random.Random(seed), CorrectnessPrior(), PromptPrior()
    for prompt, text in enumerate(population.texts.texts):
        right = sum(population.group(prompt, rng))
        prior.learn(features_of(*text), right, JUDGED, base)
        base.add(right, JUDGED)
        assert not prior.open


NOTHING_TO_TELL = {
    "hard": lambda rng, done: rng.betavariate(0.2, 3.8), "hopeless": lambda rng, done: 0.03,
    "easy": lambda rng, done: rng.betavariate(1.8, 0.2),
    "learned": lambda rng, done: rng.betavariate(0.1 + 0.5 * done, 0.9 - 0.5 * done)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", NOTHING_TO_TELL)
def test_a_model_of_nothing_but_the_level_is_not_believed(kind, seed):
    """All prompts have a source, a word and a length in common, of which the level of all prompts is soon learned.
    Negative control: against the prior of all prompts, which follows slowly, it would be believed."""
    words, visits = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi".split(), 1200
    rng, base, prior, against_all, most = random.Random(seed), CorrectnessPrior(), PromptPrior(), 0.0, 0.0
    for visit in range(visits):
        features = features_of("Solve: " + " ".join(rng.choices(words, k=8)), "gsm")
        chance = NOTHING_TO_TELL[kind](rng, visit / visits)
        right = sum(rng.random() < chance for _ in range(JUDGED))
        against_all = KEPT * against_all + (log_likelihood(right, JUDGED, *prior.parameters(features, base))
                                            - log_likelihood(right, JUDGED, *base.parameters()))
        most = max(most, against_all)
        prior.learn(features, right, JUDGED, base)
        base.add(right, JUDGED)
        assert not prior.open
    assert most > math.log(OPENS_AT)


def test_an_older_state_keeps_what_it_learned_and_is_asked_anew():
    prior, base, _ = played(0.6, 800)
    state = {**prior.texts.to_state(), "sums": [*prior.texts.to_state()["sums"], 50.0]}
    again = PromptPrior.from_state(json.loads(json.dumps(state)))
    features = features_of("a")
    assert again.parameters(features, base) == pytest.approx(prior.parameters(features, base), rel=1e-3)
    assert prior.open and not again.open


def test_it_stops_believing_texts_that_no_longer_say_anything():
    prior, base, _ = played(0.6, 800)
    assert prior.open
    rng, other = random.Random(1), prompt_sampling.Population(2500, 1, explained=1e-9)
    for prompt, text in enumerate(other.texts.texts):
        right = sum(other.group(prompt, rng))
        prior.learn(features_of(*text), right, JUDGED, base)
        base.add(right, JUDGED)
    assert not prior.open


def test_a_number_counts_by_its_digits_and_order_of_words_counts():
    assert set(features_of("add 12 and 345")) == set(features_of("add 98 and 761"))
    assert set(features_of("add 12 and 345")) != set(features_of("add 12 and 3450"))
    assert set(features_of("a b c")) != set(features_of("c b a"))
    assert set(features_of("x", "gsm8k")) != set(features_of("x", "math"))


@given(st.text(max_size=400), st.text(max_size=20))
def test_features_are_indices_without_repetition_whatever_the_text(text, source):
    features = features_of(text, source)
    assert len(set(features)) == len(features) and all(0 <= index < BUCKETS for index in features)
    assert features == features_of(text, source)


@given(st.integers(0, 12), st.integers(0, 12), st.floats(0.05, 50), st.floats(0.05, 50))
def test_likelihoods_of_all_sequences_sum_to_one(right, wrong, alpha, beta):
    judged = right + wrong
    total = sum(math.comb(judged, k) * math.exp(log_likelihood(k, judged, alpha, beta)) for k in range(judged + 1))
    assert total == pytest.approx(1.0)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=60))
def test_parameters_are_those_of_a_beta_and_the_state_goes_round(visits):
    base, prior = CorrectnessPrior(), PromptPrior()
    for right, kind in visits:
        prior.learn(features_of(f"kind {'x' * kind}"), right, JUDGED, base)
        base.add(right, JUDGED)
    features = features_of("kind xx")
    assert all(value > 0 and math.isfinite(value) for value in prior.parameters(features, base))
    again = PromptPrior.from_state(json.loads(json.dumps(prior.to_state())))
    assert again.parameters(features, base) == pytest.approx(prior.parameters(features, base), rel=1e-3)


@pytest.mark.parametrize("damage", [{"sums": [math.nan, 0, 0, 0]}, {"sums": [0, -1, 0, 0]}, {"sums": [0, 0]},
                                    {"level": {"weights": {}, "sums": [0, 0, 0]}, "ratios": [math.inf, 0]},
                                    {"weights": {"5": [math.inf, 1]}}, {"weights": {str(BUCKETS): [0, 1]}}])
def test_a_damaged_state_is_refused(damage):
    with pytest.raises(ValueError):
        PromptPrior.from_state({"weights": {}, "sums": [0, 0, 0, 0], **damage})


def test_the_history_learns_from_first_visits_and_uses_it_only_when_it_is_open():
    history, features = PromptHistory(config.History(enable=True)), features_of("hard 99", "math")
    for visit in range(200):
        hard = visit % 2
        history.observe(f"key {visit}", [10] * JUDGED, [not hard] * JUDGED, [False] * JUDGED,
                        features=features_of(*(("hard 99", "math") if hard else ("easy", "words"))))
    assert history.texts.open and history.texts.evidence > math.log(OPENS_AT)
    alpha, beta = history.posterior("new", features=features)
    blind = history.posterior("new")
    assert alpha / (alpha + beta) < 0.1 and blind[0] / sum(blind) == pytest.approx(0.5, abs=0.05)
    visits = history.texts.visits
    history.observe("key 0", [10] * JUDGED, [True] * JUDGED, [False] * JUDGED, features=features)
    assert history.texts.visits == visits  # a later visit is of a prompt that somebody chose
    again = PromptHistory.from_state(history.settings, json.loads(json.dumps(history.to_state())))
    assert again.posterior("new", features=features) == pytest.approx((alpha, beta), rel=1e-3)
    shut = PromptHistory(config.History(enable=True))
    assert shut.posterior("new", features=features) == shut.posterior("new")
