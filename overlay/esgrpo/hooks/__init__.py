"""Hook files, one behaviour each. A file that declares `HOOK` is a hook; the others are what hooks share.

The files are found, not listed, and only in a process that the overlay is on in. They are told apart by their text:
importing them all would load what a hook imports when it is called, numpy for one.
"""

from __future__ import annotations

import os

_DECLARATION = b"\nHOOK = Hook("


def files() -> list[str]:
    """Dotted names below this package, sorted. Where order counts, hooks say so (`Hook.after`)."""
    root, found = os.path.dirname(__file__), []
    for directory, _, names in os.walk(root):
        for path in (os.path.join(directory, name) for name in names if name.endswith(".py")):
            with open(path, "rb") as file:
                if _DECLARATION in file.read():
                    found.append(os.path.relpath(path, root).removesuffix(".py").replace(os.sep, "."))
    return sorted(found)
