"""Early verdicts: what a look sees, what the model learns of it, and what is decided about a group."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esgrpo.algo.verdict import AUDIT, CUT, WATCH, Lessons, Verdicts
from esgrpo.algo.verdict_features import FEATURES, LARGEST, READ_TOKENS, Glance, Look, Siblings, Sketches, vector
from esgrpo.algo.verdict_gate import FIRST, Settings
from esgrpo.algo.verdict_model import Logistic, Sums, log_loss

SIZE = len(FEATURES)
OPEN = Settings(min_outcomes=0, min_candidates=0, max_false_rate=1.0)
number = st.floats(allow_nan=True, allow_infinity=True)


def a_look(tokens: int = 100, surprisal: float = 0.1) -> Look:
    return Look(tokens, surprisal, surprisal, 1.0, 1.0, 0.0, 0.0)


# Features

@given(number, number, number, number, number, number, st.lists(number, max_size=4), st.integers(0, 4))
def test_features_are_finite_whatever_comes(surprisal, recent, distinct, novel, shared, recently, others, right):
    row = vector(Look(7, surprisal, recent, distinct, novel, shared, recently), Siblings(8, others, [3] * 4, right))
    assert len(row) == SIZE and all(math.isfinite(value) and abs(value) <= LARGEST for value in row)


@pytest.mark.parametrize(("novel", "loop", "siblings", "of_siblings"), [
    (0.25, 0.0, Siblings(4, [0.1, 0.1], [64, 256, 128], 1), (1.0, 0.75, math.log(1.5 / 2.5), 2.0)),
    (0.0, 1.0, Siblings(4, [], [1024], 1), (0.0, 0.25, math.log(1.5 / 0.5), 0.0)),  # shorter than who has finished
    (0.0, 1.0, Siblings(4, [0.1 * math.e ** 3, 0.0], [], 0), (1.0 - (3.0 + math.log(0.01)) / 2, 0.0, 0.0, 0.0))])
def test_features_say_what_their_names_say(novel, loop, siblings, of_siblings):
    row = vector(Look(512, 0.1 * math.e, 0.1 * math.e ** 2, 0.5, novel, 0.125, 0.5), siblings)
    minus_group, finished, logit, doublings = of_siblings
    told = (1.0, 1.0, 1.0, 2.0, minus_group, 0.5, novel, 0.125, 0.5, finished, logit, doublings, loop, 0.125, 1.0)
    assert row[:len(told)] == pytest.approx(told)
    assert row[len(told):] == pytest.approx([0.5 * value for value in told[1:13]])


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=READ_TOKENS), min_size=2, max_size=5))
def test_a_look_counts_what_sets_would(windows):
    """Two members read the same windows, one by one; the counts are those of plain sets."""
    sketches, seen, read, earlier = Sketches(), set(), 0, 0
    for turn, window in enumerate(windows):
        grams = {tuple(window[at:at + 4]) for at in range(len(window) - 3)}
        looks = [sketches.look(key, Glance(10, window, 0.1, 0.1)) for key in "ab"]
        new = len(grams - seen)
        seen |= grams
        read += max(0, len(window) - 3)
        for look in looks:
            assert look.distinct == (len(seen) / read if read else 1.0)
            assert look.novel == (new / max(1, len(window) - 3) if len(window) > 3 else 1.0)
            # "b" came as far as "a" only after a's look: what they share is asked one look later
            assert look.shared == (1.0 if turn and earlier else 0.0)
        earlier = len(seen)


def test_a_member_alone_shares_nothing():
    sketches = Sketches()
    looks = [sketches.look(0, Glance(8, [1, 2, 3, 4, 5, 6, 7, 8], 0.1, 0.1)) for _ in range(3)]
    assert [look.shared for look in looks] == [0.0] * 3 and [look.novel for look in looks] == [1.0, 0.0, 0.0]


# Model

def outcomes(seed: int, count: int, truth=(0.5, -1.0, 2.0)):
    rng = random.Random(seed)
    for _ in range(count):
        x = (1.0, rng.gauss(0, 1), rng.gauss(0, 1))
        chance = 1 / (1 + math.exp(-sum(a * b for a, b in zip(truth, x, strict=True))))
        yield x, rng.random() < chance


def test_the_model_learns_what_is_there():
    model = Logistic((0, 1, 2))
    for part in range(40):
        for x, correct in outcomes(part, 200):
            model.learn(x, correct)
        model.update(model.take())
    assert model.weights == pytest.approx([0.5, -1.0, 2.0], abs=0.25)


@settings(deadline=None, max_examples=20)
@given(st.permutations(range(30)), st.integers(1, 5))
def test_it_matters_not_who_saw_what_in_which_order(order, workers):
    rows = list(outcomes(0, 30))

    def learned(order, workers):
        copies = [Logistic((0, 1, 2)) for _ in range(workers)]
        for place, index in enumerate(order):
            copies[place % workers].learn(*rows[index], weight=1 + index % 3)
        total = Sums.empty(3)
        for copy in reversed(copies):
            total.add(copy.take())
        for copy in copies:
            copy.update(total)
        assert len({tuple(copy.weights) for copy in copies}) == 1
        return copies[0].weights

    assert learned(order, workers) == pytest.approx(learned(range(30), 1), abs=1e-9)


def test_curvature_is_that_of_the_likelihood_whoever_learned_it():
    """Sum of w p (1 - p) x x' over the outcomes, p at the weights at which each was learned."""
    model, wanted = Logistic((0, 1, 2)), np.zeros((3, 3))
    for part in range(3):
        for x, correct in outcomes(part, 20):
            p = model.probability(x)
            model.learn(x, correct, weight=2.0)
            wanted += 2.0 * p * (1 - p) * np.outer(x, x)
        model.update(model.take())
    assert model.curvature == pytest.approx(wanted[np.tril_indices(3)])
    weights = model.weights
    model.update(Sums.empty(3))  # nothing learned, nothing moves
    assert model.weights == pytest.approx(weights)


