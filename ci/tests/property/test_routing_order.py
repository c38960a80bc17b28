"""Order of a step under a barrier: longest first, dealt out in order. When replicas join as little as can be moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from esgrpo.algo.routing import cheapest_to_move, surplus
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


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 40), max_size=6))
def test_what_is_above_a_share_moves_and_no_more(loads):
    moving = surplus(loads)
    assert all(0 < count <= loads[name] for name, count in moving.items())
    left = {name: count - moving.get(name, 0) for name, count in loads.items()}
    homeless = sum(moving.values())
    for _ in range(homeless):  # each goes to the replica with the fewest
        left[min(left, key=left.get)] += 1
    assert max(left.values(), default=0) - min(left.values(), default=0) <= 1
    floor, larger = divmod(sum(loads.values()), max(1, len(loads)))
    shares = sorted([floor + 1] * larger + [floor] * (len(loads) - larger), reverse=True)
    fewest = sum(max(0, load - share) for load, share in zip(sorted(loads.values(), reverse=True), shares, strict=True))
    assert homeless == fewest


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 40), max_size=6), st.integers(-1, 8))
def test_the_cheapest_move(tokens, count):
    moved = cheapest_to_move(tokens, count)
    assert len(set(moved)) == len(moved) == min(max(0, count), len(tokens))
    stay = tokens.keys() - set(moved)
    assert all(tokens[one] <= tokens[other] for one in moved for other in stay)
