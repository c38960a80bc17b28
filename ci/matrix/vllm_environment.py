"""Environment in which the Python of any vLLM release imports from its unpacked wheel, without being installed.

The installed torch is used. What else a release wants and the stack has not is a pure wheel, kept in the cache; the
distribution "vllm" that its code asks for is a directory with one METADATA file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from esgrpo.errors import EsgrpoError
from esgrpo.tools import upstreams

ROOT = Path(__file__).resolve().parents[2]
# vLLM < 0.20 imports both at start-up
EXTRAS = ("diskcache==5.6.3", "gguf==0.19.0")
# settings of a developer's shell that would change what is imported or decided
LEAKS = ("ESGRPO_", "VERL_", "VLLM_", "RAY_")
KEPT = ("ESGRPO_CACHE", upstreams.VERL_GIT)
FEATURES = "observe,segment,prune,yield"


def _place(target: Path, fill) -> Path:
    """`target`, filled by `fill(directory)` when it is not there; complete or absent, also with two processes."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            tree = Path(scratch) / "tree"
            tree.mkdir()
            fill(tree)
            try:
                os.rename(tree, target)
            except OSError:
                if not target.is_dir():
                    raise
    return target


def extras() -> Path:
    """Directory with the pure wheels of EXTRAS. Raises EsgrpoError when the index has them not."""
    return _place(upstreams.cache_directory() / "extras", _install_extras)


def _install_extras(tree: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--target", str(tree), *EXTRAS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise EsgrpoError("matrix", (done.stderr.strip().splitlines() or ["no output"])[-1], " ".join(EXTRAS),
                          "old vLLM releases do not import", "check that the package index is reachable")


def shim(version: str) -> Path:
    """Directory with the metadata of a distribution "vllm"; "cpu" in its version makes vLLM choose its CPU platform."""

    def write(tree: Path) -> None:
        folder = tree / f"vllm-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")

    return _place(upstreams.cache_directory() / "shims" / f"vllm-{version}", write)


def paths(version: str, ascend: str | None = None) -> list[str]:
    """Import path for vLLM `version`, with vllm-ascend `ascend` beside it. Raises upstreams.Unavailable."""
    first = [] if ascend is None else [upstreams.sources("vllm-ascend", ascend, say=_quiet)]
    return [str(path) for path in (*first, upstreams.sources("vllm", version, say=_quiet), shim(version),
                                   ROOT / "overlay", ROOT, extras())]


def environment(version: str, ascend: str | None = None) -> dict[str, str]:
    """Environment variables of a process that sees this release, with the overlay enabled for an engine process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LEAKS) or name in KEPT}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths(version, ascend)), "OMP_NUM_THREADS": "1",
            "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0",
            "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "ESGRPO_FEATURES": FEATURES}


def _quiet(line: str) -> None:
    print(line, file=sys.stderr)


def run(module: str, version: str, ascend: str | None = None) -> int:
    """`python -m module` in that environment; its exit code."""
    command = [sys.executable, "-m", module]
    return subprocess.run(command, env=environment(version, ascend), cwd=ROOT).returncode
