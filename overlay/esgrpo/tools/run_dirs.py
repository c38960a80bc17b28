"""Run directories, as `status`, `status --books` and `top` take them: one run, or the directory of a comparison."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from esgrpo import records
from esgrpo.errors import EsgrpoError, say

HOOKS = records.HOOKS  # in records.FOLDER; in the directory itself by older releases
ADVICE = "give the run directory (trainer.default_local_dir)"
Found = TypeVar("Found")


def has_hooks(path: str) -> bool:
    """The states of its hooks lie there, which are written once all of its processes have answered.

    Raises OSError where that cannot be known, as in a folder that may not be read.
    """
    for name in ((records.FOLDER, HOOKS), (HOOKS,)):
        try:
            os.stat(os.path.join(path, *name))
            return True
        except (FileNotFoundError, NotADirectoryError):
            continue
    return False


def has_rows(path: str) -> bool:
    """A process of a run has written there."""
    try:
        return any(name.endswith(".jsonl") for name in os.listdir(os.path.join(path, records.FOLDER)))
    except OSError:
        return False


def is_run(path: str) -> bool:
    """It has hooks or rows, or those may not be read, which whoever reads them says; another closed folder is none."""
    try:
        return has_hooks(path) or has_rows(path)
    except OSError:
        return os.path.isdir(os.path.join(path, records.FOLDER))


def _around(directory: str, is_run: Callable[[str], bool]) -> str:
    """The run to which a folder of records belongs; any other directory as it is, one of runs of that name, too."""
    here = os.path.abspath(directory)
    run = os.path.dirname(here)
    inside = os.path.basename(here) == records.FOLDER and not os.path.isdir(os.path.join(here, records.FOLDER))
    return run if inside and is_run(run) else directory


def runs_in(directory: str, is_run: Callable[[str], bool]) -> list[str]:
    """The directory of a run itself, whose folder of records may be given instead, or those of the runs in the
    directory of a comparison; else as it was given."""
    directory = _around(directory, is_run)
    if is_run(directory):
        return [directory]
    try:
        below = sorted(entry.path for entry in os.scandir(directory) if entry.is_dir())
    except OSError:  # whoever reads it says so
        return [directory]
    return list(filter(is_run, below)) or [directory]


def read_each(who: str, directory: str, read: Callable[[str], Found]) -> tuple[dict[str, Found], dict[str, str]]:
    """({path: what `read` finds there}, {path: why it finds nothing}) of each run of a directory, the second is said,
    too: no run of a comparison is left out, and none costs the others. Of one alone raises what `read` raises."""
    found, lost = {}, {}
    paths = runs_in(directory, is_run)
    for path in paths:
        try:
            found[path] = read(path)
        except (EsgrpoError, OSError) as error:
            if len(paths) == 1:
                raise
            line = error if isinstance(error, EsgrpoError) else EsgrpoError(
                who, f"{error.filename or path}: {error.strerror}", "files that can be read", "the run is left out",
                "correct its rights")
            say(line)
            lost[path] = str(line)
    return found, lost


def check(who: str, directory: str, consequence: str) -> None:
    """Raises EsgrpoError for what is no directory: nothing ever comes into it."""
    if not os.path.isdir(directory):
        found = "is a file" if os.path.exists(directory) else "does not exist"
        raise EsgrpoError(who, f"{directory} {found}", "the directory of a run with the overlay", consequence, ADVICE)
