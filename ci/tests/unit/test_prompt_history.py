"""Length history: what it learns from whole and from cut-off responses, its calibration and its state."""

from __future__ import annotations

import json
import math
import random

import pytest

from esgrpo import config
from esgrpo.algo import lengths
from esgrpo.algo.calibration import Calibration, ranks, spearman
from esgrpo.algo.history import PromptHistory, chance_of_correct, prompt_key
from esgrpo.algo.prompt_sampling import expected_gain

MEDIAN, PROMPT_SIGMA, SAMPLE_SIGMA = 1160, 0.81, 0.57  # TailSieve's trace
GROUP = 8


def history(routing=None, budget=0, **settings) -> PromptHistory:
    return PromptHistory(config.History(enable=True, **settings), routing, budget)


def population(seed=0, count=300):
    rng = random.Random(seed)
    return rng, [rng.gauss(0, PROMPT_SIGMA) for _ in range(count)]


def responses(rng, effect, count=GROUP):
    return [math.ceil(MEDIAN * math.exp(effect + rng.gauss(0, SAMPLE_SIGMA))) for _ in range(count)]


def whole(lengths_):
    return [None] * len(lengths_), [False] * len(lengths_)


# ---- keys

def test_the_key_is_of_the_content_alone():
    import numpy as np

    prompt = [{"role": "user", "content": "2 + 2 = ?"}]
    assert prompt_key(prompt) == prompt_key(tuple(prompt)) == prompt_key(np.array(prompt, dtype=object))
    assert prompt_key(prompt) == prompt_key([{"content": "2 + 2 = ?", "role": "user"}])
    assert prompt_key(prompt) == "ac5d8ac3cfd58436"  # the same in every process and release, or files are worthless
    assert prompt_key(prompt) != prompt_key([{"role": "user", "content": "2 + 2 = ? "}])
    assert prompt_key([{"content": "\ud800 é"}]) != prompt_key([{"content": "\ud801 é"}])


def test_images_and_arrays_count_by_content():
    import numpy as np

    class Image:
        def __init__(self, data):
            self.data, self.size = data, (1, 2)

        def tobytes(self):
            return self.data

    def key(value):
        return prompt_key([{"content": value}])

    assert key(Image(b"ab")) == key(Image(b"ab")) != key(Image(b"cd"))
    assert key(np.arange(3)) == key(np.arange(3)) != key(np.arange(4))
    assert key(b"ab") != key(b"cd") and key(object()) == key(object())


# ---- lengths

def test_forecasts_are_ranked_and_calibrated():
    rng, effects = population()
    known, cold, told = Calibration(10_000), Calibration(10_000), history()
    for visit in range(4):
        for number, effect in enumerate(effects):
            forecast, seen = told.forecast(str(number)), responses(rng, effect)
            (known if forecast["known"] else cold).add(forecast, seen, [False] * GROUP)
            told.observe(str(number), seen, *whole(seen), visit)
    assert known.metrics()["rank_correlation"] > 0.9
    assert known.metrics()["coverage"] == pytest.approx(0.8, abs=0.03)
    assert cold.metrics()["coverage"] == pytest.approx(0.8, abs=0.05) and "rank_correlation" not in cold.metrics()
    within, between = told.lengths.variances()
    assert within == pytest.approx(SAMPLE_SIGMA**2, rel=0.1) and between == pytest.approx(PROMPT_SIGMA**2, rel=0.2)


def test_a_shuffled_history_has_no_rank_correlation():
    """Negative control of the measure: forecasts of other prompts."""
    rng, effects = population()
    told, measured = history(), Calibration(10_000)
    for number, effect in enumerate(effects):
        seen = responses(rng, effect)
        told.observe(str(number), seen, *whole(seen))
    for number in range(len(effects)):
        other = (number * 7 + 11) % len(effects)
        measured.add(told.forecast(str(number)), responses(rng, effects[other]), [False] * GROUP)
    assert abs(measured.metrics()["rank_correlation"]) < 0.15


