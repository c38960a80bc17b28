"""Puts SegmentMixin in front of the scheduler class on vLLM releases that resolve it in EngineCore itself."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.vllm import mixin_sources

HOOK = Hook(
    slug="segment-scheduler-by-class",
    target="vllm.v1.engine.core:EngineCore._initialize_kv_caches",
    process=("engine-core",),
    kind="wrap",
    why="before vLLM 0.12 there is no get_scheduler_cls: EngineCore.__init__ reads scheduler_config.scheduler_cls "
        "right after this method. A scheduler_cls from the command line is overwritten by async_scheduling=True, and "
        "one that is set earlier would be pickled to the workers",
    remove_when="vLLM 0.11 is no longer supported",
    features=("observe",),
    relies_on=("vllm.v1.engine.core:EngineCore.__init__", *mixin_sources.TARGETS),
    without=((">=0.12", "get_scheduler_cls is the place (segment-scheduler)"),),
)


def around(call):
    sizes = call()
    config = call.arguments["vllm_config"]
    _mix(config.scheduler_config)
    return sizes


def _mix(scheduler_config) -> None:
    """Whatever class vLLM, Ascend or the user chose, with the mixin in front."""
    from vllm.v1.engine.core import resolve_obj_by_qualname

    from esgrpo.hooks.vllm import segment_mixin

    chosen = scheduler_config.scheduler_cls
    base = resolve_obj_by_qualname(chosen) if isinstance(chosen, str) else chosen
    scheduler_config.scheduler_cls = segment_mixin.mixed_with(base)
