"""What is found on this host. Parsers are pure; every look at the host goes through a Host, which a test can fake."""

from __future__ import annotations

import glob
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from esgrpo import compat

NEEDS = ("wrapt", "packaging")
TIMEOUT_SECONDS = 20  # npu-smi hangs when the driver does
ASCEND = "/usr/local/Ascend"
NAMES = {"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_RT_VISIBLE_DEVICES", "ATB_HOME_PATH",
         "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "VERL_PLATFORM", "VLLM_USE_V1", "VLLM_ASCEND_ENABLE_NZ"}
PREFIXES = ("ESGRPO_", "HCCL_", "RAY_EXPERIMENTAL_NOSET_")
# asks the loader itself, so that LD_LIBRARY_PATH, RPATH and its cache count as they would
_LIBSTDCXX = ("import ctypes; ctypes.CDLL('libstdc++.so.6'); "
              "print(next(l.split()[-1] for l in open('/proc/self/maps') if 'libstdc++' in l))")


@dataclass(frozen=True)
class Ran:
    """A command's output; `problem` says why there is none."""

    output: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Host:
    """Everything that is looked at: commands, files, distributions."""

    run: Callable[[Sequence[str]], Ran]
    read: Callable[[str], bytes | None]
    glob: Callable[[str], list[str]]
    version: Callable[[str], str | None]  # None: not installed; "": its metadata has no version
    environ: Mapping[str, str]
    path: Sequence[str]
    python: str
    executable: str
    prefix: str


@dataclass(frozen=True)
class Devices:
    """What npu-smi or nvidia-smi lists: ids of the cards, one entry a device (an A3 card has two)."""

    driver: str = ""
    names: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    unhealthy: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Library:
    """A libstdc++ and the newest CXXABI_1.3.N that it has; -1 when the file could not be read."""

    path: str = ""
    cxxabi: int = -1


@dataclass(frozen=True)
class Environment:
    """The facts that checks.py judges."""

    python: str
    versions: dict[str, str]
    broken: tuple[str, ...] = ()  # distributions without a version in their metadata
    missing: tuple[str, ...] = ()  # what this project itself needs
    megatron: str = ""  # directory on the path that has megatron/core
    cann: str = ""
    npu: Devices = field(default_factory=Devices)
    gpu: Devices = field(default_factory=Devices)
    compiler: tuple[str, tuple[int, int] | None] = ("", None)
    loaded: Library = field(default_factory=Library)
    beside: Library = field(default_factory=Library)  # libstdc++ of the Python environment
    variables: dict[str, str] = field(default_factory=dict)
    patched: tuple[str, ...] = ()  # git patches whose traces are in the sources found
    flash_attn: bool = True  # is it installed?

    @property
    def ascend(self) -> bool:
        """Is this meant for NPUs?"""
        return bool(self.npu.ids or self.cann or {"torch-npu", "vllm-ascend"} & self.versions.keys()
                    or "ASCEND_RT_VISIBLE_DEVICES" in self.variables)


def parse_npu_smi(text: str) -> Devices:
    """`npu-smi info`: a row "| id name | health |", then "| chip [phy-id] | bus-id |" for each device."""
    driver = re.search(r"npu-smi \S+\s+Version: (\S+)", text)
    names, ids, unhealthy, card = [], [], [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and re.fullmatch(r"\d+\s+[A-Za-z0-9]*[A-Za-z]\w*", cells[0]):
            card = int(cells[0].split()[0]), cells[0].split()[1], cells[1]
        elif len(cells) == 3 and card and re.fullmatch(r"\d+(\s+\d+)?", cells[0]) and ":" in cells[1]:
            ids.append(card[0])
            names.append(card[1])
            if card[2] != "OK":
                unhealthy.append(f"{card[0]}: {card[2]}")
    problem = "" if ids else (text.strip().splitlines() or ["no output"])[-1]
    return Devices(driver.group(1) if driver else "", tuple(names), tuple(ids), tuple(unhealthy), problem)


def parse_nvidia_smi(text: str) -> Devices:
    """`nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[0].isdigit()]
    problem = "" if rows else (text.strip().splitlines() or ["no output"])[-1]
    return Devices(rows[0][2] if rows else "", tuple(r[1] for r in rows), tuple(int(r[0]) for r in rows), (), problem)


def parse_gcc(text: str) -> tuple[int, int] | None:
    """(7, 3) from the first line of `g++ --version`; None for another compiler."""
    found = re.match(r".*\)\s+(\d+)\.(\d+)", (text.splitlines() or [""])[0])
    return (int(found.group(1)), int(found.group(2))) if found else None


def parse_cann(text: str) -> str:
    """version= of ascend_toolkit_install.info (Version= of older version.info files); "" without."""
    found = re.search(r"(?mi)^version=\[?(\S+?)\]?$", text)
    return found.group(1) if found else ""


def newest_cxxabi(content: bytes) -> int:
    """N of the newest CXXABI_1.3.N in a libstdc++; -1 when it names none."""
    return max(map(int, re.findall(rb"CXXABI_1\.3\.(\d+)", content)), default=-1)


def this_host() -> Host:
    """The real one."""
    return Host(_run, _read, lambda pattern: sorted(glob.glob(pattern)), _version, os.environ, _path(),
                platform.python_version(), sys.executable, sys.prefix)


def _path() -> tuple[str, ...]:
    """Where modules come from: the working directory, sys.path, and editable installs that only a finder knows."""
    found = [os.getcwd(), *filter(None, sys.path)]
    for name in ("verl", "ray", "megatron"):
        try:
            spec = importlib.util.find_spec(name)  # of a top-level package: imports nothing
        except Exception:
            continue
        found += [os.path.dirname(place) for place in (spec and spec.submodule_search_locations or ())]
    return tuple(dict.fromkeys(found))


def _run(command: Sequence[str]) -> Ran:
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        return Ran(problem=error.strerror or str(error))
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: a process that hangs in the driver does not even die
        return Ran(problem=f"no answer in {TIMEOUT_SECONDS} s")
    last = (output.strip().splitlines() or [""])[-1]
    return Ran(output) if process.returncode == 0 else Ran(output, f"exit status {process.returncode}: {last}")


def _read(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # a half-deleted distribution raises whatever its files make email.parser raise
        return ""


def collect(host: Host) -> Environment:
    """All facts; nothing here raises for what a host lacks."""
    versions, broken = _versions(host)
    loaded = host.run([host.executable, "-I", "-S", "-c", _LIBSTDCXX]).output.strip()
    beside = (host.glob(f"{host.prefix}/lib/libstdc++.so.6") + [""])[0]
    compiler = host.environ.get("CXX") or "g++"
    said = host.run([compiler, "--version"])
    return Environment(
        host.python, versions, broken, tuple(name for name in NEEDS if host.version(name) is None), _megatron(host),
        _cann(host), _devices(host, ["npu-smi", "info"], parse_npu_smi),
        _devices(host, ["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv,noheader"],
                 parse_nvidia_smi),
        (compiler, None if said.problem else parse_gcc(said.output)), _library(host, loaded), _library(host, beside),
        {k: v for k, v in host.environ.items() if k in NAMES or k.startswith(PREFIXES)}, _patched(host),
        host.version("flash-attn") is not None)


def _versions(host: Host) -> tuple[dict[str, str], tuple[str, ...]]:
    """Versions by the names of compat.toml; a checkout on the path counts, too."""
    found = {name: host.version(name) for name in compat.UPSTREAMS if name not in ("python", "CANN")}
    broken = tuple(name for name, version in found.items() if version == "")
    if not found["verl"]:
        checkout = _first(host, "verl/version/version")
        found["verl"] = checkout.decode(errors="replace").strip() if checkout else None
    if not found["megatron-core"]:
        info = (_first(host, "megatron/core/package_info.py") or b"").decode(errors="replace")
        parts = [re.search(rf"(?m)^{part} = (\d+)", info) for part in ("MAJOR", "MINOR", "PATCH")]
        found["megatron-core"] = ".".join(p.group(1) for p in parts) if all(parts) else None
    # the part after + names a build (0.11.0+empty, 2.7.1+cpu), not a release
    versions = {name: version.partition("+")[0] for name, version in found.items() if version}
    return {**versions, "python": ".".join(host.python.split(".")[:2])}, broken


def _first(host: Host, name: str) -> bytes | None:
    """Content of the first such file on the path."""
    return next((found for directory in host.path if (found := host.read(os.path.join(directory, name)))), None)


def _megatron(host: Host) -> str:
    return next((directory for directory in host.path
                 if host.read(os.path.join(directory, "megatron/core/__init__.py")) is not None), "")


def _cann(host: Host) -> str:
    roots = [host.environ.get("ASCEND_HOME_PATH"), host.environ.get("ASCEND_TOOLKIT_HOME"), f"{ASCEND}/cann",
             f"{ASCEND}/ascend-toolkit/latest"]
    for root in filter(None, roots):
        for pattern in (f"{root}/*-linux/ascend_toolkit_install.info", f"{root}/version.info",
                        f"{root}/compiler/version.info"):
            for file in host.glob(pattern):
                if found := parse_cann((host.read(file) or b"").decode(errors="replace")):
                    return found
    return ""


def _devices(host: Host, command: list[str], parse: Callable[[str], Devices]) -> Devices:
    said = host.run(command)
    return Devices(problem=said.problem) if said.problem else parse(said.output)


def _library(host: Host, path: str) -> Library:
    return Library(path, newest_cxxabi(host.read(path) or b"")) if path else Library()


def _patched(host: Host) -> tuple[str, ...]:
    """Patches for which no hook exists, by what they leave in the sources."""
    traces = {"sync-weights-over-stateless-group": ("recipe/fully_async_policy/sync_collective.py", b""),
              "derive-npu-uuid-from-visible-devices": ("recipe/fully_async_policy/checkpoint_engine.py",
                                                       b"def _npu_smi_info"),
              "default-flash-attention-under-mindspeed": ("verl/workers/megatron_workers.py",
                                                          b"def _mindspeed_repatch"),
              "add-hccl-collective-group": ("ray/util/collective/collective_group/hccl_collective_group.py", b"")}
    return tuple(slug for slug, (name, trace) in traces.items()
                 if (found := _first(host, name)) is not None and trace in found)
