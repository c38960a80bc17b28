"""`esgrpo status` of the directory of a comparison: no run is left out without a word."""

from __future__ import annotations

import json
import os

import pytest

from esgrpo import cli

APPLIED = {"process": "driver", "host": "h", "pid": 1, "hooks": [
    {"slug": "hook-0", "state": "APPLIED", "detail": "because", "needed": True}]}


def one_line(text: str) -> str:
    assert text.count("\n") == 1 and text.startswith("esgrpo: ") and "Traceback" not in text, text
    return text


def comparison(folder, hooks: str | None) -> None:
    """A good run, and one with rows and these states of hooks."""
    for name in ("good", "other"):
        (folder / name / "esgrpo").mkdir(parents=True)
        (folder / name / "esgrpo" / "responses-vm-1.jsonl").touch()
    (folder / "data").mkdir()
    (folder / "good" / "esgrpo" / "hooks.json").write_text(json.dumps([APPLIED]))
    if hooks is not None:
        (folder / "other" / "esgrpo" / "hooks.json").write_text(hooks)


@pytest.mark.parametrize("hooks, said", [(None, "other has rows, but no states of hooks"), ("[{", "hooks.json: ")])
def test_of_several_runs_one_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path, capsys, hooks, said):
    comparison(tmp_path, hooks)
    assert cli.main(["status", str(tmp_path)]) == 1
    out, errors = capsys.readouterr()
    assert said in one_line(errors) and str(tmp_path / "good") in out.splitlines() and "hook-0" in out
    assert cli.main(["status", str(tmp_path), "--json"]) == 1
    out, errors = capsys.readouterr()
    found = json.loads(out)
    assert list(found) == ["good", "other"] and found["other"] == {"error": one_line(errors).rstrip()}
    assert found["good"]["processes"] == [APPLIED]
    assert cli.main(["status", str(tmp_path / "other")]) == 2  # by itself nothing is left to show
    assert said in one_line(capsys.readouterr().err)


def forbid(monkeypatch, folder) -> None:
    """As chmod 000 does for whoever is not root."""
    def guarded(call, forbidden: str):
        def checked(path=".", *more, **options):
            if str(path).startswith(forbidden):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *more, **options)
        return checked

    monkeypatch.setattr(os, "stat", guarded(os.stat, f"{folder}{os.sep}"))
    monkeypatch.setattr(os, "listdir", guarded(os.listdir, str(folder)))


@pytest.mark.parametrize("books", [(), ("--books",)])
def test_a_run_that_may_not_be_read_is_not_waited_for(tmp_path, capsys, monkeypatch, books):
    comparison(tmp_path, json.dumps([APPLIED]))
    forbid(monkeypatch, tmp_path / "other" / "esgrpo")
    assert cli.main(["status", str(tmp_path / "other"), *books]) == 2
    assert "Permission denied" in one_line(capsys.readouterr().err)
    if not books:
        assert cli.main(["status", str(tmp_path)]) == 1
        out, errors = capsys.readouterr()
        assert "hook-0" in out and "other" in one_line(errors) and "Permission denied" in errors
