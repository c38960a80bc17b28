"""Groups without a gradient: which of them give their place to another prompt."""

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esgrpo.algo.null_groups import (
    DEVIATIONS,
    MOST_BATCHES,
    MOST_LEFT_OUT,
    LeftOutShare,
    NullFilter,
    a_batch_can_wait,
    alike_is_null,
    costs_rollout,
    spare_share,
    to_begin,
)
from esgrpo.algo.terms import NullGroups

GROUPS = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=300)  # all alike, waiting for the trainer


def played(mode: str, groups, batch: int) -> list[bool]:
    """Whether each group was left out."""
    judge, found = NullFilter(), []
    for alike, waiting in groups:
        found.append(judge.leaves_out(mode, alike, waiting, batch))
        judge.note(found[-1], batch)
    return found


@given(GROUPS, st.integers(1, 6))
def test_only_groups_without_a_gradient_are_left_out_and_never_too_many_in_a_row(groups, batch):
    for mode in NullGroups:
        in_a_row = 0
        for (alike, waiting), left_out in zip(groups, played(mode, groups, batch), strict=True):
            assert not left_out or alike and mode != NullGroups.TRAIN
            wanted = mode == NullGroups.REPLACE or mode == NullGroups.SPARE and waiting >= batch
            assert left_out or not alike or not wanted or in_a_row == MOST_BATCHES * batch
            in_a_row = in_a_row + 1 if left_out else 0
            assert in_a_row <= MOST_BATCHES * batch


@given(GROUPS, st.integers(1, 6))
def test_a_loop_in_which_nothing_waits_is_left_as_it_is(groups, batch):
    starved = [(alike, min(waiting, batch - 1)) for alike, waiting in groups]
    assert not any(played(NullGroups.SPARE, starved, batch))


TAKES = None  # the trainer takes a batch, or what is there
EVENTS = st.lists(st.one_of(st.just(TAKES), st.booleans()), max_size=400)  # or a group ends: alike?


@given(EVENTS, st.integers(1, 6))
def test_before_a_batch_waits_no_more_are_left_out_than_the_last_one_left_waiting(events, batch):
    """So that the next one is complete where as many end as before, whatever becomes of the other prompts."""
    judge, waiting, beyond, early = NullFilter(), 0, 0, 0
    for event in events:
        if event is TAKES:
            beyond = waiting = max(0, waiting - batch)
            early = 0
            continue
        left_out = judge.leaves_out(NullGroups.SPARE, event, waiting, batch)
        judge.note(left_out, batch)
        early += left_out and waiting < batch
        assert not left_out or event
        assert waiting >= batch or early <= beyond
        waiting += not left_out


class Rollouter:
    """Whose trainer takes batches of four."""

    def __init__(self):
        self.judge = NullFilter()

    def ends(self, alike: bool, waiting: int) -> bool:
        left_out = self.judge.leaves_out(NullGroups.SPARE, alike, waiting, 4)
        self.judge.note(left_out, 4)
        return left_out

    def two_batches_from_seven(self) -> None:
        for waiting in (3, 4, 5, 6, 3, 4, 5, 6):
            assert not self.ends(False, waiting)


def test_a_group_is_left_out_early_once_two_batches_were_taken_from_more():
    made = Rollouter()
    made.two_batches_from_seven()
    assert [made.ends(True, 3) for _ in range(4)] == [True, True, True, False]  # three waited beyond the second one


def test_the_fewer_that_two_batches_left_waiting_count():
    made = Rollouter()
    made.two_batches_from_seven()
    assert not made.ends(False, 3)  # the third batch was taken: four wait
    assert not made.ends(True, 0)  # and the fourth, from four


def test_a_trainer_that_took_what_there_was_waits_for_the_next_one():
    made = Rollouter()
    made.two_batches_from_seven()
    for waiting in (3, 4, 1):  # the third batch was taken, and the fourth, from five
        assert not made.ends(False, waiting)
    assert not made.ends(True, 0)  # and then the two that there were


