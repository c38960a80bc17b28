"""Loops: what proves one, what does not, and what the audit makes of it."""

from __future__ import annotations

import asyncio
import json
import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import loops
from ci.tests.property.rollout_fakes import ended, new_driver, seat_of
from esgrpo import config
from esgrpo.algo import audit
from esgrpo.algo.group_pruning import Finished, GroupPruner
from esgrpo.algo.loops import surprisal
from esgrpo.algo.segments import PRUNE, YIELD, SegmentBook
from esgrpo.algo.terms import Rule
from esgrpo.call import Call
from esgrpo.config import Repetition
from esgrpo.hooks.verl.groups import client_attempts
from esgrpo.hooks.verl.run import pruning_rules

RULE = Repetition(enable=True)
# control: what once was a proven loop
EIGHT_EQUAL = Repetition(enable=True, min_span=8, max_pattern_size=1, check_interval=1)
TEXT = "We write this number down, digit by digit, and go on with the next step of the proof. "
RIGHT = {  # responses that repeat themselves and are right
    "round number": "1000000000",
    "repeating decimal": "1/3 = 0.333333333333",
    "list of zeros": "[" + ", ".join(["0"] * 16) + "]",
    "zeros as tokens": "0" * 16,
    "32 bits": "1" + "0" * 31,
    "twenty repeating decimals": "\n".join(f"{n}/9 = 0.{str(n) * 20}" for n in range(1, 9)) * 2 + "\n0.3333333333" * 4,
    "identity matrix": "\n".join(" & ".join("1" if i == j else "0" for j in range(8)) + r" \\" for i in range(8)),
    "table": ("+" + "-" * 12) * 5 + "+\n" + ("|" + " " * 12) * 5 + "|\n",
    "indentation": "\n".join(" " * 40 + "pass" for _ in range(4)),
    "ruler": "# " + "-" * 100,
}


def pruned_somewhere(text: str, read, rule: Repetition) -> bool:
    """At one place of all that a look can fall on; the model is certain of every token."""
    tokens = read(TEXT + text + "\n" + TEXT)
    return any(loops.found_at(tokens, None, rule, phase) is not None for phase in range(rule.check_interval))


@pytest.mark.parametrize("read", loops.TOKENS.values(), ids=loops.TOKENS)
@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_no_loop_wherever_it_stands(text, read):
    assert not pruned_somewhere(text, read, RULE)


@pytest.mark.parametrize("name", ["round number", "list of zeros", "zeros as tokens", "32 bits", "ruler", "indentation",
                                  "twenty repeating decimals"])
def test_eight_equal_tokens_were_no_proof(name):
    """Negative control: the same placements under a rule that asks for eight equal tokens in a row."""
    read = list if name in ("ruler", "indentation") else loops.TOKENS["digits"]
    text = RIGHT[name].replace(", ", "") if name == "list of zeros" else RIGHT[name]
    assert pruned_somewhere(text, read, EIGHT_EQUAL)


def looping(pattern: int, count: int, surprisal: float = 0.0):
    return [7 + i % pattern for i in range(count)], [-surprisal] * count


@pytest.mark.parametrize("pattern", [1, 2, 7, 31, 32])
@pytest.mark.parametrize("phase", [0, 1, 31])
def test_a_loop_is_found_at_the_first_look_after_its_span(pattern, phase):
    tokens, log_probs = looping(pattern, 600)
    at = loops.found_at(tokens, log_probs, RULE, phase)
    assert RULE.min_span <= at < RULE.min_span + RULE.check_interval and (phase + at) % RULE.check_interval == 0


def test_a_pattern_that_is_too_long_is_no_loop():
    assert loops.found_at(*looping(33, 600), RULE, 0) is None


