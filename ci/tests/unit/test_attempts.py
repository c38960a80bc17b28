"""What a member keeps of an attempt, by example; whole responses are in the property tests."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from ci.tests.property.rollout_fakes import ended, new_driver, seat_of
from esgrpo import config
from esgrpo.algo import attempts, rollout
from esgrpo.algo.terms import Outcome
from esgrpo.call import Call
from esgrpo.hooks.verl.groups import client_attempts, rollout_driver
from esgrpo.hooks.verl.v0_7_0 import client_attempts as partial_attempts

BUDGET = 1000

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


def play(seat, *outputs_and_prompts, left: int = BUDGET):
    """Attempts of one member: (output, prompt tokens) each; returns the last action."""
    async def scene():
        return [await rollout_driver.attempt_ended(seat, output, prompt, left)
                for output, prompt in outputs_and_prompts]

    return asyncio.run(scene())[-1]


def test_an_attempt_tells_the_scheduler_what_was_done_before():
    seat = seat_of(new_driver(), number=2)
    assert {"group": "g", "member": 2, "done_before": 0}.items() <= seat.fields().items()
    play(seat, (output([1, 2, 3], "aborted", global_steps=4), 10))
    assert seat.fields()["done_before"] == 3


def test_the_marks_of_a_loop_travel_to_the_next_attempt_unless_nobody_knows_them():
    seat = seat_of(new_driver())
    assert "marks" not in seat.fields()
    marks = [[2, 0.0, -1]]
    play(seat, (output([1, 2], payload={**payload("yield", [[1, 2]]), "marks": marks}), 10))
    assert seat.fields()["marks"] == marks
    play(seat, (output([3], "aborted"), 12))
    assert "marks" not in seat.fields()


@pytest.mark.parametrize("tokens, found", [
    (0, []), (4, [[1, 4]]), (5, [[1, 5]]), (7, [[1, 5], [2, 2]]), (10, [[1, 5], [2, 5]])])
def test_tokens_that_a_client_never_got_are_in_no_span(tokens, found):
    assert attempts.given([[1, 5], [2, 5]], tokens) == found


@pytest.mark.parametrize("known, pruned", [
    ({}, False), ({"cut": "repetition"}, True), ({"outcome": Outcome.PRUNE}, True), ({"decision": DOOMED}, True),
    ({"decision": {**DOOMED, "prune": False}}, False)])
def test_a_response_that_was_cut_stays_cut_whatever_it_did_after_it(known, pruned):
    response = attempts.Response("g", 0, **known)
    assert response.pruned is pruned and (response.record(1.0, 0.0, None, "failed").outcome == "prune") is pruned


def test_a_member_goes_on_where_it_was_interrupted_under_another_version():
    driver = new_driver()
    seat = rollout_driver.join(driver, "g", 2, version=3)
    play(seat, (output([1, 2], payload=payload("yield", [[-1, 2]], boundaries=1)), 10), (output([3], "aborted"), 12))
    state = json.loads(json.dumps(seat.response.state()))
    assert seat.on(rollout.MemberEnded, now=0.0, carried=True) is None  # no record yet
    again = rollout_driver.join(new_driver(), "g", 2, member=0, state=state, version=5)
    assert again.fields() == {"group": "g", "member": 0, "done_before": 3, "length_class": "body", "move": False}
    play(again, (output([4, 5], payload=payload("finish", [[-1, 2]])), 13))
    row = ended(again)
    assert row["spans"] == [[3, 3], [5, 2]] and (row["tokens"], row["attempts"], row["boundaries"]) == (5, 3, 1)


@pytest.mark.hook("attempt-places")
def test_an_attempt_says_where_it_was_unless_it_was_aborted(monkeypatch):
    monkeypatch.setattr(rollout_driver.time, "time", lambda: 2.0)
    seat = seat_of(new_driver())
    monkeypatch.setattr(rollout_driver.time, "time", lambda: 7.0)
    play(seat, (output([1], "aborted", global_steps=0), 10))
    monkeypatch.setattr(rollout_driver.time, "time", lambda: 9.0)
    play(seat, (output([2, 3], payload=payload("finish", [[1, 2]])), 11))
    assert ended(seat)["places"] == [["", 2.0, 7.0, 1], ["1", 5.0, 9.0, 2]]


def test_neighbouring_spans_of_one_version_become_one():
    seat = seat_of(new_driver())
    play(seat, (output([1, 2], payload=payload("yield", [[3, 2]])), 10), (output([3], "aborted", global_steps=3), 12),
         (output([], "aborted", global_steps=4), 13), (output([4, 5], payload=payload("finish", [[4, 1], [5, 1]])), 13))
    row = ended(seat)
    assert row["spans"] == [[3, 3], [4, 1], [5, 1]]
    assert (row["tokens"], row["attempts"], row["outcome"]) == (5, 4, "finish")


@pytest.mark.parametrize("keeps, spans", [(True, [[3, 600], [4, 400], [5, 1]]), (False, [[4, 1000], [5, 1]])])
def test_tokens_of_a_kept_and_then_aborted_response_keep_their_versions(monkeypatch, keeps, spans):
    """It lived through a sync and was aborted by a rebalance: vLLM answers that without a payload, the book knows.

    Without `keep` nobody asks: there all tokens of an attempt are of the server's version (the negative control).
    """
    sync = {"requests": "keep"} if keeps else {}
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": True, "sync": sync}))
    asked = []

    async def take(group, member, attempt):
        asked.append((group, member))
        return payload("abort", [[3, 600], [4, 400]])

    seat = seat_of(new_driver())
    seat.placed("r", SimpleNamespace(esgrpo_take_book=SimpleNamespace(remote=take)))
    play(seat, (output(range(1000), "aborted", global_steps=4), 10),
         (output([1], payload=payload("finish", [[5, 1]])), 1010))
    assert ended(seat)["spans"] == spans and asked == ([("g", 0)] if keeps else [])


def test_a_response_that_ended_at_a_stop_string_keeps_its_versions(monkeypatch):
    """vLLM's front end finds it and aborts the request in the engine: the book knows what the client is not told."""
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": True, "sync": {"requests": "keep"}}))

    async def take(group, member, attempt):
        return payload("abort", [[3, 3], [4, 3]], boundaries=1)

    seat = seat_of(new_driver())
    seat.placed("r", SimpleNamespace(esgrpo_take_book=SimpleNamespace(remote=take)))
    stopped = output(range(5), global_steps=4, min_global_steps=4)
    play(seat, (stopped, 10))
    row = ended(seat)
    assert (row["spans"], row["outcome"], row["boundaries"]) == ([[3, 3], [4, 2]], "finish", 1)
    assert stopped.extra_fields["min_global_steps"] == 3 and stopped.stop_reason == "completed"


