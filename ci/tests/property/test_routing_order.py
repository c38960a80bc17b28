"""Complementary order: always a permutation, descending then ascending, and undone exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from esgrpo.algo.routing_order import alternate, by_group, deal, inverse

LENGTHS = st.lists(st.floats(0, 1e6), max_size=24)


@given(LENGTHS, st.integers(0, 9))
def test_alternate(lengths, step):
    items = list(range(len(lengths)))
    order = alternate(step, items, lengths)
    assert sorted(order) == items
    ordered = [lengths[item] for item in order]
    assert ordered == sorted(lengths, reverse=step % 2 == 0)
    ties = list(zip(ordered, order, strict=True))
    assert all(first[1] < second[1] for first, second in zip(ties, ties[1:], strict=False) if first[0] == second[0])


@given(LENGTHS, st.integers(0, 9), st.integers(0, 5))
def test_inverse_undoes_every_order(lengths, step, hands):
    order = deal(alternate(step, list(range(len(lengths))), lengths), hands)
    assert sorted(order) == list(range(len(lengths)))
    rows = [f"row {n}" for n in range(len(lengths))]
    moved = [rows[at] for at in order]
    assert [moved[at] for at in inverse(order)] == rows


def test_dealt_pieces_together_follow_the_order():
    order = [7, 6, 5, 4, 3, 2, 1, 0]
    dealt = deal(order, 2)
    assert [item for pair in zip(dealt[:4], dealt[4:], strict=True) for item in pair] == order
    assert dealt[:4] != order[:4]  # cut as it is, the first worker has all the long ones
    assert deal(order, 3) == order and deal(order, 1) == order and deal([], 2) == []


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 100)), max_size=20), st.integers(0, 3))
def test_groups_stay_together(rows, step):
    groups, lengths = [group for group, _ in rows], [length for _, length in rows]
    order = by_group(groups, step, lengths)
    assert sorted(order) == list(range(len(rows)))
    seen = [groups[at] for at in order]
    assert all(seen.index(group) + seen.count(group) == len(seen) - seen[::-1].index(group) for group in set(seen))
    assert all(first < second for first, second in zip(order, order[1:], strict=False)
               if groups[first] == groups[second])