def test_ten_batches_of_groups_alike_are_left_out_then_one_group_is_trained():
    assert played(NullGroups.REPLACE, [(True, 0)] * 42, batch=2) == ([True] * 20 + [False]) * 2
    assert played(NullGroups.REPLACE, [(True, 0)] * 11, batch=0) == [True] * 10 + [False]  # before a batch is known


SHARES = st.floats(0.0, MOST_LEFT_OUT)


@given(st.integers(1, 64), st.integers(0, 96), st.integers(0, 96), st.integers(0, 96), st.integers(0, 96), SHARES)
def test_what_is_begun_ahead_leaves_as_many_as_wanted_to_be_expected(batch, wanted, good, running, left_out, share):
    """Once verl has begun others for what it leaves out and the step has taken its batch."""
    begun = to_begin(batch, wanted, good, running, left_out, share)
    after = good + (running + begun + left_out) * (1 - share) - batch
    on_top = DEVIATIONS * sqrt((batch + wanted) * share)
    assert begun >= 1 and (begun == 1 or after <= wanted + on_top + 1e-6)
    assert after > wanted + on_top - 1


@given(st.integers(1, 64), st.integers(0, 96), st.integers(0, 96), st.integers(0, 96))
def test_where_nothing_is_left_out_a_step_begins_what_verl_begins(batch, wanted, good, running):
    assert to_begin(batch, wanted, good, running, 0, 0.0) == max(1, batch + wanted - good - running)
    if good + running == wanted:
        assert to_begin(batch, wanted, good, running, 0, 0.0) == batch


STEPS = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 640)), max_size=40)  # trained, left out


@given(STEPS, st.integers(1, 64), st.integers(0, 64))
def test_the_share_is_between_those_of_the_steps(steps, batch, visible):
    share = LeftOutShare()
    assert 0.0 <= share.foreseen(batch, visible) == min(MOST_LEFT_OUT, visible / (visible + batch))
    for trained, left_out in steps:
        share.note(trained, left_out)
    shares = [min(MOST_LEFT_OUT, left_out / (left_out + trained)) for trained, left_out in steps]
    if steps:  # what is visible says nothing any more
        assert min(shares) - 1e-9 <= share.foreseen(batch, visible) <= max(shares) + 1e-9


def test_the_share_follows_the_last_steps():
    share = LeftOutShare()
    for left_out in [96] * 20 + [0] * 8:
        share.note(32, left_out)
    assert 0.4 < share.foreseen(32, 0) < 0.6  # of 0.75
    for _ in range(40):
        share.note(32, 0)
    assert share.foreseen(32, 0) < 0.01


@pytest.mark.parametrize("estimator, kl_in_reward, null", [
    ("grpo", False, True), ("grpo_segment", False, True), ("rloo", False, True),
    ("grpo", True, False),  # no two responses have the same KL term
    ("gae", False, False), ("reinforce_plus_plus", False, False), ("gae", True, False)])
def test_rewards_alike_are_null_where_only_the_group_is_compared(estimator, kl_in_reward, null):
    assert alike_is_null(estimator, kl_in_reward) is null


@pytest.mark.parametrize("mode, foreseen, costs", [
    (NullGroups.SPARE, False, False), (NullGroups.SPARE, True, True), (NullGroups.TRAIN, False, False),
    (NullGroups.REPLACE, False, True), (NullGroups.REPLACE, True, True)])
def test_who_waits_for_another_prompt(mode, foreseen, costs):
    assert costs_rollout(mode, foreseen) is costs


def test_the_share_that_spare_may_leave_out():
    assert spare_share(NullGroups.SPARE, 3, 12) == 0.25 and spare_share(NullGroups.SPARE, 0, 12) == 0.0
    assert spare_share(NullGroups.SPARE, 0, 0) is None and spare_share(NullGroups.REPLACE, 3, 12) is None


@pytest.mark.parametrize("staleness, batches, waits", [
    (0.0, 1, False), (0.0, 2, True), (0.5, 1, False), (0.9, 1, False), (1.0, 1, True), (0.1, 2, True)])
def test_a_batch_waits_where_two_are_allowed(staleness, batches, waits):
    assert a_batch_can_wait(staleness, batches) is waits
