"""Real fully-async runs with two vLLM replicas: stragglers move to the tail replica, and without routing nobody moves.

Two starts of the same command; the second one, with routing off, is the negative control.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.common import arm
from ci.tests.e2e.test_fully_async import (
    GROUP_SIZE,
    NEVER_WAIT,
    RESPONSE_LENGTH,
    ROOT,
    SEGMENT,
    metrics_of,
    overrides,
)
from esgrpo.records import read

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

REPLICAS, PROMPTS = 2, 160  # the tail has a replica from the fourth weight version on: prompts are left then
MOVED = "yield/move"  # how an engine's window counts a response that it handed back to be routed anew


def start(tmp_path: Path, routing: bool) -> Path:
    run_dir = tmp_path / "run"
    arm.run("two-replicas", overrides(
        tmp_path, run_dir, f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=16", f"{SEGMENT}.history.enable=True",
        f"{SEGMENT}.routing.tail_fraction=0.5",  # half of a group makes the rest its tail: many moves in a short run
        f"{SEGMENT}.routing.enable={routing}", f"{SEGMENT}.routing.tail_share=0.25",
        "actor_rollout_ref.actor.policy_loss.loss_mode=pois",
        prompts=PROMPTS, staleness=NEVER_WAIT, replicas=REPLICAS), run_dir, ROOT / "overlay")
    return run_dir


@pytest.fixture(scope="module")
def routed(tmp_path_factory) -> Path:
    return start(tmp_path_factory.mktemp("routed"), True)


@pytest.fixture(scope="module")
def unrouted(tmp_path_factory) -> Path:
    return start(tmp_path_factory.mktemp("unrouted"), False)


def outcomes(run_dir: Path) -> Counter:
    found = Counter()
    for window in read(str(run_dir), "windows"):
        found.update(window["outcomes"])
    return found


def replicas_of_responses(run_dir: Path) -> list[set[str]]:
    """Of every response the replicas that served it; attempts that a weight sync aborted do not tell theirs."""
    return [{replica for replica, *_ in row["places"] if replica} for row in read(str(run_dir), "responses")]


def check_conservation(run_dir: Path) -> None:
    """Every sample ends once, and the engines of both replicas made what the responses say."""
    reports = json.loads((run_dir / "esgrpo" / "hooks.json").read_text())
    counted = Counter(report["process"] for report in reports)
    assert counted["vllm-server"] == counted["engine-core"] == REPLICAS
    responses, windows = read(str(run_dir), "responses"), read(str(run_dir), "windows")
    assert len({(row["group"], row["member"]) for row in responses}) == len(responses) == PROMPTS * GROUP_SIZE
    last = max(window["version"] for window in windows)  # the window of the last version is never closed
    after = sum(tokens for row in responses for version, tokens in row["spans"] if version > last)
    assert sum(window["tokens"] for window in windows) + after == sum(row["tokens"] for row in responses)
    for row in responses:
        versions = [version for version, _ in row["spans"]]
        assert sum(tokens for _, tokens in row["spans"]) == row["tokens"] <= RESPONSE_LENGTH
        assert versions == sorted(set(versions))


def test_stragglers_move_to_the_tail_replica_and_lose_no_token(routed):
    rows = metrics_of(routed, "esgrpo/routing/moves")
    assert max(row["esgrpo/routing/tail_replicas"] for row in rows) == 1
    moves = sum(row["esgrpo/routing/moves"] for row in rows)
    assert 0 < moves <= outcomes(routed)[MOVED]  # some stay where they are: the tail replica was fuller
    assert {"0", "1"} in replicas_of_responses(routed), "nobody was on both replicas"
    check_conservation(routed)


def test_without_routing_nobody_moves(unrouted):
    assert metrics_of(unrouted, "esgrpo/routing/moves") == [] and outcomes(unrouted)[MOVED] == 0
    found = replicas_of_responses(unrouted)
    assert {"0"} in found and {"1"} in found and {"0", "1"} not in found
    check_conservation(unrouted)
