"""What one response lived through, attempt by attempt, while the client and vLLM took turns.

Set by the agent-loop worker in a context variable of the member's own task; read by the client hook.
"""

from __future__ import annotations

import contextvars
import dataclasses
import time
from dataclasses import dataclass, field

PAYLOAD = "esgrpo"
STATE = "esgrpo_member"  # key in extra_fields under which an interrupted response carries its member
ABORTED = ("aborted", "abort")

current: contextvars.ContextVar[Member | None] = contextvars.ContextVar("esgrpo_member", default=None)


@dataclass
class Member:
    """One response of a group. Token counts are response tokens."""

    group: str
    number: int
    asked_to_finish: bool = False
    tokens: int = 0
    attempts: int = 0
    reprefill: int = 0  # prompt + response tokens prefilled again after an interruption
    boundaries: int = 0
    logprob_sum: float = 0.0
    outcome: str = "finish"
    rule: str = ""
    spans: list[list[int]] = field(default_factory=list)  # [weight version, tokens], oldest first
    started: float = field(default_factory=time.time)
    score: float | None = None  # set under verl's v1, where nothing but the TransferQueue gets the row
    version: int | None = None  # set where no attempt lives through a weight sync: all its tokens are of this version

    @classmethod
    def resumed(cls, state: dict, version: int | None) -> Member:
        """The member whose `state()` came back with an interrupted response."""
        return cls(**{**state, "version": version})

    def state(self) -> dict:
        """All of it as a plain dict, to travel with an interrupted response."""
        return dataclasses.asdict(self)

    def fields(self) -> dict:
        """What the scheduler needs to know about this attempt; msgpack-plain."""
        return {"group": self.group, "member": self.number, "done_before": self.tokens}

    def record(self, output, prompt_tokens: int) -> None:
        """Take over one attempt's TokenOutput and set its stop_reason to what really happened."""
        fields = output.extra_fields
        payload = (fields.pop("kv_transfer_params", None) or {}).get(PAYLOAD)
        count = len(output.token_ids)
        if self.attempts:
            self.reprefill += prompt_tokens - (fields.get("num_cached_tokens") or 0)
        self.attempts += 1
        self.tokens += count
        if payload is None:  # aborted by a weight sync: the server's version made all of them
            version = fields.get("global_steps")
            spans, self.outcome, self.rule = [[-1 if version is None else version, count]], "abort", ""
        else:
            spans, self.outcome, self.rule = payload["spans"], payload["outcome"], payload["rule"]
            self.boundaries += payload["boundaries"]
            self.logprob_sum += payload["logprob_sum"]
        if self.version is not None:
            spans = [[self.version, count]]
        for version, tokens in spans:
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1][1] += tokens
            elif tokens:
                self.spans.append([version, tokens])
        if self.outcome == "abort" and self.asked_to_finish and output.stop_reason in ABORTED:
            self.outcome, self.rule = "prune", "group"  # the finish and the weight sync crossed
        if self.outcome == "prune":
            output.stop_reason = "pruned"
        elif self.outcome == "yield":
            output.stop_reason = "segment"

    def summary(self) -> dict:
        return {"group": self.group, "member": self.number, "outcome": self.outcome, "rule": self.rule,
                "tokens": self.tokens, "attempts": self.attempts, "reprefill": self.reprefill,
                "boundaries": self.boundaries, "spans": self.spans, "started": self.started, "ended": time.time()}
