"""Plays faults on real fully-async runs (elastic profile, CPU) and says what a user is left with.

    python -m ci.faults --out DIR [SCENE ...]

A table of every start goes to standard output, and to DIR/faults.json: exit code, last line, seconds from the fault to
the end, lines after our own last one, processes that did not end by themselves, and what the books of the scene say.
Exit code 0 when every promise is kept, 1 otherwise. Scenes with a full or a read-only run directory mount a file
system: root only. A start takes two to four minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.common import arm, stack
from bench.testbed import make_data

ROOT = Path(__file__).resolve().parents[1]
SEGMENT = "+actor_rollout_ref.rollout.segment"
GROUP_SIZE, MINI_BATCH, RESPONSE_LENGTH, PROMPTS = 4, 8, 384, 96
UPDATES_BEFORE_FAULT = 2  # optimiser steps of a start before its fault
SMALL_DISK = "256k"
START_LIMIT_S, POLL_S = 900.0, 0.25
# After a clean end verl's task runner is last: seconds in its interpreter's own teardown, also without the overlay.
TEARDOWN_LIMIT_S = 30.0
KILLED, TERMINATED = 1, 128 + signal.SIGTERM

REWARD = """
import sys
sys.path.insert(0, {root!r})
from bench.testbed.reward import compute_score as score
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if {raises}:
        raise ValueError("the scorer broke on purpose")
    return score(data_source, solution_str, ground_truth, extra_info, **kwargs)
"""
NEVER, ONE_PROMPT, ALWAYS = "False", "(extra_info or {}).get('index') == 3", "True"


@dataclass(frozen=True)
class Start:
    """One start of verl: what happens to it, and what its end must be."""

    fault: str
    act: Callable[[Path, int], None] | None = None  # called with run directory and driver's pid after some updates
    exit_code: int = 0
    last_line: tuple[str, ...] = ()  # words that the last line holds
    log: tuple[str, ...] = ()  # words that the log holds, each in exactly one line


@dataclass(frozen=True)
class Scene:
    """Starts in one run directory, one after the other; each but the first resumes."""

    starts: tuple[Start, ...]
    raises: str = NEVER
    checkpoints: bool = True
    directory: Callable[[Path], object] = nullcontext  # context manager over the run directory of our records


@dataclass
class Outcome:
    """What one start left behind."""

    scene: str
    fault: str
    exit_code: int | None = None
    last_line: str = ""
    end_s: float | None = None
    lines_after_fault: int = 0
    updates: int = 0
    gone_s: float | None = None  # until no process was left; None when some had to be ended
    left: int = 0  # processes that had to be ended
    books: str = ""
    broken: list[str] = field(default_factory=list)


def kill(process: str) -> Callable[[Path, int], None]:
    """SIGKILL for the first process of this kind in the handshake's report."""
    def act(run_dir: Path, driver: int) -> None:
        reports = json.loads((run_dir / "esgrpo" / "hooks.json").read_text())
        os.kill(next(report["pid"] for report in reports if report["process"] == process), signal.SIGKILL)
    return act


def terminate(run_dir: Path, driver: int) -> None:
    os.kill(driver, signal.SIGTERM)


