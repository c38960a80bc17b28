"""Swaps the rollouter's queue of prompts for one that is ordered by forecast and holds no more than what runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from esgrpo.engine import Hook

_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"
HOOK = Hook(
    slug="prompt-queue",
    target=f"{_ROLLOUTER}.__init__",
    process=("rollouter",),
    kind="wrap",
    why="verl's pending_queue is an asyncio.Queue of 128 prompts in the order of the data set: the longest may start "
        "last, and prompts are chosen long before the outcomes they should be chosen by",
    remove_when="verl's rollouter takes a queue class from the config",
    features=("routing", "sampler"),
    relies_on=(f"{_ROLLOUTER}._feed_samples", f"{_ROLLOUTER}._processor_worker",
               f"{_ROLLOUTER}._streaming_generation_main", f"{_ROLLOUTER}.set_max_required_samples"),
    without=(("==0.7.0", "the recipe has another rollouter, whose prompts stay in order"),),
)


def around(call):
    rollouter = call.owner
    call()
    rollouter.pending_queue = queue_for(rollouter)


class OrderedQueue(asyncio.Queue):
    """asyncio.Queue with another order and a bound that may change; the end signal (None) leaves last.

    Only what asyncio.Queue names as overridable is, and what reads its deque: waiting, waking, cancelling, task_done
    and join are its own.
    """

    def __init__(self, order, tokens_of: Callable[[object], float], bound: Callable[[], int]):
        self.order, self._tokens_of, self._bound = order, tokens_of, bound
        self._end_signals = 0
        super().__init__()

    def _init(self, maxsize):
        pass

    def _put(self, item):
        if item is None:
            self._end_signals += 1
        else:
            self.order.push(item, self._tokens_of(item))

    def _get(self):
        if len(self.order):
            return self.order.pop()
        self._end_signals -= 1
        return None

    def qsize(self) -> int:
        return len(self.order) + self._end_signals

    def empty(self) -> bool:
        return self.qsize() == 0

    @property
    def maxsize(self) -> int:
        return self._bound()

    def full(self) -> bool:
        return self.qsize() >= self.maxsize


def queue_for(rollouter) -> OrderedQueue:
    """The queue that stands in for the rollouter's empty one, in front of the same methods."""
    from esgrpo import config
    from esgrpo.algo.routing import PromptQueue
    from esgrpo.hooks.verl.metrics import decision_counts
    from esgrpo.hooks.verl.prompts.prompt_forecasts import key_of
    from esgrpo.hooks.verl.prompts.prompt_history import history_of

    routing, before = config.current().routing, rollouter.pending_queue.maxsize

    def tokens_of(sample) -> float:
        if not routing.enable:
            return 0.0
        forecast = history_of(rollouter).forecast(key_of(sample) or "")
        decision_counts.add("routing", known=forecast["known"])
        return forecast["tokens"]

    def bound() -> int:
        """Known only once the replicas are; it changes when replicas come and go."""
        return routing.lookahead or rollouter.max_concurrent_samples or before

    return OrderedQueue(PromptQueue(routing.ageing, by_length=routing.enable), tokens_of, bound)
