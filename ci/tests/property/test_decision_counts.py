"""Whatever rows of running counts are lost, doubled or out of order: what the last ones say is what happened."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from esgrpo.algo import decisions
from esgrpo.config import Segment

NAMES = sorted({name for module in decisions.MODULES for name in module.counted} | {"late", "pruning/exempted"})
PROCESSES = st.sampled_from([("agent-loop-worker", 1, 0), ("agent-loop-worker", 1, 1), ("rollouter", 2, 0)])
STEPS = st.lists(st.one_of(
    st.tuples(st.just("decide"), PROCESSES, st.sampled_from(NAMES), st.integers(1, 5)),
    st.tuples(st.just("write"), PROCESSES, st.booleans(), st.integers(1, 3))), min_size=8, max_size=60)


@given(steps=STEPS, data=st.data())
def test_counts_of_rows_are_what_happened(steps, data):
    """Every process writes once more at its end; rows before that may be lost, come twice, and in any order."""
    running: dict[tuple, Counter] = {}
    happened: Counter = Counter()
    rows, told = [], Counter()
    gathered = decisions.Gathered()

    def row(process):
        name, pid, restart = process
        return {"process": name, "pid": pid, "restart": restart, "node": "n", "counts": dict(running[process])}

    for kind, process, what, number in steps:
        counts = running.setdefault(process, Counter())
        if kind == "decide":
            counts[what] += number
            happened[what] += number
        elif what:  # not lost
            rows += [row(process)] * number
            gathered.add(process, counts)
            told += gathered.take()
    rows += [row(process) for process in running]
    found, audit = decisions.of_rows(data.draw(st.permutations(rows)))
    assert found == happened and audit == {}
    for process, counts in running.items():
        gathered.add(process, counts)
    assert told + gathered.take() == happened and not gathered.take()
    settings = Segment(enable=True)
    assert sum(row.decided for row in decisions.table(decisions.Run(settings, found))) == sum(
        number for name, number in happened.items() if name not in ("late", "pruning/exempted"))
