"""The comparison of arms: when a target counts as reached, and what is said where it does not."""

from types import SimpleNamespace

import pytest

from bench.common import compare

TARGET = 0.6


@pytest.mark.parametrize("rewards, reached, said", [
    ([0.5, 0.65, 0.7], 20.0, "20 s"), ([0.5, 0.65, 0.55, 0.7, 0.6], 60.0, "60 s"),
    ([0.5, 0.65], None, "not in 2 evaluations in a row"), ([0.5, 0.65, 0.55], None, "not in 2 evaluations in a row"),
    ([0.7, 0.5], None, "not reached"), ([0.5], None, "not reached"), ([], None, "not reached")])
def test_a_target_counts_when_it_holds(rewards, reached, said):
    evaluations = [(20.0 * number, reward) for number, reward in enumerate(rewards)]
    found = compare.time_to_target(evaluations[1:], TARGET)
    assert found == reached
    assert compare.time_said(SimpleNamespace(time_to_target=found, target=TARGET, evaluations=evaluations)) == said
