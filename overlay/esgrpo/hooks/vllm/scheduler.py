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
    releases=(Release("vllm", ">=0.24,<0.29", {"0.24.0": "40c577ab1da2558b", "0.28.0": "d017e8d8a42c85db"}),),
    remove_when="vLLM offers a per-request callback at token boundaries",
    features=("observe",),
    relies_on=("vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
               "vllm.v1.core.sched.scheduler:Scheduler.finish_requests",
               "vllm.v1.core.sched.scheduler:Scheduler.add_request",
               "vllm.v1.core.sched.scheduler:Scheduler._free_request"),
)


def build(original):
    @functools.wraps(original)
    def get_scheduler_cls(self):
        from esgrpo.hooks.vllm import segment_mixin

        return segment_mixin.mixed_with(original(self))

    return get_scheduler_cls
