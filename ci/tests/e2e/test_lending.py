"""A real fully-async run whose trainer lends its device to the rollout, while standalone replicas keep requests.

Engine steps last longer, so that each of the two replicas has a speed of its own although they share the cores.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from bench.common import arm, stack
from ci.tests.e2e.test_fully_async import GROUP_SIZE, NEVER_WAIT, RESPONSE_LENGTH, ROOT, SEGMENT, overrides
from esgrpo.algo import decisions
from esgrpo.records import read

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS, STEP_MS = 48, 15.0
HYBRID, STANDALONE = "0", "1"  # verl's ranks: those on the trainer's devices come first
EXPECTED = {"rollouter": {"rebalance-moves-the-surplus", "lent-wait-ends-with-data"},
            "vllm-server": {"kept-requests", "standalone-cache-stays"}, "trainer": {"lent-replicas-turn-away"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("lending")
    run_dir = tmp_path / "run"
    arm.run("lending", overrides(
        tmp_path, run_dir, f"{SEGMENT}.profile=elastic", f"{SEGMENT}.segment_length=64",
        "async_training.use_dynamic_resource_scheduling=True", prompts=PROMPTS, staleness=NEVER_WAIT), run_dir,
        ROOT / "overlay", environment=stack.slow_engine(STEP_MS))
    return run_dir


def test_its_hooks_are_in_place(run):
    reports = json.loads((run / "esgrpo" / "hooks.json").read_text())
    states = {(report["process"], hook["slug"]): hook["state"] for report in reports for hook in report["hooks"]}
    for process, slugs in EXPECTED.items():
        for slug in slugs:
            assert states[process, slug] == "APPLIED", (process, slug)


def test_a_rebalance_moves_the_surplus_and_leaves_the_others(run):
    """Without the hook every request is aborted (ci/tests/contract/test_keep_and_lending.py has that control)."""
    moved = [(int(some), int(of)) for some, of in re.findall(r"rebalanced: (\d+) of (\d+) requests",
                                                             (run / "log.txt").read_text())]
    assert moved and all(some <= of // 2 for some, of in moved)
    counts, _ = decisions.of_rows(read(str(run), "decisions"))
    assert 0 < counts["keep/moved"] <= sum(some for some, _ in moved)  # who has no token yet is not counted
    assert counts["keep/kept"] > 0


def test_lent_replicas_make_tokens_and_hand_them_on(run):
    outcomes: dict[str, Counter] = {HYBRID: Counter(), STANDALONE: Counter()}
    for window in read(str(run), "windows"):
        outcomes[window["replica"]].update(window["outcomes"])
    assert outcomes[STANDALONE]["yield/surplus"] > 0
    assert outcomes[HYBRID]["abort"] > 0  # when the trainer takes its device back
    places = [[replica for replica, *_ in row["places"]] for row in read(str(run), "responses")]
    assert any(HYBRID in places_of and places_of[-1] == STANDALONE for places_of in places)


def test_every_token_is_accounted_for(run):
    responses = read(str(run), "responses")
    keys = [(row["group"], row["member"]) for row in responses]
    replaced = {row["group"] for sample in read(str(run), "replaced") for row in sample["rows"]}
    assert len(set(keys)) == len(keys) == (PROMPTS + len(replaced)) * GROUP_SIZE
    trained = [(row["group"], row["member"]) for row in read(str(run), "trained")]
    assert len(set(trained)) == len(trained) and set(trained) <= set(keys)
    assert max(row["attempts"] for row in responses) > 2
    for row in responses:
        versions = [version for version, _ in row["spans"]]
        assert sum(count for _, count in row["spans"]) == row["tokens"] <= RESPONSE_LENGTH
        assert sum(tokens for *_, tokens in row["places"]) == row["tokens"]
        assert versions == sorted(set(versions)) and versions[0] >= 0