@pytest.mark.parametrize("first", range(0, 1000, 200))
def test_an_update_never_makes_what_it_learned_from_less_likely(first):
    """Also where the model was certain and wrong: there p (1 - p) is nothing, and a Newton step flies off."""
    for seed in range(first, first + 200):
        rng = random.Random(seed)
        model = Logistic((0, 1, 2, 3), weights=[rng.uniform(-0.7, 0.7) for _ in range(4)])
        rows = [([rng.uniform(-4, 4) for _ in range(4)], rng.random() < 0.5, 10.0) for _ in range(40)]

        def loss(model=model, rows=rows) -> float:
            return sum(weight * log_loss(model.probability(x), correct) for x, correct, weight in rows)

        before = loss()
        for x, correct, weight in rows:
            model.learn(x, correct, weight)
        model.update(model.take())
        assert loss() <= before


def test_little_known_is_nearer_to_a_half():
    model = Logistic((0, 1))
    for _ in range(50):
        for x, correct in (((1.0, 0.0), False), ((1.0, 0.1), False)):
            model.learn(x, correct)
        model.update(model.take())
    seen, strange = (1.0, 0.0), (1.0, 4.0)
    assert model.probability(strange) <= model.probability(seen) < model.moderated(seen)
    assert model.moderated(seen) < model.moderated(strange) < 0.5


def test_a_rare_outcome_counts_as_many_as_it_stands_for():
    once, often = Logistic((0,)), Logistic((0,))
    once.learn((1.0,), True, 10.0)
    for _ in range(10):
        often.learn((1.0,), True)
    assert once.take().gradient == pytest.approx(often.take().gradient)


@pytest.mark.parametrize("state", [None, [], [[0.0], []], [[0.0] * 3, [float("nan")] * 6], [["a"] * 3, [0.0] * 6],
                                   [[0.0] * 3, [-1.0] * 6]])
