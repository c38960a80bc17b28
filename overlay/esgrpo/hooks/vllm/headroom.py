"""kv_headroom at vLLM's scheduler: its `watermark` where it has one, else nobody is let in while too little is free.

Part of SegmentMixin. Releases before 0.24 are asked for their next request once a step, so that one step may let in as
many as its token budget allows before the headroom holds.
"""

from __future__ import annotations

import math

from esgrpo.algo.admission import held_back


class Headroom:
    """`blocks` of the KV cache stay free; 0: vLLM as it is. A larger `watermark` of the user's own stays."""

    def __init__(self, scheduler):
        self.manager, self.pool = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool
        self.own = getattr(self.manager, "watermark_blocks", None)  # None before vLLM 0.24
        self.blocks = self.held = 0  # held: requests that waited
        self.last = None  # of these

    def keep(self, share: float) -> None:
        """From now on this share of the cache stays free."""
        self.blocks = math.ceil(share * self.pool.num_gpu_blocks)
        if self.own is not None:
            self.manager.watermark_blocks = max(self.own, self.blocks)

    def most_running(self, scheduler) -> int:
        """How many requests may run after this step, when some run and some wait; counts who is held back."""
        request = scheduler.waiting.peek_request()
        need = -(-request.num_tokens // scheduler.block_size)  # what is in the prefix cache is counted, too
        if not held_back(self.pool.get_num_free_blocks(), need, self.blocks):
            return scheduler.max_num_running_reqs
        if len(scheduler.running) < scheduler.max_num_running_reqs and request.request_id != self.last:
            self.held, self.last = self.held + 1, request.request_id
        return len(scheduler.running) if self.own is None else scheduler.max_num_running_reqs

    def take_held(self) -> int:
        """Requests that waited since the last call."""
        held, self.held = self.held, 0
        return held
