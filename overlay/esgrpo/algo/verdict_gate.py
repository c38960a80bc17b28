"""When early verdicts may cut: the gate, on outcomes of this run alone.

The limit is one of SCALES times `cut_below`. `cut_below` itself is asked about first; where the gate is open there, so
are the higher limits, one after the other; where it is not, the lower one. It is open at a limit while all of this
holds:
 1. enough responses were seen to their end;
 2. of the last candidates whose outcome was seen, few were right: the upper end of a Wilson interval is within the bar;
 3. the score says more than the length does: the sum of log-likelihood ratios of what was seen, predicted before it was
    learned, old ones counting less, is above log(OPENS_AT). Each is a ratio of two predictions of one outcome;
 4. few of the correct responses would be lost, of all and in every tenth of their lengths, by the upper ends. At a
    reward of 6 % "5 % of the cuts are false" would permit to cut nearly everything;
 5. the correct responses that are left are not shorter than all of them (`Gate.shortening`): else cutting would teach
    that short answers are the right ones.

The gate hears of a response when its group is closed: those that end early are short, and say nothing of the long
ones. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from esgrpo.algo.audit import wilson_upper

OPENS_AT = 20.0  # likelihood ratio against length alone
EVIDENCE_WINDOW = 500.0  # responses after which an old ratio counts 1/e
DECILES = 10
LOST_WINDOW = 1500  # correct responses that their lost share is estimated from: one that a coin of 0.1 spared is, in a
# tenth of them, not enough to shut the gate
SCALES = (0.5, 1.0, 1.5, 2.0)  # of `cut_below`: the limits
FIRST = 1  # of SCALES, that is asked about
HIGHEST_LIMIT = 0.5  # beyond it a response is rather right than wrong


@dataclass(frozen=True)
class Settings:
    """Defaults as measured by bench.verdict."""

    cut_below: float = 0.10  # probability of ending correct at which a response is a candidate; see SCALES
    audit: float = 0.10  # probability that a candidate of the open gate runs to its end
    max_fraction: float = 0.5  # of a group
    min_outcomes: int = 500  # responses seen to their end before anything is cut
    min_candidates: int = 20  # with a known outcome, before anything is cut
    candidates: int = 40  # share (Outcome) of the newest candidates with a known outcome that the false rate is of
    z: float = 1.0  # of the Wilson intervals, standard deviations
    max_false_rate: float = 0.15  # largest upper bound of the share of cuts that are false
    max_correct_lost: float = 0.05  # share of the correct responses that may be candidates, by its upper bound
    max_lost_of_length: float = 0.10  # of those in a tenth of their lengths
    max_shortening: float = 0.05  # share by which cutting may shorten the mean correct response, by its lower bound

    @property
    def limits(self) -> tuple[float, ...]:
        """What a probability may have to be below, lowest first."""
        return tuple(min(self.cut_below * scale, HIGHEST_LIMIT) for scale in SCALES)


@dataclass(frozen=True)
class Outcome:
    """A response seen to its end."""

    tokens: int
    correct: bool
    weight: float
    lowest: float  # probability at its looks: it is a candidate of every limit above
    share: float  # what it counts among candidates: 1; the coin's probability if none was tossed and others were cut
    ratio: float  # log-likelihood of the model over that of length alone, nats

    def predicted(self) -> dict:
        """What the row of a response does not say otherwise: with it a gate can be played again (bench.gate)."""
        return {"weight": self.weight, "lowest": self.lowest, "share": self.share, "ratio": self.ratio}


@dataclass
class Gate:
    """Invariant: shut before `min_outcomes`, and at a limit at which one of the conditions fails. `at`: index of a
    limit."""

    settings: Settings
    outcomes: int = 0
    evidence: float = 0.0
    falses: list[deque[tuple[float, bool]]] = field(init=False)  # of each limit, its newest candidates: share, correct
    lost: deque[tuple[int, float, float]] = field(init=False)  # correct responses: tokens, weight, lowest probability

    def __post_init__(self):
        self.falses = [deque() for _ in SCALES]
        self.lost = deque(maxlen=LOST_WINDOW)

    def learn(self, outcome: Outcome) -> None:
        self.outcomes += 1
        self.evidence = (1.0 - 1.0 / EVIDENCE_WINDOW) * self.evidence + outcome.weight * outcome.ratio
        for limit, falses in zip(self.settings.limits, self.falses, strict=True):
            if outcome.lowest < limit:
                falses.append((outcome.share, outcome.correct))
                self._forget(falses)
        if outcome.correct:
            self.lost.append((outcome.tokens, outcome.weight, outcome.lowest))

    def _forget(self, falses: deque[tuple[float, bool]]) -> None:
        """The oldest beyond the newest `candidates`, by their shares: one that stands for a tenth must not push out one
        that stands for ten, or a few dead groups would open the gate."""
        total = sum(share for share, _ in falses)
        while total - falses[0][0] >= self.settings.candidates:
            total -= falses.popleft()[0]

    def false_rate(self, at: int = FIRST) -> float:
        falses = self.falses[at]
        return sum(share for share, false in falses if false) / sum(share for share, _ in falses) if falses else 0.0

    def false_bound(self, at: int = FIRST) -> float:
        return self._at_most(self.falses[at])

    def lost_shares(self, at: int = FIRST) -> list[float]:
        """Share of correct responses that are candidates, at most: of all, and in each tenth of their lengths.

        Upper ends of Wilson intervals, 1 of none: who has seen few correct responses does not know what would be lost.
        An outcome that was seen by a coin stands for 1/pi of them.
        """
        # of equal lengths as they came: candidates side by side would fill a tenth of their own
        rows = [(weight, candidate) for _, weight, candidate in sorted(self._lost_at(at), key=lambda row: row[0])]
        tenths = [rows[len(rows) * i // DECILES:len(rows) * (i + 1) // DECILES] for i in range(DECILES)]
        return [self._at_most(part) for part in (rows, *tenths)]

    def shortening(self, at: int = FIRST) -> float:
        """Share by which cutting all candidates shortens the mean correct response, at least.

        The control are those that the coin spared, each for 1/pi, or all candidates while nothing is cut.

        Cutting moves the mean of x from D + m to m, where m is that of no candidates and D the mean over all of
        (x - m, for a candidate, else 0); its standard error is that of a weighted mean.
        """
        rows = self._lost_at(at)
        kept = [tokens for tokens, _, candidate in rows if not candidate]
        total = sum(weight for _, weight, _ in rows)
        if not kept or not total:
            return 0.0
        mean = sum(kept) / len(kept)
        moves = [(weight / total, (tokens - mean) * candidate) for tokens, weight, candidate in rows]
        move = sum(share * value for share, value in moves)
        error = math.sqrt(sum((share * (value - move)) ** 2 for share, value in moves))
        return (move - self.settings.z * error) / (mean + move)

    def _lost_at(self, at: int) -> list[tuple[int, float, bool]]:
        limit = self.settings.limits[at]
        return [(tokens, weight, lowest < limit) for tokens, weight, lowest in self.lost]

    def _at_most(self, rows: Collection[tuple[float, bool]]) -> float:
        """Upper end of the share of rows (weight, event) with the event; as of so many equal rows as carry the same
        information (Kish)."""
        total = sum(weight for weight, _ in rows)
        if not total:
            return 1.0
        share = sum(weight for weight, event in rows if event) / total
        effective = total * total / sum(weight * weight for weight, _ in rows)
        return wilson_upper(share * effective, effective, self.settings.z)

    def why_shut(self, at: int = FIRST) -> str:
        """Empty while it is open at that limit, else the first condition that fails."""
        limits = self.settings
        if self.outcomes < limits.min_outcomes:
            return "too few outcomes"
        if len(self.falses[at]) < limits.min_candidates or self.false_bound(at) > limits.max_false_rate:
            return "false cuts"
        if self.evidence <= math.log(OPENS_AT):
            return "no better than length"
        share, *tenths = self.lost_shares(at)
        if share > limits.max_correct_lost or max(tenths) > limits.max_lost_of_length:
            return "correct responses lost"
        if self.shortening(at) > limits.max_shortening:
            return "short answers favoured"
        return ""

    def says(self) -> str:
        """`why_shut` of `cut_below`, with what was found and what is allowed."""
        limits, why = self.settings, self.why_shut()
        if why == "false cuts" and len(self.falses[FIRST]) < limits.min_candidates:
            why += f": {len(self.falses[FIRST])} candidates seen to their end, wanted {limits.min_candidates}"
        elif why == "false cuts":
            why += (f": up to {self.false_bound():.0%} of {len(self.falses[FIRST])} candidates, allowed "
                    f"{limits.max_false_rate:.0%}")
        elif why == "no better than length":
            why += f": {self.evidence:.1f} nats, wanted {math.log(OPENS_AT):.1f}"
        elif why == "correct responses lost":
            share, *tenths = self.lost_shares()
            lengths = sorted(tokens for tokens, *_ in self.lost)
            worst = max(range(DECILES), key=tenths.__getitem__)
            at = lengths[len(lengths) * worst // DECILES] if lengths else 0
            why += (f": up to {share:.0%} of all, allowed {limits.max_correct_lost:.0%}"
                    if share > limits.max_correct_lost else
                    f": up to {tenths[worst]:.0%} of the tenth from {at:,} tokens on, allowed "
                    f"{limits.max_lost_of_length:.0%}")
        elif why == "short answers favoured":
            why += f": by {self.shortening():.0%}, allowed {limits.max_shortening:.0%}"
        return why

    def opens_at(self) -> int | None:
        """Index of the limit at which it is open; None: it is shut. A higher limit is only asked about where the one
        below it is proven, and the lowest where nothing else is, so that it has two chances to be open by luck."""
        proven = None
        for at in range(FIRST, len(SCALES)):
            if self.why_shut(at):
                break
            proven = at
        lower = FIRST - 1
        return lower if proven is None and not self.why_shut(lower) else proven

    def to_state(self) -> dict:
        return {"outcomes": self.outcomes, "evidence": self.evidence,
                "falses": [[list(entry) for entry in falses] for falses in self.falses],
                "lost": [list(entry) for entry in self.lost]}

    def restore(self, state: Mapping) -> None:
        """Raises ValueError when it is damaged."""
        try:
            outcomes, evidence = int(state["outcomes"]), float(state["evidence"])
            falses = [[(float(share), bool(false)) for share, false in limit] for limit in state["falses"]]
            lost = [(int(tokens), float(weight), float(lowest)) for tokens, weight, lowest in state["lost"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        possible = (all(weight >= 1 and math.isfinite(weight) and 0 <= lowest <= 1 for _, weight, lowest in lost)
                    and len(falses) == len(SCALES) and all(0 < share <= 1 for limit in falses for share, _ in limit))
        if outcomes < 0 or not math.isfinite(evidence) or not possible:
            raise ValueError("a gate that no outcomes give")
        self.outcomes, self.evidence = outcomes, evidence
        for mine, found in zip((self.lost, *self.falses), (lost, *falses), strict=True):
            mine.clear()
            mine.extend(found)
