"""Attempts of one response: a scripted engine under the hooked client, inside verl's resuming loop."""

from __future__ import annotations

import asyncio
from itertools import groupby

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ci.tests.property.rollout_fakes import (
    RESPONSE_LENGTH,
    ResumingClient,
    TokenOutput,
    ended,
    new_driver,
    run_with_member,
    seat_of,
)

PROMPT = [900, 901, 902]
# of a member whose coin has fallen
DOOMED = {"rule": "enough", "prune": True, "keep_probability": 0.5, "reason": "coin", "tokens": 0, "pivot": 0.0}


def runs(versions):
    return [[version, len(list(tokens))] for version, tokens in groupby(versions)]


class ScriptedServer:
    """Ends attempt i as script[i] says, and as a plain finish after the script. Token i of the response has id i.

    An entry is (kind, growth, ask): `growth` lists the tokens made under each successive weight version, `ask` is
    None or the index in `growth` at which a sibling asks this member to finish.
    """

    def __init__(self, member, script, version=-1):
        self.member, self.script, self.version = member, list(script), version
        self.budgets, self.prompts, self.fields = [], [], []
        self.kinds, self.counts, self.preempted, self.prefilled = [], [], 0, 0
        self.stamps = []  # weight version of every token, as the engine knew it
        self.made, self.asked_in = 0, None  # the attempt during which a sibling asked

    async def generate(self, prompt_ids, parameters):
        await asyncio.sleep(0)
        assert self.kinds[-1:] not in (["finish"], ["prune"]), "submitted again after its end"
        self.budgets.append(parameters["max_tokens"])
        assert "max_new_tokens" not in parameters  # the server would not expect both
        self.prompts.append(list(prompt_ids))
        fields = parameters["extra_args"]["segment"]
        self.fields.append(dict(fields))
        kind, growth, ask = self.script.pop(0) if self.script else ("finish", [1], None)
        stamps, asked = [], False
        for position, grown in enumerate(growth):
            if position:
                self.version = max(self.version, 0) + 1  # a weight sync that kept the request
            if ask == position:
                self.member.response.decision, asked = DOOMED, True
                self.asked_in = len(self.kinds)
            stamps += [self.version] * min(grown, parameters["max_tokens"] - len(stamps))
        if len(stamps) == parameters["max_tokens"]:
            kind = "finish"  # vLLM's own length cap comes first
        elif kind == "prune" and not asked:
            kind = "finish"
        elif kind == "finish" and not stamps:
            stamps = [self.version]
        elif kind == "yield" and not stamps:
            stamps = [self.version]
            kind = "finish" if parameters["max_tokens"] == 1 else kind
        return self._output(kind, stamps, len(prompt_ids))

    def _output(self, kind, stamps, prompt_tokens):
        tokens = list(range(self.made, self.made + len(stamps)))
        self.made += len(stamps)
        extra = {"global_steps": max(self.version, 0), "num_cached_tokens": prompt_tokens // 2}
        if kind == "abort":
            stamps = [extra["global_steps"]] * len(stamps)  # known to the server only
            if not tokens:  # aborted before the first output: verl has no logprobs and no experts to give
                extra.pop("num_cached_tokens")
        else:
            extra["kv_transfer_params"] = {"other": 1, "esgrpo": {
                "outcome": kind, "rule": "rule" if kind == "prune" else "", "spans": runs(stamps),
                "boundaries": 1, "logprob_sum": -float(len(tokens)),
                "replica": "0", "arrived": 0.0}}
        self.stamps += stamps
        self.last_stamps = stamps
        self.kinds.append(kind)
        self.counts.append(len(tokens))
        self.preempted += 1
        self.prefilled += (prompt_tokens - extra.get("num_cached_tokens", 0)) if len(self.kinds) > 1 else 0
        empty = kind == "abort" and not tokens
        output = TokenOutput(
            tokens, None if empty else [-0.5 * token for token in tokens],
            None if empty else np.array([*[-1] * (prompt_tokens + self.made - len(tokens) - self.prompted()), *tokens]),
            "aborted" if kind == "abort" else "completed", 1, extra)
        self.version += kind == "abort"  # verl aborts because new weights come
        return output

    def prompted(self):
        """Response tokens that came with the prompt: their experts are reported again, as -1."""
        return len(self.prompts[-1]) - len(PROMPT)


def entries(kinds, ask=False):
    """One attempt of a script."""
    growth = st.lists(st.integers(0, 9), min_size=1, max_size=3)
    return st.tuples(st.sampled_from(kinds), growth, st.integers(0, 2) | st.none() if ask else st.none())


@st.composite
def calls(draw, kinds, ask=False):
    script = draw(st.lists(entries(kinds, ask), max_size=8))
    limit = draw(st.sampled_from(["max_tokens", "max_new_tokens", None]))
    budget = RESPONSE_LENGTH if limit is None else draw(st.integers(1, 40))
    return script, limit, budget


def play(script, limit, budget, version=-1):
    member = seat_of(new_driver(), number=3)
    server = ScriptedServer(member, script, version)
    parameters = {"temperature": 1.0, "extra_args": {"mine": 1}, **({limit: budget} if limit else {})}
    given_parameters = {**parameters, "extra_args": dict(parameters["extra_args"])}
    output = run_with_member(member, ResumingClient(server).generate(
        "request", prompt_ids=list(PROMPT), sampling_params=parameters))
    assert parameters == given_parameters  # the caller uses its dict again in the next turn
    return member, server, output


def check_tokens(member, server, output, budget):
    """Nothing lost, nothing doubled, everything aligned, every attempt within the budget."""
    assert output.token_ids == list(range(server.made))
    assert output.log_probs == [-0.5 * token for token in output.token_ids]
    if server.made:
        assert [int(e) for e in output.routed_experts if e >= 0] == output.token_ids
    assert server.made <= budget
    done = 0
    for max_tokens, prompt, fields in zip(server.budgets, server.prompts, server.fields, strict=True):
        assert prompt[:len(PROMPT)] == PROMPT
        done = len(prompt) - len(PROMPT)
        assert prompt[len(PROMPT):] == list(range(done))
        assert max_tokens == budget - done >= 1
        assert (fields["group"], fields["member"], fields["done_before"]) == ("g", 3, done)
    assert output.num_preempted == server.preempted


def check_summary(member, server):
    summary = ended(member, 1.0)
    assert summary["tokens"] == server.made == sum(count for _, count in summary["spans"])
    assert summary["spans"] == runs(server.stamps)
    assert [version for version, _ in summary["spans"]] == sorted({version for version, _ in summary["spans"]})
    assert summary["attempts"] == len(server.kinds)
    assert summary["boundaries"] == sum(kind != "abort" for kind in server.kinds)
    assert summary["reprefill"] == server.prefilled
    return summary


@pytest.mark.hook("client-attempts")
@settings(max_examples=2 * settings.default.max_examples)
@given(calls(["finish", "yield", "abort"]), st.sampled_from([-1, 0, 5]))
def test_yields_and_aborts_lose_nothing(call, version):
    member, server, output = play(*call, version)
    check_tokens(member, server, output, call[-1])
    summary = check_summary(member, server)
    assert server.kinds.count("finish") == 1 and server.kinds[-1] == "finish"
    assert (summary["outcome"], summary["rule"]) == ("finish", "")
    assert output.stop_reason == ("length" if server.made == call[-1] else "completed")
    last = server.last_stamps  # of the last attempt: a sync after its last token is not its own
    assert output.extra_fields["max_global_steps"] == (last[-1] if last and last[0] >= 0 else max(server.version, 0))
    event(f"{len(server.kinds)} attempts")


@settings(max_examples=2 * settings.default.max_examples)
@given(calls(["finish", "yield", "abort", "prune"], ask=True))
def test_every_response_ends_once_and_an_asked_one_is_not_resumed(call):
    member, server, output = play(*call)
    check_tokens(member, server, output, call[-1])
    summary = check_summary(member, server)
    last = server.kinds[-1]
    assert not {"finish", "prune"} & set(server.kinds[:-1])
    if not summary["candidate"]:
        assert summary["outcome"] == last == "finish"
        return
    assert server.asked_in == len(server.kinds) - 1 or not sum(server.counts[:-1])  # verl wants a token of each
    assert (summary["outcome"], summary["rule"]) == ("prune", "enough")
    assert (output.stop_reason == "pruned") == (last != "finish")  # it may have ended before the engine heard of it
    event(f"last={last}")


@given(calls(["finish", "abort"]))
def test_without_yields_the_client_returns_what_verl_would(call):
    """The hook adds a payload to read and changes nothing else."""
    script, limit, budget = call
    member, server, output = play(script, limit, budget)
    plain_server = ScriptedServer(seat_of(new_driver(), number=3), script)
    generate = plain_server.generate

    async def with_fields(prompt_ids, parameters):
        fields = {"segment": {"group": "g", "member": 3, "done_before": 0}}
        parameters["max_tokens"] = parameters.pop("max_new_tokens", parameters.get("max_tokens"))
        result = await generate(prompt_ids, {**parameters, "extra_args": fields})
        result.extra_fields.pop("kv_transfer_params", None)
        return result

    plain_server.generate = with_fields
    parameters = {} if limit is None else {limit: budget}
    plain = asyncio.run(ResumingClient(plain_server, hooked=False).generate(
        "request", prompt_ids=list(PROMPT), sampling_params=parameters))
    assert [int(e) for e in output.routed_experts] == [int(e) for e in plain.routed_experts]
    output.routed_experts = plain.routed_experts = None
    for name in ("global_steps", "min_global_steps", "max_global_steps"):  # of the tokens, not of the moment of reading
        assert output.extra_fields.pop(name) <= plain.extra_fields.pop(name)
    assert output == plain
    assert server.budgets == plain_server.budgets


@given(calls(["yield"]))
def test_the_plain_client_also_joins_yields(call):
    """LLMServerClient without verl's resuming loop around it: one call, one whole response."""
    script, limit, budget = call
    member = seat_of(new_driver(), number=3)
    server = ScriptedServer(member, script)
    parameters = {limit: budget} if limit else {}
    output = run_with_member(member, ResumingClient(server).attempt(
        request_id="request", prompt_ids=list(PROMPT), sampling_params=parameters))
    check_tokens(member, server, output, budget)
    assert check_summary(member, server)["outcome"] == "finish"
    first = server.fields[0] and output.extra_fields["min_global_steps"]
    assert first <= output.extra_fields["max_global_steps"]


def test_a_caller_outside_a_group_is_left_alone():
    class Server:
        async def generate(self, prompt_ids, parameters):
            assert (prompt_ids, parameters) == ([1], {"max_tokens": 4})
            return TokenOutput([7], extra_fields={"kv_transfer_params": {"esgrpo": {}}})

    output = asyncio.run(ResumingClient(Server()).attempt(request_id="r", prompt_ids=[1],
                                                          sampling_params={"max_tokens": 4}))
    assert output.token_ids == [7]
    assert "kv_transfer_params" in output.extra_fields
