"""Who may begin to decode while memory is scarce: a part of the KV cache stays free for requests that already run.

A request that is let into the last free blocks takes what those beside it grow into with every step. One of them is
preempted then, loses its KV cache, comes back as soon as it fits, and is preempted again. vLLM has the remedy as
`watermark` from 0.24 on (pull request 44594), off by default.
"""

from __future__ import annotations


def held_back(free: float, need: float, headroom: float) -> bool:
    """True when a request that needs `need` of `free` would fit, but leaves less than `headroom`; all of one unit,
    blocks or tokens of KV cache. Ask only while others run: an empty engine waits for nobody."""
    return need <= free < need + headroom
