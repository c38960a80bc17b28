"""What the tests of the overlap law and of its controller are played on: limits, rates, and any that users have."""

from __future__ import annotations

from hypothesis import strategies as st

from esgrpo.algo.overlap_law import Limits, Rates

LIMITS, AGE_SCALE = Limits((4, 128), (0.0, 8.0), (16, 128), mini_batch=16), 4.0
RATES = Rates(5000.0, (4e-3, 1e-4), (1.0, 1e-4), sync=1.0, pause=2.0)
rates_of_loops = st.builds(Rates, st.floats(500, 20000), st.tuples(st.floats(1e-4, 1e-2), st.floats(1e-5, 3e-4)),
                           st.tuples(st.floats(0, 5), st.floats(1e-5, 5e-4)), st.floats(0, 10), st.floats(0, 10))
settings_of_users = st.builds(LIMITS.within, st.integers(4, 128), st.floats(0, 256), st.integers(16, 128))