@pytest.mark.parametrize("made, outcome, left", [(1, "prune", "pruned"), (0, "abort", "aborted")])
def test_a_member_that_is_to_end_is_handed_on_with_a_token_at_least(made, outcome, left):
    """verl cannot pad a response without log-probs beside others that have some: it goes on, and ends with its first
    token."""
    seat = seat_of(new_driver())
    seat.response.decision = DOOMED
    attempt = output(range(made), "aborted", global_steps=1)
    play(seat, (attempt, 10))
    assert (seat.response.outcome, attempt.stop_reason) == (outcome, left)


def test_reprefill_counts_what_was_computed_again():
    seat = seat_of(new_driver())
    play(seat, (output([1], "aborted", global_steps=0, num_cached_tokens=0), 100))
    assert seat.response.reprefill == 0  # the first prefill is not a waste
    play(seat, (output([1], "aborted", global_steps=1, num_cached_tokens=64), 101),
         (output([1], payload=payload("finish", [[1, 1]]), num_cached_tokens=None), 102))
    assert seat.response.reprefill == (101 - 64) + 102


@pytest.mark.parametrize("asked, stop_reason, outcome, left", [
    (False, "aborted", "abort", "aborted"), (True, "aborted", "prune", "pruned"), (True, "abort", "prune", "pruned"),
    (True, "completed", "finish", "completed"),
])
def test_a_finish_that_meets_a_weight_sync(asked, stop_reason, outcome, left):
    seat = seat_of(new_driver())
    seat.response.decision = DOOMED if asked else None
    attempt = output([1], stop_reason, global_steps=1)
    play(seat, (attempt, 10))
    assert (seat.response.outcome, attempt.stop_reason) == (outcome, left)
    assert seat.response.rule == ("enough" if outcome == "prune" else "")


@pytest.mark.parametrize("outcome, stop_reason", [("finish", "completed"), ("prune", "pruned"), ("yield", "segment")])
def test_stop_reason_says_what_really_happened(outcome, stop_reason):
    seat = seat_of(new_driver())
    attempt = output([1], payload=payload(outcome, [[0, 1]], rule="repetition", boundaries=2))
    play(seat, (attempt, 10))
    assert attempt.stop_reason == stop_reason
    assert "kv_transfer_params" not in attempt.extra_fields
    response = seat.response
    assert (response.rule, response.boundaries, response.logprob_sum) == ("repetition", 2, -1.5)


def test_a_version_that_nobody_knows_is_minus_one():
    seat = seat_of(new_driver())
    play(seat, (output([1], "aborted"), 10))
    assert seat.response.spans == [[-1, 1]]


