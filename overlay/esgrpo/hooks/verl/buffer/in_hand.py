"""The sample that the running task of verl's rollouter is about to put. Every sample has a task of its own. No hook."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_SAMPLE: contextvars.ContextVar = contextvars.ContextVar("esgrpo_rollout_sample", default=None)


@contextlib.contextmanager
def holding(sample) -> Iterator[None]:
    token = _SAMPLE.set(sample)
    try:
        yield
    finally:
        _SAMPLE.reset(token)


def sample():
    """None outside of such a task, as for the signal that ends the data."""
    return _SAMPLE.get()
