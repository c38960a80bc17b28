"""Puts SegmentMixin in front of whatever scheduler class vLLM picked."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="segment-scheduler",
    target="vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
    process=("engine-core",),
    kind="wrap",
    why="a boundary is decided where tokens are made. `scheduler_cls` would replace vLLM's (or Ascend's) own choice "
        "between sync, async and balancing schedulers; wrapping the answer composes with all of them",
    releases=(Release("vllm", ">=0.12,<0.34", {
        "0.12.0": "ab550ed1683213fe", "0.13.0": "a1cba0ef0e40475d", "0.18.0": "91cea0224ac02527",
        "0.18.1": "91cea0224ac02527", "0.20.2": "452478d96c44b84a", "0.23.0": "2a16377db9dbd638",
        "0.24.0": "40c577ab1da2558b", "0.28.0": "d017e8d8a42c85db", "0.30.0": "68249aae98666f43",
        "0.32.0": "9fd8b3dba1d3b594", "0.33.0": "574d3f29d06b934a",
    }),),
    remove_when="vLLM offers a per-request callback at token boundaries",
    features=("observe",),
    relies_on=("vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
               "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
               "vllm.v1.core.sched.scheduler:Scheduler.add_request",
               "vllm.v1.core.sched.scheduler:Scheduler._free_request"),
    without=(("<0.12", "EngineCore resolves the class itself (segment-scheduler-by-class)"),),
)


def build(original):
    @functools.wraps(original)
    def get_scheduler_cls(self):
        from esgrpo.hooks.vllm import segment_mixin

        return segment_mixin.mixed_with(original(self))

    return get_scheduler_cls