def test_one_response_is_believed_less_than_many():
    rng, effects = population(1)
    told = history()
    for number, effect in enumerate(effects):
        told.observe(str(number), *(lambda seen: (seen, *whole(seen)))(responses(rng, effect)))
    told.observe("one", [9000], [None], [False])
    told.observe("many", [9000] * GROUP, *whole([9000] * GROUP))
    one, many, none = (told.forecast(key) for key in ("one", "many", "none"))
    assert none["tokens"] < one["tokens"] < many["tokens"]
    width = {name: math.log(f["high"] / f["low"]) for name, f in (("one", one), ("many", many), ("none", none))}
    assert width["many"] < width["one"] < width["none"]
    assert (many["known"], none["known"]) == (True, False) and many["length_class"] == "tail"
    assert none["length_class"] == "body"


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_pruned_responses_are_lower_bounds(share):
    """The longest of each group are cut off: read as lengths they halve the forecast, as bounds they do not."""
    rng, effects = population(2)
    as_bounds, as_lengths = history(), history()
    for number, effect in enumerate(effects):
        seen = responses(rng, effect)
        cut = sorted(seen)[int(GROUP * (1 - share)) - 1]
        short, capped = [min(n, cut) for n in seen], [n > cut for n in seen]
        as_bounds.observe(str(number), short, [None] * GROUP, capped)
        as_lengths.observe(str(number), short, *whole(seen))
    truth = [MEDIAN * math.exp(effect + SAMPLE_SIGMA**2 / 2) for effect in effects]

    def ratio(told):
        return sum(told.forecast(str(number))["tokens"] for number in range(len(effects))) / sum(truth)

    assert ratio(as_bounds) == pytest.approx(1, abs=0.12)
    assert ratio(as_lengths) < 0.88


def test_a_response_cut_off_at_once_says_next_to_nothing():
    told = history()
    told.observe("a", [1000] * GROUP, *whole([1000] * GROUP))
    before = told.forecast("a")["tokens"]
    told.observe("a", [2] * GROUP, [None] * GROUP, [True] * GROUP)
    assert told.forecast("a")["tokens"] == pytest.approx(before, rel=0.02)
    told.observe("b", [2] * GROUP, [None] * GROUP, [True] * GROUP)
    assert not told.forecast("b")["known"]


def test_a_prompt_that_always_hits_the_budget_stays_finite():
    told = history(budget=4096)
    for version in range(50):
        told.observe("a", [4096] * GROUP, [False] * GROUP, [True] * GROUP, version)
        told.observe("b", [300] * GROUP, [True] * GROUP, [False] * GROUP, version)
    forecast = told.forecast("a")
    assert 2048 < forecast["tokens"] <= 4096 == forecast["high"] and forecast["length_class"] == "tail"
    assert math.isfinite(told.lengths.all.mean)


def test_censored_against_a_numerical_integral():
    """hazard, expected value and square deviation beyond a bound, by the trapezoidal rule."""
    for bound in (-3.0, -0.5, 0.0, 1.0, 4.0):
        grid = [bound + i * 1e-3 for i in range(12_000)]
        density = [math.exp(-x * x / 2) for x in grid]
        total = sum(density)
        mean = sum(x * d for x, d in zip(grid, density, strict=True)) / total
        square = sum(x * x * d for x, d in zip(grid, density, strict=True)) / total
        assert lengths.hazard(bound) == pytest.approx(mean, abs=2e-3)
        assert lengths.expected_beyond(5 + 2 * bound, 5, 2) == pytest.approx(5 + 2 * mean, abs=5e-3)
        value, weight, deviation = lengths.censored(5 + 2 * bound, 5, 2)
        assert deviation == pytest.approx(4 * square, rel=5e-3) and 0 <= weight <= 1
        # one Fisher step is the score over the information
        assert weight * (value - 5) == pytest.approx(2 * mean, abs=1e-2)
    assert lengths.hazard(40) == pytest.approx(40.025, abs=1e-3)


def test_expected_tokens_and_the_quantile_of_t_against_simulation():
    rng = random.Random(3)
    draws = [math.exp(rng.gauss(6, 0.9)) for _ in range(200_000)]
    for budget in (0, 300, 800):
        cut = [min(d, budget) if budget else d for d in draws]
        assert lengths.expected_tokens(6, 0.81, budget) == pytest.approx(sum(cut) / len(cut), rel=0.01)
    assert lengths.expected_tokens(20, 1, 100) == pytest.approx(100)
    for degrees, table in ((8, 1.3968), (16, 1.3368), (100, 1.2901)):
        assert lengths.student(1.2815515655446004, degrees) == pytest.approx(table, abs=2e-3)


def test_the_histogram_follows_the_population_and_forgets():
    statistics, rng = lengths.LengthStatistics(), random.Random(4)
    values = [rng.gauss(7, 1) for _ in range(5000)]
    for value in values:
        statistics.add(lengths.Moments(1, value, 0), [value])
    ordered = sorted(values)
    for q in (0.1, 0.5, 0.8, 0.9):
        assert statistics.quantile(q) == pytest.approx(math.exp(ordered[int(q * 5000)]), rel=0.09)
    assert statistics.mean_tokens(0) == pytest.approx(sum(map(math.exp, values)) / 5000, rel=0.05)
    for _ in range(5 * lengths.WINDOW):
        statistics.add(lengths.Moments(1, 3.0, 0), [3.0])
    assert statistics.quantile(0.9) == pytest.approx(math.exp(3), rel=0.09)
    assert statistics.all.mean == pytest.approx(3, abs=0.05)


