"""Steps one of vLLM's scheduler classes with scripted requests and a scripted model; no worker, no weights."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bench.common.scripted_scheduler import block_hasher, drafted_output, make_request, make_scheduler, model_output

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

    def __init__(self, config, cls: type, segment: dict | None, lag: int, blocks: int = BLOCKS, caching: bool = False):
        self.lag = lag
        config.cache_config.enable_prefix_caching = caching
        self.hasher = block_hasher(config)
        self.scheduler = make_scheduler(config, blocks, cls)
        if segment is not None:
            from esgrpo import config as settings

            self.scheduler._segment_start(settings.parse(segment))
        self.made = defaultdict(int)  # tokens that the model sampled for a request, delivered or not
        self.tokens, self.logprobs, self.ends = defaultdict(list), defaultdict(list), {}
        self.script = {}
        self.queue = []  # scheduled, output not yet handed in
        self.drafts = 0  # tokens that are drafted for every request and step
        self.trimmed = 0  # tokens beyond an end that upstream did not deliver

    def speculate(self, drafts: int) -> None:
        """From now on a step holds up to `drafts` accepted tokens of each request beside its own one."""
        self.drafts = drafts
        scheduler = self.scheduler
        scheduler.num_spec_tokens = scheduler.num_lookahead_tokens = drafts
        if self.lag:
            scheduler._spec_token_placeholders = [-1] * drafts

    def add(self, key: str, eos_at: int | None = None, loop: bool = False, stop: tuple[str, ...] = (),
            **fields) -> None:
        request = make_request(key, hasher=self.hasher, **fields)
        request.sampling_params.stop_token_ids, request.sampling_params.stop = [EOS], list(stop)
        self.script[key] = eos_at, loop
        self.scheduler.add_request(request)

    def _sample(self, output):
        scheduled, requests = output.num_scheduled_tokens, self.scheduler.requests
        order = list(scheduled)
        silent = {key for key in order if requests[key].num_computed_tokens < requests[key].num_tokens}
        tokens, values = [], []
        for key in order:
            drafted = len(output.scheduled_spec_decode_tokens.get(key, ()))
            accepted = self.made[key] % (drafted + 1)  # of the others all are, and one is rejected, in turn
            tokens.append([self._token(key, self.made[key] + i) for i in range(1 + accepted)])
            self.made[key] += 0 if key in silent else 1 + accepted
            values.append([-0.01 * (self.made[key] - i + len(key)) for i in reversed(range(1 + accepted))])
        if self.drafts and order:
            places = range(len(order))
            return drafted_output(order, *([[] if order[place] in silent else column[place] for place in places]
                                           for column in (tokens, values)))
        return model_output(order, np.asarray([made[0] for made in tokens], dtype=np.int64),
                            np.asarray([row[0] for row in values], dtype=np.float32), silent)

    def _token(self, key: str, i: int) -> int:
        eos_at, loop = self.script[key]
        return EOS if i == eos_at else LOOP if loop else LOOP + i

    def _draft(self) -> None:
        """What the worker drafted after the last step; async scheduling puts placeholders in by itself."""
        for request in self.scheduler.running if self.drafts and not self.lag else ():
            if request.num_computed_tokens >= request.num_tokens - 1:
                request.spec_token_ids = [LOOP] * self.drafts

    def step(self) -> None:
        """One turn of EngineCore's loop: fill the queue of batches first, then take the oldest output."""
        if self.scheduler.has_requests():
            self._draft()
            output = self.scheduler.schedule()
            self.queue.append((output, self._sample(output)))
            if len(self.queue) <= self.lag and (output.num_scheduled_tokens or self.scheduler.has_requests()):
                return
        if self.queue:
            self.hand_in()

    def hand_in(self) -> None:
        scheduled, sampled = self.queue.pop(0)
        made = {key: len(tokens) for key, tokens in zip(sampled.req_ids, sampled.sampled_token_ids, strict=True)}
        for client in self.scheduler.update_from_output(scheduled, sampled).values():
            for output in client.outputs:
                key = output.request_id
                self.trimmed += made.get(key, 0) - len(output.new_token_ids)
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
