"""Lines of ours are one line of plain text, whatever a foreign exception says."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esgrpo import cli
from esgrpo.errors import ConfigError, EsgrpoError, plain
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
