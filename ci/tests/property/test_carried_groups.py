"""ES-GRPO under a barrier: groups are carried over whole, oldest first, none lost, none staler than its bound."""

from __future__ import annotations

import itertools
import math
import random
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.common.workload import generate
from bench.policies import ABORT, KEEP, SYNC, Limits, policy
from bench.policies.carry import ColocateAsync
from bench.policies.es_grpo import EsGrpo, Pruning
from bench.sim.device import ABORT_WAIT_S, Device
from bench.sim.simulation import Course, Simulation
from esgrpo.algo.carry_over import CarryOverError

CAP, PROMPTS = 64, 400
MACHINE = Device("made up", ((1, 0.01), (4, 0.012), (8, 0.03)), 10_000.0, 10**6, 0.1)


def carried(cls, over: float, bound: int | None, limits: Limits, updates: int, seed: int = 0):
    """(simulation that has run, its policy, indexes of the groups that it was shown)."""
    kind = type("Carrying", (cls,), {"over": over, "bound": bound})
    stream = iter(generate("math", PROMPTS, limits.members, CAP, seed, scale=0.01))
    shown: list[int] = []

    def source(count: int) -> list:
        groups = list(itertools.islice(stream, count))
        shown.extend(group.index for group in groups)
        return groups

    chosen = kind(limits, random.Random(seed))
    simulation = Simulation(chosen, limits, MACHINE, Course(updates), source)
    simulation.run()
    return simulation, chosen, shown


def allowed(over: float, bound: int, groups: int) -> int:
    """Versions: all that are `bound` versions old are waited for, and then trained, an update's at a time. They are no
    more than what is open, and, from one version on, no more than what was carried."""
    old = round(over * groups) - (groups if bound else 0)
    return bound + max(0, math.ceil(old / groups) - 1)


@settings(max_examples=80, deadline=None)
@given(over=st.sampled_from([1.0, 1.3, 2.0, 3.5]), bound=st.sampled_from([None, 0, 1, 2, 4]),
       groups=st.integers(1, 5), members=st.integers(2, 4), replicas=st.integers(1, 3), sequences=st.integers(1, 8),
       updates=st.integers(1, 12), seed=st.integers(0, 99), kind=st.sampled_from([EsGrpo, Pruning]),
       keeps=st.booleans())
def test_every_group_is_trained_once_or_still_open_and_none_is_too_stale(over, bound, groups, members, replicas,
                                                                         sequences, updates, seed, kind, keeps):
    limits = Limits(replicas, sequences, sequences, CAP, members, groups, SYNC)
    kind = type("Kind", (kind,), {"keeps": keeps})
    simulation, chosen, shown = carried(kind, over, bound, limits, updates, seed)
    ledger = simulation.ledger  # whose books the simulation closed: every token has one fate
    assert chosen.sync == (KEEP if keeps else ABORT) and ledger.waste["discarded"] == 0
    assert len(ledger.closed) == len(ledger.staleness) == updates * groups
    waiting = [group.index for group in chosen.queue._items.values()]
    assert sorted([*ledger.closed, *chosen.born, *waiting]) == sorted(shown), "one is lost, or there twice"
    assert len(chosen.born) + len(waiting) == max(0, round(over * groups) - groups)
    assert set(chosen.carried.carried) == {str(index) for index in chosen.born}
    if bound is not None:
        assert ledger.stale()["max"] <= allowed(over, bound, groups)


LIMITS = Limits(2, 8, 8, CAP, 4, 4, SYNC)


def test_without_waiting_the_bound_is_broken():
    """Negative control, and what the bound costs."""
    class Hasty(EsGrpo):
        def step_is_over(self):
            return len(self.whole) >= self.limits.groups

    hasty, bounded = (carried(kind, 2.0, 1, LIMITS, 20)[0] for kind in (Hasty, EsGrpo))
    assert hasty.ledger.stale()["max"] > 1 == bounded.ledger.stale()["max"]
    assert hasty.now < bounded.now


def test_the_real_pool_stops_a_policy_that_trains_the_youngest_first():
    """Negative control: the rules are algo.carry_over's, not the policy's own."""
    class Youngest(EsGrpo):
        def oldest_first(self):
            return super().oldest_first()[::-1]

    with pytest.raises(CarryOverError, match="are early"):
        carried(Youngest, 2.0, 1, LIMITS, 20)


