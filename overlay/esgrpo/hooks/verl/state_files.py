"""State files of an earlier run: set aside when they cannot be understood. `esgrpo.records` writes them."""

from __future__ import annotations

import json
import os

from esgrpo.errors import EsgrpoError, say


def restored(who: str, file: str | None, parse):
    """`parse(content)` of a JSON file; None when there is no file, or one that `parse` refuses with a ValueError.

    The latter is set aside and said so. Raises EsgrpoError when the file is there and cannot be read or set aside: it
    would be overwritten.
    """

    if file is None or not os.path.exists(file):
        return None
    try:
        with open(file, encoding="utf-8") as stream:
            return parse(json.load(stream))
    except (ValueError, RecursionError) as error:  # not JSON, not text, damaged, or of a newer esgrpo
        reason = f"{file}: {error}"
    except OSError as error:
        raise EsgrpoError(who, str(error), "a state file that can be read", "it would be lost, the run stops",
                          "correct its permissions, or move it away") from None
    kept = _set_aside(who, file)
    say(EsgrpoError(who, reason, "a state that this version wrote under these settings", "it starts empty",
                    f"the old file is kept as {kept}: use the esgrpo and the settings that wrote it, or delete it"))
    return None


def _set_aside(who: str, file: str) -> str:

    number = 1
    while os.path.exists(f"{file}.unreadable-{number}"):
        number += 1
    kept = f"{file}.unreadable-{number}"
    try:
        os.rename(file, kept)
    except OSError as error:
        raise EsgrpoError(who, str(error), "a damaged state file that can be renamed",
                          "it would be overwritten, the run stops", f"move {file} away") from None
    return kept
