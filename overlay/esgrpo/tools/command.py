"""What is proven wrong with a command before `esgrpo run` becomes it: upstream says so after a minute of imports."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from esgrpo.config import PREFIX
from esgrpo.errors import EsgrpoError

STOPS = "nothing was started"
OWN_CONFIG = ("-cn", "--config-name", "-cp", "--config-path", "-cd", "--config-dir", "hydra.searchpath")
MULTIRUN = ("-m", "--multirun")
GROUP = re.compile(rf"^\s*{PREFIX.rpartition('.')[2]}\s*:", re.M)


def check(command: list[str]) -> None:
    """Raises EsgrpoError."""
    module, rest = module_of(command)
    check_verl(command[0], module)
    check_overrides(command, module, rest)


def module_of(command: list[str]) -> tuple[str, list[str]]:
    """M and what follows of `python -m M ...`; "" and everything of another command."""
    for index, argument in enumerate(command[1:-1], 1):
        if argument == "-m":
            return command[index + 1], command[index + 2:]
        if not argument.startswith("-"):  # a script, or the value of an option
            break
    return "", command[1:]


def check_verl(program: str, module: str) -> None:
    """verl is not there for this interpreter. Another one, or a wrapper around it, may have it: not judged."""
    if module.partition(".")[0] != "verl" or not is_this_python(program):
        return
    if not _verl():
        raise EsgrpoError("run", f"verl is neither installed in {sys.prefix} nor in this directory", f"a verl with "
                          f"{module}", STOPS, "install it there, start from the root of a checkout, or run the esgrpo "
                          "of the environment that has it")


def _verl() -> list[ModuleSpec]:
    """What this interpreter would import; `python -m` looks into the directory that it is started in, too."""
    return [spec for spec in (PathFinder.find_spec("verl", [os.getcwd()]), find_spec("verl")) if spec]


def is_this_python(program: str) -> bool:
    """Under any of its names in its own directory: a link from elsewhere is another environment."""
    found = shutil.which(program)
    return found is not None and all(
        of(found) == of(sys.executable) for of in (lambda path: os.path.dirname(os.path.abspath(path)),
                                                   os.path.realpath))


def check_overrides(command: list[str], module: str, rest: list[str]) -> None:
    """An override of ours that Hydra cannot read, or would sweep over; a key that must be added, and is not."""
    ours = [argument for argument in command if argument.lstrip("+~").startswith((f"{PREFIX}.", f"{PREFIX}="))]
    if ours and find_spec("hydra") is not None:
        for argument in ours:
            _check_value(argument, sweeps=bool(module) and not any(option in rest for option in MULTIRUN))
    if module.partition(".")[0] == "verl" and not any(
            argument.lstrip("+").partition("=")[0] in OWN_CONFIG or "@" in argument.partition("=")[0]
            for argument in rest):
        _check_added(rest)


def _knows_group() -> bool:
    """A YAML file of verl has the group, as of a checkout that somebody has changed; or there is no verl to look at."""
    folders = [Path(folder) for spec in _verl() for folder in spec.submodule_search_locations or ()]
    return not folders or any(GROUP.search(file.read_text(encoding="utf-8", errors="replace"))
                              for folder in folders for file in folder.rglob("*.yaml"))


def _check_value(argument: str, sweeps: bool) -> None:
    """`sweeps`: a list of values is no value, because nothing asks for several runs."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = argument.partition("=")
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        found = str(error).splitlines()[0]
    else:
        if not (sweeps and parsed.is_sweep_override()):
            return
        found = "to Hydra it is several values, for several runs"
    raise EsgrpoError(key.lstrip("+~"), f"{value!r}: {found}", "a value in Hydra's grammar", STOPS,
                      f"quote it twice, once for the shell and once for Hydra: '{key}=\"...\"'")


def _check_added(overrides: list[str]) -> None:
    """verl's own configurations have no `segment`: without + Hydra only changes what an earlier override has added."""
    added: list[str] = []
    for override in overrides:
        key, equals, _ = override.partition("=")
        if key.startswith("+"):
            added.append(key.lstrip("+"))
        elif equals and f"{key}.".startswith(f"{PREFIX}.") and not any(
                f"{key}.".startswith(f"{one}.") or f"{one}.".startswith(f"{key}.") for one in added):
            if _knows_group():
                return
            raise EsgrpoError(key, f"{override!r} without +", f"+{key}=..., because verl's configuration has no "
                              f"{PREFIX}", STOPS, f"write '+{override}'")
