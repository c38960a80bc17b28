"""The simulator: no token and no sample is lost, whatever the policy; event by event is token by token."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.common.ledger import Ledger
from bench.common.workload import Sample, generate
from bench.policies import ASYNC, SYNC, Limits, Submit, policies, policy
from bench.policies.es_grpo import EsGrpo, Pruning
from bench.policies.order import Verl
from bench.policies.pool import Pool
from bench.sim.device import Device
from bench.sim.experiment import Setting, run, summary
from bench.sim.replica import NEVER, Replica, Run
from bench.sim.simulation import Course, Simulation, Stuck
from esgrpo.algo.routing import CLASSES, choose_replica

CAP = 64
KEPT = ("verl", "oracle", "seer", "es-grpo", "es-grpo-prune", "es-grpo/A")  # decode nothing that is not needed


def device(kv_tokens: int = 10**6, per_kv_token: float = 0.0) -> Device:
    return Device("made up", ((1, 0.01), (4, 0.012), (8, 0.03)), 10_000.0, kv_tokens, 0.1, per_kv_token)


@st.composite
def courses(draw):
    setting = Setting(workload=draw(st.sampled_from(["math", "code"])), replicas=draw(st.integers(1, 5)),
                      groups=draw(st.integers(1, 6)), members=draw(st.integers(2, 5)), cap=CAP, scale=0.01,
                      sequences=draw(st.integers(1, 8)), updates=draw(st.integers(1, 4)),
                      scenario=draw(st.sampled_from([SYNC, ASYNC])), seed=draw(st.integers(0, 99)),
                      prompts=draw(st.integers(4, 30)), warm=draw(st.integers(0, 2)),
                      staleness=draw(st.sampled_from([0.0, 0.5, 2.0])), train_s=draw(st.sampled_from([0.0, 0.7])))
    return setting, device(draw(st.sampled_from([700, 2000, 10**6])), draw(st.sampled_from([0.0, 1e-5])))


@settings(max_examples=40)
@given(courses())
def test_every_policy_keeps_its_books(course):
    """The ledger checks every token at the end of every run; here, that every group came to its end."""
    setting, machine = course
    for name, cls in {**policies(), **{f"es-grpo/{has}": policy(f"es-grpo/{has}") for has in (
            "A", "ABCS", "AB+bound-1+drop", "AB+abort+tails")}}.items():
        if setting.scenario not in cls.scenarios:
            continue
        found = run(setting, name, machine)
        assert found["decoded"] == found["trained"] + sum(found["waste"].values())
        assert found["trained_groups"] == setting.updates * setting.groups
        ended = found["trained_samples"] + found["pruned_samples"]
        assert ended >= found["trained_groups"] * setting.members
        if name in KEPT:
            assert found["waste"]["discarded"] == 0
        if name in KEPT and not (cls.carries and setting.scenario == SYNC):
            assert found["waste"]["left_over"] == 0
            assert ended == found["trained_groups"] * setting.members
        if found["pruned_samples"] == 0:
            assert found["waste"]["pruned"] == 0
        assert found == run(setting, name, machine), "the same seed gives the same run"


def test_drop_waits_for_nobody_and_throws_old_groups_away_where_wait_waits():
    """verl's two strategies: no update has a group of more versions than the threshold under either."""
    setting = Setting(workload="math", replicas=2, groups=4, members=4, cap=4096, sequences=8, updates=12)
    machine = device()
    waits, drops = (run(setting, f"es-grpo/AB+bound-1{change}", machine) for change in ("", "+drop"))
    assert waits["waste"]["discarded"] == 0 < drops["waste"]["discarded"]
    assert waits["staleness"]["max"] == drops["staleness"]["max"] == 1
    never = run(setting, "es-grpo/AB+unbounded", machine)
    assert never["staleness"]["max"] > 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 8))
def test_event_by_event_is_token_by_token(lengths, sequences):
    """Against a loop over decode steps, with all requests there from the start."""
    machine, now = Device("made up", ((1, 0.01), (4, 0.012), (8, 0.03)), 1e12, 10**9, 0.0), 0.0
    replica = Replica(machine, sequences, 1, lambda: now)
    for key, tokens in enumerate(lengths):
        replica.submit(Run(Sample(key, 0, key, 0, tokens, True), 0, None, False))
    ends: dict[int, float] = {}
    replica.admit(now)
    while (time := replica.next_event()) != NEVER:
        now = time
        replica.advance(now)
        for stopped in replica.fire():
            replica.drop(stopped)
            ends[stopped.sample.key] = now
        replica.admit(now)

    expected, clock, waiting, left = {}, 0.0, list(range(len(lengths))), {}
    while waiting or left:
        while waiting and len(left) < sequences:
            key = waiting.pop(0)
            left[key] = lengths[key]
        clock += machine.step(len(left))
        for key in list(left):
            left[key] -= 1
            if not left[key]:
                del left[key]
                expected[key] = clock
    assert ends == pytest.approx(expected, abs=1e-6) and replica.decoded == sum(lengths)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 1, -1])), max_size=60), st.integers(0, 6),
       st.sampled_from(CLASSES), st.sampled_from([None, 0, 3, 5, 9]))
