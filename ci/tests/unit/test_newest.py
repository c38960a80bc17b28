"""The weekly look at the newest releases: what it asks, what it says, and when it is an issue."""

from __future__ import annotations

import json
import subprocess

import pytest

from bench.common import hook_tables
from ci import newest
from ci.matrix import cells
from esgrpo.tools import drift, upstreams

INDEX = {"verl": "9.1, 9.0", "vllm": "8.0", "ray": "7.0", "vllm-ascend": "6.0.post1, 6.0"}
NO_WHEEL = ("vllm-ascend", "6.0.post1")


@pytest.fixture
def index(monkeypatch, tmp_path):
    """An index in which verl's newest release changes one hook; `outcome` is that of vllm-ascend's classes."""
    def run(command, **_):
        name = command[command.index("versions") + 1]
        out = f"{name} (0)\nAvailable versions: {INDEX[name]}\n" if INDEX.get(name) else ""
        return subprocess.CompletedProcess(command, 0 if out else 1, out, "" if out else "ERROR: not here")

    def sources(upstream, version, say=print):
        if (upstream, version) == NO_WHEEL:
            raise upstreams.Unavailable(f"{upstream} {version}", "no wheel", "a wheel", "not run", "nothing")
        return tmp_path

    def compare(upstream, version, say=print):
        changed = drift.Verdict("a-hook", drift.CHANGED, ["- old", "+ new"])
        return [drift.Verdict("b-hook", drift.UNCHANGED), *([changed] if upstream == "verl" else [])]

    monkeypatch.setattr(drift, "compare_ascend", lambda version, say=print: (
        [drift.Verdict("up:New", drift.CHANGED), drift.Verdict("up:Old", drift.UNCHANGED)], "5.0"))
    outcome = cells.Outcome(cells.PASS, ["a case: ok"])
    monkeypatch.setattr(newest.subprocess, "run", run)
    monkeypatch.setattr(upstreams, "pip_command", lambda: ["pip"])
    monkeypatch.setattr(upstreams, "sources", sources)
    monkeypatch.setattr(drift, "compare", compare)
    monkeypatch.setitem(cells.KINDS, "ascend", cells.Kind(lambda row: outcome, (), 0, True))
    return outcome


def test_a_changed_hook_is_an_issue_with_the_lines_that_changed(index, tmp_path, capsys):
    report = tmp_path / "report.md"
    assert newest.main(["--report", str(report)]) == newest.LOST
    text = report.read_text()
    assert "- **verl 9.1** (not in compat.toml): hooks: 1 unchanged, 1 changed" in text and "    + new" in text
    assert (tmp_path / "report.md.title").read_text() == "Drift: verl 9.1"
    assert "### vllm" not in text and capsys.readouterr().out == text


def test_a_release_without_a_wheel_is_said_and_the_one_before_is_looked_at(index, capsys):
    assert newest.main(["vllm-ascend"]) == newest.FINE
    assert "vllm-ascend 6.0** (not in compat.toml)" in (said := capsys.readouterr().out)
    assert "6.0.post1 has no wheel to look at" in said and "beside vLLM 6.0" in said
    assert "2 scheduler classes, 1 changed since 5.0" in said
    index.state, index.evidence = cells.FAIL, ["one case: no such name", "other case: no such name"]
    assert newest.main(["vllm-ascend"]) == newest.LOST
    assert newest.look("vllm-ascend", print).lost == ["2 cases: no such name"]


def test_an_index_that_does_not_answer_is_no_verdict(index, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(INDEX, "ray", "")
    report = tmp_path / "report.md"
    assert newest.main(["ray", "--report", str(report)]) == newest.UNKNOWN
    assert "not here" in report.read_text() and (tmp_path / "report.md.title").read_text() == ""

    def hangs(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(newest.subprocess, "run", hangs)
    assert newest.main(["ray"]) == newest.UNKNOWN and "no answer within" in capsys.readouterr().out


def test_the_record_is_the_table(index, tmp_path, monkeypatch):
    monkeypatch.setattr(newest, "RECORD", tmp_path / "newest.json")
    newest.main(["--record"])
    record = json.loads((tmp_path / "newest.json").read_text())
    assert [one["version"] for one in record["releases"]] == ["9.1", "8.0", "6.0", "7.0"]
    monkeypatch.setattr(hook_tables, "NEWEST", tmp_path / "newest.json")
    for language in ("en", "zh"):
        head, first, *_ = hook_tables.newest_rows(language)
        assert record["date"] in head[0] and first[0] == "verl 9.1" and first[3] == "a-hook"


def test_the_map_of_processes_has_every_kind():
    from esgrpo.algo.terms import Process

    assert set(hook_tables.PLACES) == set(Process)
    assert all(row[2][0] != "0" for row in hook_tables.process_rows()[1:])
