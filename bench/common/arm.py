"""Runs one arm of a comparison: verl's own main under the overlay, watched, stopped at its budget, cleaned up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import stack
from esgrpo.tools.doctor import logs as doctor

# of fully-async training, and of the v1 trainers, which say no sooner that all of their replicas are there
READY = ("All components initialized successfully", "Initial validation metrics")
MARKER = "ESGRPO_ARM_ID"  # in the environment of every process of an arm, so that only ours are ever ended
PROGRESS_PERIOD_S = 5.0
TERM_GRACE_S = 10.0
STARTUP_LIMIT_S = 900.0


@dataclass
class Arm:
    """What is known of a run. Times are seconds since the epoch; metrics are verl's own lines with arrival time."""

    name: str
    run_dir: Path
    started: float = 0.0
    ready: float | None = None
    ended: float = 0.0
    return_code: int | None = None
    stopped_at_budget: bool = False
    metrics: list[dict] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)  # of processes by their name, since `ready`
    peak_bytes: int = 0  # memory of all processes, shared pages once; seen every PROGRESS_PERIOD_S

    def last(self, key: str):
        return next((m["data"][key] for m in reversed(self.metrics) if key in m["data"]), None)

    @property
    def steps(self) -> int:
        return int(self.last("training/global_step") or 0)


def processes_of(marker: str) -> list[int]:
    """Pids whose environment carries this marker."""
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
            except OSError:
                continue
            if wanted in environment.split(b"\0"):
                found.append(int(entry))
    return found


