"""Puts SegmentMixin in front of whatever scheduler class vLLM picked."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release
from esgrpo.hooks.vllm import mixin_sources

HOOK = Hook(
    slug="segment-scheduler",
    target="vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
    process=("engine-core",),
    kind="wrap",
    why="a boundary is decided where tokens are made. `scheduler_cls` would replace vLLM's (or Ascend's) own choice "
        "between sync, async and balancing schedulers; wrapping the answer composes with all of them",
    releases=(Release("vllm", ">=0.12,<0.34", {
        "0.12.0": "05d56fbf6670afcc", "0.13.0": "bf8c3b60f67220eb", "0.18.0": "4270aeadbc58c743",
        "0.18.1": "4270aeadbc58c743", "0.20.2": "7327de88e0048658", "0.23.0": "83269d0c40ffba05",
        "0.24.0": "3602b26d1052e901", "0.28.0": "b4759d282f412ac3", "0.30.0": "5b0d7a7a343a6d95",
        "0.32.0": "b60fb059531882a0", "0.33.0": "5258b10cc3f614d7",
    }),),
    remove_when="vLLM offers a per-request callback at token boundaries",
    features=("observe",),
    relies_on=mixin_sources.TARGETS,
    without=(("<0.12", "EngineCore resolves the class itself (segment-scheduler-by-class)"),),
)


def build(original):
    @functools.wraps(original)
    def get_scheduler_cls(self):
        from esgrpo.hooks.vllm import segment_mixin

        return segment_mixin.mixed_with(original(self))

    return get_scheduler_cls
