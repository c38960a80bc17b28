"""What a member keeps of an attempt, by example; whole responses are in the property tests."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from esgrpo.hooks.verl import attempts, client_attempts

# of a member whose coin has fallen
DOOMED = {"rule": "enough", "prune": True, "keep_probability": 0.5, "reason": "coin", "tokens": 0, "pivot": 0.0}


def output(tokens, stop_reason="completed", payload=None, **extra):
    if payload is not None:
        extra["kv_transfer_params"] = {"esgrpo": payload}
    return SimpleNamespace(token_ids=list(tokens), log_probs=None, routed_experts=None, stop_reason=stop_reason,
                           num_preempted=None, extra_fields=extra)


def payload(outcome, spans, rule="", boundaries=0):
    return {"outcome": outcome, "rule": rule, "spans": spans, "boundaries": boundaries, "logprob_sum": -1.5,
            "replica": "1", "arrived": 5.0}


def test_an_attempt_tells_the_scheduler_what_was_done_before():
    member = attempts.Member("g", 2)
    assert {"group": "g", "member": 2, "done_before": 0}.items() <= member.fields().items()
    member.record(output([1, 2, 3], "aborted", global_steps=4), 10)
    assert member.fields()["done_before"] == 3


def test_a_member_goes_on_where_it_was_interrupted_under_another_version():
    member = attempts.Member("g", 1, version=3)
    member.record(output([1, 2], payload=payload("yield", [[-1, 2]], boundaries=1)), 10)
    member.record(output([3], "aborted"), 12)
    again = attempts.Member.resumed(json.loads(json.dumps(member.state())), version=5)
    assert again.fields() == {"group": "g", "member": 1, "done_before": 3, "length_class": "body", "move": False}
    again.record(output([4, 5], payload=payload("finish", [[-1, 2]])), 13)
    assert again.spans == [[3, 3], [5, 2]] and (again.tokens, again.attempts, again.boundaries) == (5, 3, 1)


def test_an_attempt_says_where_it_was_unless_it_was_aborted(monkeypatch):
    monkeypatch.setattr(attempts.time, "time", lambda: 7.0)
    member = attempts.Member("g", 0, started=2.0)
    member.record(output([1], "aborted", global_steps=0), 10)
    monkeypatch.setattr(attempts.time, "time", lambda: 9.0)
    member.record(output([2, 3], payload=payload("finish", [[1, 2]])), 11)
    assert member.summary()["places"] == [["", 2.0, 7.0, 1], ["1", 5.0, 9.0, 2]]


def test_neighbouring_spans_of_one_version_become_one():
    member = attempts.Member("g", 0)
    member.record(output([1, 2], payload=payload("yield", [[3, 2]])), 10)
    member.record(output([3], "aborted", global_steps=3), 12)
    member.record(output([], "aborted", global_steps=4), 13)
    member.record(output([4, 5], payload=payload("finish", [[4, 1], [5, 1]])), 13)
    assert member.spans == [[3, 3], [4, 1], [5, 1]]
    assert (member.tokens, member.attempts, member.outcome) == (5, 4, "finish")


def test_reprefill_counts_what_was_computed_again():
    member = attempts.Member("g", 0)
    member.record(output([1], "aborted", global_steps=0, num_cached_tokens=0), 100)
    assert member.reprefill == 0  # the first prefill is not a waste
    member.record(output([1], "aborted", global_steps=1, num_cached_tokens=64), 101)
    member.record(output([1], payload=payload("finish", [[1, 1]]), num_cached_tokens=None), 102)
    assert member.reprefill == (101 - 64) + 102


@pytest.mark.parametrize("asked, stop_reason, outcome, left", [
    (False, "aborted", "abort", "aborted"), (True, "aborted", "prune", "pruned"), (True, "abort", "prune", "pruned"),
    (True, "completed", "finish", "completed"),
])
def test_a_finish_that_meets_a_weight_sync(asked, stop_reason, outcome, left):
    member = attempts.Member("g", 0, decision=DOOMED if asked else None)
    attempt = output([1], stop_reason, global_steps=1)
    member.record(attempt, 10)
    assert (member.outcome, attempt.stop_reason) == (outcome, left)
    assert member.rule == ("enough" if outcome == "prune" else "")


@pytest.mark.parametrize("outcome, stop_reason", [("finish", "completed"), ("prune", "pruned"), ("yield", "segment")])
def test_stop_reason_says_what_really_happened(outcome, stop_reason):
    member = attempts.Member("g", 0)
    attempt = output([1], payload=payload(outcome, [[0, 1]], rule="repetition", boundaries=2))
    member.record(attempt, 10)
    assert attempt.stop_reason == stop_reason
    assert "kv_transfer_params" not in attempt.extra_fields
    assert (member.rule, member.boundaries, member.logprob_sum) == ("repetition", 2, -1.5)


def test_a_version_that_nobody_knows_is_minus_one():
    member = attempts.Member("g", 0)
    member.record(output([1], "aborted"), 10)
    assert member.spans == [[-1, 1]]


def run_attempts(outputs, budget, ask_after=None):
    """The hooked client on these outputs; returns the result, the member and the max_tokens of every attempt."""
    budgets, member = [], attempts.Member("g", 0)

    async def original(self, request_id, *, prompt_ids, sampling_params):
        budgets.append(sampling_params["max_tokens"])
        member.decision = DOOMED if len(budgets) == ask_after else member.decision
        return outputs[len(budgets) - 1]

    client = SimpleNamespace()
    arguments = {"prompt_ids": [9], "sampling_params": {"max_tokens": budget}}
    total = asyncio.run(client_attempts.generate_member(original, client, member, ("r",), arguments))
    return total, member, budgets


def test_a_yield_on_the_last_token_is_not_submitted_again():
    total, _, budgets = run_attempts([output([1, 2], payload=payload("yield", [[0, 2]]))], 2)
    assert (total.token_ids, budgets) == ([1, 2], [2])


def test_a_yield_of_a_member_that_was_asked_ends_it():
    total, member, budgets = run_attempts([output([1, 2], payload=payload("yield", [[0, 2]]))], 8, ask_after=1)
    assert (total.token_ids, total.stop_reason, budgets) == ([1, 2], "pruned", [8])
    assert (member.outcome, member.rule) == ("prune", "enough")


def test_versions_of_joined_attempts_run_from_the_first_to_the_last():
    first = output([1], payload=payload("yield", [[3, 1]]), global_steps=3, min_global_steps=3, max_global_steps=3)
    last = output([2], payload=payload("finish", [[5, 1]]), global_steps=5, min_global_steps=5, max_global_steps=5)
    total, _, _ = run_attempts([first, last], 8)
    assert total.extra_fields == {"global_steps": 5, "min_global_steps": 3, "max_global_steps": 5}


@pytest.mark.parametrize("forecast, own, routing, expected", [
    (None, "", True, ("body", True)), (None, "", False, ("body", False)),
    ({"length_class": "short"}, "", True, ("short", True)), ({"length_class": "tail"}, "", True, ("tail", False)),
    ({"length_class": "short"}, "tail", True, ("tail", False))])
def test_an_attempt_says_its_class_and_whether_it_may_be_moved(monkeypatch, forecast, own, routing, expected):
    for replicas, share in ((1, 0.5), (2, 0.5), (2, 0.0)):  # one replica, no share: nowhere to go
        segment = {"enable": True, "history": {"enable": True}, "routing": {"enable": routing, "tail_share": share}}
        monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps(segment))
        monkeypatch.setenv("ESGRPO_FACTS", json.dumps({"replicas": replicas}))
        fields = attempts.Member("g", 0, forecast=forecast, length_class=own).fields()
        assert (fields["length_class"], fields["move"]) == (expected[0], expected[1] and replicas > 1 and share > 0)


def test_the_versions_of_a_response_are_those_of_its_tokens():
    """A kept request ends after two syncs; the server says 5 for all of it."""
    member = attempts.Member("g", 0)
    answer = output([1, 2, 3], payload=payload("finish", [[3, 1], [4, 2]]), global_steps=5, min_global_steps=5,
                    max_global_steps=5)
    member.record(answer, 10)
    assert {name: answer.extra_fields[name] for name in ("global_steps", "min_global_steps", "max_global_steps")} == {
        "global_steps": 4, "min_global_steps": 3, "max_global_steps": 4}
    assert (member.outcome, member.attempts, member.reprefill) == ("finish", 1, 0)  # nothing was aborted