def test_damaged_weights_are_refused(state):
    with pytest.raises(ValueError):
        Logistic((0, 1, 2)).restore(state)


# The rule

def rule(settings_: Settings = OPEN, seed: int = 0, **gate) -> Verdicts:
    made = Verdicts(settings_, random.Random(seed))
    made.model.weights[0] = -12.0  # everybody is a candidate
    made.opens_at = FIRST if gate.get("open", True) else None
    return made


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.sets(st.integers(0, 11)), max_size=12), st.integers(0, 99), st.booleans())
def test_at_most_half_of_a_group_is_cut_and_one_coin_is_tossed_at_most(size, boundaries, seed, is_open):
    verdicts, decided = rule(seed=seed, open=is_open), {}
    verdicts.watch("g", size)
    for boundary in boundaries:
        running = {member: a_look() for member in boundary
                   if member < size and not (member in decided and decided[member].what == CUT)}
        new = verdicts.look("g", running)
        assert not set(new) & {member for member, decision in decided.items() if decision.what != WATCH}
        decided |= new
    cut = [decision for decision in decided.values() if decision.what == CUT]
    assert len(cut) <= size / 2 and (is_open or not cut)
    assert all(0 < decision.keep_probability <= 1 for decision in decided.values())
    assert all(decision.keep_probability == 1 for decision in decided.values() if decision.what == WATCH)


def test_what_a_group_shows_is_told_when_all_of_it_is_known():
    """Short members end first: a gate that heard of them alone would think that nothing long is ever right."""
    verdicts = rule(open=False)
    verdicts.watch("g", 2)
    verdicts.ended("g", 0, 10, False)
    assert verdicts.take().outcomes == []
    verdicts.ended("g", 1, 500, True)
    verdicts.close("g")
    assert [outcome.tokens for outcome in verdicts.take().outcomes] == [10, 500]


def test_a_coin_can_still_be_tossed_when_the_gate_opens():
    verdicts = rule(Settings(audit=1e-9), open=False)
    verdicts.watch("g", 4)
    assert verdicts.look("g", {0: a_look()})[0].what == WATCH and verdicts.look("g", {0: a_look()}) == {}
    verdicts.opens_at = FIRST
    assert verdicts.look("g", {0: a_look()})[0].what == CUT and verdicts.look("g", {0: a_look()}) == {}


@pytest.mark.parametrize("correct", [False, True])
def test_on_average_a_coin_teaches_what_all_outcomes_would(correct):
    """Cut: the prediction. Spared, one of four times: the prediction and four times what was wrong with it."""
    def gradient(what: str) -> list[float]:
        verdicts = rule(Settings(audit=0.25, max_fraction=1.0))
        verdicts.watch("g", 1)
        verdicts._rng.random = lambda: 0.0 if what == AUDIT else 1.0
        if what == WATCH:
            verdicts.opens_at = None
        assert verdicts.look("g", {0: a_look()})[0].what == what
        if what != CUT:
            verdicts.ended("g", 0, 100, correct)
        return verdicts.take().model.gradient

    mean = [0.75 * cut + 0.25 * spared for cut, spared in zip(gradient(CUT), gradient(AUDIT), strict=True)]
    assert mean == pytest.approx(gradient(WATCH))


def test_only_the_newest_of_several_looks_decides_and_all_are_learned_from():
    verdicts = rule(Settings(audit=1e-9))
    verdicts.watch("g", 4)
    glances = {0: [Glance(10, [1, 2, 3, 4], 0.1, 0.1), Glance(20, [1, 2, 3, 4], 0.1, 0.1)],
               1: [Glance(10, [1, 2, 3, 4], 0.1, 0.1)], 2: []}
    decided = verdicts.looks("g", glances, kept={1})
    assert {number: decision.what for number, decision in decided.items()} == {0: CUT, 1: WATCH}
    rows = {number: member.rows for number, member in verdicts.groups["g"].members.items()}
    assert {number: len(found) for number, found in rows.items()} == {0: 2, 1: 1}
    novel = FEATURES.index("novel 4-grams")
    assert [row[novel] for row in rows[0]] == [1.0, 0.0]


