"""Words of a script are those of bash itself: every snippet runs in a real bash whose python3 prints its arguments."""

import os
import shutil
import subprocess

import pytest

from esgrpo.tools.lint.expansion import is_unknown
from esgrpo.tools.lint.script import Script

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash to compare with")
STUB = 'python3() { printf "%s\\0" "$@"; }\n'
LAUNCH = "python3 -m verl.trainer.main_ppo "
SNIPPETS = {
    "plain": LAUNCH + "a.b=1 c.d=2",
    "continued": LAUNCH + "\\\n    a.b=1 \\\n    c.d=2",
    "glued continuation": LAUNCH + "--config-name='x.yaml'\\\n    a.b=1",
    "word over two lines": LAUNCH + "a.b=1\\\n2",
    "quotes": LAUNCH + "a.b='x y' c.d=\"p 'q'\" e.f=x\\ y 'g.h'=1",
    "lists lose their quotes": LAUNCH + "trainer.logger=['console','tensorboard']",
    "defaults": "W=${W:-\"q r\"}\nX=${X:-7}\nY=${Y-${X}8}\n"
                + LAUNCH + "a.b=${X} c.d=$Y e.f=${Z:-q} g.h=${X:+set} i.j=\"$W\"",
    "empty counts for a colon only": "X=\n" + LAUNCH + "a=${X:-1} b=${X-1}",
    "arithmetic": "p=$((1024 * 2))\nr=1024\n" + LAUNCH + "a=$(((p + r) * 2)) b=$((p / 3)) c=$((-p % 7)) d=$((p+${r}))",
    "arrays": "A=(a.b=1 # why\n  c.d='x y'\n\n  e.f=$((1+1)))\nA+=(g.h=3)\n" + LAUNCH + '"${A[@]}"',
    "array with continuations": "A=(a.b=1 \\\n  c.d=2 \\\n)\n" + LAUNCH + '"${A[@]}"',
    "no elements": 'A=()\n' + LAUNCH + 'a.b=1 "${A[@]}" "$@" $@',
    "split variable": 'C="a.b=1 \\\n  c.d=2"\n' + LAUNCH + "$C e.f=3",
    "not split": 'C="x y"\n' + LAUNCH + 'a.b="$C" c.d=$C',
    "conditions": 'D=npu\nif [ "$D" = gpu ]; then X=1; elif [[ $D == n* && -n $D ]]; then X=2; else X=3; fi\n'
                  + LAUNCH + "a.b=$X",
    "short conditions": '[ -z "$Q" ] && Q=4\n[ -n "$Q" ] || Q=5\n' + LAUNCH + "a.b=$Q",
    "nested": 'if [ 1 -eq 1 ]; then\n  if [ 2 -gt 3 ]; then X=1; else X=2; fi\nfi\n' + LAUNCH + "a.b=$X",
    "case": 'D=npu\ncase "$D" in\n  gpu | cuda) X=1 ;;\n  n*)\n    X=2\n    ;;\n  *) X=3 ;;\nesac\n'
            + LAUNCH + "a.b=$X",
    "here-document": "cat > /dev/null <<'EOF'\n" + LAUNCH + "no.no=1\nEOF\n" + LAUNCH + "a.b=1",
    "redirection": LAUNCH + "a.b=1 2>&1 | cat",
    "environment in front": "A=1 B=2 " + LAUNCH + "a.b=1",
    "append": "X=a\nX+=b\nexport Y=$X\n" + LAUNCH + "a.b=$X c.d=$Y",
    "comment": LAUNCH + "a.b=1 # c.d=2",
    "hash inside a word": LAUNCH + "a.b=1#2",
    "dollar text": LAUNCH + "a.b='$X' c.d=\"\\$X\"",
}


def bash_words(snippet: str, directory) -> list[str]:
    done = subprocess.run(["bash", "-c", STUB + snippet], cwd=directory, capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"]}, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("name", SNIPPETS)
def test_words_are_those_of_bash(name, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(SNIPPETS[name])
    (launch,) = Script(file).launches
    assert ["-m", launch.module, *(a.text for a in launch.arguments)] == bash_words(SNIPPETS[name], tmp_path)
    assert not launch.dropped and not launch.cuts


CUT = {
    "blank line": ("a.b=1 \\\n\n    c.d=2 e.f=3", "blank_line_after_continuation"),
    "line of blanks": ("a.b=1 \\\n   \n    c.d=2 e.f=3", "blank_line_after_continuation"),
    "comment": ("a.b=1 \\\n    # x \\\n    c.d=2 e.f=3", "comment_after_continuation"),
    "blank behind the backslash": ("a.b=1 \\ \n    c.d=2 e.f=3", "blank_after_backslash"),
    "no backslash": ("a.b=1\n    c.d=2 e.f=3", "no_backslash"),
    "glued": ("a.b=1\\\n\n    c.d=2 e.f=3", "blank_line_after_continuation"),
}


@pytest.mark.parametrize("name", CUT)
def test_a_cut_is_where_bash_cuts(name, tmp_path):
    text, why = CUT[name]
    file = tmp_path / "run.sh"
    file.write_text("\n" + LAUNCH + text + "\n")
    (launch,) = Script(file).launches
    assert launch.cuts[0] == (2, why) and [a.text for a in launch.dropped] == ["c.d=2", "e.f=3"]
    real = subprocess.run(["bash", "-c", STUB + LAUNCH + text], capture_output=True, text=True, timeout=60)
    assert "c.d=2" not in real.stdout and "c.d=2: command not found" in real.stderr  # bash says the same


def test_a_backslash_at_the_end_cuts_nothing(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(LAUNCH + "a.b=1 \\\n\n\necho done\n")
    (launch,) = Script(file).launches
    assert not launch.dropped and not launch.cuts


def test_what_is_not_known_stays_unknown_and_can_be_given(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("D=${D:-$(uname)}\n" + LAUNCH + "a.b=$D c.d=$HERE e.f=$((HERE + 1))\n")
    (launch,) = Script(file).launches
    assert all(is_unknown(a.text) for a in launch.arguments)
    (launch,) = Script(file, {"D": "x", "HERE": "3"}).launches
    assert [a.text for a in launch.arguments] == ["a.b=x", "c.d=3", "e.f=4"]


def test_unknown_branches_are_all_followed_and_the_first_one_counts(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("if [ -f /x ]; then\n  X=1\n  " + LAUNCH + "a.b=$X\nelse\n  X=2\n  " + LAUNCH + "c.d=$X\nfi\n")
    first, second = Script(file).launches
    assert [first.arguments[0].text, second.arguments[0].text] == ["a.b=1", "c.d=1"]


def test_sourced_files_are_read_and_nothing_is_run(tmp_path):
    (tmp_path / "common.sh").write_text("X=5\ntouch ran\n")
    file = tmp_path / "run.sh"
    file.write_text('source "$(dirname "${BASH_SOURCE[0]}")/common.sh"\n' + LAUNCH + "a.b=$X\n")
    (launch,) = Script(file).launches
    assert launch.arguments[0].text == "a.b=5" and not (tmp_path / "ran").exists()
