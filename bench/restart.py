"""A real fully async run, killed with finished samples in its queue, and its restart: was each prompt trained once?

    python -m bench.restart --results bench/results/restart_cpu.json

Training is the slower side (several epochs of an update), so that finished samples wait when the first checkpoint is
saved. The driver is then killed by its pid, and the run started again in the same directory. The exit code is 1 where
a prompt was lost or trained twice, or where nothing waited.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from bench.common import ROOT, TESTBED, arm, console, stack
from bench.common.console import say
from bench.common.provenance import commit, cpu_model
from bench.testbed import make_data
from esgrpo.records import read
from esgrpo.tools import books

SEGMENT = "+actor_rollout_ref.rollout.segment"
GROUP_SIZE, MINI_BATCH, RESPONSE_LENGTH, PROMPTS, SAVE_EVERY, EPOCHS = 4, 8, 128, 48, 2, 4
FIRST_SAVE_LIMIT_S, AFTER_SAVE_S, POLL_S = 600.0, 2.0, 0.2
TRACKER, METRICS = "latest_checkpointed_iteration.txt", "metrics.jsonl"


def overrides(data: Path, run_dir: Path, modules: list[str]) -> list[str]:
    return [*stack.fully_async(str(TESTBED / "model"), str(data / "train.parquet"), str(data / "val.parquet"),
                               str(TESTBED / "reward.py"), str(run_dir), response_length=RESPONSE_LENGTH,
                               group_size=GROUP_SIZE, mini_batch=MINI_BATCH, rollout_steps=PROMPTS, concurrent=8,
                               staleness=3.0, max_num_seqs=32),
            'trainer.logger=["console","file"]', f"trainer.save_freq={SAVE_EVERY}", "trainer.resume_mode=auto",
            f"actor_rollout_ref.actor.ppo_epochs={EPOCHS}", *modules]


def start_and_kill(given: list[str], run_dir: Path) -> None:
    """Raises RuntimeError where no checkpoint came in time."""
    run_dir.mkdir(parents=True)
    marker = uuid.uuid4().hex
    variables = {**stack.environment(str(ROOT / "overlay")), arm.MARKER: marker, "ESGRPO_RUN_DIR": str(run_dir),
                 "VERL_FILE_LOGGER_PATH": str(run_dir / METRICS)}
    deadline = time.monotonic() + FIRST_SAVE_LIMIT_S
    with open(run_dir / "log-first.txt", "wb") as log:
        driver = subprocess.Popen(stack.command(stack.FULLY_ASYNC, given), env=variables, stdout=log,
                                  stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                                  cwd=run_dir)
        try:
            while not (run_dir / TRACKER).exists():
                if driver.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no checkpoint: {arm.error_line(run_dir / 'log-first.txt')}")
                time.sleep(POLL_S)
            time.sleep(AFTER_SAVE_S)  # what is trained after it is rolled back
        finally:
            if driver.poll() is None:
                os.kill(driver.pid, signal.SIGKILL)
            arm.end_processes(marker)
            driver.wait()
    (run_dir / METRICS).rename(run_dir / "metrics-first.jsonl")  # verl writes it anew


def measure(run_dir: Path) -> dict:
    """What the rows say of both starts together."""
    (settled, *others), torn = books.of_directory(str(run_dir))
    if others:
        raise RuntimeError(f"{run_dir}: rows of {1 + len(others)} runs")
    back = [group for row in read(str(run_dir), "restored") for group in row["groups"]]
    trained = [row["group"] for row in read(str(run_dir), "trained") if row["trained_in"] == 1]
    responses = [row for row in read(str(run_dir), "responses") if row["group"] in back]
    return {"prompts": dict(settled.prompts), "balanced": settled.balanced, "problems": settled.problems,
            "starts": settled.starts, "came back whole": len(back), "torn rows": torn,
            "of these trained": len(set(back) & set(trained)),
            "of these generated again": len({row["group"] for row in responses if row["restart"] == 1})}


def failed(found: dict) -> bool:
    return (not found["balanced"] or found["prompts"] != {"trained": PROMPTS, "drawn": PROMPTS}
            or not found["came back whole"] == found["of these trained"] > 0 == found["of these generated again"])


def words(found: dict) -> str:
    return (f"{found['prompts'].get('trained', 0)} of {found['prompts']['drawn']} prompts trained once; of those in "
            f"flight at the checkpoint {found['came back whole']} came back whole and were trained as they were, "
            f"{found['starts'][-1]['came_back'] - found['came back whole']} were generated again, "
            f"{found['starts'][-1]['missing']} are missing")


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.restart", __doc__.splitlines()[0])
    parser.add_argument("--out", type=console.output_folder, default=ROOT / "runs" / "restart")
    parser.add_argument("--seed", type=console.whole, default=3)
    parser.add_argument("--results", type=console.output_file, help="also write what was found to this JSON file")
    parser.add_argument("--measure-only", action="store_true", help="of a run that was made before")
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    data, run_dir = options.out / "data", options.out / "run"
    if not options.measure_only:
        shutil.rmtree(run_dir, ignore_errors=True)
        make_data.write("search", options.seed, {"train": 256, "val": 16}, data)
        given = overrides(data, run_dir, [f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=64"])
        with console.measured("bench.restart"):
            start_and_kill(given, run_dir)
            arm.run("restart", given, run_dir, ROOT / "overlay", say=say)
    with console.measured("bench.restart"):
        found = measure(run_dir)
    say(json.dumps(found, indent=1))
    if options.results:
        console.write(options.results, json.dumps({
            "command": "python -m bench.restart", "commit": commit(), "seed": options.seed,
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": f"{os.cpu_count()} cores of {cpu_model()}",
            "python": platform.python_version(), "result": words(found), "books": found}, indent=1) + "\n")
    return int(failed(found))


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
