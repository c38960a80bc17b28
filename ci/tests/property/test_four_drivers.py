"""One script, four drivers of algo/rollout.py, the same decisions: verl 0.9 (fully async and v1), verl 0.7.0, the
simulator, the engine benchmark. Same seed, same coins."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.common import workload
from bench.common.workload import Group, Sample
from bench.policies import Policy
from bench.policies.es_grpo import EsGrpo
from ci.tests.property.lockstep import (
    Script,
    normalised,
    play_0_7_0,
    play_engine,
    play_fully_async,
    play_simulator,
    play_v1,
)
from esgrpo.hooks.verl.groups import rollout_driver

ADVISED = {"simulator": play_simulator, "engine": play_engine, "fully async": play_fully_async, "v1": play_v1}
EVERY = {**ADVISED, "0.7.0": play_0_7_0}
CAP, EXAMPLES = 64, 50
COINS = {"enable": True, "exempt_prob": 0.4, "min_candidates": 1, "max_false_rate": 1.0, "max_fraction": 0.75}
# boundaries lie at multiples of 4 and endings at odd lengths: nothing happens in the same step as something else
BASE = {"segment_length": 4, "routing": {"tail_share": 0.25}}
RULES = {"resolved": {"resolved": {"enable": True, "null_prob": 1.0}, "treatment": "masked", "audit": COINS},
         "failed": {"resolved": {"enable": True, "null_prob": 1.0}, "treatment": "failed", "audit": COINS},
         "predicted": {"resolved": {"enable": True, "null_prob": 1.0}, "treatment": "doubly_robust", "audit": COINS},
         "enough": {"resolved": {"enable": False}, "finish_group_after": 2, "treatment": "masked", "audit": COINS},
         "both": {"resolved": {"enable": True, "null_prob": 1.0}, "finish_group_after": 2, "treatment": "masked",
                  "audit": COINS}}
NO_RULES = {"resolved": {"enable": False}, "audit": {"enable": False}}


def overrides(prune: dict, **more) -> dict:
    return {**BASE, "prune": {"repetition": {"enable": False}, "verdict": {"enable": False}, **prune}, **more}


def groups_of(lengths: list[list[tuple[int, bool]]], past: bool = False) -> list[Group]:
    """Each list is a group of (tokens, correct); `past` visits come of every other prompt only."""
    size = len(lengths[0])
    return [Group(index, index, [Sample(index * size + member, index, member, 1, tokens, correct)
                                 for member, (tokens, correct) in enumerate(group)])
            for index, group in enumerate(lengths) if not past or index % 2]


def apart(groups: list[Group]) -> list[Group]:
    """The same groups, every response moved to the next odd length that no other has."""
    taken, moved = set(), {}
    for sample in sorted((sample for group in groups for sample in group.samples), key=lambda each: each.tokens):
        tokens = next(tokens for tokens in itertools.count(sample.tokens | 1, 2) if tokens not in taken)
        taken.add(tokens)
        moved[sample.key] = Sample(sample.key, sample.group, sample.member, 1, tokens, sample.correct)
    return [Group(group.index, group.prompt, [moved[sample.key] for sample in group.samples]) for group in groups]


@st.composite
def scripts(draw, prune):
    members, count = draw(st.integers(2, 5)), draw(st.sampled_from([1, 2, 4]))
    total = members * count
    odd = draw(st.lists(st.integers(0, CAP // 2 - 1), min_size=total, max_size=total, unique=True))
    right = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    pairs = [(2 * number + 1, correct) for number, correct in zip(odd, right, strict=True)]
    lengths = [pairs[begin:begin + members] for begin in range(0, total, members)]
    keeps = draw(st.booleans())
    return Script(groups_of(lengths), members, CAP, overrides(prune), groups_of(lengths[::-1], past=True),
                  per_update=draw(st.sampled_from([each for each in (1, 2, 4) if each <= count])), keeps=keeps)


def compare(script: Script, drivers: dict) -> dict:
    found = {name: normalised(play(script)) for name, play in drivers.items()}
    wanted = found["simulator"]
    assert len(wanted) == len(script.groups)
    for name, groups in found.items():
        assert groups == wanted, name
    return wanted


@pytest.mark.parametrize("rules", sorted(RULES))
def test_every_driver_takes_the_same_verdicts(rules):
    seen = {"prune": 0, "exempt": 0, "tail": 0, "move": 0}

    @settings(max_examples=EXAMPLES)
    @example(dataclasses.replace(ALIKE, groups=ALL_WRONG, overrides=overrides({**RULES[rules], "audit": ALWAYS})))
    @given(scripts(RULES[rules]))
    def check(script):
        for group in compare(script, ADVISED).values():
            seen["tail"] += any(action[0] == "tail" for action in group.advice)
            for *_, (_, outcome, _, _, _, exempted, *_) in group.members.values():
                seen["prune"] += outcome == "prune"
                seen["exempt"] += exempted
            seen["move"] += sum(action[0] == "submit" for story in group.members.values() for action in story)

    check()
    assert min(seen.values()) > 0, f"the scripts never came to {seen}"


@settings(max_examples=EXAMPLES)
@given(scripts(NO_RULES))
def test_every_driver_follows_a_response_to_the_same_end(script):
    """0.7.0 has no advice: nobody is told anything there, and nobody moves."""
    script = dataclasses.replace(script, overrides=overrides(NO_RULES, routing={"tail_share": 0.0}))
    for name, group in compare(script, EVERY).items():
        assert not group.advice
        for member, story in group.members.items():
            assert [kind for kind, *_ in story] == ["hand on", "record"]
            assert story[-1][3] == script.groups[int(name)].samples[member].tokens


@settings(max_examples=EXAMPLES)
@given(scripts(NO_RULES), st.integers(3, 30))
def test_both_releases_of_verl_yield_at_the_same_boundaries(script, length):
    """What the benchmarks do not play: boundaries that hand a response back, between weight syncs that abort it."""
    script = dataclasses.replace(script, modules="ABC", past=[],  # 0.7.0 keeps no history and moves nobody
                                 overrides=overrides(NO_RULES, boundary="yield", segment_length=length,
                                                     routing={"tail_share": 0.0}))
    new, old = normalised(play_fully_async(script)), normalised(play_0_7_0(script))
    assert new == old
    for name, group in new.items():
        for member, story in group.members.items():
            tokens = script.groups[int(name)].samples[member].tokens
            yields = [done for kind, done, *_ in story if kind == "submit"]
            assert yields == list(range(length, tokens, length)) and story[-1][1:4] == ("finish", "", tokens)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_workload_is_decided_the_same_in_simulator_engine_benchmark_and_hooks(seed, keeps):
    """bench.common.workload's prompts, first visits remembered, as the simulator and bench.engine play them."""
    members, count = 8, 8
    visits = workload.generate("math", 2 * count, members, CAP, seed, prompts=count, scale=0.02)
    past = visits[:count]
    groups = [Group(index, group.prompt, [Sample(index * members + sample.member, index, sample.member, 1,
                                                 sample.tokens, sample.correct) for sample in group.samples])
              for index, group in enumerate(visits[count:])]
    apart_ = apart(groups)
    cap = 2 + max(sample.tokens for group in apart_ for sample in group.samples)
    script = Script(apart_, members, cap, overrides(RULES["both"]), past, per_update=2, keeps=keeps)
    found = compare(script, ADVISED)
    outcomes = [story[-1] for group in found.values() for story in group.members.values()]
    assert {outcome for _, outcome, *_ in outcomes} == {"finish", "prune"} and len(outcomes) == members * count
    assert any(facts[4] for _, *facts in outcomes)


