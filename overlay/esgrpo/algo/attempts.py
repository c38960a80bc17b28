"""What one member of a group lives through, attempt by attempt, and its row; `algo/rollout.py` drives it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from esgrpo.algo import verdict_gate
from esgrpo.algo.rollout_events import AttemptEnded
from esgrpo.algo.rows import Response as Row
from esgrpo.algo.terms import Outcome


def given(spans: list[list[int]], tokens: int) -> list[list[int]]:
    """[version, count] of the first `tokens`: until an engine hears of an abort it makes what its client never gets."""
    found = []
    for version, count in spans:
        if tokens > 0:
            found.append([version, min(count, tokens)])
        tokens -= count
    return found


@dataclass
class Response:
    """What one member of a group lived through, attempt by attempt."""

    group: str
    number: int
    tokens: int = 0
    attempts: int = 0
    reprefill: int = 0
    boundaries: int = 0
    logprob_sum: float = 0.0
    outcome: Outcome = Outcome.FINISH
    rule: str = ""
    spans: list[list[int]] = field(default_factory=list)
    places: list[list] = field(default_factory=list)
    started: float = 0.0
    forecast: dict | None = None  # of this prompt, from the history; None when it is off
    sealed: bool = False  # its row is written: a coin would come too late
    decision: dict | None = None  # of the audit, plain: rule, prune, keep_probability, reason, tokens, pivot
    length_class: str = ""  # set when the group moves it; empty: the forecast's
    prompt: str | None = None
    exempt: bool = False  # the rule for loops has been let off
    cut: str = ""  # the rule by which an engine ended it without a coin; an agent loop may have gone on after it
    marks: list[list] = field(default_factory=list)  # of its looks for loops: algo.loops.Mark
    surprisal: float | None = None  # of the loop that it was proven to be, nats per token
    version: int | None = None

    @property
    def doomed(self) -> bool:
        """A coin has fallen against it."""
        return self.decision is not None and self.decision["prune"]

    @property
    def pruned(self) -> bool:
        return self.doomed or bool(self.cut) or self.outcome == Outcome.PRUNE

    def state(self) -> dict:
        """All of it as a plain dict, to travel with an interrupted response."""
        return {**dataclasses.asdict(self), "outcome": str(self.outcome)}

    def attempt_ended(self, event: AttemptEnded) -> tuple[int, int] | None:
        """Take over one attempt; returns the first and last weight version of its tokens, where the engine said it."""
        self.reprefill += event.prefilled if self.attempts else 0
        self.attempts += 1
        self.tokens += event.tokens
        answer, versions = event.answer, None
        self.marks, self.surprisal = (answer or {}).get("marks", []), (answer or {}).get("surprisal")
        since = self.places[-1][2] if self.places else self.started
        self.places.append([answer["replica"] if answer else "", answer["arrived"] if answer else since, event.now,
                            event.tokens])
        if answer is None:  # aborted, and nobody knows what its book said; or there is no hook in the scheduler
            spans = [[-1 if event.version is None else event.version, event.tokens]]
            self.outcome, self.rule = Outcome.ABORT if event.aborted else Outcome.FINISH, ""
        else:
            spans = given(answer["spans"], event.tokens)
            self.outcome, self.rule = Outcome(answer["outcome"]), answer["rule"]
            self.boundaries += answer["boundaries"]
            self.logprob_sum += answer["logprob_sum"]
            if spans and spans[0][0] >= 0:
                versions = spans[0][0], spans[-1][0]
        for version, tokens in spans if self.version is None else [[self.version, event.tokens]]:
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1][1] += tokens
            elif tokens:
                self.spans.append([version, tokens])
        if self.outcome == Outcome.ABORT and event.aborted:
            if self.doomed and self.tokens:
                self.prune(self.decision["rule"])  # the verdict and the weight sync crossed; verl wants a token of each
            elif event.left <= 0:
                self.outcome = Outcome.FINISH  # interrupted with its last token
        return versions

    def prune(self, rule: str) -> None:
        self.outcome, self.rule = Outcome.PRUNE, rule

    def record(self, now: float, score: float | None, audit: dict | None, treatment: str,
               heard: verdict_gate.Outcome | None = None) -> Row:
        """Its row, if nothing more is decided about it. `treatment`: of what is cut in this run; `heard`: by the gate
        of learned verdicts."""
        self.sealed = True
        if self.doomed or self.cut:  # also when it ended in another way before the engine heard of it, or after it
            self.prune(self.decision["rule"] if self.doomed else self.cut)
        decision = self.decision or {}
        weighed = decision.get("keep_probability", 1.0) < 1
        return Row(
            prompt=self.prompt, group=self.group, member=self.number, outcome=str(self.outcome), rule=self.rule,
            tokens=self.tokens, logprob_sum=self.logprob_sum, attempts=self.attempts, reprefill=self.reprefill,
            boundaries=self.boundaries, spans=[list(span) for span in self.spans],
            places=[list(place) for place in self.places], started=self.started, ended=now,
            candidate=self.decision is not None, exempted=self.decision is not None and not self.doomed,
            keep_probability=decision.get("keep_probability", 1.0), pivot=decision.get("pivot"),
            treatment=str(treatment) if self.pruned or weighed else "", coin=decision.get("coin", 1.0),
            predicted=decision.get("predicted"), predicted_reward=decision.get("reward"),
            candidate_rule=decision.get("rule", ""), decided_by=decision.get("reason", ""),
            tokens_at_decision=decision.get("tokens"), for_gate=None if heard is None else heard.predicted(),
            audit=audit, score=score)
