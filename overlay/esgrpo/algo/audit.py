"""Audit of pruning rules: which candidates are pruned, with which probability they are kept, and how often it is wrong.

Every candidate gets its keep probability pi before its coin is tossed, from what is known at that moment: the coin
and everything after it never enter. Then w = kept / pi has mean 1 given all earlier coins, which is all that the
estimator in `esgrpo.losses` needs, for any order of decisions and any caps.

A candidate has a score in [0, 1]: how far it uses up what its rule allows (0: certain, 1: just a candidate). The
audit lets a rule go as far as `scale`: a score above it is no candidate. The false-prune rate of a rule is measured
on exempted candidates with a score up to the present scale, so that after tightening it speaks of the rule as it is
now. What "false" means is the rule's business (see `esgrpo.algo.pruning`): the audit counts.

A rule that forecasts warms up: it prunes once the upper bound of its false-prune rate is low enough. A candidate that
is `proven` by what it has done already (a loop) needs no forecast: it may be pruned until the lower bound is too high.

The interval is of independent outcomes, and members of a group share their prompt: of those that a forecasting rule
names in one group, the first in order that is exempted is the group's witness, and the outcomes of the others are no
evidence. Loops are found one by one, and each is its own witness.

The bound is looked at after every outcome, so its 95 % hold at each look, not for all looks together.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

from esgrpo import config
from esgrpo.algo.terms import Rule

Z_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution, the usual Wilson interval
AT_LEAST = 2  # members of a group that are never pruned: one alone has no sibling to be compared with
TIGHTEN = 0.5  # factor of the scale when the bound is above the allowed rate
RELAX = 1.01  # factor of the scale per case that was let go because of it
SMALLEST_SCALE = 2.0**-10  # tightening ends here; the bound still forbids pruning
COIN, WARM_UP, CAP, TOO_FEW = "coin", "warm-up", "cap", "too-few"
PROVEN = (Rule.REPETITION,)  # by what a response has done, not forecast
SAMPLED = (COIN, WARM_UP)  # an exemption by cap selects late candidates: its outcome is not representative


def wilson_lower(events: float, trials: float, z: float = Z_95) -> float:
    """Lower end of the Wilson score interval of a rate; 0 without trials."""
    return max(0.0, 1.0 - wilson_upper(trials - events, trials, z))


def wilson_upper(events: float, trials: float, z: float = Z_95) -> float:
    """Upper end of the Wilson score interval of a rate (E. B. Wilson, 1927); 1 without trials."""
    if trials == 0:
        return 1.0
    rate, square = events / trials, z * z
    centre = rate + square / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials * trials))
    return min(1.0, (centre + spread) / (1 + square / trials))


def provable_by(max_false_rate: float) -> float:
    """Exempted outcomes by which the bound can be met at all; infinite for a rate of 0.

    Without a single false prune the Wilson bound of n outcomes is z^2 / (n + z^2): 73 of them for 5 %.
    """
    return math.ceil(Z_95 * Z_95 * (1 - max_false_rate) / max_false_rate) if max_false_rate > 0 else math.inf


def outcomes_needed(settings: config.Audit) -> int:
    """Exempted outcomes before a rule may prune: `min_candidates`, and enough for the bound to be met at all.

    More than the window holds is never waited for: a rule that forecasts then never prunes, and the driver refuses it.
    """
    return min(settings.window, max(settings.min_candidates, provable_by(settings.max_false_rate)))


def has_room(max_fraction: float, size: int, pruned: int = 0) -> bool:
    """One more of a group's `size` members may be pruned."""
    return pruned + 1 <= max_fraction * size


@dataclass(frozen=True)
class Candidate:
    """Facts of one decision. `pruned` members of the group so far, `others` that are neither pruned nor removed."""

    group: str
    member: int
    rule: str
    size: int
    pruned: int
    others: int
    score: float
    trained: bool = False  # its row is trained however the coin falls

    @property
    def proven(self) -> bool:
        return self.rule in PROVEN

    @property
    def capped(self) -> bool:
        """Else no sibling is lost: its outcome is known, and its row stays."""
        return not (self.proven and self.trained)


@dataclass(frozen=True)
class Verdict:
    prune: bool
    pi: float  # keep probability, 0 < pi <= 1, fixed before the coin
    rule: str
    reason: str  # coin, warm-up, cap or too-few

    @property
    def exempt(self) -> bool:
        return not self.prune


