"""Decision checkpoints of a group: who is a candidate, what the audit says, and what an ending teaches. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from esgrpo import config
from esgrpo.algo import pruning, verdict
from esgrpo.algo.audit import COIN, Audit, Candidate, Verdict
from esgrpo.algo.terms import PREDICTED, UNBIASED, Rule, Treatment
from esgrpo.algo.treatment import Rewards
from esgrpo.algo.verdict import Verdicts
from esgrpo.algo.verdict_features import Glance
from esgrpo.algo.verdict_gate import Outcome

OUTCOME, PASSED_BY, LENGTH = "outcome", "passed-by", "length"  # kinds of lessons
STATE_VERSION = 2  # of what `GroupPruner.to_state` returns


@dataclass(frozen=True)
class Finished:
    """A member that ended by itself. Tokens of the response; score is its reward."""

    tokens: int
    correct: bool
    score: float


@dataclass(frozen=True)
class Decided:
    """A verdict with what the estimator and the metrics need later."""

    verdict: Verdict
    tokens: int  # of the response when it was decided
    treatment: str  # of all cuts of the run
    pivot: float | None = None  # masked: what the group's advantages are measured from, known before its first coin
    predicted: float = 0.0  # probability that it is right, before its coin
    reward: float | None = None  # value, doubly_robust: what was predicted of it

    @property
    def keep_probability(self) -> float:
        """What the weight of its row is the inverse of."""
        return self.verdict.pi if self.treatment in UNBIASED else 1.0

    @property
    def keeps_siblings(self) -> bool:
        """A cut takes nothing from the group's statistics: it is no forecast, and its row is trained."""
        return self.verdict.rule == Rule.REPETITION and self.treatment != Treatment.MASKED


@dataclass
class Watched:
    size: int
    forecast: dict | None = None
    finished: dict[int, Finished] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)  # ended without a reward of their own: sample rules, failures
    decided: dict[int, Decided] = field(default_factory=dict)
    seen: dict[int, tuple[float, float, bool]] = field(default_factory=dict)  # member -> (prior, doublings, agreed on)
    pivot: float | None = None
    passed_by: dict[str, int] = field(default_factory=dict)  # rule -> members that had ended when it last passed by

    @property
    def pruned(self) -> int:
        """Members whose outcome the group will not know."""
        return sum(item.verdict.prune and not item.keeps_siblings for item in self.decided.values())

    @property
    def answers(self) -> list[bool]:
        """Correctness of the finished members, in the order in which they ended."""
        return [item.correct for item in self.finished.values()]

    def agreed(self) -> bool | None:
        """What all finished members agree on; None when they do not, or are too few."""
        answers = set(self.answers)
        return answers.pop() if len(self.finished) >= pruning.LEAST_FINISHED and len(answers) == 1 else None

    def enough(self, finish_after: int) -> float | None:
        """Score of the rule `enough`."""
        return pruning.enough(self.answers, self.size, finish_after)


