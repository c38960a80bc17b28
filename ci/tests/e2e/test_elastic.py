"""A real fully-async run with the whole method on, also what its profile leaves out.

History, routing, audited pruning, group filter, sampler, kept requests, overlap control.

One start. Its pruning is as bold as the settings allow, so that many coins fall in a short run.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from bench.common import arm
from ci.tests.e2e.test_fully_async import (
    GROUP_SIZE,
    MINI_BATCH,
    NEVER_WAIT,
    RESPONSE_LENGTH,
    ROOT,
    SEGMENT,
    check_time,
    metrics_of,
    overrides,
)
from esgrpo.algo import decisions
from esgrpo.algo.overlap import Cause
from esgrpo.records import read
from esgrpo.tools import decided

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

# More than the rollouter's queue holds: while the feed still has work, a place can be given back.
PROMPTS, EXEMPT = 96, 0.3
SCARCE_KV = 2 << 20  # bytes: ten blocks of 128 tokens, for some sixteen responses of up to four

# The engine has room for four times as many prompts as the run begins with, and age costs next to nothing: something
# can be gained.
MOST_CONCURRENT = 16
OVERLAP = [f"{SEGMENT}.overlap.{key}" for key in (
    "enable=True", "override=True", f"max_concurrency={MOST_CONCURRENT}", "max_batches=1", "age_scale=1000.0")]

# Hooks that only this run needs, beside those of test_fully_async.
EXPECTED = {
    "rollouter": {"prompt-forecasts", "prompt-queue", "prompt-sampler", "resolved-groups-are-replaced",
                  "rebalance-moves-the-surplus"},
    "trainer": {"keep-probabilities-reach-estimator", "overlap-control"},
    "vllm-server": {"kept-requests", "standalone-cache-stays", "token-outputs", "first-and-last-output"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    tmp_path = tmp_path_factory.mktemp("elastic")
    run_dir, prune = tmp_path / "run", f"{SEGMENT}.prune"
    arm.run("elastic", overrides(
        tmp_path, run_dir, f"{SEGMENT}.profile=elastic", f"{SEGMENT}.segment_length=64",
        f"{prune}.resolved.enable=True", f"{prune}.resolved.null_prob=1.0", f"{prune}.audit.min_candidates=5",
        f"{prune}.audit.max_false_rate=1.0", f"{prune}.audit.exempt_prob={EXEMPT}",
        f"{prune}.verdict.enable=False", f"{prune}.treatment=masked",  # rows with weights, which verdicts refuse
        f"{SEGMENT}.null_groups=replace", *OVERLAP,
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes={SCARCE_KV}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=pois",
        staleness=NEVER_WAIT, prompts=PROMPTS), run_dir, ROOT / "overlay")
    return run_dir


def test_its_hooks_are_in_place(run):
    reports = json.loads((run / "esgrpo" / "hooks.json").read_text())
    states = {(report["process"], hook["slug"]): hook["state"] for report in reports for hook in report["hooks"]}
    assert {key: states.get(key) for process, slugs in EXPECTED.items() for key in ((process, s) for s in slugs)} == {
        (process, slug): "APPLIED" for process, slugs in EXPECTED.items() for slug in slugs}
    log = (run / "log.txt").read_text()
    assert "loss_scale_factor: null -> " in log and "pois.anchor: auto -> token" in log
    assert "norm_adv_by_std_in_grpo: True -> False" in log and "loss_agg_mode: token-mean -> seq-mean-token-sum" in log
    assert states["rollouter", "tail-router"] == "NOT_NEEDED"


def test_every_sample_ends_once_and_every_token_has_its_version(run):
    responses = read(str(run), "responses")
    keys = [(row["group"], row["member"]) for row in responses]
    assert len(set(keys)) == len(keys)
    trained = [(row["group"], row["member"]) for row in read(str(run), "trained")]
    assert len(set(trained)) == len(trained) and set(trained) <= set(keys)
    assert any(len(row["spans"]) > 1 for row in responses), "no response lived through a weight sync"
    for row in responses:
        versions = [version for version, _ in row["spans"]]
        assert sum(count for _, count in row["spans"]) == row["tokens"] <= RESPONSE_LENGTH
        assert versions == sorted(set(versions)) and versions[0] >= 0


def test_requests_were_kept_and_none_was_aborted(run):
    """A run that keeps nothing has the switch on in vain: an error. An engine hands back a proven loop, once, for the
    coin; it begins again unless it was cut there, as a loop or by a rule that fell in the meantime."""
    windows, responses = read(str(run), "windows"), read(str(run), "responses")
    assert sum(window["kept"] for window in windows) > 0
    assert sum(window["outcomes"].get("abort", 0) for window in windows) == 0
    assert {window["in_flight"] for window in windows} == {0}
    yields = sum(count for window in windows for outcome, count in window["outcomes"].items()
                 if outcome.startswith("yield"))
    again = sum(row["attempts"] - 1 for row in responses)
    cut = Counter(row["rule"] for row in responses if row["outcome"] == "prune")
    assert yields - cut["resolved"] <= again + cut["repetition"] <= yields
    assert max(row["attempts"] for row in responses) <= 2
    assert all(row["reprefill"] == 0 for row in responses if row["attempts"] == 1)
    rows = metrics_of(run, "esgrpo/sync/kept")
    assert sum(row["esgrpo/sync/kept"] for row in rows) > 0 and max(row["esgrpo/sync/kv_age"] for row in rows) >= 1
    assert all(row["esgrpo/sync/aborted"] == 0 for row in rows)


def test_coins_fell_and_their_probabilities_are_recorded(run):
    rows = read(str(run), "responses")
    by_rule = [row for row in rows if row["rule"] == "resolved"]
    assert {"warm-up", "coin"} <= {row["decided_by"] for row in rows if row["candidate"]}
    assert {row["keep_probability"] for row in rows} == {1.0, EXEMPT}
    assert by_rule and all(row["outcome"] == "prune" and row["candidate"] and not row["exempted"] for row in by_rule)
    for group in {row["group"] for row in by_rule}:
        assert sum(row["group"] == group for row in by_rule) <= GROUP_SIZE / 2


def test_weighted_rows_were_trained_and_pruned_ones_were_not(run):
    weighted = [row for row in read(str(run), "trained") if row["keep_probability"] < 1]
    assert weighted and all(row["pruned"] != row["exempted"] for row in weighted)
    assert not any(row["gradient"] for row in weighted if row["pruned"])
    assert {row["treatment"] for row in weighted} == {"masked"} and {row["coin"] for row in weighted} == {EXEMPT}


def test_foreseen_groups_were_replaced_and_never_trained(run):
    replaced = {row["group"] for sample in read(str(run), "replaced") for row in sample["rows"]}
    assert replaced
    assert not replaced & {row["group"] for row in read(str(run), "trained")}
    assert len(read(str(run), "responses")) == (PROMPTS + len(replaced)) * GROUP_SIZE
    counted = metrics_of(run, "esgrpo/prune/replaced_groups")
    assert 0 < sum(row["esgrpo/prune/replaced_groups"] for row in counted) <= len(replaced)
    assert any("esgrpo/prune/false_rate_bound" in row and "esgrpo/length_bias/resolved" in row for row in counted)


def test_groups_without_a_gradient_were_replaced_whatever_ended_them(run):
    """But for those that came when the feed had seen its end."""
    finished = [sample["rows"] for sample in read(str(run), "replaced")]
    assert any(all(row["rule"] == "" for row in rows) for rows in finished), "only what the resolved rule foresaw"
    assert all(len({row["score"] for row in rows if row["outcome"] != "prune"}) == 1 for rows in finished)
    counts, _ = decisions.of_rows(read(str(run), "decisions"))
    assert counts["replaced/null"] > 0


def test_modules_decided_or_say_why_not(run):
    modules = {row.module: row for row in decided.of_directory(str(run)) if row.on}
    assert set(modules) == {"routing", "loops", "pruning", "replaced", "sampler", "keep", "kv_headroom",
                            "token_outputs", "overlap"}
    assert all(row.decided or row.reason for row in modules.values())
    responses, windows = read(str(run), "responses"), read(str(run), "windows")
    assert modules["pruning"].decided == sum(row["rule"] == "resolved" for row in responses) > 0
    assert modules["replaced"].decided == len(read(str(run), "replaced")) > 0  # the last ones come with the end
    assert modules["keep"].decided == sum(window["kept"] for window in windows) > 0
    assert modules["kv_headroom"].decided == sum(window["held"] for window in windows) > 0
    assert modules["token_outputs"].decided > 0
    rows = metrics_of(run, "esgrpo/decisions/pruning")
    assert 0 < sum(row["esgrpo/decisions/pruning"] for row in rows) <= modules["pruning"].decided


def test_overlap_was_measured_and_every_move_is_recorded(run):
    """Whether it gains by a move is up to the machine; what it did is written down and followed."""
    counts, _ = decisions.of_rows(read(str(run), "decisions"))
    moves, log = read(str(run), "moves"), (run / "log.txt").read_text()
    assert counts["overlap/versions"] >= counts["overlap/measured"] > 0
    assert counts["overlap/moves"] == len(moves) == log.count("esgrpo: overlap at version ")
    for move, then in itertools.pairwise(moves):
        assert move["after"] == then["before"] and move["version"] < then["version"]
    for move in moves:
        assert move["cause"] in set(Cause) and move["before"] != move["after"]
        assert 1 <= move["after"]["concurrency"] <= MOST_CONCURRENT and move["after"]["trigger"] == MINI_BATCH
    check_time(run)


def test_history_was_learnt_saved_and_used(run):
    history = json.loads((run / "esgrpo" / "history.json").read_text())
    assert history["prompts"]
    rows = metrics_of(run, "esgrpo/history/known_rate")
    assert rows and all("esgrpo/sampler/unseen" in row or "esgrpo/history/known_rate" in row for row in rows)
    outcomes = [row["rule"] for row in read(str(run), "responses")]
    assert "boundary" not in outcomes, "a soft boundary handed a response back"
