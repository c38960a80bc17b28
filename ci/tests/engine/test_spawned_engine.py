"""The overlay in vLLM's real AsyncLLM with its spawned EngineCore, against vLLM without the overlay."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]

LEFT = {"counts": [0, 0], "requests": 0, "kv": 0.0}  # nothing runs, waits or holds KV blocks


def tokens(run: dict) -> dict[str, list[int]]:
    return {label: answer["tokens"] for label, answer in run["answers"].items()}


def ending(answer: dict) -> tuple:
    return answer["finish_reason"], answer["stop_reason"], len(answer["tokens"])


def assert_empty(probe: dict) -> None:
    assert {key: probe[key] for key in LEFT} == LEFT
    if "book" in probe:
        assert (probe["book"], probe["late"]) == ([0, 0, 0], 0)


def every_answer(scenario: dict):
    for run in scenario.values():
        if isinstance(run, dict) and "answers" in run:
            yield from run["answers"].values()


@pytest.mark.parametrize("scenario", ["quiet", "yield", "elastic", "rebuild"])
def test_the_mixin_is_in_front_of_the_scheduler(played, scenario):
    assert played(scenario)["class"] == "SegmentScheduler"


@pytest.mark.hook("segment-scheduler", "engine-core-utilities")
def test_hooks_reach_the_spawned_engine_core(played):
    report = played("quiet")["report"]
    states = {row["slug"]: row["state"] for row in report["hooks"]}
    assert report["process"] == "engine-core"
    assert states["segment-scheduler"] == states["engine-core-utilities"] == "APPLIED"
    assert [row for row in report["hooks"] if row["needed"] and row["state"] not in ("APPLIED", "NOT_NEEDED")] == []


def test_without_the_switch_nothing_is_there(played):
    bare = played("bare")
    assert bare["class"] == "Scheduler"
    assert "has no attribute 'esgrpo_report'" in bare["report"]
    assert {answer["payload"] for answer in every_answer(bare)} == {None}


def test_vllm_equals_itself(played):
    first, second = played("bare")["sampled"]
    assert tokens(first) == tokens(second)
    assert len({tuple(t) for t in tokens(first).values()}) == 8


def test_segments_without_a_decision_change_no_token(played):
    with_segments, alone = played("quiet")["sampled"], played("bare")["sampled"][0]
    assert tokens(with_segments) == tokens(alone)
    assert {ending(a) for a in with_segments["answers"].values()} == {("length", None, 40)}
    # Boundaries were looked at: 16 and 32 of 40 tokens.
    assert {a["payload"]["boundaries"] for a in with_segments["answers"].values()} == {2}


def batches(run: dict) -> list:
    return run["steps"]


def test_vllm_schedules_the_same_batches_twice(played):
    first, second = played("bare")["mixed"]
    assert (tokens(first), batches(first)) == (tokens(second), batches(second))
    assert len({tuple(t) for t in tokens(first).values()}) == 12
    assert len({tuple(label for label, _ in step) for step in batches(first)}) > 8  # batches do change


@pytest.mark.parametrize("scenario", ["off", "elastic"])
def test_without_a_decision_the_batches_are_vllms(played, scenario):
    """All requests queued before the first step, seeded, fixed weights: same batches, same tokens."""
    run, alone = played(scenario)["mixed"], played("bare")["mixed"][0]
    assert batches(run) == batches(alone)
    assert tokens(run) == tokens(alone)
    # Here the CPU platform of the overlay computes linear layers in another order than vLLM's own.
    for label, answer in run["answers"].items():
        assert answer["logprobs"] == pytest.approx(alone["answers"][label]["logprobs"], abs=1e-4)
    off = played("off")["mixed"]["answers"]
    assert {k: a["logprobs"] for k, a in run["answers"].items()} == {k: a["logprobs"] for k, a in off.items()}
    payloads = [answer["payload"] for answer in run["answers"].values()]
    if scenario == "off":
        assert (played("off")["class"], payloads) == ("Scheduler", [None] * 12)
    else:
        assert {payload["outcome"] for payload in payloads} == {"finish"}
        assert sum(payload["boundaries"] for payload in payloads) > 30  # they were looked at


def test_vllm_alone_lets_a_loop_run(played):
    looping = played("bare")["looping"]["answers"]
    assert ending(looping["1"]) == ("length", None, 96)
    assert set(looping["1"]["tokens"]) == {65}
    assert min(len(set(looping[label]["tokens"])) for label in "023") > 40  # the others do not loop


def test_a_loop_is_pruned_at_the_first_look(played):
    answer = played("quiet")["looping"]["answers"]["1"]
    assert ending(answer) == ("length", "pruned", 32)
    assert set(answer["tokens"]) == {65}
    assert len(answer["logprobs"]) == 32
    assert (answer["payload"]["outcome"], answer["payload"]["rule"]) == ("prune", "repetition")


def test_pruning_one_leaves_the_others_alone(played):
    pruned, alone = tokens(played("quiet")["looping"]), tokens(played("bare")["looping"])
    assert {label: pruned[label] for label in "023"} == {label: alone[label] for label in "023"}


def test_a_yield_comes_at_every_boundary(played):
    for attempts in played("yield")["attempts"].values():
        assert [ending(a) for a in attempts[:-1]] == [("length", "segment", 16)] * 5
        assert {(a["payload"]["outcome"], a["payload"]["rule"]) for a in attempts[:-1]} == {("yield", "boundary")}
        assert ending(attempts[-1]) == ("length", None, 16)  # the budget ends with the sixth: nothing to hand back
        assert all(len(a["logprobs"]) == 16 for a in attempts)


def test_a_yield_counts_tokens_of_earlier_attempts(played):
    assert ending(played("yield")["unaligned"]) == ("length", "segment", 5)  # 27 before: the boundary is at 32


def test_yielded_and_submitted_again_is_the_uninterrupted_response(played):
    assert played("yield")["carried"] == tokens(played("bare")["greedy"])


def test_a_group_is_finished_running_and_waiting(played):
    run = played("quiet")["finish"]
    seen, before, found = run["extra"]["seen"], run["extra"]["before"], run["extra"]["found"]
    assert before["counts"] == [4, 3] and before["book"][0] == 7
    assert found == [4, 0]  # four members of a; nobody of an unknown group
    for label in ("a0", "a1"):  # the step after the call is their last
        assert ending(run["answers"][label]) == ("length", "pruned", seen[label] + 1)
    for label in ("a2", "a3"):  # without a place: no response is empty, they end with their first token
        assert ending(run["answers"][label]) == ("length", "pruned", 1)
    for label in ("b0", "b1", "b2"):
        assert ending(run["answers"][label]) == ("length", None, 400)


def test_progress_is_what_the_clients_have_seen(played):
    extra = played("quiet")["finish"]["extra"]
    expected = {group: [[i, extra["seen"][f"{group}{i}"]] for i in range(members)]
                for group, members in (("a", 4), ("b", 3))}
    assert extra["progress"] == [expected["a"], expected["b"], []]
    assert max(tokens for _, tokens in extra["progress"][0]) >= 5


def test_one_member_is_finished_in_flight(played):
    run = played("quiet")["member"]
    assert run["extra"] == 1  # member 17 is not there
    reason, stop, count = ending(run["answers"]["2"])
    assert (reason, stop) == ("length", "pruned") and 5 <= count < 200
    assert {ending(run["answers"][label]) for label in "013"} == {("length", None, 200)}


def test_weight_versions_are_spans_of_tokens(played):
    run = played("quiet")["versions"]
    for answer in run["answers"].values():
        spans = answer["payload"]["spans"]
        assert [version for version, _ in spans] == [1, 2, 3]
        assert sum(count for _, count in spans) == len(answer["tokens"]) == 96
        assert spans[0][1] >= 10 and spans[0][1] + spans[1][1] >= 30


def test_windows_count_every_token(played):
    windows = played("quiet")["versions"]["extra"]
    spans = [answer["payload"]["spans"] for answer in played("quiet")["versions"]["answers"].values()]
    assert [window["version"] for window in windows] == [1, 2, 3]
    for position, window in enumerate(windows):
        assert window["tokens"] == sum(s[position][1] for s in spans)
    assert sum(window["tokens"] for window in windows) == 3 * 96
    logprobs = [value for answer in played("quiet")["versions"]["answers"].values() for value in answer["logprobs"]]
    assert sum(window["surprisal_tokens"] for window in windows) == len(logprobs)
    assert sum(window["surprisal"] for window in windows) == pytest.approx(-sum(logprobs), rel=1e-5)


def test_logprob_sum_is_the_sum_of_the_logprobs(played):
    tracked = [answer for answer in every_answer(played("quiet")) if answer["payload"]]
    assert tracked
    for answer in tracked:
        assert answer["payload"]["logprob_sum"] == pytest.approx(sum(answer["logprobs"]), rel=1e-5, abs=1e-5)
        assert len(answer["logprobs"]) == len(answer["tokens"])


def test_a_surplus_is_handed_back_with_every_token_that_was_made(played):
    """First those that wait, who have none: vLLM's front end answers for them, and the place that the third of them
    gives up may start one of them before the engine hears of it."""
    run = played("quiet")["surplus"]
    assert run["extra"]["found"] == 3
    for label in "45":
        answer, book = run["answers"][label], run["extra"]["books"][label]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("abort", None)
        made = sum(count for _, count in book["spans"]) if book else 0  # nobody asks for one without a token
        assert len(answer["tokens"]) <= made < 200 and (book is None or book["outcome"] == "abort")
    back, = [answer for answer in run["answers"].values() if answer["stop_reason"] == "segment"]
    assert (back["payload"]["outcome"], back["payload"]["rule"]) == ("yield", "surplus")
    assert 5 <= len(back["tokens"]) == sum(count for _, count in back["payload"]["spans"]) < 200
    stay = [answer for answer in run["answers"].values() if len(answer["tokens"]) == 200]
    assert len(stay) == 3


def test_pause_abort_closes_the_book(played):
    run = played("quiet")["abort"]
    assert {answer["finish_reason"] for answer in run["answers"].values()} == {"abort"}
    assert_empty(run["extra"])


@pytest.mark.parametrize("way", ["keep", "rebuild"])
def test_pause_keep_goes_on_where_it_was(played, way):
    run = played("quiet")[way]
    extra = run["extra"]
    assert extra["first"] == extra["second"]
    assert extra["probe"]["book"][0] == extra["probe"]["requests"] == 4
    assert tokens(run) == tokens(played("bare")["greedy"])


@pytest.mark.parametrize("scenario", ["elastic", "rebuild"])
def test_a_kept_request_lives_through_new_weights(played, scenario):
    """Tokens go on, the budget is kept, and every token has the version of the weights that made it."""
    run = played(scenario)["kept"]
    window, seen = run["extra"]["window"], dict(run["extra"]["seen"])
    assert window["kept"] == 6 and window["in_flight"] == 0 and "abort" not in window["outcomes"]
    assert min(seen[i] for i in range(4)) >= 20 and (seen[4], seen[5]) == (0, 0)
    for label, answer in run["answers"].items():
        made = seen[int(label)]
        assert answer["payload"]["spans"] == ([[1, made], [2, 96 - made]] if made else [[2, 96]])
        assert ending(answer) == ("length", None, 96)
        assert answer["payload"]["boundaries"] == 5
        assert answer["payload"]["logprob_sum"] == pytest.approx(sum(answer["logprobs"]), rel=1e-5, abs=1e-5)
    # Negative control: with the old weights to the end the responses are others.
    assert all(tokens(run)[label] != tokens(played(scenario)["before"])[label] for label in run["answers"])
    assert played(scenario)["last"]["kept"] == 0  # nobody was there any more


def after_the_sync(played, scenario) -> dict[str, tuple]:
    """What kept requests made under the new weights, and what a new request with the same context makes: log-probs."""
    scenario = played(scenario)
    return {label: (scenario["kept"]["answers"][label]["logprobs"][-len(answer["logprobs"]):], answer["logprobs"])
            for label, answer in scenario["again"]["answers"].items()}


def test_rebuilt_kv_is_that_of_the_new_weights(played):
    for kept, again in after_the_sync(played, "rebuild").values():
        assert kept == pytest.approx(again, abs=1e-4)
    assert played("rebuild")["kept"]["extra"]["probe"]["counts"] == [0, 6]  # all were preempted for it
    assert played("rebuild")["kept"]["extra"]["window"]["kv_ages"] == [[0, 6]]


def test_kept_kv_is_that_of_the_old_weights(played):
    """That the two differ shows that nothing was prefilled again; the age says by how many versions."""
    for kept, again in after_the_sync(played, "elastic").values():
        assert abs(kept[0] - again[0]) > 0.01
    assert played("elastic")["kept"]["extra"]["probe"]["counts"] == [4, 2]
    assert played("elastic")["kept"]["extra"]["window"]["kv_ages"] == [[0, 2], [1, 4]]  # two waited, without KV


def test_new_requests_do_not_find_old_kv(played):
    """Negative control: with requests running, vLLM's own reset leaves the cache as it is."""
    assert played("quiet")["shared"]["extra"]["cached"] > 0
    assert played("elastic")["shared"]["extra"]["cached"] == played("rebuild")["shared"]["extra"]["cached"] == 0


@pytest.mark.parametrize("name", ["bare", "quiet", "yield", "elastic", "rebuild"])
def test_nothing_is_left_behind(played, name):
    scenario = played(name)
    probes = [run["after"] for run in scenario.values() if isinstance(run, dict) and "after" in run]
    probes += [scenario["after"]] if "after" in scenario else []
    assert probes
    for probe in probes:
        assert_empty(probe)
