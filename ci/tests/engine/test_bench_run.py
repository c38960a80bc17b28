"""The engine benchmark as its users start it, on vLLM with two replicas, at toy size: accounting only, no timing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.policies import policy

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.real, pytest.mark.slow]
GROUPS, MEMBERS, UPDATES = 3, 2, 2
POLICIES = ("verl", "es-grpo/AB+barrier", "es-grpo", "es-grpo/AB+abort", "colocate_async")
TOY = ("--model", "random:300K", "--max-num-seqs", "4", "--batched-tokens", "512", "--kv-gb", "0.02", "--prompt", "256",
       "--groups", str(GROUPS), "--members", str(MEMBERS), "--updates", str(UPDATES), "--cap", "64", "--scale", "0.02",
       "--sync-s", "0.2", "--capacity", "4")


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ESGRPO_", "VERL_", "VLLM_"))}
    paths = os.pathsep.join((str(ROOT / "overlay"), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-m", "bench.engine", *TOY, *arguments, "--cache", str(folder), "--results",
         str(folder / "r.jsonl")], env={**kept, "PYTHONPATH": paths, **variables}, capture_output=True, text=True,
        timeout=500)


def test_all_books_agree_on_two_replicas(tmp_path):
    done = start(tmp_path, "--replicas", "2", "--policies", ",".join(POLICIES), "--scenario", "sync,async")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    played = [(scenario, name) for scenario in ("sync", "async") for name in POLICIES
              if scenario in policy(name).scenarios]
    assert [row["kind"] for row in rows] == ["tau", *["run"] * len(played), "summary"]
    runs = rows[1:-1]
    assert [(run["scenario"], run["policy"]) for run in runs] == played
    for run in runs:
        assert run["decoded"] == sum(engine["decoded"] for engine in run["engines"])
        assert run["decoded"] == run["trained"] + sum(run["waste"].values())
        assert run["trained_samples"] == GROUPS * MEMBERS * UPDATES
        assert run["scheduler"].startswith("Segment")
        requests = json.loads((tmp_path / run["trace"]).read_text())
        assert run["decoded"] == sum(row["decoded"] for request in requests for row in request["attempts"])
    plain, barrier, carrying = runs[:3]
    assert plain["decoded"] == barrier["decoded"]  # who waits for all decodes the same work
    assert carrying["waste"]["left_over"] > 0 == barrier["waste"]["left_over"]
    assert "math: sync es-grpo against verl" in done.stdout
    against = rows[-1]["against_colocate_async"]["sync es-grpo"]  # no ratio without its price
    assert 0 <= against["stale_rows"] <= 1 and "keep" in against["decisions"]


def test_without_the_hook_it_stops(tmp_path):
    done = start(tmp_path, "--replicas", "1", "--policies", "verl", ESGRPO_DISABLE="segment-scheduler")
    assert done.returncode == 2
    assert "it would measure plain vLLM" in done.stderr and "segment-scheduler: DISABLED" in done.stderr
    assert not (tmp_path / "r.jsonl").exists()