ALWAYS = {**COINS, "exempt_prob": 1e-9}  # who may be pruned is
# the exempted members of the first group are the evidence on which the last two of the second one are pruned
ALIKE = Script(
    groups_of([[(1, True), (3, True), (5, True), (7, True)], [(9, True), (11, True), (31, False), (33, True)]]), 4, CAP,
    overrides({**RULES["resolved"], "audit": ALWAYS}), per_update=2)
ALL_WRONG = groups_of([[(tokens, False) for tokens in lengths] for lengths in ((1, 3, 5, 7), (9, 11, 31, 33))])


def test_a_policy_with_a_decision_of_its_own_is_found_out(monkeypatch):
    """Negative control: nobody hears how far the others are when two have ended."""
    original = EsGrpo.leave

    def leave(self, sample, *arguments):
        original(self, sample, *arguments)
        if sample.group in self.open and len(self.open[sample.group].ended) == 2:
            self.asked.pop(sample.group, None)

    compare(ALIKE, ADVISED)
    monkeypatch.setattr(EsGrpo, "leave", leave)
    with pytest.raises(AssertionError):
        compare(ALIKE, ADVISED)


def test_hooks_that_leave_an_action_out_are_found_out(monkeypatch):
    """Negative control: verdicts that reach no server."""
    async def finish(self, action):
        pass

    monkeypatch.setattr(rollout_driver.Driver, "_finish", finish)
    with pytest.raises(AssertionError):
        compare(ALIKE, ADVISED)


# of the second group four have ended at 10, so that its last one is to move at the boundary at 12: a weight sync comes
# before it, when the first group is whole at 11
INTERRUPTED = Script(groups_of([[(1, True), (3, True), (5, True), (7, True), (11, True)],
                                [(2, True), (6, True), (9, True), (10, True), (33, True)]]), 5, CAP,
                     overrides(NO_RULES), keeps=False)


def test_a_response_that_was_to_move_goes_where_it_belongs_when_a_weight_sync_aborts_it():
    """It is placed anew anyway: at the boundary nobody moves it a second time."""
    story = compare(INTERRUPTED, ADVISED)["1"]
    assert story.advice == [("tail", 4)] and [kind for kind, *_ in story.members[4]] == ["hand on", "record"]
    kept = compare(dataclasses.replace(INTERRUPTED, keeps=True), ADVISED)["1"]
    assert [kind for kind, *_ in kept.members[4]] == ["submit", "hand on", "record"]  # else it moves there


def test_a_policy_that_resumes_where_it_was_is_found_out(monkeypatch):
    monkeypatch.setattr(EsGrpo, "resumed", Policy.resumed)
    with pytest.raises(AssertionError):
        compare(INTERRUPTED, ADVISED)