def test_the_model_must_be_certain_of_exactly_this_span():
    """A model that doubts runs on, at whatever length; doubt before the span is none of it."""
    tokens, _ = looping(3, 800)
    assert loops.found_at(tokens, [-1.01 * RULE.max_surprisal] * 800, RULE, 0) is None
    assert loops.found_at(tokens, [-0.99 * RULE.max_surprisal] * 800, RULE, 0) == RULE.min_span
    doubted = 100
    at = loops.found_at(tokens, [-3.0] * doubted + [0.0] * 700, RULE, 0)
    assert at == math.ceil((doubted + RULE.min_span) / RULE.check_interval) * RULE.check_interval


@pytest.mark.parametrize("span, mean, found", [
    (RULE.min_span, 0.005, 0.005), (RULE.min_span, RULE.max_surprisal, RULE.max_surprisal), (RULE.min_span, 0.0, 0.0),
    (RULE.min_span - 1, 0.005, None), (RULE.min_span, 1.001 * RULE.max_surprisal, None)])
def test_a_proof_is_of_the_whole_span_and_at_most_of_the_surprisal_that_is_allowed(span, mean, found):
    tokens, _ = looping(3, 800)
    before, now = (800 - span, 0.0, 800 - span), (800, -mean * span, 800)
    assert surprisal(RULE, tokens, before, now) == (None if found is None else pytest.approx(found))


@pytest.mark.parametrize("log_prob", [math.nan, -math.inf])
def test_what_is_not_a_number_proves_nothing(log_prob):
    assert loops.found_at(looping(2, 600)[0], [log_prob] * 600, RULE, 0) is None


def book_of(audited: bool = False, **rule) -> SegmentBook:
    prune = {"repetition": {"enable": True, **rule}, "audit": {"enable": audited}}
    return SegmentBook(config.parse({"enable": True, "segment_length": 1 << 30, "prune": prune}), RULE.check_interval)


@pytest.mark.parametrize("rows, proven", [(lambda n: n, True), (lambda n: 0, False), (lambda n: n - 1, False),
                                          (lambda n: min(n, 200), False)])
def test_without_a_log_prob_for_every_token_nothing_is_proven(rows, proven):
    """None at all with log-probs off; too few where an engine has no rows for what it speculated."""
    book, outcomes = book_of(), []
    book.add("a", "g", 0, 0)
    for count in range(32, 700, 32):
        outcomes += [book.look(key, [7] * count, (0.0, max(0, rows(count) - (count == 32)))).outcome
                     for key in book.advance()]
        if PRUNE in outcomes:
            break
    # one row that is missing in the first tokens matters to the spans that hold it only
    assert (PRUNE in outcomes) == (proven or rows(700) == 699)


def test_the_proof_goes_over_attempts_and_needs_their_tokens():
    def attempt(marks, earlier, done, count=128):
        book, tokens = book_of(), []
        book.add("a", "g", 0, done, marks=marks, earlier=earlier)
        while len(tokens) < count:
            tokens += [7] * 32
            for key in book.advance():
                decision = book.look(key, tokens, (-0.001 * len(tokens), len(tokens)))
                if decision.outcome == PRUNE:
                    return done + len(tokens), book.tracked[key].surprisal
        item = book.close("a", count)
        return json.loads(json.dumps(book.carried_marks(item, count, (-0.001 * count, count))))

    marks, response = [], []
    for done in (0, 128):
        response = [7] * done
        found = attempt(marks, [1, 2, 3, *response], done)
        if isinstance(found, tuple):
            break
        marks = found
    assert found == (256, pytest.approx(0.001))
    assert attempt([], [7] * 128, 128)[0][0] == 128  # without marks: a proof begins anew
    first = attempt([], [], 0)
    assert isinstance(attempt(first, [5] * 128, 128), list)  # other tokens before it
    assert isinstance(attempt(first, [7] * 12, 128), list)  # tokens that are not there


