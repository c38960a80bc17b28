"""Fingerprints: the same everywhere, blind to comments, awake to code."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from esgrpo import fingerprint

SOURCE = '''
from __future__ import annotations
import functools

class Model(dict):
    """Docstring."""
    size: int = 3

    @functools.cached_property
    def width(self) -> float | None:
        """Docstring."""
        return -1.5e-7 * self.size ** 2

    @staticmethod
    async def generate(prompt: str, /, *args: int, limit: int = 1_000, **kwargs: "dict[str, int]") -> list[int]:
        async with prompt as p, p.lock:
            found = [x async for x in p if (y := x) is not ...]
        match found:
            case [int(first), *rest] if first > 0:
                text = f"{first!r:>{limit}} and {rest=} {'nested' + f'{y:.3f}'} {{literal}}" f"{limit:,}" "tail"
                text += b"\\xff".hex()
            case {"key": str() as value, **others} | Model(size=value, others=others):
                text = rf"\\d{value}" "\\N{BULLET} \\x00"
            case None | True:
                raise ValueError("no") from None
            case _:
                text = lambda a, *, b=2: (yield)
        try:
            return await text[1:-1:2, ...]
        except (ValueError, TypeError) as error:
            del error
        finally:
            global counter
            counter += 0xFF @ 1j
'''
REFORMATTED = SOURCE.replace('"""Docstring."""', '"""Another\n    one."""').replace(
    "generate(prompt: str, /, *args", "generate(\n        prompt: str,  # a comment\n        /, *args"
).replace("size: int = 3", "size: int = 3  # noqa\n")
TARGETS = ("up.mod:Model", "up.mod:Model.generate", "up.mod:Model.width")
PYENV = Path.home() / ".pyenv" / "versions"


def write(directory: Path, source: str) -> list[str]:
    package = directory / "up"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "mod.py").write_text(source)
    return [str(directory)]


def interpreters() -> list[str]:
    """The running interpreter and every other supported one on this machine."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for minor in ("3.10", "3.11", "3.12", "3.13"):
        candidates = [*sorted(PYENV.glob(f"{minor}.*/bin/python")), shutil.which(f"python{minor}")]
        for path in filter(None, candidates):
            if subprocess.run([str(path), "-c", ""], capture_output=True).returncode == 0:
                found.setdefault(minor, str(path))
    return list(found.values())


def test_every_python_gives_the_same_fingerprint(tmp_path, overlay):
    search = write(tmp_path, SOURCE)
    script = ("import json, sys; sys.path.insert(0, sys.argv[1]); from esgrpo import fingerprint\n"
              "print(json.dumps([fingerprint.of_targets((t,), [sys.argv[2]])[0] for t in sys.argv[3:]]))")
    answers = {}
    for python in interpreters():
        done = subprocess.run([python, "-I", "-c", script, overlay, *search, *TARGETS], check=True,
                              capture_output=True, text=True)
        answers[python] = tuple(json.loads(done.stdout))
    assert len(set(answers.values())) == 1, answers
    digests = set(answers.popitem()[1])
    assert len(digests) == len(TARGETS) and None not in digests


def test_comments_docstrings_and_layout_do_not_count(tmp_path):
    assert REFORMATTED.count("\n") > SOURCE.count("\n")
    before = fingerprint.of_targets(TARGETS, write(tmp_path / "a", SOURCE))
    assert fingerprint.of_targets(TARGETS, write(tmp_path / "b", REFORMATTED)) == before
    assert len(before[0]) == 16 and before[1] == ""


