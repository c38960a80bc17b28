"""What is resumed: a response after an abort or a yield (how long its client waits, what its attempts may make
together), prompt groups after a restart. Pure."""

from __future__ import annotations

FIRST_WAIT = 0.01  # seconds after the first attempt without a token
LONGEST_WAIT = 1.0  # seconds; what verl waits always


class ResumeWait:
    """Waits of one response, in seconds.

    An attempt that brought tokens met a server that pauses: it holds the next attempt itself, waiting adds nothing.
    An attempt without any may have been rejected at once, so the wait doubles or the client would spin. `steady`
    keeps verl's second where others count on a moment with no request in flight, or on its replica having left the
    load balancer.
    """

    def __init__(self, steady: bool = False):
        self.steady = steady
        self._last = 0.0

    def after(self, tokens: int) -> float:
        """Wait after an aborted attempt of this many tokens."""
        if self.steady:
            return LONGEST_WAIT
        self._last = 0.0 if tokens else min(max(2 * self._last, FIRST_WAIT), LONGEST_WAIT)
        return self._last


def unlimited_budget(prompt_tokens: int, prompt_length: int, response_length: int) -> int:
    """Tokens that verl's server gives a call without a limit, from the prompt of its first attempt.

    Of several turns the later ones have the earlier ones in their prompt: with a whole response each, they would
    decode what the agent loop cuts off. One token is the least that vLLM takes.
    """
    return max(1, min(response_length, prompt_length + response_length - prompt_tokens))


def reissued_words(groups: int, finished: int, tokens: int, running: int) -> str:
    """What a restart generates a second time: prompt groups, their responses that had ended and the tokens of these."""
    return (f"restart: {groups} prompt groups were unfinished and start anew: {finished} responses that had ended "
            f"({tokens} tokens) are generated a second time, {running} that had not lose what they had")
