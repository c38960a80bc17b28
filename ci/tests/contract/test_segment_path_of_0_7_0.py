"""The whole segment path of v0.7.0's fully-async recipe: worker, client and partial server with a scripted engine.

Scripts of the four responses: 6 tokens; longer than the budget; a repetition loop longer than the budget; 10 tokens.
"""

import json
from pathlib import Path

import pytest

from ci.tests.contract import release_0_7_0
from esgrpo.hooks.verl.server import control_methods

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
LENGTHS, BUDGET, SEGMENT, FIRST_ID = (6, 40, 40, 10), 24, 4, 1000
CASES = ("soft", "yield", "resumed", "advantages")
REPAIRS = ("accept-prompts-without-token-ids", "pass-dataset-to-partial-agent-loops")
KINDS = {  # patches, and whether the overlay is loaded
    "full": (release_0_7_0.SLUGS, True),
    "alone": (release_0_7_0.SLUGS, False),
    "repaired": (REPAIRS, True),
}
SHIPPED = ("full", "alone")  # those whose classes are looked at in another process
_answers: dict[str, dict] = {}


@pytest.fixture
def answers(forked_python, overlay, tmp_path_factory):
    def of(kind: str) -> dict:
        if kind not in _answers:
            slugs, loaded = KINDS[kind]
            tree = release_0_7_0.whole_tree(tmp_path_factory.mktemp(kind), slugs)
            file = tmp_path_factory.mktemp("shipped") / "class"

            def probe(*arguments, enable):
                done = forked_python(HERE / "segment_path_probe.py", *arguments, path=(tree, overlay, HERE),
                                     ESGRPO_FEATURES="observe,segment,prune,yield", ESGRPO_ENABLE=enable,
                                     PROBE_SHIPPED=str(file))
                return json.loads(done.stdout.splitlines()[-1])

            ships = ["by-value"] if kind in SHIPPED else []
            _answers[kind] = probe(*CASES, *ships, enable="1" if loaded else "0")
            if ships:
                _answers[kind]["by-value"]["carried"] = probe("--load", file, enable="0")
        return _answers[kind]

    return of


def outcomes(answer):
    return [(row["esgrpo"]["outcome"], row["esgrpo"]["rule"]) for row in answer["rows"]]


def check_conservation(answer):
    """Every token is the scripted one, once, with the log-prob it was made with; within the budget; none left over."""
    for number, row in enumerate(answer["rows"]):
        assert row["tokens"][0] == FIRST_ID + number and len(row["tokens"]) <= BUDGET
        assert number == 2 or row["tokens"][1:] == list(range(len(row["tokens"]) - 1))
        assert row["log_probs"] == [-(i + 1) / 128 for i in range(len(row["tokens"]))]
        if row["esgrpo"]:
            assert row["esgrpo"]["tokens"] == len(row["tokens"]) == sum(n for _, n in row["esgrpo"]["spans"])
    assert answer["left"] == [0, 0]
    for attempt in answer["submitted"]:  # the budget of an attempt is what is left of the response's
        done = attempt["segment"]["done_before"] if attempt["segment"] else 0
        assert attempt["max_tokens"] == BUDGET - done


@pytest.mark.hook("partial-group", "partial-members", "partial-attempts")
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_conserved_and_one_call_is_one_group(answers, case):
    answer = answers("full")[case]
    check_conservation(answer)
    assert len({row["esgrpo"]["group"] for row in answer["rows"]}) == 1
    assert [row["esgrpo"]["member"] for row in answer["rows"]] == [0, 1, 2, 3]
    segments = [attempt["segment"] for attempt in answer["submitted"]]
    assert all(s["group"] == answer["rows"][0]["esgrpo"]["group"] for s in segments)
    assert all(s["member"] == a["script"] for s, a in zip(segments, answer["submitted"], strict=True))


