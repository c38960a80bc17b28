"""Run directories, as `status`, `status --books` and `top` take them: one run, or the directory of a comparison."""

from __future__ import annotations

import os
from collections.abc import Callable

from esgrpo import records
from esgrpo.errors import EsgrpoError

HOOKS = "hooks.json"  # in records.FOLDER; in the directory itself by older releases
ADVICE = "give the run directory (trainer.default_local_dir)"


def has_hooks(path: str) -> bool:
    """The states of its hooks lie there, which are written once all of its processes have answered."""
    return any(os.path.exists(os.path.join(path, *name)) for name in ((records.FOLDER, HOOKS), (HOOKS,)))


def has_rows(path: str) -> bool:
    """A process of a run has written there."""
    try:
        return any(name.endswith(".jsonl") for name in os.listdir(os.path.join(path, records.FOLDER)))
    except OSError:
        return False


def runs_in(directory: str, is_run: Callable[[str], bool]) -> list[str]:
    """The directory of a run itself, or those of the runs in the directory of a comparison; else as it was given."""
    if is_run(directory):
        return [directory]
    try:
        below = sorted(entry.path for entry in os.scandir(directory) if entry.is_dir())
    except OSError:  # whoever reads it says so
        return [directory]
    return list(filter(is_run, below)) or [directory]


def check(who: str, directory: str, consequence: str) -> None:
    """Raises EsgrpoError for what is no directory: nothing ever comes into it."""
    if not os.path.isdir(directory):
        found = "is a file" if os.path.exists(directory) else "does not exist"
        raise EsgrpoError(who, f"{directory} {found}", "the directory of a run with the overlay", consequence, ADVICE)