def test_a_pool_chooses_what_the_router_could_choose(changes, tail, length, sticky):
    pool = Pool(range(6), random.Random(1))
    pool.set_tail(tail)
    for name, change in changes:
        pool.add(name, change)
    possible = {choose_replica(length, pool.in_flight, pool.tail, random.Random(seed), sticky) for seed in range(60)}
    assert pool.choose(length, sticky) in possible and min(pool.in_flight.values()) >= 0


def test_a_pool_spreads_equals():
    assert len({Pool(range(6), random.Random(seed)).least() for seed in range(60)}) == 6


def simulate(cls, updates=1, scenario=SYNC, kv_tokens=10**6):
    """Updates of four groups of three under a policy that is made for it."""
    limits = Limits(2, 4, 4, CAP, 3, 4, scenario, kv_tokens)
    groups = iter(generate("math", 4 * updates, 3, CAP, 1, scale=0.01))
    simulation = Simulation(cls(limits, random.Random(0)), limits, device(kv_tokens), Course(updates),
                            lambda count: list(itertools.islice(groups, count)))
    simulation.run()
    return summary(simulation)


class Reckless(Pruning):
    """Prunes after the first outcome, whatever its audit says."""

    overrides = {"prune": {"resolved": {"enable": True, "null_prob": 1.0},
                           "audit": {"enable": True, "min_candidates": 1, "max_false_rate": 1.0}}}


class LeavesOut(Reckless):
    overrides = {"prune": {**Reckless.overrides["prune"], "treatment": "masked"}}


@pytest.mark.parametrize("scenario", [SYNC, ASYNC])
def test_pruned_and_preempted_responses_are_accounted_for(scenario):
    found = simulate(Reckless, 30, scenario, kv_tokens=900)
    assert found["pruned_samples"] > 10 and found["waste"]["pruned"] == 0 and found["preemptions"] > 0
    untrained = 30 * 4 * 3 - found["trained_samples"]
    assert 0 <= untrained < found["pruned_samples"], "what is cut is trained, unless it has no token"
    left_out = simulate(LeavesOut, 30, scenario, kv_tokens=900)
    assert left_out["pruned_samples"] > 10 and left_out["waste"]["pruned"] > 0
    assert left_out["trained_samples"] + left_out["pruned_samples"] == 30 * 4 * 3
    plain = simulate(EsGrpo, 30, scenario, kv_tokens=900)
    assert plain["decoded"] > found["decoded"] and plain["pruned_samples"] == 0


def test_the_driver_notices_a_policy_that_cheats():
    """Negative controls."""
    class Lossy(Verl):
        def place(self, now, load):
            return [action for action in super().place(now, load) if action.sample.member]

    class Twice(Verl):
        def place(self, now, load):
            return [action for action in super().place(now, load) for _ in range(2)]

    class Ahead(Verl):
        def place(self, now, load):
            return [Submit(action.sample, action.replica, None, 1) for action in super().place(now, load)]

    class Early(Verl):
        def begin(self, group):
            self.missing[group.index] = 1

        def ended(self, sample):
            if sample.group in self.missing:
                super().ended(sample)

    assert simulate(Verl)["trained_groups"] == 4
    with pytest.raises(Stuck):
        simulate(Lossy)
    for cheat, message in ((Twice, "twice"), (Ahead, "it has 0"), (Early, "of 3 samples")):
        with pytest.raises(ValueError, match=message):
            simulate(cheat)


def test_the_ledger_notices_a_token_without_fate():
    ledger = Ledger(1)
    ledger.finished(Sample(0, 0, 0, 0, 10, True))
    with pytest.raises(AssertionError, match="11 tokens were decoded"):
        ledger.close(11)


@pytest.mark.parametrize("trains_cut", [False, True])
def test_a_cut_response_is_trained_as_far_as_it_came_or_wasted(trains_cut):
    ledger = Ledger(2, trains_cut)
    right, cut = Sample(0, 0, 0, 0, 10, True), Sample(1, 0, 1, 0, 50, True)
    for sample in (right, cut):
        ledger.resumes(sample, 0)
    ledger.finished(right)
    assert ledger.prunes(cut, 7) == 2  # the group is whole
    ledger.train([0])
    ledger.close(17)
    assert (ledger.trained, ledger.waste["pruned"]) == ((17, 0) if trains_cut else (0, 7))
    assert ledger.gradient_groups == trains_cut and ledger.pruned_samples == 1  # right against cut, which is no success