@pytest.mark.hook("partial-rows-are-masked")
def test_soft_boundaries_prune_the_loop_and_interrupt_nobody(answers):
    answer = answers("full")["soft"]
    assert outcomes(answer) == [("finish", "")] * 2 + [("prune", "repetition"), ("finish", "")]
    assert [row["mask"] for row in answer["rows"]] == [6, BUDGET, 0, 10] and len(answer["submitted"]) == 4
    assert "is_cancel" in answer["columns"] and "esgrpo_member" not in answer["columns"]
    assert [row["esgrpo"]["spans"] for row in answer["rows"]] == [[[3, n]] for n in (6, BUDGET, 12, 10)]


def test_a_yield_is_submitted_again_with_the_remaining_budget(answers):
    answer = answers("full")["yield"]
    assert [len(row["tokens"]) for row in answer["rows"]] == [6, BUDGET, BUDGET, 10]
    assert [row["esgrpo"]["attempts"] for row in answer["rows"]] == [2, 6, 6, 3]
    assert [a["segment"]["done_before"] for a in answer["submitted"] if a["script"] == 1] == list(
        range(0, BUDGET, SEGMENT))


def test_grpo_segment_leaves_masked_rows_out(answers):
    """Rewards 2, 1, 7, 0, of which 7 belongs to a pruned row; upstream's grpo is the negative control."""
    advantages = answers("full")["advantages"]["advantages"]
    assert advantages["grpo_segment"] == pytest.approx([1, 0, 0, -1], abs=1e-3)
    assert advantages["grpo"][0] < 0  # the best kept response is punished for what the pruned one scored


def test_an_interrupted_group_goes_on_in_another_worker(answers):
    answer = answers("full")["resumed"]
    assert [cancelled for _, cancelled in answer["first"]] == [False, True, True, True]
    spans = [row["esgrpo"]["spans"] for row in answer["rows"]]
    assert spans[0] == [[3, 6]]  # complete before the weight sync
    for number in (1, 2, 3):  # all tokens before it are of version 3, all after it of version 5
        (first, before), (second, after) = spans[number]
        assert (first, second) == (3, 5) and before == answer["first"][number][0]
        assert before + after == min(LENGTHS[number], BUDGET)
        assert answer["rows"][number]["versions"] == [3, 5]
    assert answer["groups_left"] == [0]


def test_a_patched_checkout_without_the_overlay_generates_as_upstream(answers):
    for case in ("soft", "yield", "resumed"):
        answer = answers("alone")[case]
        check_conservation({**answer, "submitted": [a for a in answer["submitted"] if a["max_tokens"] == BUDGET]})
        assert [row["mask"] for row in answer["rows"]] == [6, BUDGET, BUDGET, 10]  # nothing is pruned
        assert all(row["esgrpo"] is None for row in answer["rows"]) and "esgrpo" not in answer["columns"]
        assert all(attempt["segment"] is None for attempt in answer["submitted"])


def test_without_the_patches_the_hooks_refuse_and_nothing_reaches_the_engine(answers):
    """Negative control: upstream, repaired so far that it starts."""
    answer = answers("repaired")
    state, detail = answer["states"]["partial-attempts"]
    assert state == "INCOMPATIBLE" and "carry-stop-reason-through-partial-server" in detail
    assert all(attempt["segment"] is None for attempt in answer["yield"]["submitted"])
    assert max(attempt["max_tokens"] for attempt in answer["yield"]["submitted"]) > BUDGET
    assert all(mask for mask in (row["mask"] for row in answer["soft"]["rows"]))


@pytest.mark.hook("partial-server-control")
def test_the_hooks_travel_with_the_classes_that_ray_ships_by_value(answers):
    methods = sorted(function.__name__ for function in control_methods.METHODS)
    assert answers("full")["by-value"] == {"carried": ["partial-group", "partial-members"], "methods": methods}
    assert answers("alone")["by-value"] == {"carried": [], "methods": []}


def test_every_hook_of_the_worker_is_settled(answers):
    states = answers("full")["states"]
    odd = {slug: row for slug, row in states.items() if row[0] not in ("APPLIED", "NOT_NEEDED")}
    assert not odd, sorted(odd)
    applied = {slug for slug, (state, _) in states.items() if state == "APPLIED"}
    assert applied >= {"segment-config-key", "register-grpo-segment", "partial-group", "partial-members",
                       "partial-attempts", "partial-rows-are-masked", "partial-server-control"}
