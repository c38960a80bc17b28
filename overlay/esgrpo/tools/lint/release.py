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
from dataclasses import dataclass, replace
from importlib import metadata, util
from pathlib import Path

from esgrpo import compat
from esgrpo.errors import EsgrpoError, say
from esgrpo.releases import public
from esgrpo.tools import upstreams

HYDRA_MAIN = re.compile(r"@hydra\.main\(\s*config_path=[\"']([^\"']*)[\"'],\s*config_name=[\"']([^\"']*)[\"']")
COMPOSE_TIMEOUT_S = 120
LEGACY_MODULES = ("recipe.fully_async_policy.", "recipe.one_step_off_policy.")  # mains of verl up to 0.7.0
LEGACY_RELEASE = "0.7.0"
VALIDATING = ("validate_config", "run_ppo", "TaskRunner")  # what a main calls or inherits that validates
REQUIRED = "REQUIRED_VERL.txt"  # in the directories of verl-recipe
# what it may name; where there are two tracks, the scripts of today belong to the one that rolls on
REQUIRED_KEYS = ("TAG", "COMMIT", "VERL_COMMIT", "ROLLING_VERL_COMMIT", "OPTION_B_VERL_COMMIT", "OPTION_A_TAG",
                 "REPRODUCTION_COMMIT")
MAX_ABOVE = 6  # directories above a script that are looked at
VERL_URL = "https://github.com/verl-project/verl.git"


@dataclass(frozen=True)
class Release:
    """`root` is the directory that holds the package verl; `why` is the name in findings.toml of what chose it.

    `beside` are directories of the user's own that modules of a launch may lie in, the script's and those above it.
    """

    version: str
    root: Path
    why: str = "judged_given"
    asked_in: str = ""  # the file that asks for this release
    beside: tuple[Path, ...] = ()

    @property
    def shown(self) -> str:
        return short(self.version)

    def file(self, module: str) -> Path | None:
        """The source of a main: in the release, else beside the script; a recipe's repository is the package recipe."""
        names = [module, *([module.removeprefix("recipe.")] if module.startswith("recipe.") else [])]
        places = [self.root, *(() if module.startswith("verl.") else self.beside)]
        files = (place.joinpath(*name.split(".")).with_suffix(".py") for place in places for name in names)
        return next((file for file in files if file.is_file()), None)

    def main(self, module: str) -> tuple[Path, str] | None:
        """(config directory, config name) of a main; None when there is no such module, or none that Hydra starts.

        A recipe beside the script may name its configs as if it lay in verl's recipe/, where it is run."""
        file = self.file(module)
        found = HYDRA_MAIN.search(file.read_text(encoding="utf-8")) if file else None
        if not found:
            return None
        placed = self.root.joinpath(*module.split(".")).parent
        folders = [(folder / found.group(1)).resolve() for folder in (file.parent, placed)]
        return next((folder for folder in folders if folder.is_dir()), folders[0]), found.group(2)

    def mains(self) -> list[str]:
        """Dotted names of all mains with a Hydra config."""
        return sorted(".".join(file.relative_to(self.root).with_suffix("").parts)
                      for folder in ("verl", "recipe") for file in (self.root / folder).rglob("main*.py")
                      if HYDRA_MAIN.search(file.read_text(encoding="utf-8"))) + sorted(
            ".".join(file.relative_to(self.root).with_suffix("").parts)
            for folder in ("verl", "recipe") for file in (self.root / folder).rglob("fully_async_main.py"))

    def names(self, module: str) -> frozenset[str]:
        """Every identifier in the Python and YAML files of the release, and of the package that a main beside the
        script is in: a key that is not here is read by nobody."""
        file = self.file(module)
        own = [] if file is None or self.root in file.parents else [file.parent]
        return frozenset().union(*map(_identifiers, (self.root / "verl", self.root / "recipe", *own)))

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

    def has_patch(self, slug: str) -> bool:
        """Whether ./apply.sh put this git patch into the tree: told by the hashes of the files that it touches."""
        from esgrpo.tools import apply, patchset

        directory = apply.PATCHES / "verl" / f"v{self.version}"
        if not (directory / "UPSTREAM").is_file():
            return False
        found = patchset.survey(patchset.load(directory), self.root)
        return slug in found.patches.slugs and found.state(slug) == "applied"

    def validates(self, module: str) -> bool:
        """Whether a main has validate_config look at the sizes of batches; verl's own experiments need not."""
        file = self.file(module)
        return file is not None and any(name in file.read_text(encoding="utf-8") for name in VALIDATING)

    @property
    def reads_ref_freely(self) -> bool:
        """The FSDP workers of verl 0.7 make no dataclass of actor_rollout_ref.ref, and read keys that it lacks."""
        return (self.root / "verl" / "workers" / "fsdp_workers.py").is_file()

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


