"""Puts SegmentMixin in front of whatever scheduler class vLLM picked."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.vllm import mixin_sources

HOOK = Hook(
    slug="segment-scheduler",
    target="vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
    process=("engine-core",),
    kind="wrap",
    why="a boundary is decided where tokens are made. `scheduler_cls` would replace vLLM's (or Ascend's) own choice "
        "between sync, async and balancing schedulers; wrapping the answer composes with all of them",
    remove_when="vLLM offers a per-request callback at token boundaries",
    features=("observe",),
    relies_on=mixin_sources.TARGETS,
    without=(("<0.12", "EngineCore resolves the class itself (segment-scheduler-by-class)"),),
)


def around(call):
    from esgrpo.hooks.vllm import segment_mixin

    return segment_mixin.mixed_with(call())
