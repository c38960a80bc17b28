"""The machine of a group's life against a model: events in any order, late, twice and unknown ones among them.

Conservation: every member that was submitted ends once, with one record unless it failed or was carried on; committed
tokens are neither lost nor counted twice; spans sum to tokens and name the weights that made them; messages go only to
replicas that hold a member of the group.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esgrpo import config
from esgrpo.algo import rollout, rows
from esgrpo.algo.audit import Audit
from esgrpo.algo.group_pruning import GroupPruner
from esgrpo.algo.terms import Outcome, Rule
from esgrpo.algo.verdict import Lessons, Verdicts
from esgrpo.algo.verdict_features import Glance
from esgrpo.algo.verdict_gate import FIRST, Settings

GROUPS, REPLICAS, BUDGET = ("a", "b", "c"), ("r0", "r1", "r2"), 40
SETTINGS = {
    "enable": True, "boundary": "yield", "segment_length": 8, "success_threshold": 0.5,
    "history": {"enable": True}, "routing": {"enable": True, "tail_share": 0.25, "tail_fraction": 0.4},
    "prune": {"resolved": {"enable": True, "null_prob": 1.0}, "finish_group_after": 2, "treatment": "masked",
              "audit": {"enable": True, "exempt_prob": 0.3, "min_candidates": 1, "max_false_rate": 1.0}}}


JUDGED = {**SETTINGS, "prune": {"verdict": {"enable": True}, "resolved": {"enable": True, "null_prob": 1.0},
                                "audit": {**SETTINGS["prune"]["audit"], "max_fraction": 0.75}}}
COUNTED = ("pruning/pruned", "pruning/exempted", "verdicts/pruned", "verdicts/exempted", "segments/resubmitted",
           "keep/moved")


@dataclass
class Member:
    """The model: what really happened to a response."""

    stamps: list[int] = field(default_factory=list)  # weight version of each token
    replica: str | None = None  # that decodes it
    born: int = 0  # tokens when its attempt began
    first: int = 0  # version at that moment
    asked: bool = False  # its replica was told to finish it
    whole: bool = False  # handed on: waits for its reward
    sealed: bool = False
    records: int = 0


def module_of(decision: dict) -> str:
    module = "verdicts" if decision["rule"] == Rule.VERDICT else "pruning"
    return f"{module}/{'pruned' if decision['prune'] else 'exempted'}"


class Life(RuleBasedStateMachine):
    settings: dict = SETTINGS

    def new_verdicts(self, segment, seed) -> Verdicts | None:
        return None

    @initialize(size=st.integers(1, 4), seed=st.integers(0, 9))
    def start(self, size, seed):
        segment = config.parse(self.settings)
        pruner = GroupPruner(segment, Audit(segment.prune.audit, random.Random(seed)), BUDGET,
                             self.new_verdicts(segment, seed))
        self.runs = rollout.GroupRuns(rollout.Rules(segment, BUDGET, len(REPLICAS), pruner))
        self.size, self.version, self.late = size, 0, 0
        self.happened: Counter = Counter()  # as decisions are named
        self.members: dict[tuple[str, int], Member] = {}
        self.over: dict[tuple[str, int], dict] = {}  # states of members that were carried on
        self.asks: list[rollout.Ask] = []

    # what the driver does

    def on(self, event):
        answer, ends = None, isinstance(event, rollout.MemberEnded)
        if ends and (decision := self.runs.response(event.group, event.member).decision):
            self.happened[module_of(decision)] += 1
        for action in self.runs.on(event):
            held = {member.replica for (group, _), member in self.members.items()
                    if group == getattr(action, "group", None) and member.replica is not None}
            if isinstance(action, rollout.Ask):
                assert set(action.replicas) <= held and action.replicas
                self.asks.append(action)
            elif isinstance(action, rollout.JoinTail):
                assert set(action.replicas) <= held and action.length == 8
                running = self.runs.groups[action.group].running.values()
                assert {response.length_class for response in running} == {"tail"}
            elif isinstance(action, rollout.Finish):
                for replica, numbers in action.members.items():
                    for number in numbers:
                        member = self.members[action.group, number]
                        assert member.replica == replica and not member.asked and not member.sealed
                        member.asked = True
            elif isinstance(action, rollout.Share):
                assert action.lessons
            elif isinstance(action, rollout.Teach):
                self.taught(action)
            else:
                assert answer is None, "two answers to one event"
                answer = action
        return answer

    def running(self, **wanted):
        return sorted(key for key, member in self.members.items()
                      if all(getattr(member, name) == value for name, value in wanted.items()))

    def decoding(self):
        return sorted(key for key, member in self.members.items() if member.replica is not None)

    # submissions

    @rule(group=st.sampled_from(GROUPS), replicas=st.lists(st.sampled_from(REPLICAS), max_size=4))
    def submit_some(self, group, replicas):
        """Members begin and are placed at once, as they mostly are."""
        for replica in replicas[:self.size - len(self.runs.groups[group].states) if group in self.runs.groups
                                else self.size]:
            self.submit(group)
            self.put(self.between()[-1] if len(self.between()) == 1 else next(
                key for key in self.between() if key[0] == group), replica)

    @rule(group=st.sampled_from(GROUPS))
    def submit(self, group):
        taken = {number for name, number in self.members if name == group}
        run = self.runs.groups.get(group)
        known = set(run.states) if run is not None else set()
        assert taken <= known
        if len(known) == self.size:
            with pytest.raises(rollout.GroupCollision):
                self.on(rollout.Submitted(group, self.size, 0.0))
            return
        action = self.on(rollout.Submitted(group, self.size, 0.0))
        assert isinstance(action, rollout.Submit) and action.fields["done_before"] == 0
        assert (group, action.member) not in self.members
        self.members[group, action.member] = Member()

    def between(self):
        """Members that have no attempt and wait for one."""
        return [key for key in self.running(whole=False, replica=None)]

    @precondition(lambda self: self.between())
    @rule(data=st.data(), replica=st.sampled_from(REPLICAS))
    def place(self, data, replica):
        self.put(data.draw(st.sampled_from(self.between())), replica)

    def put(self, key, replica):
        member = self.members[key]
        assert self.runs.fields(*key)["done_before"] == len(member.stamps)
        member.replica, member.asked, member.born, member.first = replica, False, len(member.stamps), self.version
        assert self.on(rollout.Placed(*key, replica)) is None
        assert member.asked == self.runs.response(*key).doomed  # whom a verdict has met between two attempts

    # engines

    @precondition(lambda self: self.decoding())
    @rule(data=st.data(), count=st.integers(1, 9))
    def decode(self, data, count):
        member = self.members[data.draw(st.sampled_from(self.decoding()))]
        member.stamps += [self.version] * min(count, BUDGET - len(member.stamps))

    @precondition(lambda self: self.decoding())
    @rule(count=st.integers(1, 9))
    def decode_all_over_a_sync(self, count):
        """Kept requests: their tokens are of both versions."""
        for _ in range(2):
            for key in self.decoding():
                member = self.members[key]
                member.stamps += [self.version] * min(count, BUDGET - len(member.stamps))
            self.version += 1

    @precondition(lambda self: self.decoding())
    @rule(data=st.data(), score=st.sampled_from([0.0, 1.0]))
    def live_to_the_end(self, data, score):
        """Decode, finish, get a reward; and hear how far the siblings are, if somebody wants to know."""
        key = data.draw(st.sampled_from(self.decoding()))
        asks = len(self.asks)
        self.members[key].stamps += [self.version] * (len(self.members[key].stamps) < BUDGET)
        self.answer(key, Outcome.FINISH)
        self.check(key, self.on(rollout.MemberEnded(*key, 3.0, score)).row)
        del self.members[key]
        if len(self.asks) > asks:
            self.hear(self.asks.pop())

    def answer(self, key, outcome, rule_="", unheard=(), **more):
        """`unheard`: versions of tokens that the engine made after those that its client was given."""
        member = self.members[key]
        made = member.stamps[member.born:]
        spans = [[version, len(list(tokens))] for version, tokens in groupby([*made, *unheard])]
        book = {"outcome": str(outcome), "rule": rule_, "spans": spans, "boundaries": 1, "logprob_sum": 0.0,
                "replica": member.replica, "arrived": 0.0}
        event = rollout.AttemptEnded(*key, 1.0, len(made), BUDGET - len(member.stamps), answer=book,
                                     version=self.version, **more)
        member.replica = None
        action = self.on(event)
        if made:
            assert action.versions == (made[0], made[-1])
        if isinstance(action, rollout.Submit):
            assert outcome == Outcome.YIELD and len(member.stamps) < BUDGET
            self.happened["keep/moved" if rule_ == Rule.SURPLUS else "segments/resubmitted"] += 1
            assert action.fields["done_before"] == len(member.stamps)
        else:
            member.whole = not (more.get("aborted") and action.stop_reason is None and len(member.stamps) < BUDGET)
        return action

    @precondition(lambda self: self.decoding())
    @rule(data=st.data(), outcome=st.sampled_from([Outcome.FINISH, Outcome.YIELD, Outcome.PRUNE]))
    def end_attempt(self, data, outcome):
        key = data.draw(st.sampled_from(self.decoding()))
        member, response = self.members[key], self.runs.response(*key)
        if outcome == Outcome.PRUNE and not member.asked:
            outcome = Outcome.FINISH
        why = {Outcome.FINISH: st.just(""), Outcome.PRUNE: st.just((response.decision or {}).get("rule", "")),
               Outcome.YIELD: st.sampled_from([Rule.BOUNDARY, Rule.SURPLUS])}[outcome]
        action = self.answer(key, outcome, data.draw(why))
        if outcome == Outcome.YIELD and response.doomed:
            assert action.stop_reason == "pruned"  # nobody in an engine can hear of it

    @precondition(lambda self: self.decoding())
    @rule(data=st.data(), known=st.booleans(), unheard=st.integers(0, 2))
    def abort(self, data, known, unheard):
        """By a weight sync or a rebalance; `known`: the replica's book was asked."""
        key = data.draw(st.sampled_from(self.decoding()))
        member = self.members[key]
        if known:
            self.answer(key, Outcome.ABORT, unheard=[self.version] * unheard, aborted=True)
            return
        made = len(member.stamps) - member.born
        member.stamps[member.born:] = [self.version] * made  # what the server says of all of them
        member.replica = None
        action = self.on(rollout.AttemptEnded(*key, 1.0, made, BUDGET - len(member.stamps), True,
                                              version=self.version))
        assert action.versions is None
        member.whole = action.stop_reason is not None or len(member.stamps) == BUDGET

    @rule(replica=st.sampled_from(REPLICAS))
    def empty_a_replica(self, replica):
        """It leaves the pool: its members come back to their clients, which submit them elsewhere; nobody asks it."""
        for key in [key for key in self.decoding() if self.members[key].replica == replica]:
            self.answer(key, Outcome.ABORT, aborted=True)

    # endings

    @precondition(lambda self: self.running(whole=True, sealed=False))
    @rule(data=st.data())
    def seal(self, data):
        key = data.draw(st.sampled_from(self.running(whole=True, sealed=False)))
        self.members[key].sealed = True
        self.check(key, self.on(rollout.Sealed(*key, 2.0)).row)

    @precondition(lambda self: self.running(whole=True))
    @rule(data=st.data(), score=st.sampled_from([None, 0.0, 1.0]))
    def end(self, data, score):
        key = data.draw(st.sampled_from(self.running(whole=True)))
        action = self.on(rollout.MemberEnded(*key, 3.0, score))
        self.check(key, action.row)
        assert action.row.score == score
        del self.members[key]

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def fail(self, data):
        key = data.draw(st.sampled_from(sorted(self.members)))
        assert self.on(rollout.MemberEnded(*key, 3.0, failed=True)) is None
        del self.members[key]

    @precondition(lambda self: self.between())
    @rule(data=st.data())
    def carry(self, data):
        """Interrupted and handed back (verl 0.7.0): its state goes along."""
        key = data.draw(st.sampled_from(self.between()))
        state = self.runs.response(*key).state()
        assert state["tokens"] == len(self.members[key].stamps)
        assert self.on(rollout.MemberEnded(*key, 3.0, carried=True)) is None
        del self.members[key]

    def check(self, key, record):
        member = self.members[key]
        row = record.row()
        assert (row["group"], row["member"], row["schema"]) == (*key, rows.SCHEMA)
        assert row["tokens"] == len(member.stamps) == sum(tokens for *_, tokens in row["places"])
        assert [version for version, tokens in row["spans"] for _ in range(tokens)] == member.stamps
        assert row["attempts"] == len(row["places"])
        assert row["outcome"] in (Outcome.FINISH, Outcome.PRUNE)
        assert row["candidate"] == (row["exempted"] or row["outcome"] == Outcome.PRUNE)
        assert 0 < row["keep_probability"] <= 1

    # answers

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def tell_progress(self, data):
        self.hear(self.asks.pop(data.draw(st.integers(0, len(self.asks) - 1))))

    def hear(self, ask):
        self.late += ask.group not in self.runs.groups
        before = {key for key, member in self.members.items() if member.sealed}
        self.on(rollout.Progress(ask.group, {number: len(member.stamps) for (group, number), member
                                             in self.members.items() if group == ask.group and member.replica}))
        assert before == {key for key, member in self.members.items() if member.sealed}

    @rule(group=st.sampled_from((*GROUPS, "nobody's")), number=st.integers(0, 5),
          kind=st.sampled_from(["placed", "attempt", "sealed", "ended", "progress"]))
    def late_or_unknown(self, group, number, kind):
        """About members that have ended, or never were: counted, and nothing else happens."""
        if (group, number) in self.members or kind == "progress" and group in self.runs.groups:
            return
        event = {"placed": rollout.Placed(group, number, "r0"), "sealed": rollout.Sealed(group, number, 9.0),
                 "attempt": rollout.AttemptEnded(group, number, 9.0, 3, 5), "progress": rollout.Progress(group, {0: 5}),
                 "ended": rollout.MemberEnded(group, number, 9.0, 1.0)}[kind]
        assert self.runs.on(event) == []
        self.late += 1

    @invariant()
    def what_happened_is_what_was_counted(self):
        if not hasattr(self, "runs"):
            return
        counts, open_ = self.runs.rules.decisions, Counter(self.happened)
        for run in self.runs.groups.values():
            open_.update(module_of(response.decision) for response in run.running.values() if response.decision)
        assert {name: counts[name] for name in COUNTED} == {name: open_[name] for name in COUNTED}

    @invariant()
    def late_messages_are_counted_and_only_groups_with_somebody_left_are_kept(self):
        if not hasattr(self, "runs"):
            return
        assert self.runs.rules.decisions["late"] == self.late
        for name, run in self.runs.groups.items():
            assert set(run.running) == {number for group, number in self.members if group == name}
            assert run.running or len(run.states) < self.size
            assert {number: replica for number, replica in run.where.items()} == {
                number: member.replica for (group, number), member in self.members.items()
                if group == name and member.replica is not None}
        assert {group for group, _ in self.members} <= set(self.runs.groups)