@contextmanager
def mounted(directory: Path, *options: str):
    subprocess.run(["mount", *options, str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def full(directory: Path):
    return mounted(directory, "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs")


def read_only(directory: Path):
    return mounted(directory, "-t", "tmpfs", "-o", "ro", "tmpfs")


RESUME = ("resume",)
SCENES = {
    "engine": Scene((Start("vLLM's EngineCore killed", kill("engine-core"), KILLED,
                           ("engine", "global_step", *RESUME)),)),
    "nothing-saved": Scene((Start("agent-loop worker killed", kill("agent-loop-worker"), KILLED,
                                  ("agent-loop", "nothing to resume")),), checkpoints=False),
    "one-reward-raises": Scene((Start("reward raises on one prompt"),), raises=ONE_PROMPT),
    "every-reward-raises": Scene((Start("reward raises on every prompt", None, 1,
                                        ("the scorer broke on purpose", "max_failed_prompts")),), raises=ALWAYS),
    "full-directory": Scene((Start("run directory of 256 kB"),), directory=full),
    "read-only-directory": Scene((Start("read-only run directory"),), directory=read_only),
    "chain": Scene((
        Start("SIGTERM", terminate, TERMINATED, ("SIGTERM", "global_step", *RESUME)),
        Start("rollouter killed", kill("rollouter"), KILLED, ("rollouter", "global_step", *RESUME)),
        Start("agent-loop worker killed", kill("agent-loop-worker"), KILLED, ("agent-loop", "global_step", *RESUME)),
        Start("none: to the end"))),
}


def _overrides(scene: Scene, place: Path) -> list[str]:
    make_data.write("search", 3, {"train": PROMPTS, "val": 16}, place / "data")
    reward = place / "reward.py"
    reward.write_text(REWARD.format(root=str(ROOT), raises=scene.raises))
    data = place / "data"
    return [
        *stack.fully_async(str(ROOT / "bench" / "testbed" / "model"), str(data / "train.parquet"),
                           str(data / "val.parquet"), str(reward), str(place / "checkpoints"),
                           response_length=RESPONSE_LENGTH, group_size=GROUP_SIZE, mini_batch=MINI_BATCH,
                           rollout_steps=PROMPTS, concurrent=4, staleness=1.0),
        f"{SEGMENT}.profile=elastic", f"{SEGMENT}.segment_length=64", "trainer.total_epochs=1",
        'trainer.logger=["console","file"]',
        f"trainer.save_freq={1 if scene.checkpoints else -1}", "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.resume_mode={'auto' if scene.checkpoints else 'disable'}"]


def _updates(metrics: Path) -> int:
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    return sum("actor/grad_norm" in row for row in rows)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def left_over(marker: str) -> tuple[int, float | None]:
    """(processes that do not end by themselves, seconds until the last one that did)."""
    begun = time.monotonic()
    while (left := len(arm.processes_of(marker))) and time.monotonic() - begun < TEARDOWN_LIMIT_S:
        time.sleep(POLL_S)
    return left, None if left else round(time.monotonic() - begun, 1)


def play(name: str, scene: Scene, start: Start, number: int, place: Path) -> Outcome:
    """One start, watched to its end; nothing of it is left running."""
    outcome, run_dir, marker = Outcome(name, start.fault), place / "run", uuid.uuid4().hex
    log, metrics = place / f"log-{number}.txt", place / f"metrics-{number}.jsonl"
    variables = {**stack.environment(str(ROOT / "overlay")), arm.MARKER: marker, "ESGRPO_RUN_DIR": str(run_dir),
                 "VERL_FILE_LOGGER_PATH": str(metrics)}
    begun, acted, lines_before = time.monotonic(), None, 0
    with open(log, "wb") as output:
        driver = subprocess.Popen(stack.command(stack.FULLY_ASYNC, _overrides(scene, place)), env=variables,
                                  stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                  start_new_session=True, cwd=place)
        try:
            while driver.poll() is None and time.monotonic() - begun < START_LIMIT_S:
                if start.act and acted is None and _updates(metrics) >= UPDATES_BEFORE_FAULT:
                    acted, lines_before = time.monotonic(), len(log.read_bytes().splitlines())
                    start.act(run_dir, driver.pid)
                time.sleep(POLL_S)
            ended = time.monotonic()
            outcome.exit_code = driver.poll()
        finally:
            if driver.poll() is None:
                driver.kill()
            driver.wait()
            outcome.left, outcome.gone_s = left_over(marker)
            arm.end_processes(marker)
    outcome.end_s = None if acted is None else round(ended - acted, 1)
    outcome.last_line, outcome.updates = _last_line(log), _updates(metrics)
    outcome.lines_after_fault = 0 if acted is None else len(log.read_bytes().splitlines()) - lines_before
    if outcome.exit_code != start.exit_code:
        outcome.broken.append(f"exit code {outcome.exit_code}, wanted {start.exit_code}")
    outcome.broken += [f"the last line does not say {word!r}" for word in start.last_line
                       if word.lower() not in outcome.last_line.lower()]
    if outcome.left:
        outcome.broken.append(f"{outcome.left} processes were left after {TEARDOWN_LIMIT_S:.0f} s")
    if start.act and acted is None:
        outcome.broken.append(f"ended before its fault, after {outcome.updates} updates")
    return outcome


def _books(run_dir: Path) -> tuple[str, bool]:
    """(the last line of `esgrpo status RUN --books`, whether they balance)."""
    done = subprocess.run([sys.executable, "-m", "esgrpo", "status", str(run_dir), "--books"], capture_output=True,
                          text=True, env=stack.environment(str(ROOT / "overlay")))
    text = (done.stdout + done.stderr).strip().splitlines()
    return f"exit {done.returncode}: {text[-1] if text else ''}", done.returncode == 0


def play_scene(name: str, out: Path, say=print) -> list[Outcome]:
    scene, place, outcomes = SCENES[name], (out / name).resolve(), []
    run_dir = place / "run"
    run_dir.mkdir(parents=True)
    with scene.directory(run_dir):
        for number, start in enumerate(scene.starts, 1):
            say(f"{name}: start {number} of {len(scene.starts)}, {start.fault}", flush=True)
            outcomes.append(play(name, scene, start, number, place))
            outcomes[-1].books, balanced = _books(run_dir)
            if not balanced and scene.directory is nullcontext:
                outcomes[-1].broken.append("the books do not balance")
            say(json.dumps(asdict(outcomes[-1]), indent=1), flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", nargs="*", choices=[[], *SCENES], default=[], metavar="SCENE", help=", ".join(SCENES))
    parser.add_argument("--out", type=Path, required=True, help="an empty or new directory")
    arguments = parser.parse_args()
    outcomes = [outcome for name in arguments.scene or SCENES for outcome in play_scene(name, arguments.out)]
    (arguments.out / "faults.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print("| fault | exit code | s to the end | updates | last line | books | broken |\n|---|---|---|---|---|---|---|")
    for row in outcomes:
        print(f"| {row.fault} | {row.exit_code} | {row.end_s} | {row.updates} | {row.last_line} | {row.books} | "
              f"{'; '.join(row.broken) or 'nothing'} |")
    return 1 if any(row.broken for row in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