@pytest.mark.parametrize("old, new", [
    ("1_000", "1_001"), ("size: int = 3", "size: int = 4"), ("first > 0", "first >= 0"), ("async def", "def"),
    ("{rest=}", "{rest}"), (":.3f", ":.4f"), ("@staticmethod", "@classmethod"), ("limit: int", "limit: float"),
    ("case None | True", "case None | False"), ("[1:-1:2", "[1:-1:3"), ("raise ValueError(", "raise TypeError("),
])
def test_one_changed_token_counts(tmp_path, old, new):
    changed = SOURCE.replace("async with prompt as p, p.lock", "with prompt as p, p.lock").replace(
        "async for", "for").replace("await text", "text") if old == "async def" else SOURCE
    before = fingerprint.of_targets(TARGETS[:1], write(tmp_path / "a", changed))
    after = fingerprint.of_targets(TARGETS[:1], write(tmp_path / "b", changed.replace(old, new, 1)))
    assert None not in (before[0], after[0]) and before != after


def test_a_module_that_cannot_be_imported_is_read(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write(tmp_path, SOURCE)[0])
    with pytest.raises(RuntimeError, match="imported"):  # negative control: importing does fail
        importlib.import_module("up.mod")
    assert fingerprint.of_targets(TARGETS)[0] is not None
    assert "up" not in sys.modules and "up.mod" not in sys.modules


@pytest.mark.parametrize("target, named", [
    ("up.mod:Model.gone", "up.mod:Model.gone"), ("up.mod:gone", "up.mod:gone"), ("up.gone:Model", "up.gone"),
    ("gone:f", "gone"), ("up.mod.deeper:f", "up.mod.deeper"),
    ("up.mod:generate", "up.mod:generate"),  # a method is not a module-level function of that name
])
def test_the_missing_target_is_named(tmp_path, target, named):
    search = write(tmp_path, SOURCE)
    assert fingerprint.of_targets((TARGETS[0], target, "up.other:f"), search) == (None, named)


def test_a_module_alone_only_has_to_exist(tmp_path):
    search = write(tmp_path, SOURCE)
    assert fingerprint.of_targets(("up.mod:Model", "up.mod"), search) == fingerprint.of_targets(TARGETS[:1], search)
    assert fingerprint.of_targets(("up.mod:Model", "up.gone"), search) == (None, "up.gone")


BRANCHES = """
if condition:
    def f(x): return 1
else:
    def f(x): return 2
try:
    from fast import g
except ImportError:
    def g(x): return 3
"""


def test_every_branch_of_a_definition_counts(tmp_path):
    """Which branch runs is not known without importing, so a change in either one is drift."""
    targets = ("up.mod:f", "up.mod:g")
    digests = {fingerprint.of_targets(targets, write(tmp_path / str(i), BRANCHES.replace(f"return {i}", "return 0")))[0]
               for i in range(4)}
    assert len(digests) == 4 and None not in digests


def test_unreadable_source_is_named_and_does_not_raise(tmp_path):
    search = write(tmp_path, "def f(:\n")
    found, missing = fingerprint.of_targets(("up.mod:f",), search)
    assert found is None and missing.startswith("up.mod:f (SyntaxError")


class EditableFinder:
    """What setuptools installs on sys.meta_path for `pip install -e` of a project with a flat layout."""

    def __init__(self, directory):
        self.directory = directory

    def find_spec(self, name, path=None, target=None):
        if name != "up":
            return None
        return importlib.util.spec_from_file_location(name, self.directory / "up" / "__init__.py",
                                                      submodule_search_locations=[str(self.directory / "up")])


def test_an_editable_install_with_its_own_finder_is_found(tmp_path, monkeypatch):
    search = write(tmp_path, SOURCE)
    assert fingerprint.of_targets(TARGETS) == (None, "up.mod")  # negative control: not on sys.path
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder(tmp_path)])
    assert fingerprint.of_targets(TARGETS) == fingerprint.of_targets(TARGETS, search)
    assert "up" not in sys.modules


def test_an_edited_file_is_read_again(tmp_path):
    search = write(tmp_path, SOURCE)
    before = fingerprint.of_targets(TARGETS, search)
    write(tmp_path, SOURCE.replace("1_000", "1_001"))
    path = tmp_path / "up" / "mod.py"
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 10))
    assert fingerprint.of_targets(TARGETS, search) != before
