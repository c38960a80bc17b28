"""The machine of a group, with a pruner that does as it is told: who is asked, who is told, and what counts."""

from __future__ import annotations

import pytest

from esgrpo import config
from esgrpo.algo import rollout
from esgrpo.algo.audit import COIN, Verdict
from esgrpo.algo.group_pruning import Decided
from esgrpo.algo.terms import Outcome, Rule

BUDGET = 1000


class Pruner:
    """`loses`: members whose coin falls against them, under `rule`; the coins of all others fall for them."""

    verdicts = None

    def __init__(self, rule: str = Rule.RESOLVED, loses=()):
        self.rule, self.loses, self.checked, self.loops, self.ends = rule, loses, [], [], []

    def _decided(self, member: int) -> Decided:
        return Decided(Verdict(member in self.loses, 0.5, self.rule, COIN), 5, "failed")

    def checkpoint(self, group, open_, committed):
        self.checked.append(dict(open_))
        return {member: self._decided(member) for member in open_}

    def loop(self, group, member, tokens, surprisal):
        self.loops.append(member)
        return self._decided(member)

    def ended(self, group, member, ending, by_rule):
        self.ends.append((member, by_rule))

    def watch(self, *_):
        pass

    close = watch

    def take_lessons(self):
        return []

    def wants_progress(self, group):
        return False

    def report(self, rule):
        return {}


def group_of(pruner: Pruner, size: int = 3, placed=None) -> rollout.GroupRuns:
    runs = rollout.GroupRuns(rollout.Rules(config.parse({"enable": True}), BUDGET, pruner=pruner))
    for member in range(size):
        runs.on(rollout.Submitted("g", size, 0.0))
        if placed is None or member in placed:
            runs.on(rollout.Placed("g", member, f"r{member}"))
    return runs


def attempt(outcome: str, rule: str = "", left: int = 95) -> rollout.AttemptEnded:
    answer = {"outcome": outcome, "rule": rule, "spans": [[0, 5]], "boundaries": 0, "logprob_sum": 0.0, "replica": "r0",
              "arrived": 0.0, "surprisal": 0.001}
    return rollout.AttemptEnded("g", 0, 1.0, 5, left, answer=answer)


def test_a_coin_falls_for_whoever_runs_and_has_no_row_yet():
    pruner = Pruner(loses=(0, 1, 2))
    runs = group_of(pruner)
    runs.on(rollout.Sealed("g", 1, 1.0))
    finish, = runs.on(rollout.Progress("g", {0: 5, 1: 5, 2: 5, 7: 5}))
    assert pruner.checked == [{0: 5, 2: 5}] and finish == rollout.Finish("g", Rule.RESOLVED, {"r0": (0,), "r2": (2,)})
    assert runs.rules.decisions["pruning/pruned"] == 2


def test_who_is_between_two_attempts_is_ended_when_it_arrives():
    runs = group_of(Pruner(loses=(0,)), placed=(1, 2))
    assert runs.on(rollout.Progress("g", {0: 5, 1: 5})) == []
    assert runs.on(rollout.Placed("g", 0, "r9")) == [rollout.Finish("g", Rule.RESOLVED, {"r9": (0,)})]
    assert runs.on(rollout.Placed("g", 1, "r1")) == []  # its coin fell for it
    runs.on(rollout.MemberEnded("g", 0, 2.0, score=0.0))
    assert runs.rules.pruner.ends == [(0, True)]


def test_who_was_spared_by_a_coin_is_looked_at_for_loops_no_more():
    runs = group_of(Pruner())
    assert "exempt" not in runs.fields("g", 0)
    runs.on(rollout.Progress("g", {0: 5}))
    assert runs.fields("g", 0)["exempt"] is True and "exempt" not in runs.fields("g", 1)


@pytest.mark.parametrize("left, judged, action", [(95, [0], rollout.Submit), (0, [], rollout.HandOn)])
def test_a_loop_that_comes_with_its_last_token_needs_no_coin(left, judged, action):
    runs = group_of(Pruner(Rule.REPETITION))
    found, = runs.on(attempt(Outcome.YIELD, Rule.REPETITION, left))
    assert isinstance(found, action) and runs.rules.pruner.loops == judged
    assert runs.rules.decisions["loops/exempted"] == len(judged)


@pytest.mark.parametrize("rule, score, counted", [
    (Rule.VERDICT, 1.0, 1), (Rule.VERDICT, 0.0, 0), (Rule.RESOLVED, 1.0, 0)])
def test_a_verdict_was_false_where_a_spared_response_comes_out_right(rule, score, counted):
    runs = group_of(Pruner(rule))
    runs.on(rollout.Progress("g", {0: 5}))
    runs.on(rollout.MemberEnded("g", 0, 2.0, score=score))
    assert runs.rules.decisions["verdicts/false"] == counted


def test_a_group_comes_back_once_and_only_if_somebody_still_runs():
    runs = rollout.GroupRuns(rollout.Rules(config.parse({"enable": True}), BUDGET))
    assert runs.on(rollout.Reopened("over", 2, {0: Outcome.FINISH, 1: Outcome.FINISH})) == [] and not runs.groups
    assert runs.on(rollout.Reopened("g", 3, {1: Outcome.FINISH})) == []
    with pytest.raises(rollout.GroupCollision, match="g"):
        runs.on(rollout.Reopened("g", 3, {}))
    with pytest.raises(rollout.GroupCollision, match="g"):
        runs.on(rollout.Submitted("g", 3, 0.0, member=1))
    for member in (0, 2):
        runs.on(rollout.Submitted("g", 3, 0.0, member=member))
        runs.on(rollout.Placed("g", member, "r"))
        assert runs.places() == {"r": ["g"]}
        runs.on(rollout.MemberEnded("g", member, 1.0, score=1.0))
    assert not runs.groups and runs.places() == {}
