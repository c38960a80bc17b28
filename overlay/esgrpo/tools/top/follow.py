"""New rows of a run, as they are written. Standard library only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from esgrpo import records
from esgrpo.algo import rows as kinds

TAIL_BYTES = 4 * 2**20  # of a file that was there before: older rows would scroll off


class Follower:
    """Reads the files of some kinds on from where it was; a file is known by its inode, whatever its name becomes.

    Invariants: a row is returned once; a line without its end waits for the rest; no file holds up another one.
    """

    def __init__(self, run_dir: str, wanted: Iterable[str]):
        self.folder = Path(run_dir, records.FOLDER)
        self.broken = 0  # whole lines that are no row
        self.unreadable = ""  # what the system said of the folder, or of a file, the last time
        self._wanted = frozenset(wanted)
        self._read: dict[tuple[int, int], int] = {}  # (device, inode) -> bytes that were read

    def poll(self) -> list[kinds.Row]:
        """Rows since the last call, in order of time. Empty where there is no such run yet."""
        found, self.unreadable = [], ""
        for kind, path in self._files():
            try:
                lines = self._lines(path)
            except FileNotFoundError:  # rotated away since it was listed; its new name comes next time
                continue
            except OSError as error:
                self.unreadable = f"{path.name}: {error.strerror}"
                continue
            for line in filter(str.strip, lines):
                row = records.parsed(kinds.KINDS[kind], line)
                if row is None:
                    self.broken += 1
                else:
                    found.append(row)
        return sorted(found, key=lambda row: row.time)

    def _files(self) -> list[tuple[str, Path]]:
        try:
            names = sorted(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.unreadable = f"{self.folder}: {error.strerror}"
            return []
        parts = [(name.partition("-")[0], name) for name in names if name.endswith(".jsonl")]
        return [(kind, self.folder / name) for kind, name in parts if kind in self._wanted]

    def _lines(self, path: Path) -> list[str]:
        """Whole lines that are new. Raises OSError."""
        with open(path, "rb") as file:
            told = os.fstat(file.fileno())
            key, size = (told.st_dev, told.st_ino), told.st_size
            begin = self._read.get(key)
            if begin is None or begin > size:  # new here, or cut and begun anew
                begin = max(0, size - TAIL_BYTES)
                file.seek(begin)
                begin += len(file.readline()) if begin else 0  # the rest of a line
            file.seek(begin)
            data = file.read(size - begin)
        whole = data.rfind(b"\n") + 1
        self._read[key] = begin + whole
        return data[:whole].decode("utf-8", "replace").split("\n")


def running(node: str | None, pid: int | None) -> bool | None:
    """Is the process that wrote a row still there? None: it is of another machine, or may not be looked at."""
    if node != records.NODE or not pid:
        return None
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return os.path.isdir(f"/proc/{pid}")