def run_attempts(outputs, budget, ask_after=None):
    """The hooked client on these outputs; returns the result, the record and the max_tokens of every attempt."""
    budgets, seat = [], seat_of(new_driver())

    async def original(self, request_id, *, prompt_ids, sampling_params):
        budgets.append(sampling_params["max_tokens"])
        seat.response.decision = DOOMED if len(budgets) == ask_after else seat.response.decision
        return outputs[len(budgets) - 1]

    client = SimpleNamespace()
    arguments = {"prompt_ids": [9], "sampling_params": {"max_tokens": budget}}
    total = asyncio.run(client_attempts.generate_member(Call(original, (client, "r"), arguments), seat))
    return total, ended(seat), budgets


def test_a_yield_on_the_last_token_is_not_submitted_again():
    total, _, budgets = run_attempts([output([1, 2], payload=payload("yield", [[0, 2]]))], 2)
    assert (total.token_ids, budgets) == ([1, 2], [2])


def test_a_yield_of_a_member_that_was_asked_ends_it():
    total, row, budgets = run_attempts([output([1, 2], payload=payload("yield", [[0, 2]]))], 8, ask_after=1)
    assert (total.token_ids, total.stop_reason, budgets) == ([1, 2], "pruned", [8])
    assert (row["outcome"], row["rule"]) == ("prune", "enough")


def test_versions_of_joined_attempts_run_from_the_first_to_the_last():
    first = output([1], payload=payload("yield", [[3, 1]]), global_steps=3, min_global_steps=3, max_global_steps=3)
    last = output([2], payload=payload("finish", [[5, 1]]), global_steps=5, min_global_steps=5, max_global_steps=5)
    total, _, _ = run_attempts([first, last], 8)
    assert total.extra_fields == {"global_steps": 5, "min_global_steps": 3, "max_global_steps": 5}
    assert total.log_probs is None  # nobody asked for any


def test_an_attempt_without_a_token_leaves_what_the_engine_says_of_tokens_to_the_next_one():
    """As in verl's client: the experts of the prompt are in the first that there are."""
    first, second = output([], payload=payload("yield", [])), output([1, 2], payload=payload("yield", [[0, 2]]))
    second.log_probs, second.routed_experts = [-0.1, -0.2], np.array([7, 1, 2])  # of the prompt's token and of two made
    third, last = output([3], payload=payload("yield", [[0, 1]])), output([], payload=payload("finish", []))
    third.log_probs, third.routed_experts = [-0.3], np.array([-1, -1, -1, 3])  # earlier ones are those of their weights
    last.routed_experts = np.array([-1] * 4)
    total, _, budgets = run_attempts([first, second, third, last], 8)
    assert (list(total.routed_experts), total.log_probs, budgets) == ([7, 1, 2, 3], [-0.1, -0.2, -0.3], [8, 8, 6, 5])


@pytest.mark.parametrize("forecast, own, routing, expected", [
    (None, "", True, ("body", True)), (None, "", False, ("body", False)),
    ({"length_class": "short"}, "", True, ("short", True)), ({"length_class": "tail"}, "", True, ("tail", False)),
    ({"length_class": "short"}, "tail", True, ("tail", False))])
def test_an_attempt_says_its_class_and_whether_it_may_be_moved(monkeypatch, forecast, own, routing, expected):
    for replicas, share in ((1, 0.5), (2, 0.5), (2, 0.0)):  # one replica, no share: nowhere to go
        segment = {"enable": True, "history": {"enable": True}, "routing": {"enable": routing, "tail_share": share}}
        monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps(segment))
        monkeypatch.setenv("ESGRPO_FACTS", json.dumps({"replicas": replicas}))
        seat = rollout_driver.join(new_driver(), "g", 8, forecast=forecast)
        seat.response.length_class = own
        fields = seat.fields()
        assert (fields["length_class"], fields["move"]) == (expected[0], expected[1] and replicas > 1 and share > 0)


def test_the_versions_of_a_response_are_those_of_its_tokens():
    """A kept request ends after two syncs; the server says 5 for all of it."""
    seat = seat_of(new_driver())
    answer = output([1, 2, 3], payload=payload("finish", [[3, 1], [4, 2]]), global_steps=5, min_global_steps=5,
                    max_global_steps=5)
    play(seat, (answer, 10))
    assert {name: answer.extra_fields[name] for name in ("global_steps", "min_global_steps", "max_global_steps")} == {
        "global_steps": 4, "min_global_steps": 3, "max_global_steps": 4}
    row = ended(seat)
    assert (row["outcome"], row["attempts"], row["reprefill"]) == ("finish", 1, 0)  # nothing was aborted


