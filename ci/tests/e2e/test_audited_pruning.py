"""A real fully-async run under audited pruning: coins in the workers, weights at the trainer, groups replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import arm
from ci.tests.e2e.test_fully_async import GROUP_SIZE, NEVER_WAIT, ROOT, SEGMENT, metrics_of, overrides
from esgrpo.hooks.verl.records import read

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

# More than the rollouter's queue of 128 prompts: while the feed still has work, a place can be given back.
PROMPTS, EXEMPT = 180, 0.3


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Every agreement is a candidate and every false-prune rate allowed: many coins in a short run."""
    tmp_path = tmp_path_factory.mktemp("audit")
    run_dir, audit = tmp_path / "run", f"{SEGMENT}.prune.audit"
    arm.run("audit", overrides(
        tmp_path, run_dir, f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=64",
        f"{SEGMENT}.prune.resolved.enable=True", f"{SEGMENT}.prune.resolved.null_prob=1.0", f"{audit}.enable=True",
        f"{audit}.min_candidates=5", f"{audit}.max_false_rate=1.0", f"{audit}.exempt_prob={EXEMPT}",
        "algorithm.norm_adv_by_std_in_grpo=False",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor_rollout_ref.actor.policy_loss.loss_mode=pois", staleness=NEVER_WAIT, prompts=PROMPTS), run_dir,
        ROOT / "overlay")
    return run_dir


def test_its_hooks_are_in_place(run):
    reports = json.loads((run / "esgrpo" / "hooks.json").read_text())
    states = {(report["process"], hook["slug"]): hook["state"] for report in reports for hook in report["hooks"]}
    assert states["trainer", "keep-probabilities-reach-estimator"] == "APPLIED"
    assert states["rollouter", "resolved-groups-are-replaced"] == "APPLIED"
    assert "loss_scale_factor: None -> " in (run / "log.txt").read_text()


def test_coins_fell_and_their_probabilities_are_recorded(run):
    rows = read(str(run), "responses")
    reasons = {row["decided_by"] for row in rows if row["candidate"]}
    assert {"warm-up", "coin"} <= reasons
    assert {row["keep_probability"] for row in rows} == {1.0, EXEMPT}
    pruned = [row for row in rows if row["outcome"] == "prune"]
    assert pruned and all(row["rule"] == "resolved" and row["candidate"] and not row["exempted"] for row in pruned)
    for group in {row["group"] for row in rows}:
        mine = [row for row in rows if row["group"] == group]
        assert sum(row["outcome"] == "prune" for row in mine) <= GROUP_SIZE / 2


def test_weighted_rows_were_trained_and_pruned_ones_were_not(run):
    trained = read(str(run), "trained")
    weighted = [row for row in trained if row["keep_probability"] < 1]
    assert weighted and all(row["pruned"] != row["exempted"] for row in weighted)
    assert not any(row["gradient"] for row in weighted if row["pruned"])


def test_foreseen_groups_were_replaced_and_never_trained(run):
    replaced = {row["group"] for sample in read(str(run), "replaced") for row in sample["rows"]}
    assert replaced
    assert not replaced & {row["group"] for row in read(str(run), "trained")}
    assert len(read(str(run), "responses")) == (PROMPTS + len(replaced)) * GROUP_SIZE
    counted = metrics_of(run, "esgrpo/prune/replaced_groups")
    assert 0 < sum(row["esgrpo/prune/replaced_groups"] for row in counted) <= len(replaced)
    assert any(row["esgrpo/prune/candidates"] for row in counted)
    assert any("esgrpo/prune/false_rate_bound" in row and "esgrpo/length_bias/resolved" in row for row in counted)
