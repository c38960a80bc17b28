"""Real runs of verl's v1 trainers: separate_async with everything that segments do, colocate_async with carry-over.

Three starts: separate_async; colocate_async with checkpoints; the latter once more from its checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from bench.common import arm, stack
from bench.testbed import make_data
from ci.tests.e2e.test_fully_async import EXACT_KL, ROOT, SEGMENT, SHORT_LOOPS, metrics_of, stragglers
from esgrpo.records import read

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

GROUP_SIZE, RESPONSE_LENGTH, STEPS = 4, 384, 4
# Of the engine: fewer than responses in flight and no whole groups, so that groups are unfinished at every weight sync.
FEW_SLOTS = 6
THRESHOLD = 3  # weight versions that a trained group may span
FINISH_AFTER = 3
OPTIMISER_STEPS = 2  # per weight version of the separate_async run
# The engine shall be the slower one on any machine, so that a weight sync always finds responses running: a group at a
# time in the engine, two batches of prompts in flight before the first step, and steps that last several times as long.
ONE_GROUP, IN_FLIGHT, STEP_MS = GROUP_SIZE, 2.0, 12.0
POIS = "actor_rollout_ref.actor.policy_loss.loss_mode=pois"
LOG_KL = "esgrpo/pois/log_kl_rollout_current"

# Every hook that these runs need, by the kind of process that needs it.
EXPECTED = {
    "v1-task-runner": {"v1-handshake", "v1-pruned-rows", "v1-final-outputs", "v1-trained-rows", "v1-carry-over",
                       "v1-carry-checkpoint", "v1-reissued-groups", "v1-failure-is-loud", "register-grpo-segment",
                       "metrics-keep-prefix", "server-control"},
    "agent-loop-worker": {"client-attempts", "group-members", "v1-response-rows", "resume-without-sleep"},
    "actor-worker": {"register-policy-losses", "policy-loss-context", "cpu-process-group"},
    "vllm-server": {"server-control", "server-weight-version"},
    "engine-core": {"segment-scheduler", "engine-core-utilities", "cpu-linear-reloads"},
}


def run_v1(mode: str, tmp_path: Path, *extra: str, environment: dict[str, str] | None = None, **options) -> Path:
    """One run in tmp_path/run, which may hold an earlier one to go on from."""
    data, testbed, run_dir = tmp_path / "data", ROOT / "bench" / "testbed", tmp_path / "run"
    make_data.write("search", 3, {"train": 256, "val": 16}, data)
    overrides = stack.v1(mode, str(testbed / "model"), str(data / "train.parquet"), str(data / "val.parquet"),
                             str(testbed / "reward.py"), str(run_dir), response_length=RESPONSE_LENGTH,
                             group_size=GROUP_SIZE, **options)
    arm.run(mode, [*overrides, 'trainer.logger=["console","file"]', POIS, *extra], run_dir, ROOT / "overlay",
            main=stack.MAIN_PPO, environment=environment)
    return run_dir


@pytest.fixture(scope="module")
def separate(tmp_path_factory) -> Path:
    """Two optimiser steps per weight version, yields, both kinds of pruning; verl's group filter, refilled ahead."""
    return run_v1("separate_async", tmp_path_factory.mktemp("separate"), f"{SEGMENT}.enable=True",
                  f"{SEGMENT}.segment_length=64", f"{SEGMENT}.boundary=yield",
                  *SHORT_LOOPS, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward",
                  f"{SEGMENT}.null_groups=spare",
                  *stragglers(FINISH_AFTER), mini_batch=4, sync_every=OPTIMISER_STEPS,
                  steps=STEPS, warmup=IN_FLIGHT, off_policy=THRESHOLD, max_num_seqs=ONE_GROUP,
                  environment=stack.slow_engine(STEP_MS))


STATIC = [f"{SEGMENT}.profile=static", f"{SEGMENT}.segment_length=64", "trainer.save_freq=2"]


@pytest.fixture(scope="module")
def colocate(tmp_path_factory) -> Path:
    return run_v1("colocate_async", tmp_path_factory.mktemp("colocate"), *STATIC, mini_batch=8, steps=STEPS,
                  warmup=2.0, off_policy=THRESHOLD, max_num_seqs=FEW_SLOTS)


