"""Steps one of vLLM's scheduler classes with scripted requests and a scripted model; no worker, no weights."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bench.scripted_scheduler import make_request, make_scheduler, model_output

EOS = 7
LOOP = 100  # the token of a request that repeats itself; others make LOOP + i as their i-th token
BLOCKS = 256  # of 16 tokens: enough for every script; fewer make the scheduler preempt
TOLERANCE = 1e-4  # of a log-prob sum: single precision, up to 60 tokens


def expect(found, wanted, what: str) -> None:
    """AssertionError in one line, also where pytest does not rewrite assertions."""
    if found != wanted:
        raise AssertionError(f"{what}: found {found}, wanted {wanted}")


class Player:
    """A scheduler of class `cls` and its clients. `segment` None: `cls` is upstream's own class.

    `lag` steps are scheduled before the oldest output is handed in, as EngineCore.step_with_batch_queue does under
    async scheduling.
    """

    def __init__(self, config, cls: type, segment: dict | None, lag: int, blocks: int = BLOCKS):
        self.lag = lag
        self.scheduler = make_scheduler(config, blocks, cls)
        if segment is not None:
            from esgrpo import config as settings

            self.scheduler._segment_start(settings.parse(segment))
        self.made = defaultdict(int)  # tokens that the model sampled for a request, delivered or not
        self.tokens, self.logprobs, self.ends = defaultdict(list), defaultdict(list), {}
        self.script = {}
        self.queue = []  # scheduled, output not yet handed in

    def add(self, key: str, eos_at: int | None = None, loop: bool = False, **fields) -> None:
        request = make_request(key, **fields)
        request.sampling_params.stop_token_ids = [EOS]
        self.script[key] = eos_at, loop
        self.scheduler.add_request(request)

    def _sample(self, scheduled: dict[str, int]):
        order, requests = list(scheduled), self.scheduler.requests
        silent = {key for key in order if requests[key].num_computed_tokens < requests[key].num_tokens}
        tokens = []
        for key in order:
            eos_at, loop = self.script[key]
            i = self.made[key]
            tokens.append(EOS if i == eos_at else LOOP if loop else LOOP + i)
            self.made[key] += key not in silent
        values = np.asarray([-0.01 * (self.made[key] + len(key)) for key in order], dtype=np.float32)
        return model_output(order, np.asarray(tokens, dtype=np.int64), values, silent)

    def step(self) -> None:
        """One turn of EngineCore's loop: fill the queue of batches first, then take the oldest output."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.queue.append((output, self._sample(output.num_scheduled_tokens)))
            if len(self.queue) <= self.lag and (output.num_scheduled_tokens or self.scheduler.has_requests()):
                return
        if self.queue:
            self.hand_in()

    def hand_in(self) -> None:
        for client in self.scheduler.update_from_output(*self.queue.pop(0)).values():
            for output in client.outputs:
                key = output.request_id
                self.tokens[key] += output.new_token_ids
                if output.new_logprobs is not None:
                    self.logprobs[key] += np.asarray(output.new_logprobs.logprobs)[:, 0].tolist()
                if output.finish_reason is not None:
                    expect(key in self.ends, False, f"{key} ended before")
                    payload = (output.kv_transfer_params or {}).get("esgrpo")
                    self.ends[key] = str(output.finish_reason), output.stop_reason, payload

    def run(self, steps: int = 1 << 12) -> None:
        """Up to `steps` turns; a scheduler that is not done after so many hangs."""
        bounded = steps < 1 << 12
        while steps and (self.scheduler.has_requests() or self.queue):
            self.step()
            steps -= 1
        expect(bounded or not self.scheduler.has_requests(), True, "every request ends")

    def drain(self) -> None:
        """Hand in what is in flight, without scheduling more."""
        while self.queue:
            self.hand_in()

    def counts(self) -> dict[str, int]:
        return {key: len(tokens) for key, tokens in self.tokens.items()}

    def assert_empty(self) -> None:
        """Neither upstream nor the mixin keeps anything of a request that has ended."""
        scheduler, book = self.scheduler, self.scheduler.segment_book
        expect((len(scheduler.running), len(scheduler.waiting), len(scheduler.requests)), (0, 0, 0), "requests left")
        expect(scheduler.kv_cache_manager.usage, 0.0, "KV cache in use")
        expect((book.tracked, book.pending, book._groups), ({}, {}, {}), "the book")
        expect(scheduler.segment_logprobs._late, {}, "rows that are still expected")

    def assert_accounted(self) -> None:
        """Window, spans and log-prob sums agree with what the client got."""
        window = self.scheduler.segment_set_version(1)
        expect(window["tokens"], sum(self.counts().values()), "tokens of the window")
        for key, (_, _, payload) in self.ends.items():
            expect(sum(count for _, count in payload["spans"]), len(self.tokens[key]), f"spans of {key}")
            off = abs(payload["logprob_sum"] - sum(self.logprobs[key]))
            expect(off < TOLERANCE, True, f"log-prob sum of {key}, off by {off}")
