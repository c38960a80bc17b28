"""Pictures of a comparison."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")


def test_time_average_is_weighted_by_time():
    from bench.page import time_average

    steps = [(0.0, 2.0), (3.0, 4.0), (12.0, 0.0), (20.0, 0.0)]
    assert time_average(steps, 10.0) == [(5.0, pytest.approx(3.4)), (15.0, pytest.approx(0.8))]
    assert time_average(steps[:1], 10.0) == []