def test_nothing_is_decided_by_an_older_look():
    """What it said then is too late; the newest one says that the response goes on."""
    verdicts = rule(Settings(audit=1e-9))
    verdicts.model.weights[0], verdicts.model.weights[FEATURES.index("novel 4-grams")] = 12.0, -24.0
    verdicts.watch("g", 4)
    assert verdicts.looks("g", {0: [Glance(10, [1, 2, 3, 4], 0.1, 0.1), Glance(20, [1, 2, 3, 4], 0.1, 0.1)]}) == {}
    assert verdicts.groups["g"].members[0].lowest > verdicts.limit


def test_the_gate_hears_how_low_a_probability_ever_was():
    verdicts = rule(open=False)
    verdicts.model.weights[0], verdicts.model.weights[FEATURES.index("novel 4-grams")] = 12.0, -24.0
    verdicts.watch("g", 1)
    for novel in (0.0, 1.0, 0.0):
        verdicts.look("g", {0: Look(100, 0.1, 0.1, 1.0, novel, 0.0, 0.0)})
    assert verdicts.ended("g", 0, 100, True).lowest < Settings().limits[0]


@pytest.mark.parametrize("correct", [False, True])
def test_evidence_is_what_a_look_says_more_than_length_does(correct):
    """The model knows at two looks of three, length never does: in nats, their mean."""
    verdicts = rule(open=False)
    verdicts.model.weights[0], verdicts.model.weights[FEATURES.index("novel 4-grams")] = 0.0, 2.0
    verdicts.watch("g", 1)
    for novel in (1.0, 0.0, 1.0):
        verdicts.look("g", {0: Look(100, 0.1, 0.1, 1.0, novel, 0.0, 0.0)})
    right = 1 / (1 + math.exp(-2.0))
    said = math.log(right if correct else 1 - right) - math.log(0.5)
    assert verdicts.ended("g", 0, 100, correct).ratio == pytest.approx(2 / 3 * said)


def test_who_ends_without_a_look_says_nothing_of_the_model():
    verdicts = rule()
    verdicts.watch("g", 1)
    assert verdicts.ended("g", 0, 100, True).predicted() == {"weight": 1.0, "lowest": 1.0, "share": OPEN.audit,
                                                             "ratio": 0.0}


@pytest.mark.parametrize(("is_open", "weight"), [(False, 1.0), (True, 1.0 / OPEN.audit)])
def test_a_candidate_whose_coin_was_tossed_or_that_needs_none_counts_once(is_open, weight):
    verdicts = rule(open=is_open)
    verdicts._rng.random = lambda: 0.0  # spared
    verdicts.watch("g", 2)
    verdicts.look("g", {0: a_look()})
    outcome = verdicts.ended("g", 0, 100, False)
    assert (outcome.share, outcome.weight) == (1.0, weight)


def test_a_candidate_of_a_group_with_no_room_counts_as_the_coin_would_have_let_it():
    """Of others like it only the coin's share is ever seen to its end: this one must not count more."""
    verdicts = rule()
    verdicts.watch("g", 2)
    verdicts.removed("g", 1, cut=True)
    verdicts.look("g", {0: a_look()})
    outcome = verdicts.ended("g", 0, 100, False)
    assert (outcome.share, outcome.weight) == (OPEN.audit, 1.0)


def test_who_was_right_before_is_seen_by_the_others():
    verdicts = rule(open=False)
    verdicts.watch("g", 4)
    for number, correct in ((0, True), (1, True), (2, False)):
        verdicts.ended("g", number, 100, correct)
    verdicts.look("g", {3: a_look()})
    row = verdicts.groups["g"].members[3].rows[0]
    assert [row[FEATURES.index(name)] for name in ("finished share", "siblings' logit")] == pytest.approx(
        [0.75, math.log(2.5 / 1.5)])