def proven_at(tokens: list[int], log_probs: list[float], ends: list[int]) -> int | None:
    """Length at which a response is a proven loop whose attempts end at `ends`; an engine step makes one token."""
    marks, done = [], 0
    for end in [*ends, len(tokens)]:
        book = book_of()
        book.add("a", "g", 0, done, marks=marks, earlier=tokens[:done])
        for total in range(done + 1, end + 1):
            told = sum(log_probs[done:total]), total - done
            for key in book.advance():
                if book.look(key, tokens[done:total], told).outcome == PRUNE:
                    return total
        told = sum(log_probs[done:end]), end - done
        marks, done = json.loads(json.dumps(book.carried_marks(book.close("a", end - done), end - done, told))), end
    return None


@given(st.integers(0, 200), st.integers(1, 32), st.sets(st.integers(1, 639), max_size=6).map(sorted))
def test_wherever_attempts_end_a_loop_is_proven_no_later_and_by_its_own_tokens(before, pattern, ends):
    """An attempt's start is one more place from which a look may read, so it may be proven earlier than in one go."""
    tokens = [1000 + at for at in range(before)] + [at % pattern for at in range(640 - before)]
    log_probs = [-3.0] * before + [-0.0] * (640 - before)
    whole = proven_at(tokens, log_probs, [])
    first_look = math.ceil(before / RULE.check_interval) * RULE.check_interval
    assert whole == math.ceil((first_look + RULE.min_span) / RULE.check_interval) * RULE.check_interval
    assert before + RULE.min_span <= proven_at(tokens, log_probs, ends) <= whole


def test_an_audited_loop_is_handed_back_and_an_exempted_one_is_not_looked_at():
    for audited, exempt, expected in ((False, False, {PRUNE}), (True, False, {YIELD}), (True, True, set())):
        book, seen = book_of(audited), set()
        book.add("a", "g", 0, 0, exempt=exempt)
        for count in range(32, 400, 32):
            for key in book.advance():
                decision = book.look(key, [7] * count, (0.0, count))
                if decision.outcome != "continue":
                    assert decision.rule == Rule.REPETITION
                    seen.add(decision.outcome)
        assert seen == expected


# The audit


def pruner(seed=0, **prune) -> GroupPruner:
    prune = {"repetition": {"enable": True}, "audit": {"enable": True, "exempt_prob": 0.25}, **prune}
    settings = config.parse({"enable": True, "prune": prune})
    return GroupPruner(settings, audit.Audit(settings.prune.audit, random.Random(seed)), budget=1000)


def play(groups: GroupPruner, count: int, tokens: int, correct: bool) -> list:
    """`count` groups of eight with one loop each; an exempted one ends after `tokens`, of 1,000 that it may have."""
    decided = []
    for number in range(count):
        group = f"g{number}"
        groups.watch(group, 8, None)
        decided.append(groups.loop(group, 0, 300, 0.0))
        if decided[-1] is not None:
            groups.ended(group, 0, Finished(tokens, correct, float(correct)), by_rule=False)
        groups.close(group)
    return decided


@pytest.mark.parametrize("tokens", [1000, 400])  # what ends by itself and is wrong loses nothing by being cut
def test_a_proven_loop_gets_a_coin_from_the_first_one_on(tokens):
    groups = pruner()
    decided = play(groups, 400, tokens, correct=False)
    exempted = sum(item.verdict.exempt for item in decided)
    assert {item.verdict.pi for item in decided} == {0.25} and {item.verdict.reason for item in decided} == {"coin"}
    assert 70 < exempted < 130
    assert groups.audit.evidence(Rule.REPETITION) == (0, exempted)


@pytest.mark.parametrize("tokens", [1000, 400])
def test_loops_that_come_out_right_stop_the_rule(tokens):
    groups = pruner()
    decided = play(groups, 300, tokens, correct=True)
    pruned = [item is not None and item.verdict.prune for item in decided]
    first = pruned.index(False)
    assert not any(pruned[first:]), "a loop was pruned after an exempted one had come out right"
    false, all_ = groups.audit.evidence(Rule.REPETITION)
    assert false == all_ > 0 or groups.audit.scale(Rule.REPETITION) < 1


