"""Lines of ours are one line of plain text, whatever a foreign exception says."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esgrpo import cli, errors, guard
from esgrpo.algo import failures
from esgrpo.errors import ConfigError, EsgrpoError, plain
from esgrpo.hooks.verl.prompts import failed_prompts
from esgrpo.hooks.verl.sync import kept_requests
from esgrpo.tools.doctor import logs

ESCAPES = ["\x1b[31m", "\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\", "\x1bc", "\x9b2J", "\x07", "\r",
           "\x00", "\u202e"]


@pytest.mark.parametrize("escape", ESCAPES, ids=repr)
def test_an_escape_does_not_reach_the_terminal(escape):
    line = str(EsgrpoError("who", f"be{escape}fore", "wanted", "consequence", f"to{escape}do"))
    assert line.isprintable() and escape not in line and "title" not in line and line.count(" | ") == 3


@given(st.text())
def test_every_text_becomes_one_printable_line(text):
    line = plain(text)
    assert line.isprintable() and plain(line) == line
    if text.isprintable():
        assert line == text  # nothing of plain text is lost, in any language


def test_the_parts_stay_as_they_were():
    """A handler, or a pickle through Ray, gets what was said; only the line is cleaned."""
    error = pickle.loads(pickle.dumps(ConfigError("who", "\x1b[1mfound", "wanted", "consequence", "todo")))
    assert error.args[1] == "\x1b[1mfound" and str(error) == "esgrpo: who: found | wanted wanted | consequence | todo"


def test_doctor_prints_no_escape_of_a_log(tmp_path, capsys):
    log = tmp_path / "log.txt"
    log.write_text("Traceback (most recent call last):\n  File \"x.py\", line 1, in <module>\n"
                   "ValueError: \x1b]0;owned\x07\x1b[2Jgone\n")
    assert cli.main(["doctor", "--log", str(log)]) == 3
    out = capsys.readouterr().out
    assert "ValueError: gone" in out and all(line.isprintable() for line in out.splitlines())
    cli.main(["doctor", "--log", str(log), "--json"])
    assert "\x1b" not in capsys.readouterr().out
    answer = logs.read(["torch.distributed.DistBackendError: a \x1b[2J b"])
    assert json.dumps(logs.as_dict(answer)) and all(line.isprintable() for line in logs.render(answer).splitlines())


def test_every_line_of_ours_goes_through_the_one_place():
    """`print` is for JSON alone, which escapes; `say` and `show` clean the rest. No other way to a stream is open."""
    package = Path(errors.__file__).parent
    found = [f"{path.relative_to(package)}:{line}" for path in package.rglob("*.py") if path.name != "errors.py"
             for line in past_the_one_place(path.read_text(encoding="utf-8"))]
    assert found == []


def past_the_one_place(source: str) -> list[int]:
    """Lines that mention `print` otherwise than as print(json.dumps(...)), or write to a standard stream."""
    module = ast.parse(source)
    json_only = {id(node.func) for node in ast.walk(module) if isinstance(node, ast.Call) and node.args
                 and ast.unparse(node.func) == "print" and isinstance(node.args[0], ast.Call)
                 and ast.unparse(node.args[0].func) == "json.dumps"}
    return [node.lineno for node in ast.walk(module)
            if (isinstance(node, ast.Name) and node.id == "print" and id(node) not in json_only)
            or (isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout.write", "sys.stderr.write"))]


def test_the_check_above_can_fail():
    source = ("print(json.dumps(x))\nprint(f'esgrpo: {x}')\nsys.stderr.write(x)\nf(say=print)\n"
              "print(x, file=sys.stderr)\nprint(json.dumps(x) if y else z)\n")
    assert sorted(set(past_the_one_place(source))) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("speak", [
    lambda text: failed_prompts.note(failures.FailedPrompts(0.5, 8), 0, [failures.Failed("uid_1", "a prompt", text)],
                                     {"uid_1": ("a prompt", 1)}),
    lambda text: kept_requests.say_aborted(text),
    lambda text: guard.say_once(f"esgrpo: driver-start DISABLED ({text})"),
], ids=["failed prompt", "requests that are aborted", "guard"])
def test_foreign_text_in_a_line_that_is_no_error(speak, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    speak("Value\x1b]0;owned\x07\x1b[2JError\rof a\nreward")
    said = capsys.readouterr().err
    assert said.startswith("esgrpo: ") and said.endswith("\n") and said[:-1].isprintable() and "owned" not in said
    assert "ValueError of a reward" in said