def cpu_seconds(marker: str) -> dict[tuple[int, str], float]:
    """(pid, name) -> CPU seconds of the processes of an arm; Ray and vLLM give theirs the name of the actor."""
    found = {}
    for pid in processes_of(marker):
        try:
            title = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            times = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        name = re.fullmatch(r"(?:ray|VLLM)::(\w+).*", title)  # without the method that runs just now
        if name:
            found[pid, name[1]] = sum(map(int, times[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


def memory_bytes(marker: str) -> int:
    """Memory of the processes of an arm; a page that several share counts once."""
    total = 0
    for pid in processes_of(marker):
        try:
            text = Path("/proc", str(pid), "smaps_rollup").read_text()
        except OSError:
            continue
        found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        total += 1024 * int(found[1]) if found else 0
    return total


def _cpu_by_name(begin: dict, end: dict) -> dict[str, float]:
    found: dict[str, float] = {}
    for (pid, name), seconds in end.items():
        found[name] = found.get(name, 0.0) + seconds - begin.get((pid, name), 0.0)
    return {name: round(seconds, 2) for name, seconds in found.items()}


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def end_processes(marker: str) -> None:
    """Ask, wait, insist: afterwards no process of the arm is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + TERM_GRACE_S
        _signal_all(processes_of(marker), number)
        while time.monotonic() < deadline:
            if not processes_of(marker):
                return
            time.sleep(0.2)


def error_line(log: Path) -> str:
    """The line of the cause, where `esgrpo doctor` knows it; else the last one that names an error, without Ray's
    colours and prefixes."""
    if not log.exists():
        return "not started"
    answer = doctor.read_file(str(log))
    if answer.state == "known":
        return f"{answer.matches[0].signature.slug}: {answer.matches[0].text[:doctor.SHOWN]}"
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    lines = [line for line in text.splitlines() if re.search(r"(Error|Exception)\b.*:|^esgrpo: ", line)]
    return lines[-1].strip() if lines else f"see {log}"


class _Tail:
    """Complete new lines of a growing file."""

    def __init__(self, path: Path):
        self.path, self.position, self.rest = path, 0, ""

    def lines(self) -> list[str]:
        if not self.path.exists():
            return []
        with open(self.path, encoding="utf-8", errors="replace") as file:
            file.seek(self.position)
            text = self.rest + file.read()
            self.position = file.tell()
        *lines, self.rest = text.split("\n")
        return lines


def _progress(arm: Arm, budget_s: float | None) -> str:
    now = time.time()
    if arm.ready is None:
        return f"{arm.name}: starting, {now - arm.started:.0f} s (verl imports in about ten processes)"
    limit = f"/{budget_s:.0f}" if budget_s else ""
    reward = arm.last("critic/score/mean")
    reward = "" if reward is None else f", training reward {reward:.2f}"
    return f"{arm.name}: {now - arm.ready:.0f}{limit} s, optimiser step {arm.steps}{reward}"


def run(name: str, overrides: list[str], run_dir: Path, overlay: Path, *, budget_s: float | None = None,
        main: str = stack.FULLY_ASYNC, environment: dict[str, str] | None = None, stop: Path | None = None,
        say=print) -> Arm:
    """Run an arm to its end, or for `budget_s` seconds after it is ready, or until file `stop` exists.

    Raises RuntimeError with the cause when it ends with an error or is stopped before it is ready; nothing of it is
    left running in any case.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    marker = uuid.uuid4().hex
    log, metrics = run_dir / "log.txt", run_dir / "metrics.jsonl"
    metrics.unlink(missing_ok=True)  # verl empties it, and what is read would begin in an earlier run's
    variables = {**stack.environment(str(overlay)), **(environment or {}), MARKER: marker,
                 "VERL_FILE_LOGGER_PATH": str(metrics), "ESGRPO_RUN_DIR": str(run_dir)}
    arm = Arm(name, run_dir, started=time.time())

    def over() -> bool:
        spent = arm.ready and budget_s and time.time() - arm.ready >= budget_s
        return bool(spent or stop and stop.exists())

    with open(log, "wb") as output:
        process = subprocess.Popen(stack.command(main, overrides), env=variables, stdout=output,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                                   cwd=run_dir)
        try:
            _watch(arm, process, marker, _Tail(log), _Tail(metrics), over, lambda: say(_progress(arm, budget_s)))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(TERM_GRACE_S)
                except subprocess.TimeoutExpired:
                    pass
            end_processes(marker)
            process.wait()
            arm.ended, arm.return_code = time.time(), process.returncode
    (run_dir / "arm.json").write_text(json.dumps({
        "name": name, "started": arm.started, "ready": arm.ready, "ended": arm.ended, "budget_s": budget_s,
        "return_code": arm.return_code, "stopped_at_budget": arm.stopped_at_budget, "overrides": overrides,
        "cpu_s": arm.cpu_s, "peak_bytes": arm.peak_bytes}, indent=1))
    with open(run_dir / "metrics-timed.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in arm.metrics)
    if arm.return_code != 0 and not arm.stopped_at_budget:
        raise RuntimeError(f"{name}: exit code {arm.return_code}: {error_line(log)} (log: {log})")
    return arm


def _watch(arm: Arm, process, marker: str, log: _Tail, metrics: _Tail, over: Callable[[], bool],
           show: Callable[[], None]) -> None:
    """Until the process has ended or its time is `over`."""
    next_progress, at_ready = 0.0, {}
    while True:
        ended = process.poll() is not None
        if arm.ready is None and any(mark in line for line in log.lines() for mark in READY):
            arm.ready, at_ready = time.time(), cpu_seconds(marker)
        arm.metrics += [{"time": time.time(), **json.loads(line)} for line in metrics.lines() if line]
        if ended:
            return
        if time.monotonic() >= next_progress:
            show()
            arm.peak_bytes = max(arm.peak_bytes, memory_bytes(marker))
            next_progress = time.monotonic() + PROGRESS_PERIOD_S
        if arm.ready is None and time.time() - arm.started > STARTUP_LIMIT_S:
            raise RuntimeError(f"{arm.name}: not ready after {STARTUP_LIMIT_S:.0f} s (log: {log.path})")
        if over():
            if arm.ready is None:
                raise RuntimeError(f"{arm.name}: stopped before it was ready; nothing of it was measured")
            arm.stopped_at_budget, arm.cpu_s = True, _cpu_by_name(at_ready, cpu_seconds(marker))
            return
        time.sleep(0.5)
