"""Runs that start side by side on the same devices, and are let go together once each of them could begin.

Where a trainer and its rollout share a GPU, the runs are spread over the GPUs that there are, neighbours together.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common import ROOT
from bench.common.arm import STARTUP_LIMIT_S
from bench.common.console import say

ENGINE_MEMORY = 0.7  # of a GPU, for the engines of all runs; one alone has 0.3
SHARED_MEMORY = 0.4  # the same where the trainers are on that GPU, too
HELPER = ROOT / "bench" / "together"
POLL_S, PROGRESS_S = 0.5, 15.0
LIMIT_S = 0.8 * STARTUP_LIMIT_S  # for all to be there: who was there first is not ready before its gate is open


def engine_memory(runs: int, shared: bool = False) -> float:
    """vLLM's share of a GPU's memory, of each run; `shared`: with trainers on the same one."""
    return round((SHARED_MEMORY if shared else ENGINE_MEMORY) / runs, 3)


def gpu_of(number: int, runs: int, gpus: Sequence[str]) -> str:
    """The GPU of a run of `runs`: as many on each as can be, those of one after those of the other."""
    return gpus[number * len(gpus) // runs]


def _environment(folder: Path, number: int, turns: bool, gpu: str | None = None) -> dict[str, str]:
    paths = [str(ROOT / "overlay"), str(HELPER), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # a comparison that is itself given a lock takes turns with others on the same GPU
    own = {"TOGETHER_TURN": os.environ.get("TOGETHER_TURN", str(folder / "engine.lock"))} if turns else {
        "VLLM_CACHE_ROOT": str(folder / f"vllm-{number}")}  # what engines compile at once is not written at one place
    if gpu is not None:
        own["CUDA_VISIBLE_DEVICES"] = gpu
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
            "TOGETHER_GATE": str(folder / f"gate-{number}"), **own}


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1].removeprefix("esgrpo: ") if lines else f"{log.name}: nothing said yet"


def run(commands: dict[str, list[str]], out: Path, limit_s: float = LIMIT_S, turns: bool = True,
        gpus: Sequence[str] = ()) -> None:
    """Each command (label -> arguments of python -m) to its end; what fails there is the caller's to tell.

    Nobody waits longer than `limit_s` for one that does not come: then those that are there are let go. `turns`:
    engines start one after the other, as they must where they measure the memory of a GPU. `gpus`: each run sees one of
    them, which others may have, too; without, every run sees all.
    """
    out.mkdir(parents=True, exist_ok=True)
    children: dict[str, subprocess.Popen] = {}
    with tempfile.TemporaryDirectory(prefix="together-") as name:
        folder, begun, shown = Path(name), time.monotonic(), 0.0
        gates = {label: folder / f"gate-{number}" for number, label in enumerate(commands)}
        logs = {label: out / f"together-{number}.log" for number, label in enumerate(commands)}
        try:
            for number, (label, command) in enumerate(commands.items()):
                gates[label].touch()
                with open(logs[label], "wb") as log:
                    children[label] = subprocess.Popen(
                        [sys.executable, "-m", *command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                        env=_environment(folder, number, turns,
                                         gpu_of(number, len(commands), gpus) if gpus else None),
                        stdin=subprocess.DEVNULL, start_new_session=True)
            while running := [label for label, child in children.items() if child.poll() is None]:
                there = [label for label in running if Path(f"{gates[label]}.at").exists()]
                late = time.monotonic() - begun > limit_s
                if any(gate.exists() for gate in gates.values()) and (late or len(there) == len(running)):
                    say(f"{len(there)} of {len(children)} runs are let go together")
                    for gate in gates.values():
                        gate.unlink(missing_ok=True)
                if time.monotonic() - shown > PROGRESS_S:
                    shown = time.monotonic()
                    for label in running:
                        say(_last_line(logs[label]))
                time.sleep(POLL_S)
        finally:
            for child in children.values():
                if child.poll() is None:
                    child.terminate()
            for child in children.values():
                child.wait()
