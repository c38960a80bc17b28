"""The verl release that a script is checked against: its config tree, its mains and its names, from source files.

verl is never imported. An installed verl or a checkout serves as it is; any other release is unpacked by
`esgrpo.tools.upstreams`.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from esgrpo import compat, engine
from esgrpo.errors import EsgrpoError, say
from esgrpo.tools import upstreams

HYDRA_MAIN = re.compile(r"@hydra\.main\(\s*config_path=[\"']([^\"']*)[\"'],\s*config_name=[\"']([^\"']*)[\"']")
COMPOSE_TIMEOUT_S = 120
LEGACY_MODULES = "recipe."  # where verl up to 0.7.0 kept the asynchronous mains
LEGACY_RELEASE = "0.7.0"


@dataclass(frozen=True)
class Release:
    """`root` is the directory that holds the package verl."""

    version: str
    root: Path

    def main(self, module: str) -> tuple[Path, str] | None:
        """(config directory, config name) of a main; None when the release has no such module."""
        file = self.root.joinpath(*module.split(".")).with_suffix(".py")
        if not file.is_file():
            return None
        found = HYDRA_MAIN.search(file.read_text(encoding="utf-8"))
        return ((file.parent / found.group(1)).resolve(), found.group(2)) if found else None

    def mains(self) -> list[str]:
        """Dotted names of all mains with a Hydra config."""
        return sorted(".".join(file.relative_to(self.root).with_suffix("").parts)
                      for folder in ("verl", "recipe") for file in (self.root / folder).rglob("main*.py")
                      if HYDRA_MAIN.search(file.read_text(encoding="utf-8"))) + sorted(
            ".".join(file.relative_to(self.root).with_suffix("").parts)
            for folder in ("verl", "recipe") for file in (self.root / folder).rglob("fully_async_main.py"))

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Every identifier in the Python and YAML files of the release: a key that is not here is read by nobody."""
        found: set[str] = set()
        for folder in ("verl", "recipe"):
            for file in (self.root / folder).rglob("*"):
                if file.suffix in (".py", ".yaml") and file.is_file():
                    found.update(re.findall(r"[A-Za-z_]\w*", file.read_text(encoding="utf-8", errors="replace")))
        return frozenset(found)

    @functools.cached_property
    def fields(self) -> dict[str, frozenset[str] | None]:
        """Fields of verl's config dataclasses by class name; None where two classes share the name."""
        classes: dict[str, tuple[list[str], set[str]]] = {}
        twice = set()
        for folder in ("workers/config", "trainer/config", "utils/profiler", "base_config.py", "utils/config.py"):
            place = self.root / "verl" / folder
            for file in [place] if place.suffix else sorted(place.rglob("*.py")) if place.is_dir() else []:
                if not file.is_file():
                    continue
                for node in ast.parse(file.read_text(encoding="utf-8")).body:
                    if isinstance(node, ast.ClassDef):
                        names = {item.target.id for item in node.body
                                 if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
                        twice |= {node.name} & set(classes)
                        classes[node.name] = ([b.id for b in node.bases if isinstance(b, ast.Name)], names)

        def all_of(name: str) -> set[str]:
            bases, names = classes.get(name, ([], set()))
            return names.union(*(all_of(base) for base in bases)) if bases else names

        return {name: None if name in twice else frozenset(all_of(name)) for name in classes}

    def compose(self, config_dir: Path, config_name: str, overrides: list[str], segment: bool) -> dict | None:
        """Hydra's answer (see `compose`); None where Hydra is not installed. Raises EsgrpoError when it fails."""
        if util.find_spec("hydra") is None:
            return None
        overlay = str(Path(__file__).resolve().parents[3])
        request = {"root": str(self.root), "config_dir": str(config_dir), "config_name": config_name,
                   "overrides": overrides, "segment": segment}
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("ESGRPO_", "HYDRA_"))}
        done = subprocess.run([sys.executable, "-m", "esgrpo.tools.lint.compose"], input=json.dumps(request), text=True,
                              capture_output=True, timeout=COMPOSE_TIMEOUT_S,
                              env={**environment, "PYTHONPATH": overlay})
        if done.returncode != 0:
            problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise EsgrpoError(f"verl {self.version}", problem, f"a config {config_name} in {config_dir}",
                              "nothing could be composed", "check --config-path and --config-name")
        return json.loads(done.stdout)

    @property
    def flash_default(self) -> bool:
        """MindSpeed's engine sets use_flash_attn from 0.7.1 on; the workers of 0.7.0 do with our patch."""
        workers = self.root / "verl" / "workers" / "megatron_workers.py"
        return not self.version.startswith(LEGACY_RELEASE) or (
            workers.is_file() and 'setdefault("use_flash_attn"' in workers.read_text(encoding="utf-8"))

    @functools.cached_property
    def config_names(self) -> frozenset[str]:
        """Every key in the YAML files of the release, without its path: all that can be known without Hydra."""
        return frozenset(name for folder in ("verl", "recipe") for file in (self.root / folder).rglob("*.yaml")
                         for name in re.findall(r"^\s*-?\s*([A-Za-z_]\w*)\s*:", file.read_text(encoding="utf-8"), re.M))


def installed() -> Release | None:
    """The verl of this interpreter, without importing it."""
    spec = util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations))).parent
    try:
        return Release(engine.public_version(metadata.version("verl")), root)
    except metadata.PackageNotFoundError:
        return checkout(root)


def checkout(root: Path) -> Release:
    """A source tree of verl; a patched one counts as the release that it was. Raises EsgrpoError for another folder."""
    version = root / "verl" / "version" / "version"
    if not version.is_file():
        raise EsgrpoError("lint", str(root), "a directory with the package verl", "nothing to check against",
                          "give a release (0.9.1) or the root of a checkout")
    return Release(engine.public_version(version.read_text(encoding="utf-8").strip()), root.resolve())


def find(wanted: str | None, module: str) -> Release:
    """`wanted` is a version or a checkout; without it the installed verl, or the pinned one that has such mains."""
    if wanted and Path(wanted).is_dir():
        return checkout(Path(wanted))
    here = installed()
    fits = here and (here.version == wanted if wanted else here.main(module) or not is_legacy(module))
    if fits:
        return here
    if not wanted:
        pinned = {row.versions["verl"] for row in compat.load() if "verl" in row.versions}
        wanted = LEGACY_RELEASE if is_legacy(module) else max(pinned, key=lambda v: [int(p) for p in v.split(".")])
    return Release(wanted, upstreams.sources("verl", wanted, say=say))


def is_legacy(module: str) -> bool:
    return module.startswith(LEGACY_MODULES)
