"""Early verdicts: a running response that will fail is told by a learned score, and cut only where the score knows.

At a look every running member of a group has a probability of ending correct (`verdict_model`, `verdict_features`).
Below a limit it is a candidate. While the gate is shut nothing is cut, and the outcome of every candidate is seen.
While it is open a coin decides, once: with probability `audit` the candidate runs to its end, so that false cuts are
still counted; else it is cut. At most `max_fraction` of a group is cut. The model learns its own prediction of both,
and of those that ran to their end 1 / audit times what was wrong with it: on average the same as if all were seen, with
less noise than if a few counted for all (Robins, Rotnitzky and Zhao, 1994).

The limit, and whether the gate is open at all, is the business of `verdict_gate`.

One model for the run: `take` gives what a worker saw since the last weight sync, `update` takes in what all saw. Pure.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from esgrpo import config
from esgrpo.algo.audit import has_room
from esgrpo.algo.verdict_features import (
    FEATURES,
    LENGTH_FEATURES,
    Glance,
    Look,
    Siblings,
    Sketches,
    vector,
)
from esgrpo.algo.verdict_gate import FIRST, SCALES, Gate, Outcome, Settings
from esgrpo.algo.verdict_model import Logistic, Sums, log_loss

CUT, AUDIT, WATCH = "cut", "audit", "watch"  # what becomes of a candidate: WATCH lets it go on, whatever the coin says
STATE_VERSION = 3


@dataclass(frozen=True)
class Decision:
    """About one candidate, before its outcome."""

    what: str  # cut, audit or watch
    probability: float  # predicted, of ending correct
    keep_probability: float  # that its outcome is seen


@dataclass
class Member:
    rows: list[tuple[float, ...]] = field(default_factory=list)  # features of its looks, until it is decided to go on
    surprisal: float | None = None  # at its last look
    lowest: float = 1.0  # probability so far
    decision: Decision | None = None
    predicted: int = 0  # of its rows, those of which the prediction was learned when the coin was tossed


@dataclass
class Group:
    size: int
    members: dict[int, Member] = field(default_factory=dict)
    sketches: Sketches = field(default_factory=Sketches)
    lengths: list[int] = field(default_factory=list)  # of finished members
    right: int = 0
    cut: int = 0
    outcomes: list[Outcome] = field(default_factory=list)  # for the gate, once the group is closed


@dataclass
class Lessons:
    """What one worker saw since the last weight sync."""

    model: Sums
    length: Sums
    outcomes: list[Outcome]

    def add(self, other: Lessons) -> None:
        self.model.add(other.model)
        self.length.add(other.length)
        self.outcomes += other.outcomes

    def to_plain(self) -> list:
        return [*([sums.gradient, sums.curvature, sums.bound] for sums in (self.model, self.length)),
                [list(dataclasses.astuple(outcome)) for outcome in self.outcomes]]

    @classmethod
    def from_plain(cls, plain: Sequence) -> Lessons:
        model, length, outcomes = plain
        return cls(Sums(*map(list, model)), Sums(*map(list, length)), [Outcome(*row) for row in outcomes])


class Verdicts:
    """The rule for the groups of one worker. Invariants: at most one coin is tossed of a member; at most `max_fraction`
    of a group is cut; nothing is cut by a shut gate; what a coin decides never enters the probability of that coin."""

    def __init__(self, settings: Settings, rng: random.Random, columns: Sequence[int] = range(len(FEATURES))):
        self.settings, self._rng = settings, rng
        self.model, self.length = Logistic(tuple(columns)), Logistic(LENGTH_FEATURES)
        self.gate = Gate(settings)
        self.opens_at: int | None = None  # limit at which the gate was open at the last update
        self.groups: dict[str, Group] = {}
        self._outcomes: list[Outcome] = []

    @property
    def open(self) -> bool:
        return self.opens_at is not None

    @property
    def limit(self) -> float:
        """Probability below which a response is a candidate."""
        return self.settings.limits[self._at]

    @property
    def _at(self) -> int:
        """Index of it; that of `cut_below` while the gate is shut."""
        return FIRST if self.opens_at is None else self.opens_at

    def watch(self, group: str, size: int) -> None:
        self.groups.setdefault(group, Group(size))

    def looks(self, group: str, seen: Mapping[int, Sequence[Glance]], kept: Container[int] = ()) -> dict[int, Decision]:
        """`look` at what engines saw since the last time, once for as many looks as a member had. Decided is by the
        newest: of earlier ones it is too late."""
        sketches, decided = self.groups[group].sketches, {}
        for turn in range(max(map(len, seen.values()), default=0)):
            here = {member: sketches.look(member, glances[turn]) for member, glances in seen.items()
                    if turn < len(glances)}
            older = {member for member in here if turn + 1 < len(seen[member])}
            decided |= self.look(group, here, kept, older)
        return decided

    def look(self, group: str, looks: Mapping[int, Look], kept: Container[int] = (),
             older: Container[int] = ()) -> dict[int, Decision]:
        """Members that become candidates by these looks, all of one boundary, or of which a coin is tossed at last; the
        others go on.

        Of the `kept` nobody may be cut: another rule has decided about them, or nothing can be decided yet. Of the
        `older` looks is only learned.
        """
        mine = self.groups[group]
        for number, look in looks.items():
            mine.members.setdefault(number, Member()).surprisal = look.surprisal
        decided = {}
        for number, look in sorted(looks.items()):
            member = mine.members[number]
            others = [other.surprisal for key, other in mine.members.items()
                      if key != number and other.surprisal is not None]
            row = vector(look, Siblings(mine.size, others, mine.lengths, mine.right))
            member.rows.append(row)
            if number in older:
                continue
            probability = self.model.moderated(row)
            member.lowest = min(member.lowest, probability)
            before = member.decision
            if probability < self.limit and (before is None or before.what == WATCH):
                member.decision = self._decide(mine, probability, number in kept)
                if before is None or member.decision.what != WATCH:
                    decided[number] = member.decision
                if member.decision.what != WATCH:
                    self._predict(member, probability)
        return decided

    def _predict(self, member: Member, probability: float) -> None:
        """What is learned of a member of which a coin was tossed, whatever it said."""
        member.predicted = len(member.rows)
        for row in member.rows:
            for model in (self.model, self.length):
                model.learn(row, probability)

    def _decide(self, group: Group, probability: float, kept: bool) -> Decision:
        if kept or not self.open or not has_room(self.settings.max_fraction, group.size, group.cut):
            return Decision(WATCH, probability, 1.0)
        if self._rng.random() < self.settings.audit:
            return Decision(AUDIT, probability, self.settings.audit)
        group.cut += 1
        return Decision(CUT, probability, self.settings.audit)

    def removed(self, group: str, member: int, cut: bool = False) -> None:
        """It ended without an outcome of its own: another rule has `cut` it, or it failed. It teaches nothing."""
        mine = self.groups[group]
        mine.cut += cut
        mine.members.pop(member, None)

    def ended(self, group: str, number: int, tokens: int, correct: bool) -> Outcome:
        """It ran to its end: what the gate will hear of it. One that was cut has no end: telling of it is an error of
        the caller (ValueError)."""
        mine = self.groups[group]
        member = mine.members.setdefault(number, Member())
        decision = member.decision
        if decision is not None and decision.what == CUT:
            raise ValueError(f"member {number} of {group} was cut: nobody knows how it would have ended")
        mine.lengths.append(tokens)
        mine.right += correct
        weight = 1.0 if decision is None else 1.0 / decision.keep_probability
        ratio = 0.0
        for place, row in enumerate(member.rows):
            ratio += log_loss(self.length.probability(row), correct) - log_loss(self.model.probability(row), correct)
            for model in (self.model, self.length):
                if place < member.predicted:
                    model.correct(row, weight * (correct - decision.probability))
                else:  # what is seen after the coin decides about nobody: it counts once
                    model.learn(row, correct)
        share = self.settings.audit if self.open and not member.predicted else 1.0
        outcome = Outcome(tokens, bool(correct), weight, member.lowest, share, ratio / max(len(member.rows), 1))
        mine.outcomes.append(outcome)
        member.rows = []
        return outcome

    def close(self, group: str) -> None:
        """Nothing more comes of it."""
        closed = self.groups.pop(group, None)
        if closed is not None:
            self._outcomes += closed.outcomes

    def take(self) -> Lessons:
        """What was seen since the last call, for `update` of every worker, this one included."""
        outcomes, self._outcomes = self._outcomes, []
        return Lessons(self.model.take(), self.length.take(), outcomes)

    def update(self, lessons: Lessons) -> None:
        """At a weight sync: what all workers saw since the last one."""
        for outcome in lessons.outcomes:
            self.gate.learn(outcome)
        self.model.update(lessons.model)
        self.length.update(lessons.length)
        self.opens_at = self.gate.opens_at()

    def report(self) -> dict:
        """False rate of the newest candidates and its bound, as an audit reports those of its rules, and the gate."""
        at = self._at
        return {"false_rate": self.gate.false_rate(at), "false_rate_bound": self.gate.false_bound(at),
                "outcomes": len(self.gate.falses[at]), "scale": SCALES[at],
                "needed": self.settings.min_candidates, "responses": self.gate.outcomes,
                "needed_responses": self.settings.min_outcomes, "open": self.open,
                "shut": "" if self.open else self.gate.says()}

    def adopt(self, state: Mapping) -> None:
        """What the run knows (`to_state` of its pool); what was seen here since `take` is still to be told."""
        seen = self.model.sums, self.length.sums
        self.restore(state)
        self.model.sums, self.length.sums = seen

    def to_state(self) -> dict:
        """What was learned, JSON-able; running groups and what was seen since the last update are not in it."""
        return {"state_version": STATE_VERSION, "settings": dataclasses.asdict(self.settings),
                "model": self.model.to_state(), "length": self.length.to_state(), "gate": self.gate.to_state()}

    def restore(self, state: Mapping) -> None:
        """Go on from `to_state()` of an earlier run. Raises ValueError when it is damaged, or of other settings."""
        fresh = Verdicts(self.settings, self._rng, self.model.columns)
        try:
            found = state["state_version"], state["settings"]
            if found != (STATE_VERSION, dataclasses.asdict(self.settings)):
                raise ValueError(f"state {found}, not {(STATE_VERSION, dataclasses.asdict(self.settings))}")
            fresh.model.restore(state["model"])
            fresh.length.restore(state["length"])
            fresh.gate.restore(state["gate"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        self.model, self.length, self.gate = fresh.model, fresh.length, fresh.gate
        self.opens_at = self.gate.opens_at()


def verdicts_of(settings: config.Segment, rng: random.Random) -> Verdicts:
    """As a run has set them."""
    prune = settings.prune
    return Verdicts(Settings(cut_below=prune.verdict.cut_below, audit=prune.audit.exempt_prob,
                             max_fraction=prune.audit.max_fraction, min_outcomes=prune.verdict.min_outcomes), rng)


class VerdictPool:
    """One model for the workers of a run.

    A worker tells what it saw at each weight sync. An update waits for all who took part in the last one, so that it
    takes in what was seen at the same weights; it does not wait for one that is silent until others come again. Who was
    answered before the update has the new weights one sync later.
    """

    def __init__(self, verdicts: Verdicts):
        self.verdicts = verdicts  # decides nothing
        self._expected: set[int] = set()
        self._gathered: dict[int, Lessons] = {}

    def exchange(self, worker: int, lessons: Sequence | None) -> dict:
        """The state to go on with. `lessons`: `Lessons.to_plain`; None: the worker begins and has none."""
        if lessons is not None:
            if worker in self._gathered:
                self._update()
            self._gathered[worker] = Lessons.from_plain(lessons)
            if self._expected <= self._gathered.keys():
                self._update()
        else:
            self._expected.add(worker)
        return self.verdicts.to_state()

    def _update(self) -> None:
        first, *others = self._gathered.values()
        for lessons in others:
            first.add(lessons)
        self.verdicts.update(first)
        self._expected, self._gathered = set(self._gathered), {}
