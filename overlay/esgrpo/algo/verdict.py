"""Early verdicts: a running response that will fail is told by a learned score, and cut only where the score knows.

At a look every running member of a group has a probability of ending correct (`verdict_model`, `verdict_features`).
Below `cut_below` it is a candidate, once. While the gate is shut nothing is cut, and the outcome of every candidate is
seen. While it is open a coin decides: with probability `audit` the candidate runs to its end, so that false cuts are
still counted, and what it teaches counts 1 / audit; else it is cut. At most `max_fraction` of a group is cut.

The gate is open while all of this holds:
 1. enough responses were seen to their end;
 2. of the last candidates whose outcome was seen, few were right: the upper end of a Wilson interval is within the bar;
 3. the score says more than the length does: the sum of log-likelihood ratios of what was seen, predicted before it was
    learned, old ones counting less, is above log(OPENS_AT). Each is a ratio of two predictions of one outcome;
 4. few of the correct responses would be lost, of all and in every tenth of their lengths, by the upper ends. At a
    reward of 6 % "5 % of the cuts are false" would permit to cut nearly everything;
 5. the correct responses that are left are not shorter than all of them (`Gate.shortening`): else cutting would teach
    that short answers are the right ones.

One model for the run: `take` gives what a worker saw since the last weight sync, `update` takes in what all saw. Pure.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from esgrpo import config
from esgrpo.algo.audit import wilson_upper
from esgrpo.algo.verdict_features import (
    FEATURES,
    LENGTH_FEATURES,
    Glance,
    Look,
    Siblings,
    Sketches,
    vector,
)
from esgrpo.algo.verdict_model import Logistic, Sums, log_loss

OPENS_AT = 20.0  # likelihood ratio against length alone
EVIDENCE_WINDOW = 500.0  # responses after which an old ratio counts 1/e
DECILES = 10
LOST_WINDOW = 500  # correct responses that their lost share is estimated from
CUT, AUDIT, WATCH = "cut", "audit", "watch"  # what becomes of a candidate: WATCH lets it go on, whatever the coin says
STATE_VERSION = 1


@dataclass(frozen=True)
class Settings:
    """Defaults as measured by bench.verdict."""

    cut_below: float = 0.10  # probability of ending correct at which a response is a candidate
    audit: float = 0.10  # probability that a candidate of the open gate runs to its end
    max_fraction: float = 0.5  # of a group
    min_outcomes: int = 500  # responses seen to their end before anything is cut
    min_candidates: int = 20  # with a known outcome, before anything is cut
    candidates: int = 40  # newest candidates with a known outcome that the false rate is estimated from
    z: float = 1.0  # of the Wilson intervals, standard deviations
    max_false_rate: float = 0.15  # largest upper bound of the share of cuts that are false
    max_correct_lost: float = 0.05  # share of the correct responses that may be candidates, by its upper bound
    max_lost_of_length: float = 0.10  # of those in a tenth of their lengths
    max_shortening: float = 0.05  # share by which cutting may shorten the mean correct response, by its lower bound


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
    decision: Decision | None = None


@dataclass
class Group:
    size: int
    members: dict[int, Member] = field(default_factory=dict)
    sketches: Sketches = field(default_factory=Sketches)
    lengths: list[int] = field(default_factory=list)  # of finished members
    right: int = 0
    cut: int = 0


@dataclass(frozen=True)
class Outcome:
    """A response seen to its end. `candidate`: None if it never was one, else whether it stands for those cut now."""

    tokens: int
    correct: bool
    weight: float
    candidate: bool | None
    ratio: float  # log-likelihood of the model over that of length alone, nats


@dataclass
class Gate:
    """Invariant: shut before `min_outcomes`, and whenever one of the four conditions fails."""

    settings: Settings
    outcomes: int = 0
    evidence: float = 0.0
    falses: deque[bool] = field(init=False)
    lost: deque[tuple[int, float, bool]] = field(init=False)  # correct responses: tokens, weight, was a candidate

    def __post_init__(self):
        self.falses = deque(maxlen=self.settings.candidates)
        self.lost = deque(maxlen=LOST_WINDOW)

    def learn(self, outcome: Outcome) -> None:
        self.outcomes += 1
        self.evidence = (1.0 - 1.0 / EVIDENCE_WINDOW) * self.evidence + outcome.weight * outcome.ratio
        if outcome.candidate:
            self.falses.append(outcome.correct)
        if outcome.correct:
            self.lost.append((outcome.tokens, outcome.weight, outcome.candidate is not None))

    def false_bound(self) -> float:
        return wilson_upper(sum(self.falses), len(self.falses), self.settings.z)

    def lost_shares(self) -> list[float]:
        """Share of correct responses that are candidates, at most: of all, and in each tenth of their lengths.

        Upper ends of Wilson intervals, 1 of none: who has seen few correct responses does not know what would be lost.
        An outcome that was seen by a coin stands for 1/pi of them, and the interval is that of as many equal ones as
        carry the same information (Kish).
        """
        rows = sorted(self.lost)
        tenths = [rows[len(rows) * i // DECILES:len(rows) * (i + 1) // DECILES] for i in range(DECILES)]
        return [self._at_most(part) for part in (rows, *tenths)]

    def shortening(self) -> float:
        """Share by which cutting all candidates shortens the mean correct response, at least.

        The control are those that the coin spared, each for 1/pi, or all candidates while nothing is cut.

        Cutting moves the mean of x from D + m to m, where m is that of no candidates and D the mean over all of
        (x - m, for a candidate, else 0); its standard error is that of a weighted mean.
        """
        kept = [tokens for tokens, _, candidate in self.lost if not candidate]
        total = sum(weight for _, weight, _ in self.lost)
        if not kept or not total:
            return 0.0
        mean = sum(kept) / len(kept)
        moves = [(weight / total, (tokens - mean) * candidate) for tokens, weight, candidate in self.lost]
        move = sum(share * value for share, value in moves)
        error = math.sqrt(sum((share * (value - move)) ** 2 for share, value in moves))
        return (move - self.settings.z * error) / (mean + move)

    def _at_most(self, rows: Sequence[tuple[int, float, bool]]) -> float:
        total = sum(weight for _, weight, _ in rows)
        if not total:
            return 1.0
        share = sum(weight for _, weight, candidate in rows if candidate) / total
        effective = total * total / sum(weight * weight for _, weight, _ in rows)
        return wilson_upper(share * effective, effective, self.settings.z)

    def why_shut(self) -> str:
        """Empty while it is open, else the first condition that fails."""
        limits = self.settings
        if self.outcomes < limits.min_outcomes:
            return "too few outcomes"
        if len(self.falses) < limits.min_candidates or self.false_bound() > limits.max_false_rate:
            return "false cuts"
        if self.evidence <= math.log(OPENS_AT):
            return "no better than length"
        share, *tenths = self.lost_shares()
        if share > limits.max_correct_lost or max(tenths) > limits.max_lost_of_length:
            return "correct responses lost"
        if self.shortening() > limits.max_shortening:
            return "short answers favoured"
        return ""

    def to_state(self) -> dict:
        return {"outcomes": self.outcomes, "evidence": self.evidence, "falses": list(self.falses),
                "lost": [list(entry) for entry in self.lost]}

    def restore(self, state: Mapping) -> None:
        """Raises ValueError when it is damaged."""
        try:
            outcomes, evidence = int(state["outcomes"]), float(state["evidence"])
            falses = [bool(false) for false in state["falses"]]
            lost = [(int(tokens), float(weight), bool(candidate)) for tokens, weight, candidate in state["lost"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        weights = all(weight >= 1 and math.isfinite(weight) for _, weight, _ in lost)
        if outcomes < 0 or not math.isfinite(evidence) or not weights:
            raise ValueError("a gate that no outcomes give")
        self.outcomes, self.evidence = outcomes, evidence
        self.falses.clear()
        self.falses.extend(falses)
        self.lost.clear()
        self.lost.extend(lost)


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
        return [*([sums.gradient, sums.curvature] for sums in (self.model, self.length)),
                [list(dataclasses.astuple(outcome)) for outcome in self.outcomes]]

    @classmethod
    def from_plain(cls, plain: Sequence) -> Lessons:
        model, length, outcomes = plain
        return cls(Sums(*map(list, model)), Sums(*map(list, length)), [Outcome(*row) for row in outcomes])


class Verdicts:
    """The rule for the groups of one worker. Invariants: a member is a candidate at most once; at most `max_fraction`
    of a group is cut; nothing is cut by a shut gate; what a coin decides never enters the probability of that coin."""

    def __init__(self, settings: Settings, rng: random.Random, columns: Sequence[int] = range(len(FEATURES))):
        self.settings, self._rng = settings, rng
        self.model, self.length = Logistic(tuple(columns)), Logistic(LENGTH_FEATURES)
        self.gate = Gate(settings)
        self.open = False  # as of the last update
        self.groups: dict[str, Group] = {}
        self._outcomes: list[Outcome] = []

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
        """Members that become candidates by these looks, all of one boundary; the others go on.

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
            probability = self.model.probability(row)
            if number not in older and member.decision is None and probability < self.settings.cut_below:
                decided[number] = member.decision = self._decide(mine, probability, number in kept)
        return decided

    def _decide(self, group: Group, probability: float, kept: bool) -> Decision:
        if kept or not self.open or group.cut + 1 > self.settings.max_fraction * group.size:
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

    def ended(self, group: str, number: int, tokens: int, correct: bool) -> None:
        """It ran to its end. One that was cut has no end: telling of it is an error of the caller (ValueError)."""
        mine = self.groups[group]
        member = mine.members.setdefault(number, Member())
        decision = member.decision
        if decision is not None and decision.what == CUT:
            raise ValueError(f"member {number} of {group} was cut: nobody knows how it would have ended")
        mine.lengths.append(tokens)
        mine.right += correct
        weight = 1.0 if decision is None else 1.0 / decision.keep_probability
        ratio = 0.0
        for row in member.rows:
            ratio += log_loss(self.length.probability(row), correct) - log_loss(self.model.probability(row), correct)
            for model in (self.model, self.length):
                model.learn(row, correct, weight)
        # while the gate is open, one that is let go because it is kept or its group has no more room is no random
        # candidate
        candidate = None if decision is None else decision.what == AUDIT or not self.open
        self._outcomes.append(Outcome(tokens, bool(correct), weight, candidate, ratio / max(len(member.rows), 1)))
        member.rows = []

    def close(self, group: str) -> None:
        self.groups.pop(group, None)

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
        self.open = not self.gate.why_shut()

    def report(self) -> dict:
        """False rate of the newest candidates and its bound, as an audit reports those of its rules, and the gate."""
        falses = self.gate.falses
        return {"false_rate": sum(falses) / len(falses) if falses else 0.0,
                "false_rate_bound": self.gate.false_bound(), "outcomes": len(falses), "scale": 1.0,
                "needed": self.settings.min_candidates, "responses": self.gate.outcomes,
                "needed_responses": self.settings.min_outcomes, "open": self.open, "shut": self.gate.why_shut()}

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
        self.open = not self.gate.why_shut()


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
