"""Writes what `esgrpo report` makes: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from esgrpo.errors import EsgrpoError


def write_whole(path: Path, text: str, option: str) -> None:
    """Raises EsgrpoError where the place that `option` of the command line names cannot be written."""
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        if new.is_file():
            new.unlink()
        raise EsgrpoError("report", f"{error.strerror}: {error.filename}", "a file in a folder that can be written",
                          f"{path.name} was not written", f"give another one with {option}") from None