class Audit:
    """One audit for the run: each worker has a copy, and outcomes reach all copies. `to_state` outlives a restart.

    Invariants: pi does not depend on the coin; pi = 1 once `max_fraction` of the group is pruned, when fewer than two
    members would be left, and while a rule has too few outcomes or too high a bound at its scale; nobody is decided
    twice; an exempted candidate counts at most once, of a forecasting rule one a group.
    """

    def __init__(self, settings: config.Audit, rng: random.Random):
        self.settings = settings
        self._rng = rng
        self._needed = outcomes_needed(settings)
        self._decided: dict[str, dict[int, tuple[Candidate, Verdict]]] = {}
        self._witnesses: dict[str, dict[str, int]] = {}  # group -> rule -> member
        self._windows: dict[str, deque[tuple[float, bool]]] = {}  # rule -> (score, false), oldest first
        self._scales: dict[str, float] = {}

    def scale(self, rule: str) -> float:
        """How far the rule may go, in (0, 1]."""
        return self._scales.get(rule, 1.0)

    def evidence(self, rule: str, scale: float | None = None) -> tuple[int, int]:
        """(false, all) exempted outcomes in the window with a score up to `scale` (default: the present one)."""
        scale = self.scale(rule) if scale is None else scale
        chosen = [false for score, false in self._windows.get(rule, ()) if score <= scale]
        return sum(chosen), len(chosen)

    def report(self, rule: str) -> dict:
        """False-prune rate, its upper bound, outcomes it rests on, and scale."""
        false, trials = self.evidence(rule)
        return {"false_rate": false / trials if trials else 0.0, "false_rate_bound": wilson_upper(false, trials),
                "outcomes": trials, "scale": self.scale(rule)}

    def reports(self) -> dict[str, dict]:
        """Of every rule that has brought an outcome; `needed` is how many it takes before it may prune."""
        return {rule: {**self.report(rule), "needed": self._needed} for rule in self._windows}

    def is_decided(self, group: str, member: int) -> bool:
        return member in self._decided.get(group, ())

    def keep_probability(self, candidate: Candidate) -> tuple[float, str]:
        """(pi, reason): a function of what is known before the coin."""
        if candidate.others < AT_LEAST and candidate.capped:
            return 1.0, TOO_FEW
        if candidate.capped and not has_room(self.settings.max_fraction, candidate.size, candidate.pruned):
            return 1.0, CAP
        false, trials = self.evidence(candidate.rule)
        if self._too_often(candidate.rule, false, trials) or (not candidate.proven and trials < self._needed):
            return 1.0, WARM_UP
        return self.settings.exempt_prob, COIN

    def decide(self, candidate: Candidate) -> Verdict:
        """Toss the coin of a candidate. Raises ValueError for one that was decided before, or is above the scale."""
        if self.is_decided(candidate.group, candidate.member):
            raise ValueError(f"member {candidate.member} of {candidate.group} was decided before")
        if not 0 <= candidate.score <= self.scale(candidate.rule):
            raise ValueError(f"score {candidate.score} is not in [0, {self.scale(candidate.rule)}]")
        pi, reason = self.keep_probability(candidate)
        prune = pi < 1 and self._rng.random() >= pi
        verdict = Verdict(prune, pi, candidate.rule, reason)
        self._decided.setdefault(candidate.group, {})[candidate.member] = candidate, verdict
        if not prune and reason in SAMPLED and not candidate.proven:
            self._witnesses.setdefault(candidate.group, {}).setdefault(candidate.rule, candidate.member)
        return verdict

    def resolve(self, group: str, member: int, false: bool) -> tuple[str, float, bool] | None:
        """An exempted candidate ended; `false`: pruning it would have been wrong.

        Returns what `learn` is told, None where it is no evidence.
        """
        candidate, verdict = self._decided[group][member]
        if verdict.prune:
            raise ValueError(f"member {member} of {group} was pruned: nobody knows how it would have ended")
        witness = member if candidate.proven else self._witnesses.get(group, {}).get(candidate.rule)
        if verdict.reason not in SAMPLED or member != witness:
            return None
        outcome = candidate.rule, candidate.score, bool(false)
        self.learn(*outcome)
        return outcome

    def learn(self, rule: str, score: float, false: bool) -> None:
        """The outcome of an exempted candidate, of this worker or of another one."""
        self._windows.setdefault(rule, deque(maxlen=self.settings.window)).append((score, false))
        self._adjust(rule)

    def _too_often(self, rule: str, false: int, trials: int) -> bool:
        """Is it wrong more often than is allowed? What is proven counts as right until the outcomes say otherwise."""
        bound = wilson_lower if rule in PROVEN else wilson_upper
        return bound(false, trials) > self.settings.max_false_rate

    def _adjust(self, rule: str) -> None:
        """Tighten until the bound is met, or too little evidence is left and the rule warms up at the new scale."""
        false, trials = self.evidence(rule)
        while trials >= self._needed and self._too_often(rule, false, trials):
            if self.scale(rule) <= SMALLEST_SCALE:
                return
            self._scales[rule] = self.scale(rule) * TIGHTEN
            false, trials = self.evidence(rule)

    def passed_by(self, rule: str) -> None:
        """A case with a score above the scale was let go: relax by one step.

        Never unsafe: where the outcomes at the wider scale do not meet the bound, candidates are exempted with pi = 1
        and bring newer outcomes. Without this step a rule that was unlucky once would never be tried again.
        """
        self._scales[rule] = min(1.0, self.scale(rule) * RELAX)

    def forget(self, group: str) -> None:
        """The group is over."""
        self._decided.pop(group, None)
        self._witnesses.pop(group, None)

    def to_state(self) -> dict:
        """Evidence and scales, JSON-able. Groups that run are not in it: their exempted members are never resolved."""
        return {"windows": {rule: [list(entry) for entry in window] for rule, window in self._windows.items()},
                "scales": dict(self._scales)}

    def restore(self, state: dict) -> None:
        """Go on from `to_state()`; a smaller window keeps the newest. Raises ValueError when `state` is damaged."""
        windows, scales = {}, {}
        try:
            for rule, entries in _items(state, "windows"):
                if not all(0 <= score <= 1 and isinstance(false, bool) for score, false in entries):
                    raise ValueError(f"outcomes of {rule}")
                windows[rule] = deque([(float(score), false) for score, false in entries], maxlen=self.settings.window)
            for rule, scale in _items(state, "scales"):
                if not 0 < scale <= 1:
                    raise ValueError(f"scale {scale} of {rule}")
                scales[rule] = float(scale)
        except TypeError as error:  # something else where a number or a list should be
            raise ValueError(str(error)) from None
        self._windows, self._scales = windows, scales


def _items(state: dict, name: str):
    if not isinstance(state, dict) or not isinstance(state.get(name), dict):
        raise ValueError(f"no {name}")
    return state[name].items()