def test_where_no_engine_says_it_an_attempt_begins_when_the_one_before_it_ended():
    response = attempts.Response("g", 0, started=1.0)
    for now in (3.0, 7.0):
        response.attempt_ended(rollout.AttemptEnded("g", 0, now, 5, left=10, version=2))
    assert response.places == [["", 1.0, 3.0, 5], ["", 3.0, 7.0, 5]] and response.spans == [[2, 10]]


@pytest.mark.parametrize("left, outcome", [(0, Outcome.FINISH), (1, Outcome.ABORT)])
def test_an_interrupted_response_ends_with_its_last_token_and_not_before(left, outcome):
    response = attempts.Response("g", 0)
    versions = response.attempt_ended(rollout.AttemptEnded("g", 0, 1.0, 5, left, aborted=True,
                                                           answer=payload("abort", [[0, 5]])))
    assert response.outcome == outcome and versions == (0, 0)  # the first weights have a version, too


def test_a_loop_that_no_coin_can_judge_yet_runs_on_and_is_looked_at_no_more():
    """`prune.treatment` wants a reward for it, and what wrong responses get is not known yet."""
    pruner = SimpleNamespace(loop=lambda *_: None, watch=lambda *_: None, take_lessons=list, verdicts=None)
    runs = rollout.GroupRuns(rollout.Rules(config.parse({"enable": True}), BUDGET, pruner=pruner))
    first, = runs.on(rollout.Submitted("g", 1, 0.0))
    assert "exempt" not in first.fields
    ended = rollout.AttemptEnded("g", 0, 1.0, 5, left=95, answer=payload("yield", [[0, 5]], rule="repetition"))
    again, = runs.on(ended)
    assert isinstance(again, rollout.Submit) and again.fields["exempt"] is True
    assert runs.rules.decisions["loops/passed_by"] == 1


def test_the_rest_of_a_group_joins_the_tail_once():
    settings = config.parse({"enable": True, "history": {"enable": True},
                             "routing": {"enable": True, "tail_share": 0.5, "tail_fraction": 0.5}})
    runs = rollout.GroupRuns(rollout.Rules(settings, BUDGET, replicas=2))
    for number in range(2):
        runs.on(rollout.Submitted("g", 2, 0.0))
        runs.on(rollout.Placed("g", number, "r"))
    assert not runs.on(rollout.Progress("g", {0: 5, 1: 5}))
    runs.on(rollout.MemberEnded("g", 0, 1.0, score=1.0))
    joined = [runs.on(rollout.Progress("g", {1: 9})) for _ in range(2)]
    assert [[type(action) for action in actions] for actions in joined] == [[rollout.JoinTail], []]


@pytest.mark.parametrize("state", [None, {"coin": 1}])
def test_what_other_workers_learned_is_taken_in_and_a_state_only_where_there_is_one(state):
    heard = []
    pruner = SimpleNamespace(restore=lambda found: heard.append(("state", found)),
                             absorb=lambda found: heard.append(("lessons", found)))
    runs = rollout.GroupRuns(rollout.Rules(config.parse({"enable": True}), BUDGET, pruner=pruner))
    assert runs.on(rollout.Learned(["lesson"], state)) == []
    assert heard == [("state", state)] * (state is not None) + [("lessons", ["lesson"])]


def test_a_verdict_after_the_row_is_written_decides_nothing():
    response = attempts.Response("g", 0)
    assert not response.sealed
    response.record(now=1.0, score=None, audit=None, treatment="failed")
    assert response.sealed


class Client:
    """Something with a generate that may hold others."""

    def __init__(self, **held):
        vars(self).update(held)

    def generate(self):
        raise AssertionError("it is only looked at")


def test_a_seat_follows_its_workers_client_through_what_wraps_it():
    inner, teacher = Client(), Client()
    wrapper = Client(inner=Client(client=inner), config={"teacher": teacher})
    inner.owner = wrapper  # a circle has an end
    seat = rollout_driver.join(new_driver(), "g", 1, wrapper)
    assert seat.follows(wrapper) and seat.follows(inner) and not seat.follows(teacher)
    assert seat_of(new_driver(), "g").follows(teacher)  # a worker that names no client, as in verl 0.7.0


@pytest.mark.hook("partial-attempts")
def test_a_call_without_a_limit_has_a_whole_response_in_0_7_0():
    """Its partial server, patched, takes that of any prompt; the control is the server of later releases."""
    rollout_config, asked = SimpleNamespace(prompt_length=4, response_length=16), []

    async def original(self, request_id, prompt_ids, sampling_params):
        asked.append(sampling_params["max_tokens"])
        return [], [], True, {}

    client = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout_config)))
    call = Call(original, (client, "r"), {"prompt_ids": [9] * 10, "sampling_params": {}})
    asyncio.run(partial_attempts.generate_member(call, seat_of(new_driver())))
    assert asked == [16] and client_attempts.unlimited(rollout_config, 10) == 10
