"""Runs that start side by side on the same devices, and are let go together once each of them could begin, or one after
the other, which start up while those before them are measured.

Where a trainer and its rollout share a GPU, the runs are spread over the GPUs that there are, neighbours together.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.common import ROOT
from bench.common.arm import STARTUP_LIMIT_S
from bench.common.console import say

ENGINE_MEMORY = 0.7  # of a GPU, for the engines of all runs; one alone has 0.3
SHARED_MEMORY = 0.4  # the same where the trainers are on that GPU, too
HELPER = ROOT / "bench" / "together"
POLL_S, PROGRESS_S = 0.5, 15.0
LIMIT_S = 0.8 * STARTUP_LIMIT_S  # for all to be there: who was there first is not ready before its gate is open
PATIENCE_S = 150.0  # after the last one that came, once half are there; eight of one H200 were seconds apart
AHEAD_LIMIT_S = STARTUP_LIMIT_S / 2  # of measurement before a run that has started: it waits, and is not ready
LOGS = "beside-*.log"  # one of each run


def engine_memory(runs: int, shared: bool = False) -> float:
    """vLLM's share of a GPU's memory, of each run; `shared`: with trainers on the same one."""
    return round((SHARED_MEMORY if shared else ENGINE_MEMORY) / runs, 3)


def gpu_of(number: int, runs: int, gpus: Sequence[str]) -> str:
    """The GPU of a run of `runs`: as many on each as can be, those of one after those of the other."""
    return gpus[number * len(gpus) // runs]


def _environment(gate: Path, own: dict[str, str]) -> dict[str, str]:
    paths = [str(ROOT / "overlay"), str(HELPER), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
            "TOGETHER_GATE": str(gate), **own}


def _apart(folder: Path, number: int, turns: bool, gpu: str | None = None) -> dict[str, str]:
    """What keeps runs that start at once out of each other's way."""
    # a comparison that is itself given a lock takes turns with others on the same GPU
    own = {"TOGETHER_TURN": os.environ.get("TOGETHER_TURN", str(folder / "engine.lock"))} if turns else {
        "VLLM_CACHE_ROOT": str(folder / f"vllm-{number}")}  # what engines compile at once is not written at one place
    return own if gpu is None else own | {"CUDA_VISIBLE_DEVICES": gpu}


def _start(command: list[str], gate: Path, log: Path, own: dict[str, str]) -> subprocess.Popen:
    """The command behind its closed gate, in a process group of its own; paths mean in it what they mean here."""
    gate.touch()
    with open(log, "wb") as file:
        return subprocess.Popen([sys.executable, "-m", *command], stdout=file, stderr=subprocess.STDOUT,
                                env=_environment(gate, own), stdin=subprocess.DEVNULL, start_new_session=True)


def _there(gate: Path) -> bool:
    return Path(f"{gate}.at").exists()


@contextlib.contextmanager
def _ended_in_the_end(children: dict[str, subprocess.Popen]):
    try:
        yield
    finally:
        for child in children.values():
            if child.poll() is None:
                child.terminate()
        for child in children.values():
            child.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1].removeprefix("esgrpo: ") if lines else f"{log.name}: nothing said yet"


def _watching(children: dict[str, subprocess.Popen], logs: dict[str, Path]) -> Iterator[list[str]]:
    """Labels of the runs that have not ended, every POLL_S until there is none; says now and then where they are."""
    shown = 0.0
    while running := [label for label, child in children.items() if child.poll() is None]:
        yield running
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            for label in running:
                say(_last_line(logs[label]))
        time.sleep(POLL_S)


def run(commands: dict[str, list[str]], out: Path, limit_s: float = LIMIT_S, patience_s: float = PATIENCE_S,
        turns: bool = True, gpus: Sequence[str] = ()) -> None:
    """Each command (label -> arguments of python -m) to its end; what fails there is the caller's to tell.

    Nobody waits longer than `limit_s` for one that does not come, nor `patience_s` once half of those that run are
    there and no further one comes: then those that are there are let go. `turns`: engines start one after the other,
    as they must where they measure the memory of a GPU, and may come as far apart as that. `gpus`: each run sees one of
    them, which others may have, too; without, every run sees all.
    """
    out.mkdir(parents=True, exist_ok=True)
    children: dict[str, subprocess.Popen] = {}
    with tempfile.TemporaryDirectory(prefix="together-") as name, _ended_in_the_end(children):
        folder, begun = Path(name), time.monotonic()
        gates = {label: folder / f"gate-{number}" for number, label in enumerate(commands)}
        logs = {label: out / LOGS.replace("*", str(number)) for number, label in enumerate(commands)}
        for number, (label, command) in enumerate(commands.items()):
            gpu = gpu_of(number, len(commands), gpus) if gpus else None
            children[label] = _start(command, gates[label], logs[label], _apart(folder, number, turns, gpu))
        came = 0, begun  # how many were there, and when that last changed
        for running in _watching(children, logs):
            there, now = [label for label in running if _there(gates[label])], time.monotonic()
            came = came if len(there) == came[0] else (len(there), now)
            alone = not turns and 2 * len(there) >= len(running) and now - came[1] > patience_s
            late = alone or now - begun > limit_s
            if any(gate.exists() for gate in gates.values()) and (late or len(there) == len(running)):
                say(f"{len(there)} of {len(children)} runs are let go together")
                for gate in gates.values():
                    gate.unlink(missing_ok=True)


def one_by_one(commands: dict[str, list[str]], out: Path, ahead: int = 1) -> None:
    """Each command (label -> arguments of python -m) to its end, alone but for the starts of the `ahead` next ones.

    They wait at their gates until those before them have ended; one that ends before it is there holds nobody.
    """
    out.mkdir(parents=True, exist_ok=True)
    children: dict[str, subprocess.Popen] = {}
    with tempfile.TemporaryDirectory(prefix="one-by-one-") as name, _ended_in_the_end(children):
        gates = {label: Path(name, f"gate-{number}") for number, label in enumerate(commands)}
        logs = {label: out / LOGS.replace("*", str(number)) for number, label in enumerate(commands)}

        def begun() -> Iterator[int]:
            """How many there are, after the first of them was let go if it is there."""
            for running in _watching(children, logs):
                if _there(gates[running[0]]):
                    gates[running[0]].unlink(missing_ok=True)
                yield len(running)

        for label, command in commands.items():
            children[label] = _start(command, gates[label], logs[label], _apart(Path(name), len(children), turns=False))
            for count in begun():
                if count <= ahead:
                    break
        for _ in begun():
            pass
