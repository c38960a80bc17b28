"""A real fully-async run whose weight syncs leave running requests in the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import arm
from ci.tests.e2e.test_fully_async import (
    GROUP_SIZE,
    NEVER_WAIT,
    RESPONSE_LENGTH,
    ROOT,
    SEGMENT,
    metrics_of,
    overrides,
)
from esgrpo.hooks.verl.records import read

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS = 32


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    tmp_path = tmp_path_factory.mktemp("kept")
    run_dir = tmp_path / "run"
    arm.run("kept", overrides(
        tmp_path, run_dir, f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=64", f"{SEGMENT}.sync.requests=keep",
        "actor_rollout_ref.actor.policy_loss.loss_mode=pois", prompts=PROMPTS, staleness=NEVER_WAIT), run_dir,
        ROOT / "overlay")
    return run_dir


def test_requests_were_kept_and_none_was_aborted(run):
    """A run that keeps nothing has the switch on in vain: an error."""
    windows, responses = read(str(run), "windows"), read(str(run), "responses")
    assert sum(window["kept"] for window in windows) > 0
    assert sum(window["outcomes"].get("abort", 0) for window in windows) == 0
    assert {window["in_flight"] for window in windows} == {0}
    assert {response["attempts"] for response in responses} == {1} and {r["reprefill"] for r in responses} == {0}
    assert len(responses) == PROMPTS * GROUP_SIZE


def test_versions_are_those_of_the_tokens(run):
    responses = read(str(run), "responses")
    assert any(len(response["spans"]) > 1 for response in responses), "no response lived through a weight sync"
    for response in responses:
        versions = [version for version, _ in response["spans"]]
        assert sum(count for _, count in response["spans"]) == response["tokens"] <= RESPONSE_LENGTH
        assert versions == sorted(set(versions)) and versions[0] >= 0


def test_the_metrics_say_so(run):
    rows = metrics_of(run, "esgrpo/sync/kept")
    assert sum(row["esgrpo/sync/kept"] for row in rows) > 0
    assert all(row["esgrpo/sync/aborted"] == 0 for row in rows)
    assert max(row["esgrpo/sync/kv_age"] for row in rows) >= 1
    spans = metrics_of(run, "esgrpo/version_span/max")
    assert max(row["esgrpo/version_span/max"] for row in spans) > 1


def test_the_hooks_were_in_place(run):
    reports = json.loads((run / "esgrpo" / "hooks.json").read_text())
    states = {(r["process"], h["slug"]): h["state"] for r in reports for h in r["hooks"]}
    assert states["vllm-server", "kept-requests"] == states["rollouter", "rebalance-aborts"] == "APPLIED"
