"""LogprobSums by example, on the layouts that vLLM's model runners produce."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from esgrpo.hooks.vllm.logprob_sums import LogprobSums

NAN, INF = float("nan"), float("inf")


def output(keys, sampled, rows=None, starts=None):
    """A ModelRunnerOutput with `sampled[i]` tokens of request i and one log-prob per row."""
    logprobs = None if rows is None else SimpleNamespace(
        logprobs=np.array([[row, -7.0] for row in rows], dtype=np.float32), cu_num_generated_tokens=starts)
    return SimpleNamespace(req_ids=list(keys), sampled_token_ids=[[1] * count for count in sampled], logprobs=logprobs,
                           req_id_to_index={key: index for index, key in enumerate(keys)})


def add(sums, keys, sampled, rows=None, starts=None, alive="abc"):
    return sums.add(output(keys, sampled, rows, starts), dict.fromkeys(keys, 1), alive)


def test_one_token_per_request():
    sums = LogprobSums()
    assert add(sums, "ab", [1, 1], [-1, -2]) == 2
    assert add(sums, "ab", [1, 1], [-4, -8]) == 2
    assert (sums.pop("a"), sums.pop("b"), sums.pop("c")) == (-5, -10, 0)


@pytest.mark.parametrize("junk", [-9.0, -INF, NAN])
@pytest.mark.parametrize("sampled, rows, starts", [
    ([1, 0, 1], [-1, None, -2], None),  # a prefill chunk in the middle, one row per request
    ([2, 0, 1], [-0.5, -0.5, None, -2], [0, 2, 3, 4]),  # accepted drafts, with the end appended
    ([1, 0, 2], [-1, None, None, None, None, None, -1, -1, None], [0, 3, 6, 9]),  # rejected drafts keep their rows
    ([1, 0, 2], [-1, None, None, None, None, None, -1, -1, None], [0, 3, 6]),
])
def test_only_rows_of_sampled_tokens_count(sampled, rows, starts, junk):
    sums = LogprobSums()
    assert add(sums, "abc", sampled, [junk if row is None else row for row in rows], starts) == sum(sampled)
    assert (sums.pop("a"), sums.pop("b"), sums.pop("c")) == (-1, 0, -2)


def test_a_preempted_request_finds_its_sum_again():
    sums = LogprobSums()
    add(sums, "ab", [1, 1], [-1, -2])
    add(sums, "b", [1], [-2])
    add(sums, "ba", [1, 1], [-2, -1])
    assert (sums.pop("a"), sums.pop("b")) == (-2, -6)


def test_a_preempted_request_may_end_while_it_waits():
    sums = LogprobSums()
    add(sums, "ab", [1, 1], [-1, -2])
    add(sums, "b", [1], [-2])
    assert (sums.pop("a"), sums.pop("a")) == (-1, 0)


def test_what_arrives_too_late_is_neither_counted_nor_kept():
    sums = LogprobSums()
    assert add(sums, "ab", [1, 1], [-1, -2]) == 2
    sums.ended("a", 1)
    assert sums.pop("a") == -1
    assert add(sums, "ab", [1, 1], [-1, -2], alive="b") == 1
    assert add(sums, "b", [1], [-2], alive="b") == 1
    assert (sums._order, sums._parked, sums._late) == (["b"], {}, {})
    assert sums.pop("b") == -6


def test_a_request_that_nobody_tracks_is_forgotten():
    sums = LogprobSums()
    add(sums, "ab", [1, 1], [-1, -2])
    add(sums, "b", [1], [-2], alive="b")
    assert sums._parked == {}


def test_steps_without_tokens_or_logprobs():
    sums = LogprobSums()
    assert add(sums, "", []) == 0
    assert add(sums, "ab", [1, 1]) == 2
    assert (sums.pop("a"), sums._order) == (0, [])


@pytest.mark.parametrize("beyond", [-9.0, -INF])
def test_what_follows_an_end_is_taken_back(beyond):
    """An accepted draft holds the end of "a": the last two of its four tokens are never delivered."""
    sums = LogprobSums()
    add(sums, "ab", [1, 1], [-1, -2])
    assert add(sums, "ab", [4, 2], [-1, -1, beyond, -3, -4, -4], [0, 4, 6]) == 6
    assert sums.several == {"a": 4, "b": 2}
    assert (sums.trim("a", 2), sums.trim("a", 2), sums.trim("b", 2), sums.trim("c", 0)) == (2, 0, 0, 0)
    assert (sums.pop("a"), sums.pop("b")) == (-3, -10)


def test_tokens_are_trimmed_without_logprobs_and_without_rows():
    sums = LogprobSums()
    assert add(sums, "a", [3]) == 3 and sums.trim("a", 1) == 2 and sums.pop("a") == 0
    assert add(sums, "a", [3], [-1]) == 3 and sums.trim("a", 2) == 1 and sums.pop("a") == -1  # vLLM < 0.12: one row