def test_a_tightened_rule_asks_for_more_certainty():
    groups = pruner()
    groups.audit._scales[Rule.REPETITION] = 0.5
    groups.watch("g", 8, None)
    limit = groups.prune.repetition.max_surprisal
    assert groups.loop("g", 0, 300, 0.6 * limit) is None
    assert groups.loop("g", 0, 300, 0.4 * limit) is not None
    assert groups.loop("g", 0, 300, 0.0) is None  # nobody is decided twice


def test_caps_hold_for_loops_that_leave_and_not_for_those_that_are_trained():
    def decide(treatment):
        groups = pruner(treatment=treatment, repetition={"enable": True},
                        audit={"enable": True, "exempt_prob": 1e-9, "max_fraction": 0.5})
        groups.watch("g", 4, None)
        return [groups.loop("g", member, 300, 0.0) for member in range(4)]

    left = decide("masked")
    assert [item.verdict.prune for item in left] == [True, True, False, False]
    assert [item.keep_probability for item in left] == [1e-9, 1e-9, 1.0, 1.0]
    trained = decide("failed")
    assert all(item.verdict.prune and item.keep_probability == 1.0 and item.pivot is None for item in trained)


def test_evidence_of_another_rule_for_loops_is_not_taken_over():
    groups = pruner()
    play(groups, 50, 1000, correct=False)
    state = json.loads(json.dumps(groups.to_state()))
    pruner().restore(state)
    with pytest.raises(ValueError, match="state"):
        pruner(repetition={"enable": True, "min_span": 128}).restore(state)


class Server:
    """Hands a loop back after 300 tokens, unless it is told that it is exempt; the budget is 1,000."""

    def __init__(self):
        self.asked = []

    async def generate(self, *, prompt_ids, sampling_params):
        fields = sampling_params["extra_args"]["segment"]
        self.asked.append(fields)
        held = not fields.get("exempt")
        count = 300 if held else sampling_params["max_tokens"]
        payload = {"outcome": YIELD if held else "finish", "rule": Rule.REPETITION if held else "",
                   "spans": [[0, count]], "boundaries": 0, "logprob_sum": 0.0, "replica": "0", "arrived": 0.0,
                   "surprisal": 0.001, "marks": [[fields["done_before"], 0.0, -count]]}
        return SimpleNamespace(token_ids=[7] * count, log_probs=[0.0] * count, routed_experts=None, num_preempted=0,
                               stop_reason="completed", extra_fields={"kv_transfer_params": {"esgrpo": payload}})


def generate(monkeypatch, treatment: str, seed: int):
    """One response of a group of four through the client hook, and its record."""
    settings = config.parse({"enable": True, "seed": seed, "prune": {
        "treatment": treatment, "repetition": {"enable": True}, "audit": {"enable": True, "exempt_prob": 0.5}}})
    monkeypatch.setenv(config.ENV_SEGMENT, config.to_json(settings))
    monkeypatch.delenv("ESGRPO_RUN_DIR", raising=False)
    server = Server()

    async def run():
        driver = new_driver(1000)
        seat = seat_of(driver, size=4)
        original = lambda self, *, prompt_ids, sampling_params: server.generate(  # noqa: E731
            prompt_ids=prompt_ids, sampling_params=sampling_params)
        call = Call(original, (None,), {"prompt_ids": [1], "sampling_params": {"max_tokens": 1000}})
        output = await client_attempts.generate_member(call, seat)
        return output, ended(seat, 0.0), driver.decisions

    return *asyncio.run(run()), server


