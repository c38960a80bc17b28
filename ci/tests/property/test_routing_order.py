"""Order of a step under a barrier: a permutation, longest first, dealt out so that the pieces together keep it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from esgrpo.algo.routing_order import deal, longest_first

LENGTHS = st.lists(st.floats(0, 1e6), max_size=24)


@given(LENGTHS)
def test_longest_first(lengths):
    items = list(range(len(lengths)))
    order = longest_first(items, lengths)
    assert sorted(order) == items
    ordered = [lengths[item] for item in order]
    assert ordered == sorted(lengths, reverse=True)
    ties = list(zip(ordered, order, strict=True))
    assert all(first[1] < second[1] for first, second in zip(ties, ties[1:], strict=False) if first[0] == second[0])


@given(st.lists(st.integers(), max_size=24), st.integers(0, 5))
def test_dealing_keeps_every_item(items, hands):
    assert sorted(deal(items, hands)) == sorted(items)


def test_dealt_pieces_together_follow_the_order():
    order = [7, 6, 5, 4, 3, 2, 1, 0]
    dealt = deal(order, 2)
    assert [item for pair in zip(dealt[:4], dealt[4:], strict=True) for item in pair] == order
    assert dealt[:4] != order[:4]  # cut as it is, the first worker has all the long ones
    assert deal(order, 3) == order and deal(order, 1) == order and deal([], 2) == []