# ---- correctness

def test_beta_decays_at_each_visit_and_between_them():
    told = history(decay=0.8, half_life=10)
    assert told.posterior("unknown", 10) == pytest.approx((1, 1))
    told.observe("a", [10] * 4, [True, True, False, None], [False] * 4, 0)
    alpha, beta = told.posterior("unknown", 10)
    assert told.posterior("a", 0) == pytest.approx((alpha + 2, beta + 1))
    assert told.posterior("a", 10) == pytest.approx((alpha + 1, beta + 0.5))
    assert told.posterior("a", 1000) == pytest.approx((alpha, beta))
    assert told.posterior("a", 0) == pytest.approx((alpha + 2, beta + 1))  # looking changes nothing
    told.observe("a", [10] * 2, [True, True], [False] * 2, 10)  # not a first visit: the prior stays
    assert told.posterior("a", 10) == pytest.approx((alpha + 0.8 * 0.5 * 2 + 2, beta + 0.8 * 0.5 * 1))
    forecast = told.forecast("a", 10)
    assert (forecast["alpha"], forecast["beta"]) == told.posterior("a", 10)


@pytest.mark.parametrize("outcome, rule, full, chance", [
    ("finish", "", False, True), ("finish", "", True, True), (None, "", False, True), ("abort", "", True, True),
    ("prune", "verdict", False, 0.1), ("prune", "repetition", False, 0.1),  # cut for what they had shown themselves
    ("prune", "enough", False, None), ("prune", "resolved", False, None), ("abort", "", False, None)])
def test_what_a_response_says_of_its_prompt(outcome, rule, full, chance):
    assert chance_of_correct({"outcome": outcome, "rule": rule, "predicted": 0.1}, True, full) == chance
    assert chance_of_correct(None, False, full) is False  # no hook: it counts as whole


@pytest.mark.parametrize("rule, chance", [("repetition", 0.0), ("verdict", None), ("enough", None)])
def test_a_loop_that_the_engine_cut_without_a_coin_came_out_wrong(rule, chance):
    """Nobody predicted anything there; left out, a prompt of which six of eight loop would look solved."""
    assert chance_of_correct({"outcome": "prune", "rule": rule, "predicted": None}, False, False) == chance


def test_a_prompt_whose_wrong_responses_are_cut_is_not_taken_for_a_solved_one():
    told, whole_ = history(), dict(lengths=[10] * 8, capped=[False] * 8)
    for prompt, correct in (("solved", [True] * 8), ("cut", [True] * 6 + [0.1] * 2), ("seen", [True] * 6 + [False] * 2),
                            ("unheard", [True] * 6 + [None] * 2)):
        told.observe("first of all", [10], [None], [False])
        told.observe(prompt, correct=correct, **whole_)
    prior = told.posterior("unknown")
    assert told.posterior("cut") == pytest.approx((prior[0] + 6.2, prior[1] + 1.8))
    gains = {prompt: expected_gain(*told.posterior(prompt)) for prompt in ("solved", "cut", "seen", "unheard")}
    assert gains["cut"] > 0.8 * gains["seen"] > 3 * gains["solved"]
    assert gains["unheard"] < 2 * gains["solved"]  # what leaving them out would say


def test_lists_that_do_not_fit_are_refused_and_an_empty_visit_is_none():
    told = history()
    with pytest.raises(ValueError, match="2 lengths, 1 verdicts, 2 caps"):
        told.observe("a", [1, 2], [True], [False, False])
    told.observe("a", [], [], [])
    assert len(told) == 0


# ---- before and beside a history

def test_there_is_always_an_answer():
    for budget in (0, 512):
        forecast = history(budget=budget).forecast("new")
        assert 0 < forecast["low"] <= forecast["tokens"] <= forecast["high"] <= (budget or math.inf)
        assert forecast["length_class"] == "body" and not forecast["known"]
        assert (forecast["alpha"], forecast["beta"]) == pytest.approx((1, 1))


@pytest.mark.parametrize(("budget", "tokens", "high"), [(0, 1024.0, 2048.0), (1000, 500.0, 1000.0), (1, 1.0, 1.0)])
def test_before_any_response_a_forecast_is_half_of_what_may_be(budget, tokens, high):
    forecast = history(budget=budget).forecast("x")
    assert {name: forecast[name] for name in ("tokens", "low", "high", "known", "length_class")} == {
        "tokens": tokens, "low": 1.0, "high": high, "known": False, "length_class": "body"}


def test_without_a_budget_a_prompt_like_all_others_is_no_tail():
    told = history()
    for number in range(20):
        told.observe(str(number), [1000] * GROUP, *whole([1000] * GROUP))
    assert told.forecast("3")["length_class"] == "body"


# ---- quality

