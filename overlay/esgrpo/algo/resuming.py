"""What is resumed: a response after an abort (how long its client waits), prompts in flight after a restart. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

FIRST_WAIT = 0.01  # seconds after the first attempt without a token
LONGEST_WAIT = 1.0  # seconds; what verl waits always


class ResumeWait:
    """Waits of one response, in seconds.

    An attempt that brought tokens met a server that pauses: it holds the next attempt itself, waiting adds nothing.
    An attempt without any may have been rejected at once, so the wait doubles or the client would spin. `steady`
    keeps verl's second where others count on a moment with no request in flight.
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


def reissued_words(groups: int, finished: int, tokens: int, running: int) -> str:
    """What a restart generates a second time: prompt groups, their responses that had ended and the tokens of these."""
    return (f"restart: {groups} prompt groups were unfinished and start anew: {finished} responses that had ended "
            f"({tokens} tokens) are generated a second time, {running} that had not lose what they had")


@dataclass(frozen=True)
class Drawn:
    """A prompt from its draw to its end. `draw`: position in the stream of the data loader, from 1, over the whole run.

    `prompt`: whatever its owner needs to issue it again. `responses` and `tokens` are what was generated for it.
    """

    draw: int
    epoch: int
    prompt: object
    was: str = ""  # sample under which an earlier start had issued it
    responses: int = 0
    tokens: int = 0


class InFlight:
    """Prompts that the data loader has given out and that are neither trained nor given up: what a restart gives back.

    A checkpoint holds the data loader's position and, without this, none of them. Invariant: each draw up to `drawn`
    is exactly one of waiting (given back, not issued yet), open (issued), or ended; so that over a chain of restarts
    each draw ends once in what the checkpoints kept.
    """

    def __init__(self, drawn: int = 0, waiting: Iterable[Drawn] = ()):
        self.drawn = self.restored = drawn
        self.waiting = deque(waiting)
        self.open: dict[str, Drawn] = {}

    def again(self, sample: str) -> Drawn | None:
        """The next prompt to issue again, from now on open as `sample`; None when none waits."""
        if not self.waiting:
            return None
        self.open[sample] = self.waiting.popleft()
        return self.open[sample]

    def took(self, sample: str, epoch: int, prompt) -> None:
        """The data loader has given out a prompt, which will be issued as `sample`."""
        self.drawn += 1
        self.open[sample] = Drawn(self.drawn, epoch, prompt)

    def generated(self, sample: str, responses: int, tokens: int) -> None:
        if sample in self.open:
            self.open[sample] = replace(self.open[sample], responses=responses, tokens=tokens)

    def ended(self, samples: Iterable[str]) -> None:
        """Trained or given up; samples that are not open are left alone."""
        for sample in samples:
            self.open.pop(sample, None)

    def to_give_back(self) -> list[Drawn]:
        """What a checkpoint has to hold, in order of the draws; nothing is known of their responses after it."""
        entries = [replace(entry, was=sample) for sample, entry in self.open.items()]
        return sorted([*self.waiting, *entries], key=lambda entry: entry.draw)
