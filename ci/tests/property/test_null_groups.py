"""Groups without a gradient: which of them give their place to another prompt."""

from hypothesis import given
from hypothesis import strategies as st

from esgrpo.algo.null_groups import MOST_BATCHES, NullFilter
from esgrpo.algo.terms import NullGroups

GROUPS = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=300)  # all alike, waiting for the trainer


def played(mode: str, groups, batch: int) -> list[bool]:
    """Whether each group was left out."""
    judge, found = NullFilter(), []
    for alike, waiting in groups:
        found.append(judge.leaves_out(mode, alike, waiting, batch))
        judge.note(found[-1])
    return found


@given(GROUPS, st.integers(1, 6))
def test_only_groups_without_a_gradient_are_left_out_and_never_too_many_in_a_row(groups, batch):
    for mode in NullGroups:
        in_a_row = 0
        for (alike, waiting), left_out in zip(groups, played(mode, groups, batch), strict=True):
            assert not left_out or alike and mode != NullGroups.TRAIN
            assert not left_out or mode == NullGroups.REPLACE or waiting >= batch
            assert left_out or not alike or mode != NullGroups.REPLACE or in_a_row == MOST_BATCHES * batch
            in_a_row = in_a_row + 1 if left_out else 0
            assert in_a_row <= MOST_BATCHES * batch


@given(GROUPS, st.integers(1, 6))
def test_a_loop_in_which_nothing_waits_is_left_as_it_is(groups, batch):
    starved = [(alike, min(waiting, batch - 1)) for alike, waiting in groups]
    assert not any(played(NullGroups.SPARE, starved, batch))