@functools.cache
def _identifiers(folder: Path) -> frozenset[str]:
    found: set[str] = set()
    for file in folder.rglob("*"):
        if file.suffix in (".py", ".yaml") and file.is_file():
            found.update(re.findall(r"[A-Za-z_]\w*", file.read_text(encoding="utf-8", errors="replace")))
    return frozenset(found)


def installed() -> Release | None:
    """The verl of this interpreter, without importing it."""
    spec = util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations))).parent
    try:
        return Release(public(metadata.version("verl")), root, "judged_installed")
    except metadata.PackageNotFoundError:
        return replace(checkout(root), why="judged_installed")


def checkout(root: Path) -> Release:
    """A source tree of verl; a patched one counts as the release that it was. Raises EsgrpoError for another folder."""
    version = root / "verl" / "version" / "version"
    if not version.is_file():
        raise EsgrpoError("lint", str(root), "a directory with the package verl", "nothing to check against",
                          "give a release (0.9.1) or the root of a checkout")
    return Release(public(version.read_text(encoding="utf-8").strip()), root.resolve())


def required_by(file: Path) -> str:
    """The release or commit of verl that a recipe's REQUIRED_VERL.txt names; empty when it names none."""
    said = dict(line.split("=", 1) for line in file.read_text(encoding="utf-8").splitlines()
                if "=" in line and not line.startswith("#"))
    found = next((said[key].strip() for key in REQUIRED_KEYS if said.get(key, "").strip()), "")
    return found.removeprefix("v") if re.fullmatch(r"v\d[\w.]*", found) else found


def _above(script: Path | None) -> list[Path]:
    """The script's directory and those above it, up to the root of its repository."""
    found: list[Path] = []
    for folder in script.resolve().parents if script else ():
        found.append(folder)
        if (folder / ".git").exists() or len(found) == MAX_ABOVE:
            break
    return found


def find(wanted: str | None, module: str, script: Path | None = None) -> Release:
    """The release to judge a launch by: --verl, what the recipe asks for, the checkout that the script lies in, the
    installed one, or a pinned one that has such mains. Raises upstreams.Unavailable where its sources cannot be had."""
    above = _above(script)
    return replace(_find(wanted, module, above), beside=tuple(above))


def _find(wanted: str | None, module: str, above: list[Path]) -> Release:
    if wanted and (Path(wanted).is_dir() or os.sep in wanted):  # no release has one: pip is not asked for it
        return checkout(Path(wanted))
    here, why, asked_in = installed(), "judged_given", ""
    if not wanted:
        file = next((folder / REQUIRED for folder in above if (folder / REQUIRED).is_file()), None)
        wanted = required_by(file) if file else None
        why, asked_in = ("judged_required", REQUIRED) if wanted else (why, "")
    if not wanted:
        around = next((folder for folder in above if (folder / "verl" / "version" / "version").is_file()), None)
        if around is not None:
            return replace(checkout(around), why="judged_checkout")
    if here and (here.version == wanted if wanted else here.main(module) or not is_legacy(module)):
        return replace(here, why=why, asked_in=asked_in) if wanted else here
    if not wanted:
        wanted = LEGACY_RELEASE if is_legacy(module) else releases()[-1]
        why = "judged_legacy" if is_legacy(module) else "judged_newest"
    return Release(wanted, upstreams.sources("verl", wanted, say=say), why, asked_in)


def releases() -> list[str]:
    """Those of verl that the overlay knows, oldest first."""
    known = {row.versions["verl"] for row in compat.load() if "verl" in row.versions}
    return sorted(known, key=lambda version: [int(part) for part in version.split(".")])


def short(version: str) -> str:
    """A commit as git shortens it; a release as it is."""
    return version[:12] if upstreams.COMMIT.fullmatch(version) else version


def is_legacy(module: str) -> bool:
    """A main that verl up to 0.7.0 kept under recipe/ and later releases have elsewhere."""
    return module.startswith(LEGACY_MODULES)


def commands(version: str) -> str:
    """The two commands that fetch a release of verl with its recipes."""
    tag = version if upstreams.COMMIT.fullmatch(version) else f"v{version}"
    return (f"git clone {VERL_URL} verl && git -C verl checkout {tag}; "
            "git -C verl submodule update --init --recursive recipe")
