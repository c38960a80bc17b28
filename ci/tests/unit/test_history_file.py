"""The file of the history: atomic, kept aside when it cannot be understood, never a reason to lose a run."""

from __future__ import annotations

import json
import os
import stat
from types import SimpleNamespace

import pytest

from esgrpo import config, records
from esgrpo.hooks.verl.prompts import prompt_history


@pytest.fixture
def run_dir(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "_writer", records.Writer())  # what was said in another test is said again
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setenv(config.ENV_SEGMENT, '{"enable": true, "history": {"enable": true}}')
    return tmp_path


def owner():
    return SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(max_response_length=512)))


def test_saved_and_loaded_by_the_next_owner(run_dir):
    first = owner()
    assert prompt_history.history_of(first) is prompt_history.history_of(first)
    prompt_history.history_of(first).observe("a", [100] * 4, [True] * 4, [False] * 4, 3)
    prompt_history.save(first)
    assert records.flush()
    second = prompt_history.history_of(owner())
    alpha, beta = second.posterior("new")
    assert second.posterior("a", 3) == pytest.approx((alpha + 4, beta)) and second.budget == 512
    assert [path.name for path in (run_dir / "esgrpo").iterdir()] == ["history.json"]


@pytest.mark.parametrize("content", ["", "{", '{"state_version": 99}', "[]", "\x00", b"\xff\xfe"])
def test_what_cannot_be_understood_is_kept_aside_and_said_once(run_dir, capsys, content):
    file = run_dir / "esgrpo" / "history.json"
    file.parent.mkdir()
    data = content if isinstance(content, bytes) else content.encode()
    for number in (1, 2):
        file.write_bytes(data)
        assert len(prompt_history.history_of(owner())) == 0
        line = capsys.readouterr().err
        assert line.startswith("esgrpo: prompt-history: ") and line.count(" | ") == 3 and line.count("\n") == 1
        kept = file.with_name(f"history.json.unreadable-{number}")
        assert kept.name in line and kept.read_bytes() == data and not file.exists()
    assert file.with_name("history.json.unreadable-1").read_bytes() == data


def test_a_crash_while_writing_leaves_the_old_file(run_dir, monkeypatch):
    file = str(run_dir / "history.json")
    records.write_whole(file, {"old": 1})

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError):
        records.write_whole(file, {"new": 1})
    assert json.loads((run_dir / "history.json").read_text()) == {"old": 1}
    assert [path.name for path in run_dir.iterdir()] == ["history.json"]


def test_a_failed_save_costs_one_line_not_the_run(run_dir, capsys):
    (run_dir / "esgrpo").write_text("a file where the directory should be")
    first = owner()
    prompt_history.history_of(first)
    prompt_history.save(first)
    assert records.flush()
    assert capsys.readouterr().err.count(" | ") == 3


def test_a_file_that_may_not_be_read_stops_the_run(run_dir, monkeypatch):
    from esgrpo.errors import EsgrpoError

    (run_dir / "esgrpo" / "history.json").mkdir(parents=True)  # like one without permission, also for root
    with pytest.raises(EsgrpoError, match="the run stops"):
        prompt_history.history_of(owner())


def test_without_a_run_directory_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv("ESGRPO_RUN_DIR", raising=False)
    monkeypatch.setenv(config.ENV_SEGMENT, '{"enable": true, "history": {"enable": true}}')
    first = owner()
    prompt_history.history_of(first)
    prompt_history.save(first)
    assert records.flush()
    named = tmp_path / "here" / "h.json"
    monkeypatch.setenv(config.ENV_SEGMENT, json.dumps(
        {"enable": True, "history": {"enable": True, "path": str(named)}}))
    prompt_history.save(first)
    assert records.flush()
    assert named.is_file() and stat.S_ISREG(named.stat().st_mode)
