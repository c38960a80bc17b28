"""Records that later ones replaced: said in one file beside them, with the reason, never guessed."""

from __future__ import annotations

import sys
from pathlib import Path

from esgrpo.errors import EsgrpoError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIST = "superseded.toml"  # FILE = {by = "FILE", why = "..."}


def replaced(root: Path) -> dict[str, str]:
    """File -> "by FILE: why", of the records in `root`. Raises EsgrpoError when the list names what is not there."""
    path = root / LIST
    if not path.is_file():
        return {}
    found = {}
    for name, said in tomllib.loads(path.read_text(encoding="utf-8")).items():
        lost = [one for one in (name, said.get("by")) if not one or not (root / one).is_file()]
        if lost or not said.get("why"):
            raise EsgrpoError("report", f"{path}: {name} names {lost or 'no reason'}", "records in that directory, why",
                              "nothing was written", f"correct {LIST}")
        found[name] = f"by {said['by']}: {said['why']}"
    return found