def check_hooks(run_dir: Path, *more: str) -> None:
    reports = json.loads((run_dir / "esgrpo" / "hooks.json").read_text())
    by_process = {report["process"]: {h["slug"]: h["state"] for h in report["hooks"]} for report in reports}
    expected = {**EXPECTED, "v1-task-runner": EXPECTED["v1-task-runner"] | set(more)}
    assert {slug: by_process[process].get(slug) for process, slugs in expected.items() for slug in slugs} == {
        slug: "APPLIED" for slugs in expected.values() for slug in slugs}
    for report in reports:
        for hook in report["hooks"]:
            assert hook["state"] in ("APPLIED", "NOT_NEEDED", "ABSENT"), (report["process"], hook)
    assert len({r["pid"] for r in reports}) == len(reports)


def check_groups(run_dir: Path) -> list[dict]:
    """Whole groups, each trained once and within the bound; returns the records of the pool."""
    pool, trained = read(str(run_dir), "carry"), read(str(run_dir), "trained")
    groups = [group for step in pool for group in step["groups"]]
    assert len(set(groups)) == len(groups), "a group was trained twice"
    assert Counter(row["group"] for row in trained) == {group: GROUP_SIZE for group in groups}
    assert len({(row["group"], row["member"]) for row in trained}) == len(trained)
    assert all(step["partial"] == 0 and step["age_max"] <= THRESHOLD for step in pool)
    for earlier, later in zip(pool, pool[1:], strict=False):  # nothing is lost between two steps
        gone = set(earlier["waiting"]) - set(later["waiting"]) - set(later["groups"])
        assert len(gone) <= later["dropped"] + later["filtered"] + later["failed"] and not later["odd"]
    return pool


def check_tokens(run_dir: Path) -> None:
    """Engines made what the responses say, version by version, and what was still running at the end."""
    responses, windows = read(str(run_dir), "responses"), read(str(run_dir), "windows")
    ended = Counter()
    for row in responses:
        assert sum(tokens for _, tokens in row["spans"]) == row["tokens"] <= RESPONSE_LENGTH
        assert [v for v, _ in row["spans"]] == sorted({v for v, _ in row["spans"]}), "versions run backwards"
        assert sum(tokens for *_, tokens in row["places"]) == row["tokens"]
        for version, tokens in row["spans"]:
            ended[version] += tokens
    made = Counter()
    for window in windows:
        made[window["version"]] += window["tokens"]
    running = {version: tokens - ended[version] for version, tokens in made.items()}
    assert all(tokens >= 0 for tokens in running.values()), running
    last = read(str(run_dir), "carry")[-1]
    assert sum(running.values()) <= last["carried"] * GROUP_SIZE * RESPONSE_LENGTH
    if not last["unfinished"]:
        assert sum(running.values()) == 0
    known = {(row["group"], row["member"]): row for row in responses}
    for row in read(str(run_dir), "trained"):
        assert known[row["group"], row["member"]]["spans"] == row["spans"]


def test_separate_async_has_every_hook_it_needs(separate):
    check_hooks(separate, "v1-standalone-start", "v1-filter-trained-rows", "v1-refill-ahead",
                "v1-keep-probabilities", "keep-probabilities-reach-estimator")  # it masks what it cuts


def test_separate_async_trains_whole_groups_once(separate):
    assert len(check_groups(separate)) == STEPS * OPTIMISER_STEPS
    check_tokens(separate)


def test_separate_async_has_the_slow_engine_that_the_next_test_relies_on(separate):
    paces = [window["pace"] for window in read(str(separate), "windows")]
    assert sum(pace["seconds"] for pace in paces) * 1e3 >= STEP_MS * sum(pace["steps"] for pace in paces) > 0


