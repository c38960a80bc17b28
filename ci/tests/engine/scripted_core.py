"""What bench.engine.replica needs of an EngineCore, around vLLM's real scheduler classes and a scripted model.

Under async scheduling the next step is scheduled before the output of this one is known, as in step_with_batch_queue;
the CPU platform never does that by itself.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from bench.common.scripted_scheduler import make_config, make_scheduler, model_output, upstream_class
from esgrpo.hooks.vllm import engine_core

BLOCK = 16  # tokens


class ScriptedCore:
    def __init__(self, asynchronous: bool, sequences: int, length: int, blocks: int):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        from esgrpo.hooks.vllm.segment_mixin import mixed_with

        config = make_config(asynchronous, sequences, length, max(512, sequences))
        config.cache_config.enable_prefix_caching = True
        self.scheduler = make_scheduler(config, blocks, mixed_with(upstream_class(asynchronous)))
        self.batch_queue = deque() if asynchronous else None
        self.from_request = Request.from_engine_core_request
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)

    def preprocess_add_request(self, request):
        return self.from_request(request, self.hasher), 0

    def add_request(self, request, _wave):
        self.scheduler.add_request(request)

    def abort_requests(self, keys):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED)

    def pause_scheduler(self, mode, clear_cache):
        from vllm.v1.core.sched.interface import PauseState

        assert (mode, clear_cache) == ("keep", False)
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)

    def resume_scheduler(self):
        from vllm.v1.core.sched.interface import PauseState

        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def reset_prefix_cache(self):
        return self.scheduler.reset_prefix_cache()

    def post_step(self, _executed):
        pass

    def _sample(self, scheduled):
        order, requests = list(scheduled), self.scheduler.requests
        silent = {key for key in order if requests[key].num_computed_tokens < requests[key].num_tokens}
        return model_output(order, np.full(len(order), 7), np.full(len(order), -1.0, dtype=np.float32), silent)

    def step_fn(self):
        scheduler, queue = self.scheduler, self.batch_queue
        if queue is None:
            if not scheduler.has_requests():
                return {}, False
            output = scheduler.schedule()
            return scheduler.update_from_output(output, self._sample(output.num_scheduled_tokens)), True
        if scheduler.has_requests():
            output = scheduler.schedule()
            queue.append((output, self._sample(output.num_scheduled_tokens)))
            if len(queue) < 2 and (output.num_scheduled_tokens or scheduler.has_requests()):
                return None, True
        return (scheduler.update_from_output(*queue.popleft()) if queue else None), True


for function in engine_core.UTILITIES:
    setattr(ScriptedCore, function.__name__, function)


class LocalFleet:
    """bench.engine.fleet.Fleet with its replicas in this process, a step of each at every look."""

    def __init__(self, count: int, asynchronous: bool, sequences: int, length: int, blocks: int):
        from bench.engine.probe import Probe

        self.messages: list[list] = [[] for _ in range(count)]
        self.replicas = [Probe(ScriptedCore(asynchronous, sequences, length, blocks), messages.append)
                         for messages in self.messages]
        self.pipes, self.blocks, self.block_size = self.replicas, blocks, BLOCK
        self.batched_tokens, self.longest = max(512, sequences), length

    def send(self, number, commands):
        for name, *arguments in commands:
            getattr(self.replicas[number], f"do_{name}")(*arguments)

    def poll(self, _seconds):
        for replica in self.replicas:
            replica.turn()
        found = [(number, message) for number, messages in enumerate(self.messages) for message in messages]
        for messages in self.messages:
            messages.clear()
        return found

    def ask(self, command, answer, only=None):
        asked = list(range(len(self.replicas))) if only is None else only
        for number in asked:
            self.send(number, [command])
        found = {}
        while len(found) < len(asked):
            for number, (*_, events) in self.poll(0):
                for kind, _, *values in events:
                    if kind == answer:
                        found[number] = values
        return [found[number] for number in asked]
