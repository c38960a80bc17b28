"""The replica's side of tau(b): a fixed batch at a fixed context, timed inside the engine's own process."""

from __future__ import annotations

import random
import statistics
import time

from bench.engine.replica import Replica

SETTLE_STEPS = 8  # after the prefill: batch queue full, clocks up
TOKEN_LIMIT = 100  # prompts are random tokens below this; every vocabulary has them


class Probe(Replica):
    """Also times steps. One batch at a time: prefill, decode as often as wanted, clear."""

    def timed_step(self) -> bool:
        if len(self.open) == 0:
            raise RuntimeError("all requests ended before the measurement did")
        return self.step()

    def _mean_tokens(self) -> float:
        """Tokens in the KV cache of a request."""
        return statistics.mean(attempt.prompt + attempt.done + len(attempt.tokens) for attempt in self.open.values())

    def do_prefill(self, batch: int, context: int, length: int, seed: int) -> None:
        """Submit `batch` requests with different prompts of `context` tokens; tells tokens per second until each has
        its first token."""
        rng, self.held = random.Random(seed), True
        begin = time.perf_counter()
        for number in range(batch):
            prompt = [rng.randrange(TOKEN_LIMIT) for _ in range(context)]
            self.do_submit(f"tau-{seed}-{number}", prompt, [], length, None)
        while any(not attempt.tokens for attempt in self.open.values()):
            self.timed_step()
        self.events.clear()
        self.tell("prefilled", batch * context / (time.perf_counter() - begin), len(self.scheduler.running))

    def do_decode(self, steps: int, windows: int) -> None:
        """Tells the milliseconds per step of every window, and how many requests ran all the time, and the
        tokens in the KV cache of each."""
        for _ in range(SETTLE_STEPS):
            self.timed_step()
        found, before = [], self._mean_tokens()
        for _ in range(windows):
            begin, made = time.perf_counter(), 0
            while made < steps:
                made += self.timed_step()
            found.append((time.perf_counter() - begin) / steps * 1e3)
        self.events.clear()
        self.tell("decoded", found, len(self.open), (before + self._mean_tokens()) / 2)

    def do_clear(self) -> None:
        for key in list(self.open):
            self.do_abort(self.open[key].sample)
        while self.has_work():
            self.step()
        self.core.reset_prefix_cache()
        self.held = False
        self.events.clear()
        self.tell("cleared")