@pytest.mark.parametrize("treatment", ["masked", "failed"])
def test_the_coin_decides_whether_a_handed_back_loop_ends_or_runs_to_its_end(monkeypatch, treatment):
    seen = set()
    for seed in range(12):
        output, summary, decisions, server = generate(monkeypatch, treatment, seed)
        cut = {"loops/pruned": 1, f"treated/{treatment}": 1}
        assert +decisions == ({"loops/exempted": 1} if summary["exempted"] else cut)  # and nobody was moved
        assert summary["candidate"] and summary["candidate_rule"] == Rule.REPETITION
        assert summary["tokens_at_decision"] == 300
        assert summary["keep_probability"] == (1.0 if treatment == "failed" else 0.5)
        assert summary["coin"] == 0.5
        if summary["exempted"]:
            assert (summary["outcome"], len(output.token_ids), output.stop_reason) == ("finish", 1000, "completed")
            assert [fields.get("exempt", False) for fields in server.asked] == [False, True]
        else:
            assert (summary["outcome"], summary["rule"], len(output.token_ids)) == ("prune", Rule.REPETITION, 300)
            assert output.stop_reason == "pruned" and len(server.asked) == 1
        seen.add(summary["exempted"])
    assert seen == {True, False}


# The driver and the command


class Node(SimpleNamespace):
    def get(self, key, default=None):
        return getattr(self, key, default)


def lines_of(log_probs: bool, response: int, **prune) -> list:
    """What is said, or set."""
    rollout = Node(calculate_log_probs=log_probs)
    run = Node(actor_rollout_ref=Node(rollout=rollout), data=Node(max_response_length=response))
    segment = config.parse({"enable": True, "prune": {"repetition": {"enable": True}, **prune}})
    return list(pruning_rules.loops(run, segment))


def test_log_probs_are_switched_on_for_the_rule_and_what_cannot_work_is_said():
    assert lines_of(True, 4096, audit={"enable": True}) == []
    setting, = lines_of(False, 4096, audit={"enable": True})
    assert (setting.key, setting.value) == ("actor_rollout_ref.rollout.calculate_log_probs", True)
    line, = lines_of(True, 4096)
    assert "prune.audit.enable=True" in line
    line, = lines_of(True, 200, audit={"enable": True})
    assert "min_span = 256" in line and "max_response_length = 200" in line


def test_the_command_plays_the_corpus_and_the_recorded_loops(capsys):
    code = loops.main(["--json", "--placements", "1500", "--seed", "1"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["placements", "false_prunes", "loops", "found_within_512"]
    assert (found["placements"], found["false_prunes"]) == (1500, 0) and code == 0
    assert found["loops"] >= 100 and found["found_within_512"] >= 0.95


def test_the_command_sees_a_rule_that_is_wrong(capsys):
    """Negative controls: eight equal tokens are too few, and no model is certain beyond measure."""
    often = ["--check-interval", "32"]
    assert loops.main(["--json", "--placements", "600", "--min-span", "8", "--max-pattern-size", "1", *often]) == 1
    assert json.loads(capsys.readouterr().out)["false_prunes"] > 15
    assert loops.main(["--json", "--placements", "200", "--min-span", "1024"]) == 1
    assert json.loads(capsys.readouterr().out)["found_within_512"] == 0.0
    assert loops.main(["--placements", "200"]) == 0
    assert "installed text: code: " in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--placements", "0"], ["--min-span", "10"], ["--max-surprisal", "-1"]])
def test_the_command_refuses_what_makes_no_sense(wrong, capsys):
    with pytest.raises(SystemExit):
        loops.main(wrong)
    assert "wanted" in capsys.readouterr().err or wrong[0] == "--placements"


def test_recorded_responses_hold_what_they_say():
    record = loops.recorded()
    assert record["commit"] and record["command"].startswith("python -m bench.testbed.record_loops")
    for entry in [*record["loops"], *record["others"]]:
        assert len(entry["tokens"]) == len(entry["log_probs"]) and max(entry["log_probs"]) <= 0
    for loop in record["loops"]:
        tail = loop["tokens"][loop["start"]:loop["start"] + 384]
        assert any(tail[period:] == tail[:-period] for period in range(1, 33))