class GroupPruner:
    """Applies the rules of `settings.prune` to the groups of one agent-loop worker.

    A checkpoint is the ending of a member. A member is decided at most once; every kept row has the keep probability
    that was fixed before its coin, and 1 if it never was a candidate. So has a predicted reward: it knows nothing of
    what came after.
    """

    def __init__(self, settings: config.Segment, audit: Audit, budget: int, verdicts: Verdicts | None = None):
        self.verdicts = verdicts  # None: no learned verdicts
        self.prune, self.audit, self.budget = settings.prune, audit, budget
        self.calibration = pruning.LengthCalibration()
        self.rewards = Rewards()  # of this worker: the scale is the same everywhere
        self.groups: dict[str, Watched] = {}
        self.lessons: list[list] = []  # what this worker learned and others have not heard; JSON-able

    def _learned(self, kind: str, *facts) -> None:
        self.lessons.append([kind, *facts])
        self._take_in(kind, *facts)

    def _take_in(self, kind: str, *facts) -> None:
        if kind == LENGTH:
            self.calibration.learn(*facts)
        elif kind == PASSED_BY:
            self.audit.passed_by(*facts)
        else:
            self.audit.learn(*facts)

    def take_lessons(self) -> list[list]:
        """What is to be told to the other workers of the run; each lesson once."""
        lessons, self.lessons = self.lessons, []
        return lessons

    def absorb(self, lessons: list[list]) -> None:
        """What other workers learned: one audit for the run, whoever saw the outcome."""
        for lesson in lessons:
            self._take_in(*lesson)

    def watch(self, group: str, size: int, forecast: dict | None) -> Watched:
        watched = self.groups.setdefault(group, Watched(size))
        watched.forecast = watched.forecast or forecast
        if self.verdicts is not None:
            self.verdicts.watch(group, size)
        return watched

    def wants_progress(self, group: str) -> bool:
        """False when no rule can find a candidate now: asking the replicas would be for nothing."""
        watched = self.groups.get(group)
        if watched is None or len(watched.finished) + len(watched.removed) >= watched.size:
            return False
        rules = self.prune
        return ((rules.resolved.enable and watched.agreed() is not None)
                or watched.enough(self.prune.finish_group_after) is not None)

    def ended(self, group: str, member: int, ending: Finished | None, by_rule: bool = False) -> Outcome | None:
        """A member ended by itself, was cut (`by_rule`: a proven loop, no finished sibling), or failed (None). Returned
        is what the gate of the learned verdicts will hear of it.

        What a pruned candidate would have become stays unknown, even when it ended before the engine heard of it.
        """
        watched = self.groups[group]
        decided = watched.decided.get(member)
        if decided is not None and decided.verdict.prune:
            if decided.keeps_siblings:
                watched.removed.add(member)
            return None
        heard = None
        if self.verdicts is not None:
            if ending is None or by_rule:
                self.verdicts.removed(group, member, cut=by_rule)
            else:
                heard = self.verdicts.ended(group, member, ending.tokens, ending.correct)
        if ending is None or by_rule:
            watched.removed.add(member)
        else:
            watched.finished[member] = ending
            self.rewards.learn(ending.correct, ending.score)
        if ending is None:
            return None
        pi = 1.0 if decided is None else decided.verdict.pi
        if member in watched.seen:
            prior, doublings, agreed_on = watched.seen[member]
            self._learned(LENGTH, prior, doublings, ending.correct != agreed_on, 1 / pi)
        if decided is not None and decided.verdict.rule != Rule.VERDICT:
            outcome = self.audit.resolve(group, member, self._was_false(watched, member, decided.verdict.rule, ending))
            if outcome is not None:
                self.lessons.append([OUTCOME, *outcome])
        return heard

    @staticmethod
    def _was_false(watched: Watched, member: int, rule: str, ending: Finished) -> bool:
        if rule == Rule.RESOLVED:
            return ending.correct != watched.seen[member][2]
        return ending.correct

    def loop(self, group: str, member: int, tokens: int, surprisal: float) -> Decided | None:
        """Decide about a response of `tokens` that is a proven loop, with its mean surprisal in nats per token.

        None: it goes on undecided, because the audit has tightened the rule, it was decided before, or the treatment
        wants a reward that nothing is known of yet.
        """
        watched, rule = self.groups[group], self.prune.repetition
        if member in watched.decided:
            return None
        score = surprisal / rule.max_surprisal if rule.max_surprisal else 0.0
        if score > self.audit.scale(Rule.REPETITION):
            self._learned(PASSED_BY, Rule.REPETITION)
            return None
        return self.decide(group, watched, member, Rule.REPETITION, score, tokens, 0.0)

    @staticmethod
    def _fix_pivot(watched: Watched) -> None:
        if watched.pivot is None:
            watched.pivot = _pivot([item.score for item in watched.finished.values()])

    def checkpoint(self, group: str, running: Mapping[int, int],
                   committed: Mapping[int, int] | None = None) -> dict[int, Decided]:
        """Decide about members that decode now (member -> tokens of the response so far); returns the new decisions.

        `committed` has the tokens of members that are between two attempts: nobody decides about them, and yet what
        they may become counts.
        """
        watched = self.groups.get(group)
        if watched is None:
            return {}
        open_ = [member for member in running if member not in watched.decided and member not in watched.finished]
        new, tokens = {}, {**(committed or {}), **running}
        for member, (rule, score) in self._candidates(watched, open_, tokens, running).items():
            decided = self.decide(group, watched, member, rule, score, running[member],
                                   self._success(watched, member, rule))
            if decided is not None:
                new[member] = decided
        return new

    def _success(self, watched: Watched, member: int, rule: str) -> float:
        """Probability that a candidate of a group rule is right."""
        if rule == Rule.RESOLVED:
            prior, doublings, agreed_on = watched.seen[member]
            differs = self.calibration.probability(prior, doublings)
            return 1 - differs if agreed_on else differs
        alpha, beta = pruning.UNINFORMED  # of its siblings
        return (alpha + sum(watched.answers)) / (alpha + beta + len(watched.answers))

    def decide(self, group: str, watched: Watched, member: int, rule: str, score: float, tokens: int,
                success: float) -> Decided | None:
        """Toss the coin of a member of `tokens` that is right with the probability `success`, as far as is known.

        None: the treatment wants a reward, and what right or wrong responses get is not known yet.
        """
        treatment = self.prune.treatment
        reward = self.rewards.predicted(success) if treatment in PREDICTED else None
        if treatment in PREDICTED and reward is None:
            return None
        if treatment == Treatment.MASKED:
            self._fix_pivot(watched)
        others = watched.size - watched.pruned - len(watched.removed) - 1
        tossed = self.audit.decide(Candidate(group, member, str(rule), watched.size, watched.pruned, others, score,
                                             trained=treatment != Treatment.MASKED))
        if tossed.prune and self.verdicts is not None:
            self.verdicts.removed(group, member, cut=True)
        pivot = watched.pivot if treatment == Treatment.MASKED else None
        decided = watched.decided[member] = Decided(tossed, tokens, treatment, pivot, success, reward)
        return decided

    def looked(self, group: str, looks: Mapping[int, Sequence[Glance]]) -> tuple[dict[int, Decided], int]:
        """Decisions of the learned verdicts about members that decode now, and how many candidates they let go.

        No coin of the audit is tossed: the verdicts have a coin and a gate of their own.
        """
        watched = self.groups[group]
        unknown = self.prune.treatment in PREDICTED and self.rewards.predicted(0.5) is None
        kept = set(looks) if unknown else watched.decided.keys()
        found, let_go = {}, 0
        for member, decision in self.verdicts.looks(group, looks, kept).items():
            if decision.what == verdict.WATCH:
                let_go += 1
                continue
            coin = Verdict(decision.what == verdict.CUT, decision.keep_probability, Rule.VERDICT, COIN)
            reward = self.rewards.predicted(decision.probability) if self.prune.treatment in PREDICTED else None
            found[member] = watched.decided[member] = Decided(
                coin, looks[member][-1].tokens, self.prune.treatment, None, decision.probability, reward)
        return found, let_go

    def report(self, rule: str) -> dict:
        return self.verdicts.report() if rule == Rule.VERDICT else self.audit.report(rule)

    def reports(self) -> dict[str, dict]:
        """Of every rule that has brought an outcome, and of the verdicts."""
        mine = {} if self.verdicts is None else {str(Rule.VERDICT): self.verdicts.report()}
        return {**self.audit.reports(), **mine}

    def _candidates(self, watched: Watched, open_: list[int], tokens: Mapping[int, int],
                    running: Mapping[int, int]) -> dict:
        """member -> (rule, score) of the open members, in order of their numbers; the first rule that fits counts."""
        found: dict[int, tuple[str, float]] = {}

        def propose(rule: str, score: float | None) -> None:
            if score is None or not open_:
                return
            if score > self.audit.scale(rule):
                # one case an ending: answers to several questions may come after the same one
                ended = len(watched.finished) + len(watched.removed)
                if watched.passed_by.get(rule) != ended:
                    watched.passed_by[rule] = ended
                    self._learned(PASSED_BY, rule)
                return
            for member in open_:
                found.setdefault(member, (rule, score))

        if self.prune.resolved.enable:
            propose(Rule.RESOLVED, self._resolved(watched, tokens, running))
        propose(Rule.ENOUGH, watched.enough(self.prune.finish_group_after))
        return dict(sorted(found.items()))

    def _resolved(self, watched: Watched, tokens: Mapping[int, int], running: Mapping[int, int]) -> float | None:
        """Score of the resolved rule; every unfinished member counts, also one that is in no engine right now."""
        agreed_on = watched.agreed()
        if agreed_on is None:
            return None
        prior = pruning.differs(watched.forecast, watched.answers)
        lengths = [item.tokens for item in watched.finished.values()]
        probabilities = []
        for member in range(watched.size):
            pruned = member in watched.decided and watched.decided[member].verdict.prune
            if member in watched.finished or member in watched.removed or pruned:
                continue
            doublings = self.calibration.doublings(tokens.get(member, 0), lengths)
            probabilities.append(self.calibration.probability(prior, doublings))
            if member in running:
                watched.seen.setdefault(member, (prior, doublings, agreed_on))
        if agreed_on and self.prune.treatment == Treatment.FAILED:
            return None  # the others are most likely right: no failures
        return pruning.resolved(probabilities, self.prune.resolved.null_prob)

    def to_state(self) -> dict:
        """What the audit and the calibration have learned, JSON-able; the running groups are not in it."""
        return {"state_version": STATE_VERSION, "rules": self._rules(), "audit": self.audit.to_state(),
                "calibration": [self.calibration.intercept, self.calibration.slope]}

    def _rules(self) -> dict:
        """Settings that give an outcome its meaning: scores and false prunes of other rules prove nothing here."""
        return {"treatment": self.prune.treatment, "null_prob": self.prune.resolved.null_prob,
                "finish_after": self.prune.finish_group_after, "budget": self.budget,
                "loops": [self.prune.repetition.min_span, self.prune.repetition.max_pattern_size,
                          self.prune.repetition.max_surprisal]}

    def restore(self, state: dict) -> None:
        """Go on from `to_state()` of an earlier run. Raises ValueError when it is damaged, or of other rules."""
        try:
            found = (state["state_version"], state["rules"])
            if found != (STATE_VERSION, self._rules()):
                raise ValueError(f"state {found}, not {(STATE_VERSION, self._rules())}")
            calibration = pruning.LengthCalibration()
            calibration.restore(*state["calibration"])
            self.audit.restore(state["audit"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        self.calibration = calibration

    def close(self, group: str) -> None:
        """The last member has left."""
        self.groups.pop(group, None)
        self.audit.forget(group)
        if self.verdicts is not None:
            self.verdicts.close(group)


def _pivot(rewards: list[float]) -> float:
    """Mean reward of the members that finished before the first coin; exactly their reward when all are equal."""
    if not rewards:
        return 0.0
    return rewards[0] if len(set(rewards)) == 1 else sum(rewards) / len(rewards)
