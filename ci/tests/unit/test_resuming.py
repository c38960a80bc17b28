"""Waits before an aborted response is resumed, and the budget of its attempts."""

import pytest

from esgrpo.algo.resuming import FIRST_WAIT, LONGEST_WAIT, ResumeWait, unlimited_budget


def test_after_tokens_nobody_waits():
    wait = ResumeWait()
    assert [wait.after(tokens) for tokens in (5, 1, 900)] == [0, 0, 0]


@pytest.mark.parametrize("rejections", [1, 8, 2000])
def test_rejections_are_spaced_out_and_bounded(rejections):
    wait = ResumeWait()
    waits = [wait.after(0) for _ in range(rejections)]
    assert waits[0] == FIRST_WAIT and waits == sorted(waits) and max(waits) <= LONGEST_WAIT
    assert rejections < 8 or waits[-1] == LONGEST_WAIT
    assert wait.after(1) == 0 and wait.after(0) == FIRST_WAIT


def test_a_steady_wait_is_that_of_verl():
    wait = ResumeWait(steady=True)
    assert [wait.after(tokens) for tokens in (5, 0, 0)] == [LONGEST_WAIT] * 3


@pytest.mark.parametrize("prompt_tokens, budget", [
    (1, 1024), (512, 1024),  # a first turn: a short prompt gives nobody a longer response
    (513, 1023), (512 + 900, 124), (512 + 1023, 1), (512 + 1024, 1), (4096, 1)])  # at the end vLLM wants one token
def test_a_later_turn_has_what_the_earlier_ones_left(prompt_tokens, budget):
    assert unlimited_budget(prompt_tokens, prompt_length=512, response_length=1024) == budget
