"""verl on a machine without an accelerator: a platform whose device module looks like torch.cuda.

Imported by the hook `cpu-platform` only, with verl's platform module loaded and VERL_PLATFORM=cpu.
"""

from __future__ import annotations

import os
import resource
import types
from contextlib import contextmanager

import torch

# Set with setdefault, so that the user's own values win; inherited by Ray workers and the EngineCore.
ENVIRONMENT = {
    "VERL_ENGINE_DEVICE": "cuda",  # EngineRegistry keys its FSDP engine by "cuda"; nothing in it needs one
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM's CPU platform turns executor "uni" into "mp"
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}

_KIB = 1024


def _resident_bytes(*_args) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_bytes(*_args) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def _memory_info(*_args) -> tuple[int, int]:
    """(available, total) bytes, like torch.cuda.mem_get_info."""
    info = {}
    with open("/proc/meminfo") as file:
        for line in file:
            key, _, value = line.partition(":")
            info[key] = int(value.split()[0]) * _KIB
    return info["MemAvailable"], info["MemTotal"]


class _DeviceModule(types.ModuleType):
    """torch.cpu plus the functions of torch.cuda that verl calls."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)


def _nothing(*_args, **_kwargs) -> None:
    return None


def device_module() -> types.ModuleType:
    """The module that verl's get_torch_device() returns."""
    module = _DeviceModule("esgrpo.platforms.cpu.device_module")
    module.is_available = lambda: False  # verl: "is there an accelerator whose caches want attention?"
    module.is_initialized = lambda: True
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.get_device_name = lambda *_: "CPU"
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats",
                 "set_per_process_memory_fraction"):
        setattr(module, name, _nothing)
    module.memory_allocated = module.memory_reserved = _resident_bytes
    module.max_memory_allocated = module.max_memory_reserved = _peak_resident_bytes
    module.mem_get_info = _memory_info
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_rng_state = lambda *_a, **_k: torch.get_rng_state()
    module.set_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
    return module


def register(platform_manager) -> None:
    """Register the platform; `platform_manager` is verl.plugin.platform.platform_manager."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if platform_manager.PlatformRegistry.get("cpu") is not None:
        return
    device = torch.device("cpu")
    look_alike = device_module()

    class PlatformCPU(platform_manager.PlatformBase):
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = look_alike

        def is_available(self):
            return True

        def current_device(self):
            return device  # used as .to(get_device_id()); an int would mean an accelerator

        def device_count(self):
            return 1

        def set_device(self, device_index):
            return None

        def synchronize(self, device_index=None):
            return None

        def manual_seed(self, seed):
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def set_allocator_settings(self, settings):
            return None

        def empty_cache(self):
            return None

        def get_device_capability(self, device_index=0):
            return None, None

        def communication_backend_name(self):
            return "gloo"

        # verl's ResourcePoolManager counts GPU and NPU only: keep "GPU" as a logical Ray resource.
        def ray_resource_name(self):
            return "GPU"

        def visible_devices_envvar(self):
            return "CUDA_VISIBLE_DEVICES"

        def ray_noset_envvars(self):
            return []

        def is_ipc_supported(self):
            return False  # verl then sends buckets through shared memory

        @contextmanager
        def nvtx_range(self, msg):
            yield

        def profiler_start(self):
            return None

        profiler_stop = profiler_start

        def cudart(self):
            return None

    platform_manager.PlatformRegistry.register(platform="cpu")(PlatformCPU)
