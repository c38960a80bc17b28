"""Patched upstream files for contract tests: unpacked, patched with `git apply`, executed with stand-ins.

Nothing is installed and no upstream is imported: a module of another release than the installed one is executed from
its file, and what it imports comes from the test where the test says so.
"""

from __future__ import annotations

import builtins
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from esgrpo.tools import upstreams

PATCHES = Path(__file__).resolve().parents[3] / "patches"
_TOUCHED = re.compile(r"^(?:---|\+\+\+) [ab]/(\S+)$", re.MULTILINE)


def series(upstream: str, tag: str) -> list[str]:
    """Slugs in order of application."""
    return (PATCHES / upstream / tag / "series").read_text(encoding="utf-8").split()


def patch_file(upstream: str, tag: str, slug: str) -> Path:
    return PATCHES / upstream / tag / f"{slug}.patch"


def touched(patch: Path) -> list[str]:
    """Files that a patch changes or adds, relative to the root of the checkout."""
    return sorted(set(_TOUCHED.findall(patch.read_text(encoding="utf-8"))))


def pristine(upstream: str, tag: str) -> Path:
    """Unpacked sources of the release; skips where it can only come from git and no clone is named."""
    version = tag.removeprefix("v")
    try:
        return upstreams.sources(upstream, version)
    except upstreams.Unavailable as error:
        if not upstreams.needs_git(upstream, version):
            raise
        pytest.skip(str(error))


def tree(upstream: str, tag: str, slugs: list[str], directory: Path, also: tuple[str, ...] = ()) -> Path:
    """`directory` with the files that the slugs touch and those in `also`, patched with the slugs in the given order.

    With no slugs the files in `also` are upstream's: the negative control.
    """
    source = pristine(upstream, tag)
    patches = [patch_file(upstream, tag, slug) for slug in slugs]
    for name in {*also, *(name for patch in patches for name in touched(patch))}:
        if (source / name).exists():  # a patch may add it
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)
    for patch in patches:
        # the ceiling: a repository around `directory` would make git skip the files without a word
        subprocess.run(["git", "apply", str(patch)], cwd=directory, check=True,
                       env={**os.environ, "GIT_CEILING_DIRECTORIES": str(directory.parent)})
    return directory


class Upstream(SimpleNamespace):
    """Stand-in for a module: the given attributes, and an empty class under any other name."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Proxy:
    """The real thing with some attributes replaced."""

    def __init__(self, real, **replaced):
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str):
        return getattr(self._real, name)


def load(path: Path, name: str, stand_ins: dict[str, object]) -> ModuleType:
    """Execute a module's file; what it imports, at any time, is looked up in `stand_ins` first.

    Keys are module names; relative imports keep their dots (".checkpoint_engine"). `import a.b` binds the stand-in
    "a". Every call has its own globals, so that two ranks can live in two threads.
    """

    def importer(module, globals=None, locals=None, fromlist=(), level=0):
        full = "." * level + module
        wanted = full if fromlist else full.partition(".")[0]
        if wanted in stand_ins:
            return stand_ins[wanted]
        return builtins.__import__(module, globals, locals, fromlist, level)

    module = ModuleType(name)
    module.__file__ = str(path)
    module.__builtins__ = {**vars(builtins), "__import__": importer}
    # dont_inherit: the __future__ imports of this file are not those of that one
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True), vars(module))
    return module


def identity_decorator(*_args, **_kwargs):
    """Stand-in for a decorator with arguments."""
    return lambda decorated: decorated
