"""Sums of sampled log-probs per request, one vectorised operation a step."""

from __future__ import annotations

import numpy as np


class LogprobSums:
    """Accumulates in the order of the model runner's batch; re-ordered only when the batch changes."""

    def __init__(self):
        self._order: list[str] = []
        self._sums = np.zeros(0)
        self._parked: dict[str, float] = {}  # preempted: in no batch now, may come back

    def add(self, output, alive) -> int:
        """Add one ModelRunnerOutput; returns the number of sampled tokens in it.

        `alive` holds the ids of requests that still exist: under async scheduling a request that has ended may have
        one more row in flight, which must not stay behind.
        """
        sampled = output.sampled_token_ids
        if not sampled:
            return 0
        counts = np.fromiter(map(len, sampled), dtype=np.int64, count=len(sampled))
        total = int(counts.sum())
        logprobs = output.logprobs
        if logprobs is None:
            return total
        if output.req_ids != self._order:
            self._reorder(list(output.req_ids), alive)
        rows = np.asarray(logprobs.logprobs)[:, 0]  # column 0 is the sampled token
        starts = logprobs.cu_num_generated_tokens
        if starts is None and total == len(counts) == len(rows):
            self._sums += rows
        else:  # speculative decoding, or prefill chunks that sampled nothing
            starts = np.arange(len(counts)) if starts is None else np.asarray(starts[:len(counts)])
            running = np.concatenate(([0.0], np.cumsum(rows, dtype=np.float64)))
            self._sums += running[starts + counts] - running[starts]
        return total

    def _reorder(self, order: list[str], alive) -> None:
        known = {**self._parked, **dict(zip(self._order, self._sums.tolist(), strict=True))}
        self._sums = np.fromiter((known.pop(key, 0.0) for key in order), dtype=np.float64, count=len(order))
        self._order = order
        self._parked = {key: value for key, value in known.items() if key in alive}

    def pop(self, key: str) -> float:
        """The sum of an ended request; it is forgotten at the next change of the batch."""
        if key in self._parked:
            return self._parked.pop(key)
        try:
            index = self._order.index(key)
        except ValueError:
            return 0.0
        value, self._sums[index] = float(self._sums[index]), 0.0
        return value
