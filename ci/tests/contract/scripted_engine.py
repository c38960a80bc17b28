"""A vLLM engine without a model: responses are scripted, boundaries are decided by the real SegmentBook.

All running requests make one token a step. What it does at a boundary is what SegmentMixin does in vLLM's scheduler;
the mixin itself is tested on real schedulers elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from esgrpo.algo.segments import CONTINUE, PRUNE, SegmentBook

FIRST_ID = 1000  # the first token of script k is FIRST_ID + k: a resumed prompt tells which script it belongs to
STOP_REASON = {PRUNE: "pruned", "yield": "segment"}


def log_prob(index: int) -> float:
    """Of the response's token at `index`, whatever attempt made it."""
    return -(index + 1) / 128  # exact in binary


class Running:
    def __init__(self, prompt, parameters, script, done):
        self.prompt, self.parameters, self.script, self.done = prompt, parameters, script, done
        self.tokens: list[int] = []
        self.outputs: asyncio.Queue = asyncio.Queue()


class ScriptedEngine:
    """`scripts`: the responses, each a list of token ids that starts with FIRST_ID + its position in the list."""

    def __init__(self, scripts, prompt_length: int, settings):
        self.scripts, self.prompt_length = scripts, prompt_length
        self.book = SegmentBook(settings)
        self.running: dict[str, Running] = {}
        self.submitted: list[dict] = []
        self.engine_core = self  # the server's way to utility methods
        self.steps = 0
        self._fresh = 0
        self._loop = None

    async def call_utility_async(self, name, *args):
        assert name == "esgrpo_finish"
        return self.book.ask_finish(*args)

    async def generate(self, prompt, sampling_params, request_id):
        ids = list(prompt["prompt_token_ids"])
        response = ids[self.prompt_length:]
        number = response[0] - FIRST_ID if response else self._fresh
        self._fresh += not response
        request = Running(ids, sampling_params, self.scripts[number], len(response))
        fields = (sampling_params.extra_args or {}).get("segment")
        self.submitted.append({"script": number, "prompt": len(ids), "max_tokens": sampling_params.max_tokens,
                               "segment": fields})
        self.running[request_id] = request
        if fields:
            self.book.add(request_id, fields["group"], fields["member"], fields["done_before"])
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        try:
            while True:
                output = await request.outputs.get()
                yield output
                if output.outputs[0].finish_reason:
                    return
        finally:  # cancelled from outside: vLLM aborts the request
            if self.running.pop(request_id, None) is not None:
                self.book.close(request_id, len(request.tokens))

    async def _run(self):
        while self.running:
            await asyncio.sleep(0.001)
            self.steps += 1
            ended = {}
            for key, request in self.running.items():
                request.tokens.append(request.script[request.done + len(request.tokens)])
                if request.done + len(request.tokens) == len(request.script):
                    ended[key] = "stop", None, "finish", ""
                elif len(request.tokens) == request.parameters.max_tokens:
                    ended[key] = "length", None, "finish", ""
            for key in self.book.advance():
                if key in self.running and key not in ended and key in self.book.tracked:
                    tokens = self.running[key].tokens
                    decision = self.book.look(key, tokens, (0.0, len(tokens)))  # an engine that is certain
                    if decision.outcome != CONTINUE:
                        ended[key] = "length", STOP_REASON[decision.outcome], decision.outcome, decision.rule
            for key, asked in self.book.take_pending(lambda key: len(self.running[key].tokens)).items():
                if key in self.running and key not in ended:
                    ended[key] = "length", STOP_REASON[asked.outcome], asked.outcome, asked.rule
            for key, request in list(self.running.items()):
                self._report(key, request, *ended.get(key, (None, None, "", "")))

    def _report(self, key, request, finish_reason, stop_reason, outcome, rule):
        """One cumulative RequestOutput, with the payload when it is the last."""
        payload = None
        if finish_reason:
            del self.running[key]
            item = self.book.close(key, len(request.tokens))
            payload = item and {"esgrpo": {"outcome": outcome, "rule": rule, "spans": item.spans,
                                           "boundaries": item.boundaries, "logprob_sum": 0.0,
                                           "replica": "0", "arrived": time.time()}}
        rows = [{token: SimpleNamespace(logprob=log_prob(request.done + i))} for i, token in enumerate(request.tokens)]
        completion = SimpleNamespace(token_ids=list(request.tokens), logprobs=rows, finish_reason=finish_reason,
                                     stop_reason=stop_reason)
        request.outputs.put_nowait(SimpleNamespace(outputs=[completion], kv_transfer_params=payload,
                                                   num_cached_tokens=0))
