"""What one response lived through, attempt by attempt, while the client and vLLM took turns.

Set by the agent-loop worker in a context variable of the member's own task; read by the client hook.
"""

from __future__ import annotations

import contextvars
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from esgrpo import config, records
from esgrpo.algo.segments import BODY, REPETITION, TAIL, YIELD

PAYLOAD = "esgrpo"
STATE = "esgrpo_member"  # key in extra_fields under which an interrupted response carries its member
ABORTED = ("aborted", "abort")

current: contextvars.ContextVar[Member | None] = contextvars.ContextVar("esgrpo_member", default=None)
# what decides about a proven loop that an engine has handed back: called with its member
judge: contextvars.ContextVar[Callable[[Member], None] | None] = contextvars.ContextVar("esgrpo_judge", default=None)


@dataclass
class Member:
    """One response of a group. Token counts are response tokens."""

    group: str
    number: int
    tokens: int = 0
    attempts: int = 0
    reprefill: int = 0  # prompt + response tokens prefilled again after an interruption
    boundaries: int = 0
    logprob_sum: float = 0.0
    outcome: str = "finish"
    rule: str = ""
    spans: list[list[int]] = field(default_factory=list)  # [weight version, tokens], oldest first
    places: list[list] = field(default_factory=list)  # [replica, from, until, tokens] of every attempt, in seconds
    started: float = field(default_factory=time.time)
    forecast: dict | None = None  # of this prompt, from the history; None when it is off
    acc: object = None  # correctness as the reward function reports it, where no output is handed back (v1)
    sealed: bool = False  # its summary has been given out
    decision: dict | None = None  # of the audit, plain: rule, prune, keep_probability, reason, tokens, pivot
    length_class: str = ""  # set when the group moves it; empty: the forecast's
    score: float | None = None  # with acc, under v1 only, where nothing but the TransferQueue gets the row
    prompt: str | None = None  # key of its content
    exempt: bool = False  # the rule for loops has been let off
    marks: list[list] = field(default_factory=list)  # of its looks for loops: esgrpo.algo.segments.Mark
    surprisal: float | None = None  # of the loop that it was proven to be, nats per token
    version: int | None = None  # set where no attempt lives through a weight sync: all its tokens are of this version

    @classmethod
    def resumed(cls, state: dict, version: int | None) -> Member:
        """The member whose `state()` came back with an interrupted response."""
        return cls(**{**state, "version": version})

    def state(self) -> dict:
        """All of it as a plain dict, to travel with an interrupted response."""
        return dataclasses.asdict(self)

    def fields(self) -> dict:
        """What the scheduler and the router need to know about this attempt; msgpack-plain.

        `move`: once this response turns out to be of the tail class, it may be handed back so that the router can move
        it. An attempt that is of that class from the start was routed as such.
        """
        routing = config.current().routing
        length_class = self.length_class or (self.forecast or {}).get("length_class", BODY)
        loops = {**({"exempt": True} if self.exempt or self.decision else {}),
                 **({"marks": self.marks} if self.marks else {})}
        return {"group": self.group, "member": self.number, "done_before": self.tokens, "length_class": length_class,
                **loops, "move": routing.enable and routing.tail_share > 0 and config.facts()["replicas"] > 1
                and length_class != TAIL}

    def record(self, output, prompt_tokens: int) -> None:
        """Take over one attempt's TokenOutput and set its stop_reason to what really happened."""
        fields = output.extra_fields
        payload = (fields.pop("kv_transfer_params", None) or {}).get(PAYLOAD)
        count = len(output.token_ids)
        if self.attempts:
            self.reprefill += prompt_tokens - (fields.get("num_cached_tokens") or 0)
        self.attempts += 1
        self.tokens += count
        self._stayed(payload, count)
        self.marks = (payload or {}).get("marks", [])
        self.surprisal = (payload or {}).get("surprisal")
        if payload is None:  # aborted by a weight sync, or no hook in the scheduler: the server's version made all
            version = fields.get("global_steps")
            spans, self.rule = [[-1 if version is None else version, count]], ""
            self.outcome = "abort" if output.stop_reason in ABORTED else "finish"
        else:
            spans, self.outcome, self.rule = payload["spans"], payload["outcome"], payload["rule"]
            self.boundaries += payload["boundaries"]
            self.logprob_sum += payload["logprob_sum"]
            _stamp(fields, spans)
        if self.version is not None:
            spans = [[self.version, count]]
        for version, tokens in spans:
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1][1] += tokens
            elif tokens:
                self.spans.append([version, tokens])
        if self.outcome == "abort" and self.doomed and output.stop_reason in ABORTED:
            self.outcome, self.rule = "prune", self.decision["rule"]  # the verdict and the weight sync crossed
        if self.outcome == "prune":
            output.stop_reason = "pruned"
        elif self.outcome == "yield":
            output.stop_reason = "segment"

    @property
    def is_held_loop(self) -> bool:
        """An engine has handed it back as a proven loop, and nobody has decided about it."""
        return (self.outcome, self.rule) == (YIELD, REPETITION) and not self.exempt and not self.doomed

    def _stayed(self, payload: dict | None, count: int) -> None:
        """Where the attempt was; vLLM says nothing of one that it aborts, so that its replica is not known."""
        since = self.places[-1][2] if self.places else self.started
        replica, since = (payload["replica"], payload["arrived"]) if payload else ("", since)
        self.places.append([replica, since, time.time(), count])

    @property
    def doomed(self) -> bool:
        """A coin has fallen against it."""
        return self.decision is not None and self.decision["prune"]

    def summary(self) -> dict:
        """What the row carries. From now on nothing may be decided about it: a coin would come too late."""
        self.sealed = True
        if self.doomed:  # also when it ended in another way before the engine heard of it
            self.outcome, self.rule = "prune", self.decision["rule"]
        decision = self.decision or {}
        return {**self._ending(), "candidate": self.decision is not None,
                "exempted": self.decision is not None and not self.doomed,
                "keep_probability": decision.get("keep_probability", 1.0), "pivot": decision.get("pivot"),
                "candidate_rule": decision.get("rule", ""), "decided_by": decision.get("reason", ""),
                "tokens_at_decision": decision.get("tokens")}

    def _ending(self) -> dict:
        return {**records.identity(), "records_dropped": records.dropped(), "prompt": self.prompt,
                "group": self.group, "member": self.number, "outcome": self.outcome, "rule": self.rule,
                "tokens": self.tokens, "attempts": self.attempts, "reprefill": self.reprefill,
                "boundaries": self.boundaries, "spans": self.spans, "places": self.places, "started": self.started,
                "ended": time.time()}


def _stamp(fields: dict, spans: list[list[int]]) -> None:
    """verl's version range of an attempt, from the tokens: the server only knows its version when the answer is read.

    A request that lived through a weight sync would look entirely fresh.
    """
    if spans and spans[0][0] >= 0:
        fields["global_steps"] = spans[-1][0]
        fields.update({name: spans[place][0] for name, place in (("min_global_steps", 0), ("max_global_steps", -1))
                       if name in fields})