def test_a_step_that_waits_for_all_is_on_policy_and_slower():
    barrier, none, whole = (carried(policy(f"es-grpo/{name}"), 2.0, None, LIMITS, 20)[0]
                            for name in ("AB+barrier", "A", "AB"))
    fresh = {"mean": 0.0, "share": 0.0}
    assert barrier.ledger.stale() == none.ledger.stale() == {**fresh, "max": 0, "rows": fresh, "tokens": fresh}
    assert whole.ledger.stale()["mean"] > 0 and whole.now < barrier.now


@settings(max_examples=60, deadline=None)
@given(threshold=st.integers(1, 4), waits=st.booleans(), groups=st.integers(1, 5), members=st.integers(2, 4),
       replicas=st.integers(1, 3), sequences=st.integers(1, 8), updates=st.integers(1, 12), seed=st.integers(0, 99))
def test_verls_own_carry_over_keeps_its_window_and_its_threshold(threshold, waits, groups, members, replicas, sequences,
                                                                updates, seed):
    """colocate_async: two updates' groups are open, an update takes the oldest, none spans too many versions."""
    limits = Limits(replicas, sequences, sequences, CAP, members, groups, SYNC)
    kind = type("Colocate", (ColocateAsync,), {"THRESHOLD": threshold, "waits": waits})
    stream = iter(generate("math", PROMPTS, members, CAP, seed, scale=0.01))
    shown: list[int] = []

    def source(count: int) -> list:
        found = list(itertools.islice(stream, count))
        shown.extend(group.index for group in found)
        return found

    chosen = kind(limits, random.Random(seed))
    simulation = Simulation(chosen, limits, MACHINE, Course(updates), source)
    simulation.run()
    ledger = simulation.ledger
    dropped = set(shown) - set(ledger.closed) - set(chosen.born) - {group.index for group in chosen.waiting}
    assert len(shown) == (updates + 1) * groups + len(dropped), "a step begins an update's groups, and what was dropped"
    assert (ledger.waste["discarded"] > 0) == bool(dropped)
    if waits:
        assert not dropped and ledger.stale()["max"] <= allowed(2.0, threshold - 1, groups)
    else:
        assert ledger.stale()["max"] < threshold


def test_with_abort_and_resume_es_grpo_is_verls_own_carry_over():
    """So that what is claimed over it is what kept requests bring, and nothing else."""
    times = {name: Simulation(policy(name)(LIMITS, random.Random(1)), LIMITS, MACHINE, Course(12), source)
             for name in ("es-grpo/B+abort", "colocate_async/wait", "es-grpo/B", "verl")
             for source in [_source()]}
    for simulation in times.values():
        simulation.run()
    ours, theirs, kept, plain = (simulation.update_times for simulation in times.values())
    assert ours == pytest.approx(theirs)
    assert kept[-1] < theirs[-1] < plain[-1]


def _source():
    stream = iter(generate("math", PROMPTS, LIMITS.members, CAP, 1, scale=0.01))
    return lambda count: list(itertools.islice(stream, count))


def begun(name: str) -> list[int]:
    """Groups in the order of their first Submit, of a policy that knows every prompt from an earlier epoch."""
    groups = generate("math", 2 * LIMITS.groups, LIMITS.members, CAP, 1, scale=0.01)
    chosen = policy(name)(LIMITS, random.Random(0))
    chosen.remember(groups)
    chosen.admit(groups[:chosen.demand()])
    load = types.SimpleNamespace(running=[0] * LIMITS.replicas, waiting=[0] * LIMITS.replicas, free_blocks=[9],
                                 allowance=10**6)
    return list(dict.fromkeys(action.sample.group for action in chosen.next(0.0, load)))


def test_what_is_carried_over_goes_in_the_order_of_the_data():
    """As verl's asynchronous trainers send it: where nobody waits for the longest, longest first gains nothing."""
    plain, longest, barrier = (begun(f"es-grpo/AB{change}") for change in ("", "+longest", "+barrier"))
    assert plain == sorted(plain)
    assert sorted(longest) == plain and longest != plain
    assert len(barrier) == LIMITS.groups and barrier != sorted(barrier)


def test_with_segments_an_aborted_request_resumes_at_once():
    """As the hook resume-without-sleep makes verl's client do; without them it sleeps."""
    times = {name: carried(policy(f"es-grpo/{name}"), 2.0, None, LIMITS, 4)[0].update_times[-1]
             for name in ("AB+abort", "AB")}
    assert not policy("es-grpo/AB+abort")(LIMITS, random.Random(0)).sleeps
    assert policy("es-grpo/A")(LIMITS, random.Random(0)).sleeps
    assert times["AB+abort"] - times["AB"] < ABORT_WAIT_S  # three syncs lie between: one sleep would show
