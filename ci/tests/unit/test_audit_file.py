"""What the audit of a worker has learned outlives a restart: one file per worker, beside the prompt history."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from esgrpo import config, records
from esgrpo.algo.group_pruning import Finished
from esgrpo.hooks.verl import group_decisions

PRUNE = {"finish_group_after": 2, "audit": {"enable": True, "min_candidates": 1, "max_false_rate": 1.0}}
FILE = "history-audit-0.json"


def switch(monkeypatch, **prune):
    monkeypatch.setenv(config.ENV_SEGMENT, json.dumps({"enable": True, "prune": {**PRUNE, **prune}}))


@pytest.fixture
def run_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(group_decisions, "_index", lambda worker: worker.index)
    switch(monkeypatch)
    return tmp_path / "esgrpo"


def worker(index: int = 0):
    return SimpleNamespace(index=index, rollout_config=SimpleNamespace(n=4, response_length=64))


def learn(worker_, group: str) -> None:
    """A group in which the rule finds two candidates; both are exempted and end, one of them right."""
    pruner = group_decisions.pruner_of(worker_)
    pruner.watch(group, 4, None)
    for member, correct in enumerate((True, False)):
        pruner.ended(group, member, Finished(5 + member, correct, float(correct)))
    decided = pruner.checkpoint(group, {2: 7, 3: 7})
    assert len(decided) == 2
    for member, correct in ((2, True), (3, False)):
        pruner.ended(group, member, Finished(9, correct, float(correct)))
    pruner.close(group)


def rate(worker_) -> tuple[int, int]:
    return group_decisions.pruner_of(worker_).audit.evidence("enough")


def test_a_restarted_worker_goes_on_with_its_window(run_dir):
    first = worker()
    learn(first, "a")
    group_decisions.save(first)
    assert records.flush()
    assert rate(worker()) == rate(first) == (1, 2)
    assert rate(worker(1)) == (0, 0)  # another worker has its own; and so would a restart without the file
    assert [path.name for path in run_dir.iterdir()] == [FILE]


def test_nothing_is_written_without_news(run_dir):
    first = worker()
    group_decisions.save(first)
    assert records.flush()
    (run_dir / FILE).unlink()
    group_decisions.save(first)
    assert records.flush()
    assert not (run_dir / FILE).exists()


def test_what_the_length_calibration_has_learned_comes_back_too(run_dir, monkeypatch):
    first = worker()
    group_decisions.pruner_of(first).calibration.learn(0.1, 2.0, True, 1.0)
    group_decisions.save(first)
    assert records.flush()
    again, found = group_decisions.pruner_of(worker()), group_decisions.pruner_of(first)
    assert (again.calibration.intercept, again.calibration.slope) == (
        found.calibration.intercept, found.calibration.slope)


@pytest.mark.parametrize("damage", [lambda state: {**state, "state_version": 99}, lambda state: {**state, "audit": {}},
                                    lambda state: {**state, "calibration": [0.0]}, lambda state: []])
def test_what_cannot_be_understood_is_set_aside_and_said(run_dir, capsys, damage):
    first = worker()
    learn(first, "a")
    group_decisions.save(first)
    assert records.flush()
    file = run_dir / FILE
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    assert rate(worker()) == (0, 0) and file.with_name(FILE + ".unreadable-1").exists()
    assert capsys.readouterr().err.startswith("esgrpo: prune-audit: ")


def test_outcomes_of_other_rules_prove_nothing(run_dir, monkeypatch, capsys):
    """A score is relative to what the rule allows: with another null_prob the same score is another case."""
    first = worker()
    learn(first, "a")
    group_decisions.save(first)
    assert records.flush()
    switch(monkeypatch, resolved={"enable": True, "null_prob": 0.3})
    assert rate(worker()) == (0, 0) and "null_prob" in capsys.readouterr().err


def test_without_a_run_directory_nothing_is_kept(run_dir, monkeypatch):
    monkeypatch.delenv("ESGRPO_RUN_DIR")
    first = worker()
    learn(first, "a")
    group_decisions.save(first)
    assert records.flush()
    assert rate(worker()) == (0, 0) and not run_dir.exists()