class JudgedLife(Life):
    """With learned verdicts whose gate is open, and looks that come at any time, also late."""

    settings = JUDGED

    def new_verdicts(self, segment, seed):
        verdicts = Verdicts(Settings(audit=0.3, max_fraction=0.75), random.Random(seed))
        self.force(verdicts)
        self.outcomes = self.looks = self.late_looks = 0
        return verdicts

    @staticmethod
    def force(verdicts):
        verdicts.model.weights[0], verdicts.opens_at = -9.0, FIRST

    def taught(self, action):
        """The pool answers at once; what was seen is taken once."""
        verdicts = self.runs.rules.pruner.verdicts
        self.outcomes += len(Lessons.from_plain(action.lessons).outcomes)
        assert verdicts.take().outcomes == [] and self.runs.rules.version <= self.version
        state, before = verdicts.to_state(), self.runs.rules.decisions.total()
        self.runs.on(rollout.Taught(state))
        assert self.runs.rules.decisions.total() == before + 1 and verdicts.to_state() == state
        self.force(verdicts)

    @precondition(lambda self: self.decoding())
    @rule(data=st.data(), surprisal=st.floats(0.0, 2.0), count=st.integers(1, 3))
    def look(self, data, surprisal, count):
        group = data.draw(st.sampled_from(self.decoding()))[0]
        looks = {number: [Glance(len(member.stamps) - older, [older, 1, 2, 3], surprisal, surprisal)
                          for older in reversed(range(count))]
                 for (name, number), member in self.members.items() if name == group and member.replica}
        doomed = {number for number in looks if self.runs.response(group, number).doomed}
        decided = {number for number in looks if self.runs.response(group, number).decision}
        self.looks += count * (len(looks) - len(doomed))
        self.late_looks += len(doomed)
        self.on(rollout.Looked(group, looks))
        new = {number for number in looks if self.runs.response(group, number).decision} - decided
        assert all(self.runs.response(group, number).decision["rule"] == Rule.VERDICT for number in new)
        assert all(self.members[group, number].asked == self.runs.response(group, number).doomed for number in new)
        assert self.runs.rules.decisions["verdicts/looks"] == self.looks
        assert self.runs.rules.decisions["verdicts/late"] == self.late_looks

    @rule(group=st.sampled_from((*GROUPS, "nobody's")), number=st.integers(0, 5))
    def look_too_late(self, group, number):
        """It is handed back, or has ended: counted, and nobody is cut."""
        member = self.members.get((group, number))
        if member is not None and member.replica is not None:
            return
        before = self.runs.rules.pruner.verdicts.to_state()
        assert self.runs.on(rollout.Looked(group, {number: [Glance(9, [1], 0.0, 0.0)]})) == []
        assert self.runs.rules.pruner.verdicts.to_state() == before
        self.late_looks += 1

    @invariant()
    def at_most_a_share_of_a_group_is_cut(self):
        if hasattr(self, "runs"):
            for watched in self.runs.rules.pruner.groups.values():
                assert watched.pruned <= 0.75 * watched.size
            assert set(self.runs.rules.pruner.verdicts.groups) == set(self.runs.rules.pruner.groups)


TestJudgedLife = JudgedLife.TestCase
TestJudgedLife.settings = settings(max_examples=settings.default.max_examples, stateful_step_count=60)
TestLife = Life.TestCase
TestLife.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=60)
