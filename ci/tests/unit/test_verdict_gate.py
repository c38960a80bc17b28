"""Early verdicts: when the gate is open, and up to which limit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esgrpo.algo.verdict_gate import EVIDENCE_WINDOW, FIRST, SCALES, Gate, Outcome, Settings


def seen(correct: bool, candidate: bool, tokens: int = 100, weight: float = 1.0) -> Outcome:
    return Outcome(tokens, correct, weight, 0.01 if candidate else 0.9, 1.0, 0.1)


def right_gate(**changes) -> Gate:
    gate = Gate(Settings(**changes))
    for index in range(1000):
        wrong = index % 2 == 0
        gate.learn(seen(not wrong, candidate=wrong))
    return gate


def test_the_gate_opens_where_the_score_knows():
    assert right_gate().why_shut() == ""


def tell(gate, candidates):
    """So many more were seen: what each stands for, and whether it was correct."""
    for share, correct in candidates:
        gate.learn(Outcome(100, correct, 1.0, 0.01, share, 0.0))


@pytest.mark.parametrize(("spoil", "why"), [
    (lambda gate: setattr(gate, "outcomes", 499), "too few outcomes"),
    (lambda gate: gate.falses[FIRST].extend([(1.0, True)] * 5), "false cuts"),
    (lambda gate: gate.falses[FIRST].clear(), "false cuts"),
    (lambda gate: setattr(gate, "evidence", 2.9), "no better than length"),
    (lambda gate: gate.lost.extend([(100, 1.0, 0.01)] * 50), "correct responses lost"),
    # 15 of 515 are few, but they are the longest
    (lambda gate: gate.lost.extend([(9999, 1.0, 0.01)] * 15), "correct responses lost"),
])
def test_any_of_four_conditions_shuts_it(spoil, why):
    gate = right_gate()
    spoil(gate)
    assert gate.why_shut() == why


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda gate: None, ""),
    (lambda gate: setattr(gate, "outcomes", 499), "too few outcomes"),
    (lambda gate: gate.falses[FIRST].clear(), "false cuts: 0 candidates seen to their end, wanted 20"),
    (lambda gate: tell(gate, 10 * [(1.0, True)]), "false cuts: up to 32% of 40 candidates, allowed 15%"),
    (lambda gate: setattr(gate, "evidence", 2.9), "no better than length: 2.9 nats, wanted 3.0"),
    (lambda gate: gate.lost.extend([(100, 1.0, 0.01)] * 50), "correct responses lost: up to 10% of all, allowed 5%"),
    (lambda gate: gate.lost.extend([(9999, 1.0, 0.01)] * 15),
     "correct responses lost: up to 35% of the tenth from 100 tokens on, allowed 10%"),
    (lambda gate: gate.lost.extend([(99999, 1.0, 0.01)] * 2), "short answers favoured: by 24%, allowed 5%"),
])
def test_a_shut_gate_says_what_it_found_and_what_is_allowed(spoil, said):
    gate = right_gate()
    spoil(gate)
    assert gate.says() == said and said.startswith(gate.why_shut())


def test_a_little_of_every_length_is_lost_too():
    """82 of 1,500 right responses are candidates, no tenth of the lengths has more than nine of them."""
    gate = right_gate()
    gate.lost.extend([(index, 1.0, 0.01 if index % 18 == 0 else 0.9) for index in range(1500)])
    share, *tenths = gate.lost_shares()
    assert max(tenths) <= gate.settings.max_lost_of_length and share > gate.settings.max_correct_lost
    assert gate.why_shut() == "correct responses lost"


def test_old_evidence_fades():
    """A model that was better than length and no longer is does not live on what it once knew."""
    gate = Gate(Settings())
    for _ in range(10_000):
        gate.learn(seen(False, candidate=False))
    assert gate.evidence == pytest.approx(0.1 * EVIDENCE_WINDOW)
    for _ in range(int(2 * EVIDENCE_WINDOW)):
        gate.learn(Outcome(100, False, 1.0, 0.9, 1.0, 0.0))
    assert gate.evidence == pytest.approx(0.1 * EVIDENCE_WINDOW * math.exp(-2), rel=0.01)


def test_a_candidate_that_stands_for_many_proves_no_more_than_one():
    """Kish: a hundred times the weight on all changes nothing, on one it leaves little more than that one."""
    even, scaled, one_heavy = Gate(Settings()), Gate(Settings()), Gate(Settings())
    even.falses[FIRST].extend([(0.01, False)] * 40)
    scaled.falses[FIRST].extend([(1.0, False)] * 40)
    one_heavy.falses[FIRST].extend([(0.01, False)] * 39 + [(1.0, False)])
    assert even.false_bound() == pytest.approx(scaled.false_bound()) == pytest.approx(1 / 41)  # z = 1: z^2 / (n + z^2)
    assert one_heavy.false_bound() > 0.3 and even.false_rate() == one_heavy.false_rate() == 0.0
    tell(one_heavy, [(1.0, True)])
    assert one_heavy.false_rate() == pytest.approx(1.0 / 2.39)


def test_as_much_is_remembered_whatever_each_stands_for():
    """Candidates of dead groups that nobody tossed a coin for do not push out what the coin let be seen."""
    gate = Gate(Settings())
    tell(gate, 10 * [(1.0, True)] + 20 * [(1.0, False)])
    proven = gate.false_bound()
    tell(gate, 40 * [(0.125, False)])
    assert len(gate.falses[FIRST]) == 70 and proven > gate.false_bound() > 0.85 * proven
    tell(gate, 100 * [(0.125, False)])
    # the oldest goes when those behind it are enough
    assert sum(share for share, _ in gate.falses[FIRST]) == 40.5
    assert gate.falses[FIRST][0] == (1.0, True) and len(gate.falses[FIRST]) == 163
    tell(gate, 40 * [(1.0, False)])
    assert list(gate.falses[FIRST]) == 40 * [(1.0, False)]


def test_the_number_of_candidates_that_is_asked_for_is_enough():
    gate = right_gate()
    for count, why in ((gate.settings.min_candidates - 1, "false cuts"), (gate.settings.min_candidates, "")):
        gate.falses[FIRST].clear()
        gate.falses[FIRST].extend([(1.0, False)] * count)
        assert gate.why_shut() == why


def test_a_low_base_rate_permits_no_more():
    """6 % of the responses are right and all are candidates: few cuts would be false, and all lessons lost."""
    gate = Gate(Settings())
    for index in range(1000):
        gate.learn(seen(index % 16 == 0, candidate=True))
    assert gate.false_bound() < gate.settings.max_false_rate and gate.why_shut() == "correct responses lost"


@settings(deadline=None)
@given(st.integers(1, 1000), st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=40))
def test_what_is_short_by_nature_shortens_nothing(tokens, rows):
    """Candidates as long as the others: nothing moves. And it never says more than what happens."""
    gate = Gate(Settings())
    for _, candidate in rows:
        gate.learn(seen(True, candidate, tokens))
    assert gate.shortening() <= 1e-9
    gate = Gate(Settings())
    for length, candidate in rows:
        gate.learn(seen(True, candidate, length))
    kept = [length for length, candidate in rows if not candidate]
    if kept:
        real = 1 - (sum(kept) / len(kept)) / (sum(length for length, _ in rows) / len(rows))
        assert gate.shortening() <= real + 1e-9


@pytest.mark.parametrize("longer, weight, why", [(1, 1.0, ""), (100, 1.0, "short answers favoured"),
                                                 (100, 10.0, "correct responses lost")])
def test_long_right_answers_among_candidates_shut_the_gate(longer, weight, why):
    """Two of 500 right responses are candidates: too few to be missed by their number."""
    gate = Gate(Settings())
    for index in range(1000):
        gate.learn(seen(False, index % 20 == 0))
    for index in range(500):
        spared = index % 250 == 0
        gate.learn(seen(True, spared, 100 * longer if spared else 100, weight if spared else 1.0))
    assert gate.why_shut() == why


@pytest.mark.parametrize("right, why", [(0, "correct responses lost"), (40, "correct responses lost"),
                                        (500, "")])
def test_who_has_seen_few_right_responses_does_not_know_what_is_lost(right, why):
    """None of them was a candidate. Four in a tenth of the lengths do not prove that at most one of ten is."""
    gate = Gate(Settings())
    for index in range(1000):
        gate.learn(seen(False, index % 20 == 0))
    for index in range(right):
        gate.learn(seen(True, False, 100 + index))
    assert gate.why_shut() == why


def test_limits_are_proven_one_after_the_other():
    """Right responses between the first and the second limit stop the second one, whatever the third says."""
    gate = right_gate()
    assert gate.opens_at() == len(SCALES) - 1
    _, first, second, _ = gate.settings.limits
    for _ in range(10):
        gate.learn(Outcome(100, True, 1.0, (first + second) / 2, 1.0, 0.1))
        gate.lost.pop()  # that so many would be lost is another reason
    gate.falses[3].clear()
    gate.falses[3].extend([(1.0, False)] * gate.settings.candidates)
    assert [gate.why_shut(at) for at in range(len(SCALES))] == ["", "", "false cuts", ""] and gate.opens_at() == FIRST


@pytest.mark.parametrize("lowest, opens_at", [(0.06, 0), (0.04, None)])
def test_where_cut_below_is_not_proven_half_of_it_may_be(lowest, opens_at):
    """Right responses that the score was nearly sure would fail: at half the limit they are no candidates; and if they
    are, it is shut."""
    gate = right_gate()
    gate.lost.extend([(9999, 1.0, lowest)] * 15)  # the longest
    assert gate.why_shut() == "correct responses lost" and gate.opens_at() == opens_at


@given(st.floats(1e-6, 0.5))
def test_no_limit_is_beyond_a_half(cut_below):
    limits = Settings(cut_below=cut_below).limits
    assert list(limits) == sorted(limits) and limits[FIRST] == cut_below and limits[-1] <= 0.5


@pytest.mark.parametrize("lengths", [1, 2, 4])
def test_answers_of_a_few_lengths_are_no_tenth_of_candidates(lengths):
    """One of fifty correct answers is a candidate; sorted beside one another they filled a tenth of their own."""
    gate = Gate(Settings())
    for index in range(1500):
        gate.learn(seen(True, candidate=index % 50 == 0, tokens=8 + index % lengths))
    _, *tenths = gate.lost_shares()
    assert max(tenths) < 0.1