def test_ranks_and_spearman():
    assert ranks([3, 1, 3, 2]) == [3.5, 1, 3.5, 2]
    assert spearman([1, 2, 3], [10, 20, 30]) == 1 and spearman([1, 2, 3], [3, 2, 1]) == -1
    assert spearman([1, 1], [1, 2]) is None


def test_calibration_counts_rows_and_prompts():
    measured = Calibration(window=2)
    assert measured.metrics() == {}
    forecast = {"tokens": 10, "low": 5, "high": 20, "known": False}
    measured.add(forecast, [1, 5, 20, 21], [False] * 4)
    assert measured.metrics() == {"coverage": 0.5, "known_rate": 0}
    measured.add({**forecast, "known": True}, [3, 30], [True, True])  # at least 3: inside; at least 30: not
    assert measured.metrics() == {"coverage": 0.5, "known_rate": 0.5}
    measured.add(forecast, [], [])
    for _ in range(2):
        measured.add({**forecast, "known": True}, [6], [False])
    assert measured.metrics() == {"coverage": 1, "known_rate": 1}


def test_a_rank_correlation_takes_eight_prompts_with_a_forecast_and_is_that_of_their_mean_lengths():
    measured = Calibration()
    for number in range(1, 9):
        assert "rank_correlation" not in measured.metrics()
        lengths = [number] * (9 - number)  # their sums rise and fall
        measured.add({"tokens": number, "low": 0, "high": 99, "known": True}, lengths, [False] * len(lengths))
    assert measured.metrics()["rank_correlation"] == pytest.approx(1)


# ---- size and state

def test_the_least_recently_observed_goes_first():
    told = history(max_prompts=2)
    for key in "abac":
        told.observe(key, [10], [True], [False])
    blank = told.posterior("new")[0]
    assert [told.posterior(key)[0] > blank for key in "abc"] == [True, False, True] and len(told) == 2


def filled(**settings) -> PromptHistory:
    told, rng = history(**settings), random.Random(6)
    for number in range(40):
        seen = responses(rng, rng.gauss(0, 1), 4)
        told.observe(str(number), seen, [rng.random() < 0.5 for _ in seen], [rng.random() < 0.2 for _ in seen], number)
    return told


def test_a_round_trip_forecasts_alike():
    told = filled()
    again = PromptHistory.from_state(told.settings, json.loads(json.dumps(told.to_state())))
    for key in (*map(str, range(40)), "new"):
        left, right = told.forecast(key, 60), again.forecast(key, 60)
        assert left["known"] == right["known"] and left["length_class"] == right["length_class"]
        for name in ("tokens", "low", "high", "alpha", "beta"):
            assert left[name] == pytest.approx(right[name], rel=1e-3)
    assert len(PromptHistory.from_state(config.History(max_prompts=3), told.to_state())) == 3


def test_a_new_run_at_version_zero_goes_on_where_the_file_ended():
    told = history(half_life=10)
    told.observe("a", [10], [True], [False], 100)
    again = PromptHistory.from_state(told.settings, told.to_state())
    again.observe("b", [10], [True], [False], 0)
    assert again.posterior("a", 0)[0] == pytest.approx(2)
    assert again.posterior("a", 10)[0] == pytest.approx(1.5)
    resumed = PromptHistory.from_state(told.settings, told.to_state())
    resumed.observe("b", [10], [True], [False], 110)
    assert resumed.posterior("a", 110)[0] == pytest.approx(1.5)


DAMAGE = {
    "prior": lambda state: state | {"correctness": [1.0, float("nan"), 0.5]},
    "prior of nothing": lambda state: state | {"correctness": [1.0, 2.0, 0.5]},
    "newer": lambda state: state | {"state_version": 2}, "no version": lambda state: {},
    "a list": lambda state: [state], "row": lambda state: state | {"prompts": {"a": [1, 2]}},
    "text": lambda state: state | {"prompts": {"a": ["x"] * 6}},
    "nan": lambda state: state | {"prompts": {"a": [1, math.nan, 1, 1, 1, 1]}},
    "negative": lambda state: state | {"prompts": {"a": [-1, 1, 1, 1, 1, 1]}},
    "infinite": lambda state: state | {"prompts": {"a": [1, 1, 1, 1, 1, math.inf]}},
    "bins": lambda state: state | {"lengths": state["lengths"] | {"bins": {"99999": 1}}},
    "weights": lambda state: state | {"lengths": state["lengths"] | {"bins": {"1": math.nan}}},
    "moments": lambda state: state | {"lengths": state["lengths"] | {"all": [1, 2]}},
    "clock": lambda state: state | {"clock": None},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_a_value_error(name):
    with pytest.raises(ValueError):
        PromptHistory.from_state(config.History(), DAMAGE[name](filled().to_state()))