def test_a_look_is_put_beside_siblings_that_were_looked_at():
    """All of one boundary know each other, whoever comes first; one that ended unseen has no surprisal."""
    verdicts = rule(open=False)
    verdicts.watch("g", 3)
    verdicts.ended("g", 2, 10, True)
    verdicts.look("g", {0: a_look(surprisal=0.1), 1: a_look(surprisal=0.1 * math.e)})
    column = FEATURES.index("surprisal minus the group's")
    rows = {number: member.rows for number, member in verdicts.groups["g"].members.items()}
    assert [rows[number][0][column] for number in (0, 1)] == pytest.approx([-1.0, 1.0])


def test_loops_that_were_cut_count_towards_the_half():
    verdicts = rule()
    verdicts.watch("g", 2)
    verdicts.removed("g", 0, cut=True)
    assert verdicts.look("g", {1: a_look()})[1].what == WATCH


def test_nobody_tells_how_a_cut_response_would_have_ended():
    verdicts = rule(Settings(audit=1e-9))
    verdicts.watch("g", 2)
    assert verdicts.look("g", {0: a_look()})[0].what == CUT
    with pytest.raises(ValueError):
        verdicts.ended("g", 0, 100, True)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.sampled_from([0.03, 0.06, 0.2, 0.5, 0.8, 0.95]))
def test_the_gate_stays_shut_where_nothing_can_be_known(seed, base):
    rng = random.Random(seed)
    verdicts = Verdicts(Settings(), rng)
    for group in range(150):
        verdicts.watch(str(group), 8)
        for member in range(8):
            look = Look(rng.randrange(20, 500), rng.random(), rng.random(), rng.random(), rng.random(), rng.random(),
                        rng.random())
            assert all(decision.what == WATCH for decision in verdicts.look(str(group), {member: look}).values())
            verdicts.ended(str(group), member, look.tokens, rng.random() < base)
        verdicts.close(str(group))
        if group % 16 == 15:
            verdicts.update(verdicts.take())
            assert not verdicts.open


def learned_rule() -> Verdicts:
    verdicts = rule(Settings(), open=False)
    for group in range(20):
        verdicts.watch(str(group), 2)
        for member in range(2):
            verdicts.look(str(group), {member: a_look(100 + group, 0.1 * (1 + member))})
            verdicts.ended(str(group), member, 100 + group, bool(member))
        verdicts.close(str(group))
    return verdicts


def test_lessons_and_state_travel_as_json():
    verdicts = learned_rule()
    lessons = verdicts.take()
    assert Lessons.from_plain(json.loads(json.dumps(lessons.to_plain()))) == lessons
    verdicts.update(lessons)
    restored = Verdicts(Settings(), random.Random(0))
    restored.restore(json.loads(json.dumps(verdicts.to_state())))
    assert restored.to_state() == verdicts.to_state() and restored.open == verdicts.open


@pytest.mark.parametrize("spoil", [
    lambda state: state.pop("gate"), lambda state: state.update(model=[[1.0], []]),
    lambda state: state["gate"].update(evidence=math.nan), lambda state: state["gate"].update(lost=[[1, 0.0, 0.5]]),
    lambda state: state["settings"].update(cut_below=0.5), lambda state: state.update(state_version=1),
    lambda state: state["gate"].update(falses=[[]]), lambda state: state["gate"]["falses"][0].append([0.0, True]),
])
def test_a_damaged_state_changes_nothing(spoil):
    verdicts = learned_rule()
    verdicts.update(verdicts.take())
    before, state = verdicts.to_state(), json.loads(json.dumps(verdicts.to_state()))
    spoil(state)
    with pytest.raises(ValueError):
        verdicts.restore(state)
    assert verdicts.to_state() == before
