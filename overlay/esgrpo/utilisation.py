"""How busy the accelerators of this machine are, sampled by a thread of the processes that write signals.

Nothing is decided with it. NVIDIA: NVML, through pynvml or the copy that vLLM has loaded; Ascend: the text of
`npu-smi info`. Where neither answers, there is a reason instead of numbers, and no thread is left. Standard library
only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from esgrpo import records

NVML_PERIOD_S, NPU_PERIOD_S = 2.0, 30.0  # npu-smi is a process, and takes about a second
TIMEOUT_S = 20.0  # npu-smi hangs when the driver does
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
PER_CENT = 100.0
NPU_COLUMNS = 3
Shares = Mapping[str, tuple[float, float]]  # device -> busy, memory in use


class Missing(Exception):
    """Why there are no numbers."""


def nvml() -> Callable[[], Shares]:
    """Raises Missing. A device's busy share is NVML's: of the last fraction of a second, when a kernel ran."""
    try:
        import pynvml as library
    except ImportError:
        library = sys.modules.get("vllm.third_party.pynvml")
    if library is None:
        raise Missing("pynvml is not installed (pip install nvidia-ml-py)")
    try:
        library.nvmlInit()
        handles = {str(index): library.nvmlDeviceGetHandleByIndex(index)
                   for index in range(library.nvmlDeviceGetCount())}
    except library.NVMLError as error:
        raise Missing(f"NVML: {error}") from None

    def sample() -> Shares:
        found = {}
        for name, handle in handles.items():
            try:
                memory = library.nvmlDeviceGetMemoryInfo(handle)
                found[name] = (library.nvmlDeviceGetUtilizationRates(handle).gpu / PER_CENT, memory.used / memory.total)
            except library.NVMLError as error:  # such as NotSupported of a MIG slice
                raise Missing(f"NVML: device {name}: {error}") from None
        return found

    return sample


def parse_npu_smi(text: str) -> dict[str, tuple[float, float]]:
    """`npu-smi info`: AICore share and HBM in use of every chip, by its physical id, or its card's on one-chip cards.

    A row of a card, "| 0  910B3 | OK | ... |", then "| 0 [phy-id] | bus-id | AICore Memory-Usage HBM-Usage |".
    """
    found, card = {}, None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != NPU_COLUMNS:
            continue
        if re.fullmatch(r"\d+\s+[A-Za-z0-9]*[A-Za-z]\w*", cells[0]):
            card = cells[0].split()[0]
        elif card is not None and re.fullmatch(r"\d+(\s+\d+)?", cells[0]) and ":" in cells[1]:
            used = re.fullmatch(r"(\d+)\s+.*?(\d+)\s*/\s*(\d+)", cells[2])
            if used and int(used[3]):
                chip = cells[0].split()
                found[chip[1] if chip[1:] else card] = int(used[1]) / PER_CENT, int(used[2]) / int(used[3])
    return found


def npu_smi() -> Callable[[], Shares]:
    """Raises Missing."""
    def sample() -> Shares:
        try:
            told = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise Missing(f"npu-smi: {error}") from None
        found = parse_npu_smi(told.stdout)
        if not found:
            raise Missing(f"npu-smi: {(told.stdout + told.stderr).strip()[-80:] or 'no output'}")
        return found

    return sample


def this_machine() -> tuple[Callable[[], Shares], float]:
    """What samples it, and how often. Raises Missing where the machine has no accelerator."""
    if shutil.which("npu-smi"):
        return npu_smi(), NPU_PERIOD_S
    if os.path.exists("/dev/nvidiactl"):
        return nvml(), NVML_PERIOD_S
    raise Missing("no accelerator on this machine")


def visible() -> Sequence[str] | None:
    """Ids of the devices that this process was given; None: all, or named in a way that NVML has no index for."""
    told = next((os.environ[name] for name in VISIBLE if os.environ.get(name)), "")
    names = [name.strip() for name in told.split(",") if name.strip()]
    return names if names and all(name.isdigit() for name in names) else None


class Sampler:
    """Means since they were last taken. The thread begins with the first `take`; its numbers come with the next."""

    def __init__(self, found: Callable[[], tuple[Callable[[], Shares], float]] = this_machine):
        self._found = found
        self._lock = threading.Lock()
        self._sums: dict[str, list[float]] = {}  # device -> busy, memory, samples
        self._why = "not sampled yet"
        self._started = False

    def take(self, only: Sequence[str] | None = None) -> dict[str, dict | str]:
        """Fields of a row: `devices`, NODE:ID -> [busy, memory in use], and `no_devices`, why there are none."""
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="esgrpo-utilisation", daemon=True).start()
            sums, self._sums = self._sums, {}
            why = self._why
        devices = {f"{records.NODE}:{name}": [round(busy / count, 4), round(memory / count, 4)]
                   for name, (busy, memory, count) in sums.items() if only is None or name in only}
        return {"devices": devices, "no_devices": "" if devices else why}

    def _run(self) -> None:
        try:
            sample, period = self._found()
            while True:
                time.sleep(period)
                self._add(sample())
        except Missing as error:
            self._end(str(error))
        except Exception as error:  # of a driver's library: numbers are not worth a line of a run's log
            self._end(f"{type(error).__name__}: {error}")

    def _add(self, shares: Shares) -> None:
        with self._lock:
            self._why = "no sample since the last row"
            for name, (busy, memory) in shares.items():
                known = self._sums.setdefault(name, [0.0, 0.0, 0])
                known[0], known[1], known[2] = known[0] + busy, known[1] + memory, known[2] + 1

    def _end(self, why: str) -> None:
        with self._lock:
            self._why = why


_sampler = Sampler()


def of_node() -> dict[str, dict | str]:
    """All accelerators of this machine."""
    return _sampler.take()


def of_process() -> dict[str, dict | str]:
    """Those that this process was given."""
    return _sampler.take(visible())
