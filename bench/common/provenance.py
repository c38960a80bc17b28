"""What stands beside a benchmark's numbers: which code, which machine, which command."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

from bench.common import ROOT


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def cpu_model() -> str:
    """As Linux names it, else as Python does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def cpu_flags() -> frozenset[str]:
    """What the processor can do, in the words of Linux; empty where they are not known."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(named, ()))


def without_folders(text: str) -> str:
    """Absolute paths as their last part: a machine's folders mean nothing to a reader."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:=]+/)+", "", text)
