"""The mixin on the scheduler classes of vllm-ascend, without an NPU: torch_npu is a stub, the classes are real.

    python -m ci.matrix.ascend_contract ASCEND_VERSION VLLM_VERSION    unpack both and check in a process of its own
    python -m ci.matrix.ascend_contract                                check what is on the path

Each class is installed as NPUPlatform.check_and_update_config (or a patch of vllm-ascend) does, and driven with the
cases of the scheduler contract. One JSON line a case, with "ascend" and "class" in addition; "ok" is null, and the
detail begins with "not run", for a class that this machine cannot import. Exit 0 when nothing failed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
import types
from importlib import metadata
from types import SimpleNamespace

import torch

from bench.common.scripted_scheduler import upstream_class
from ci.matrix import vllm_environment
from ci.matrix.scheduler_cases import CASES
from ci.matrix.scheduler_contract import (
    Factory,
    Report,
    configure,
    hooked_class,
    hooks_are_applied,
    one_line,
    the_mixin_is_in_front,
)

STUBBED = ("torch_npu",)
LATENCY_MS = 50  # a latency objective; without its profile table SchedulerDynamicBatch keeps the whole budget


class _Stub(types.ModuleType):
    """A module whose every attribute is an empty class."""

    __path__: list = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name.partition(".")[0] in STUBBED else None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


def _ascend_0_11(config, asynchronous: bool) -> None:
    from vllm_ascend.core.schedule_config import AscendSchedulerConfig

    settings = config.scheduler_config
    chunked = settings.max_num_batched_tokens < settings.max_model_len  # refused otherwise
    config.scheduler_config = AscendSchedulerConfig.initialize_from_config(
        settings, SimpleNamespace(enable_chunked_prefill=chunked))


def _recompute_0_11(config, asynchronous: bool) -> None:
    from vllm_ascend.core.recompute_schedule_config import RecomputeSchedulerConfig

    config.scheduler_config = RecomputeSchedulerConfig.initialize_from_config(config.scheduler_config)


def _recompute(config, asynchronous: bool) -> None:
    from vllm_ascend.core.recompute_scheduler import RecomputeSchedulerConfig

    config.scheduler_config = RecomputeSchedulerConfig.initialize_from_config(config)


def _dynamic_batch(config, asynchronous: bool) -> None:
    config.scheduler_config.scheduler_cls = "vllm_ascend.core.scheduler_dynamic_batch.SchedulerDynamicBatch"
    config.scheduler_config.SLO_limits_for_dynamic_batch = LATENCY_MS


def _profiling_chunk(config, asynchronous: bool) -> None:
    """It refuses to start without pipeline parallelism. Nobody profiled it here: it has vLLM's own chunks."""
    config.parallel_config.pipeline_parallel_size = 2
    config.additional_config = {"profiling_chunk_config": {"enabled": True}}
    config.scheduler_config.scheduler_cls = "vllm_ascend.core.scheduler_profiling_chunk.ProfilingChunkScheduler"


def _balance(config, asynchronous: bool) -> None:
    """A process-wide rebinding of vLLM's Scheduler: comes last."""
    importlib.import_module("vllm_ascend.patch.platform.patch_balance_schedule")


# class name, asynchronous, a module of the releases that install it this way, how
INSTALLS = (
    ("AscendScheduler", False, "vllm_ascend.core.scheduler", _ascend_0_11),
    ("RecomputeScheduler", False, "vllm_ascend.core.recompute_schedule_config", _recompute_0_11),
    ("RecomputeScheduler", False, "vllm_ascend.core.scheduler_dynamic_batch", _recompute),
    ("AsyncRecomputeScheduler", True, "vllm_ascend.core.scheduler_dynamic_batch", _recompute),
    ("SchedulerDynamicBatch", False, "vllm_ascend.core.scheduler_dynamic_batch", _dynamic_batch),
    ("ProfilingChunkScheduler", False, "vllm_ascend.core.scheduler_profiling_chunk", _profiling_chunk),
    ("BalanceScheduler", False, "vllm_ascend.patch.platform.patch_balance_schedule", _balance),
    ("AsyncScheduler", True, "vllm_ascend.patch.platform.patch_balance_schedule", _balance),
)


PLATFORM_PATCHES = "vllm_ascend.patch.platform"
RELIED_ON = f"{PLATFORM_PATCHES}.patch_async_swa_kv_lifetime"  # 0.23: gives requests what RecomputeScheduler reads


def _exists(module: str) -> bool:
    from esgrpo import fingerprint

    return fingerprint.source_file(module) is not None


def factory(asynchronous: bool, install) -> Factory:
    """Players of the class that `install` makes vLLM choose; `base` is that class without the mixin."""
    from esgrpo.hooks.vllm.segment_mixin import SegmentMixin

    def configured(budget):
        config = configure(asynchronous, budget)
        install(config, asynchronous)
        return config

    cls = hooked_class(configured(None))
    base = cls.__mro__[2] if issubclass(cls, SegmentMixin) else cls
    return Factory(base, configured, lag=int(asynchronous))


def check(report: Report, name: str, asynchronous: bool, install) -> None:
    scheduler = "async" if asynchronous else "sync"
    report.fields["class"] = name
    try:
        new = factory(asynchronous, install)
    except ImportError as error:
        report.line(scheduler, "import", None, f"not run: {one_line(error)}")
        return
    except Exception as error:
        report.line(scheduler, "install", False, one_line(error))
        return
    report.line(scheduler, "install", new.base.__name__ == name, f"vLLM chose {new.base.__qualname__}")
    for case in (the_mixin_is_in_front, *CASES):
        report.run(scheduler, case, new)


def main() -> int:
    os.environ["VLLM_PLUGINS"] = "none"  # vllm-ascend would register its platform, which needs the device
    sys.meta_path.append(_Stubs())
    torch.npu = importlib.import_module("torch_npu.npu")
    from esgrpo import engine, releases

    engine.boot()
    report = Report(vllm=releases.installed("vllm"), ascend=metadata.version("vllm-ascend"))
    report.run("both", hooks_are_applied)
    if _exists(RELIED_ON):
        importlib.import_module(PLATFORM_PATCHES)  # as its platform does when vLLM registers it, before any scheduler
    else:
        upstream_class(True)  # as in an engine: the async class is imported before vllm-ascend may rebind its base
    for name, asynchronous, module, install in INSTALLS:
        if _exists(module):
            check(report, name, asynchronous, install)
    return 0 if report.ok else 1


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(vllm_environment.run("ci.matrix.ascend_contract", *reversed(arguments)) if arguments else main())