def test_separate_async_prunes_yields_and_spans_versions(separate):
    responses, trained = read(str(separate), "responses"), read(str(separate), "trained")
    assert any(len(row["spans"]) > 1 for row in responses), "no response lived through a weight sync"
    assert any(row["attempts"] > 1 and row["boundaries"] > 0 for row in responses), "no yield came back"
    assert {row["rule"] for row in responses if row["outcome"] == "prune"} == {"repetition", "enough"}
    masked = [row for row in trained if row["pruned"]]
    assert masked and all(row["outcome"] == "prune" and not row["gradient"] for row in masked)
    assert any(row["gradient"] for row in trained)


def test_separate_async_logs_what_it_did(separate):
    updates = metrics_of(separate, LOG_KL)
    assert len(updates) == STEPS
    assert all("esgrpo/bubble_rate" in row and "esgrpo/prune/rate" in row for row in updates)
    assert any("esgrpo/sync/kept" in row for row in updates)
    assert all("esgrpo/decisions/replaced" in row for row in updates)
    assert any(row.get("training/filter_groups/evicted_samples") for row in updates), "verl's filter left nothing out"
    assert any("esgrpo/length_bias/enough" in row and "esgrpo/prune/false_rate_bound" in row for row in updates)
    assert {row["esgrpo/pois/optimizer_steps_per_version"] for row in updates} == {OPTIMISER_STEPS}
    # how many live through a sync depends on the machine; what the metric says is what the rows say
    longest = max(len(row["spans"]) for row in read(str(separate), "trained"))
    assert max(row["esgrpo/version_span/max"] for row in updates) == longest


@pytest.mark.long
def test_colocate_async_carries_unfinished_groups_over(colocate):
    check_hooks(colocate)
    pool = check_groups(colocate)
    assert len(pool) == STEPS
    assert all(step["carried"] > 0 for step in pool) and any(step["unfinished"] > 0 for step in pool)
    assert sum(step["trained_carried"] for step in pool) > 0
    check_tokens(colocate)
    responses = read(str(colocate), "responses")
    assert any(len(row["spans"]) > 1 for row in responses), "no response was carried over a weight update"
    assert all(row["outcome"] == "finish" for row in responses)
    updates = metrics_of(colocate, LOG_KL)
    assert abs(updates[0][LOG_KL]) < EXACT_KL and all(row["esgrpo/carry/carried"] > 0 for row in updates)


@pytest.mark.long
def test_nothing_is_lost_at_checkpoint_and_restart(colocate, tmp_path):
    """In a copy, since the first run's records are looked at by themselves, in whatever order tests run."""
    before, steps = read(str(colocate), "carry")[-1], STEPS + 1
    shutil.copytree(colocate, tmp_path / "run")
    run_dir = run_v1("colocate_async", tmp_path, *STATIC, "trainer.resume_mode=auto", mini_batch=8, steps=steps,
                     warmup=2.0, off_policy=THRESHOLD, max_num_seqs=FEW_SLOTS)
    pool = check_groups(run_dir)
    assert [step["step"] for step in pool] == list(range(1, steps + 1))
    missing = set(before["waiting"]) - set(pool[-1]["groups"]) - set(pool[-1]["waiting"])
    assert len(missing) == pool[-1]["dropped"]  # complete before the restart, and too old by now
    assert pool[-1]["trained_carried"] > 0
    check_restart(run_dir, before, read(str(colocate), "responses"))


def check_restart(run_dir: Path, before: dict, ended: list[dict]) -> None:
    """What verl generates a second time is counted, said and logged with the first step; `ended` before the restart."""
    (lost,) = read(str(run_dir), "restart")
    assert 0 < lost["groups"] <= len(before["waiting"])
    assert lost["finished"] + lost["running"] == lost["groups"] * GROUP_SIZE and lost["running"] > 0
    waiting = [row for row in ended if row["group"] in before["waiting"]]  # some of them ended after the checkpoint
    assert lost["finished"] <= len(waiting) and lost["tokens"] <= sum(row["tokens"] for row in waiting)
    assert (lost["tokens"] > 0) == (lost["finished"] > 0)  # whose members end is a matter of pace
    assert f"restart: {lost['groups']} prompt groups were unfinished" in (run_dir / "log.txt").read_text()
    rows = metrics_of(run_dir, "esgrpo/restart/tokens")
    assert [row["esgrpo/restart/tokens"] for row in rows] == [lost["tokens"]]
