"""What a run writes down: JSON lines and state files under RUN_DIR/esgrpo, written by one thread a process.

Telemetry never stops or holds up training. `write` and `save` queue and return; a daemon thread writes what has
gathered every `PERIOD_S`. A disk that is full, read-only, slow or gone costs one line per process and rows, which are
counted (`dropped`, the metric esgrpo/records/dropped and, once it can be written, a row of its own). At most
`HELD_BYTES` wait. Rows are not synced to the disk one by one: what a process that is killed (SIGKILL, os._exit, as Ray
does it) loses is what it wrote in its last `PERIOD_S` plus what a slow disk has not taken yet; a state file loses up to
`STATE_PERIOD_S`. A machine that loses power loses what its page cache held. Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import re
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping

from esgrpo.algo import rows as kinds
from esgrpo.errors import EsgrpoError, say

ENV_RUN_DIR, ENV_RUN_ID, ENV_RESTART = "ESGRPO_RUN_DIR", "ESGRPO_RUN_ID", "ESGRPO_RESTART"
FOLDER, RUN_FILE = "esgrpo", "run.json"
HOOKS = "hooks.json"  # of this start: states of hooks in all processes
RUN_ID_DIGITS = 12  # hexadecimal
HELD_BYTES = 16 * 2**20  # rows that wait and those being written
CHUNK_BYTES = 2**20  # joined for one write
ROW_OVERHEAD_BYTES = 128  # of a bytes object, its tuple and its place in the queue
# a process keeps its newest so many, and as many before
ROTATED_BYTES = {"events": 16 * 2**20, "moves": 16 * 2**20, "windows": 64 * 2**20}
PERIOD_S = 0.1  # rows of this time are written together
STATE_PERIOD_S = 5.0  # a state file is synced to the disk, and so not written more often than this
WAIT_S = 5.0  # that a caller of `flush` may lose to a slow disk; once an operation has lasted longer, nobody waits
EXIT_S = 2.0


class Writer:
    """Rows and state files of one process, written by one daemon thread, which starts with the first of them.

    Invariants: no method waits for the disk but `flush`, and that at most as long as it is told to; rows held, with
    what is being written, never exceed `limit` bytes; every row is written whole, dropped and counted, or held; a state
    file is the old or the new one, never a part; no exception of the disk, or of a row, leaves a method.
    """

    def __init__(self, limit: int = HELD_BYTES, period: float = PERIOD_S):
        self.dropped = 0
        self._limit, self._period = limit - CHUNK_BYTES, period
        self._rows: deque[tuple[str, bytes]] = deque()
        self._states: dict[str, tuple[Callable[[], object], int | None]] = {}  # by file: (make, indent)
        self._state_due: dict[str, float] = {}
        self._seen: set[str] = set()  # files that this process has appended to
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._held = self._queued = self._finished = self._told = 0
        self._said = self._urgent = False
        self._busy_since: float | None = None

    def append(self, path: str, line: bytes) -> None:
        size = len(line) + ROW_OVERHEAD_BYTES
        with self._change:
            if self._held + size <= self._limit and self._running():
                self._rows.append((path, line))
                self._held += size
                self._queued += 1
                if len(self._rows) == 1:  # later ones are gathered: waking the thread for each would cost as a write
                    self._change.notify_all()
                return
        self.lose(1, f"{self._held} bytes wait for {os.path.dirname(path)}, which takes none")

    def save(self, file: str, make: Callable[[], object], indent: int | None = None) -> None:
        """Write `make()` as JSON to `file`; a newer call replaces one that still waits. `make` runs in the thread."""
        with self._change:
            if self._running():
                self._states[file] = make, indent
                self._queued += 1
                self._change.notify_all()

    def flush(self, seconds: float = WAIT_S) -> bool:
        """Wait, at most so long, until all that was queued before is written or given up. True when it is."""
        with self._change:
            wanted, self._urgent = self._queued, True
            self._change.notify_all()
            if self._busy_since is not None and time.monotonic() - self._busy_since > WAIT_S:
                return False
            return self._change.wait_for(lambda: self._finished >= wanted, seconds)

    def lose(self, rows: int, reason: str) -> None:
        """Count rows as dropped, and say so the first time."""
        with self._change:
            self.dropped += rows
            first, self._said = not self._said, True
        if first:
            with contextlib.suppress(Exception):
                say(EsgrpoError("records", reason, "a run directory that can be written to",
                                "rows are dropped and counted (esgrpo/records/dropped), training goes on",
                                f"make room, or set {ENV_RUN_DIR} to another place"))

    def _running(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="esgrpo-records", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down, or the system has no thread left
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._rows or self._urgent or self._next_state() <= time.monotonic(),
                                      self._pause())
                self._change.wait_for(lambda: self._urgent, self._period)
                everything, self._urgent = self._urgent, False
                upto = self._queued
            self._write_rows()
            self._write_states(everything)
            with self._change:
                if everything:
                    self._finished = max(self._finished, upto)
                self._change.notify_all()

    def _next_state(self) -> float:
        """When the next state file is due, on the monotonic clock."""
        return min((self._state_due.get(file, 0.0) for file in self._states), default=float("inf"))

    def _pause(self) -> float | None:
        return max(0.0, self._next_state() - time.monotonic()) if self._states else None

    def _write_rows(self) -> None:
        while True:
            with self._change:
                if not self._rows:
                    return
                chunk, size = {}, 0
                while self._rows and size < CHUNK_BYTES:
                    path, line = self._rows.popleft()
                    chunk.setdefault(path, []).append(line)
                    size += len(line) + ROW_OVERHEAD_BYTES
                    if self._rows and size + len(self._rows[0][1]) > CHUNK_BYTES:
                        break
            for path, lines in chunk.items():
                if self._attempt(lambda path=path, lines=lines: self._append_to(path, b"".join(lines)), len(lines)):
                    self._tell(os.path.dirname(path))
            with self._change:
                self._held -= size

    def _write_states(self, everything: bool) -> None:
        now = time.monotonic()
        with self._change:
            due = [file for file in self._states if everything or self._state_due.get(file, 0.0) <= now]
            states = {file: self._states.pop(file) for file in due}
        for file, (make, indent) in states.items():
            if not self._attempt(lambda file=file, make=make, indent=indent: write_whole(file, make(), indent), 0):
                with self._change:
                    self._states.setdefault(file, (make, indent))  # again later, unless there is a newer one
            self._state_due[file] = time.monotonic() + STATE_PERIOD_S

    def _attempt(self, operation: Callable[[], None], rows: int) -> bool:
        """Run one disk operation; whatever it raises costs the rows, never the thread."""
        self._busy_since = time.monotonic()
        try:
            operation()
            return True
        except Exception as error:
            self.lose(getattr(error, "rows_lost", rows), _said_of(error))
            return False
        finally:
            self._busy_since = None

    def _append_to(self, path: str, data: bytes) -> None:
        """Raises OSError; its `rows_lost` says how many rows are not in the file, none of them in part."""
        if path not in self._seen:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            data = data if _ends_whole(path) else b"\n" + data
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            before, rest = os.fstat(file).st_size, memoryview(data)
            try:
                while rest:
                    rest = rest[os.write(file, rest):]
            except OSError as error:
                whole = data.rfind(b"\n", 0, len(data) - len(rest)) + 1
                with contextlib.suppress(OSError):
                    os.ftruncate(file, before + whole)  # half a row would spoil the one after it
                error.rows_lost = data.count(b"\n", whole)
                raise
        finally:
            os.close(file)  # where a network file system says that there was no room
        self._seen.add(path)
        if before + len(data) > ROTATED_BYTES.get(os.path.basename(path).partition("-")[0], math.inf):
            os.replace(path, path.removesuffix(".jsonl") + ".before.jsonl")

    def _tell(self, directory: str) -> None:
        """Write down how many rows were dropped, now that writing works."""
        lost = self.dropped - self._told
        if lost:
            with contextlib.suppress(OSError):
                self._append_to(_path(directory, "dropped"), _line(kinds.Dropped(rows=lost)))
                self._told += lost


def _said_of(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _ends_whole(path: str) -> bool:
    """False when an earlier process with this name was killed within a row."""
    if not os.path.isfile(path) or not os.path.getsize(path):
        return True
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def write_whole(file: str, state: object, indent: int | None = None) -> None:
    """JSON in `file`: the old file or the new one, never a part. Raises OSError."""
    os.makedirs(os.path.dirname(file), exist_ok=True)
    scratch = f"{file}.new-{os.getpid()}"
    try:
        with open(scratch, "w", encoding="utf-8") as stream:
            json.dump(state, stream, indent=indent, separators=None if indent else (",", ":"))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(scratch, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


UNTOLD = {"run": "", "restart": 0, "node": "", "pid": 0}  # by rows of older releases
NODE = re.sub(r"[^\w.-]", "_", socket.gethostname()) or "node"
_writer = Writer()


def _renew() -> None:
    """A forked child has the parent's rows and none of its threads."""
    global _writer
    _writer = Writer()


os.register_at_fork(after_in_child=_renew)
atexit.register(lambda: flush(EXIT_S))


def _path(directory: str, kind: str) -> str:
    return os.path.join(directory, f"{kind}-{NODE}-{os.getpid()}.jsonl")


def identity() -> dict:
    """Run, restart, node and process: what tells a row from that of another start or process."""
    return {"run": os.environ.get(ENV_RUN_ID, ""), "restart": int(os.environ.get(ENV_RESTART) or 0), "node": NODE,
            "pid": os.getpid()}


def _line(row: kinds.Row) -> bytes:
    return (json.dumps({"time": time.time(), **identity(), **row.row()}, default=_plain) + "\n").encode()


def _plain(value):
    """JSON for numbers and arrays of numpy and torch."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write(row: kinds.Row) -> None:
    """Queue one row for RUN_DIR/esgrpo/<kind>-<node>-<pid>.jsonl; what it says of itself wins over `identity`.

    Without a run directory nothing is written. Never raises, never waits.
    """
    directory = os.environ.get(ENV_RUN_DIR)
    if not directory:
        return
    try:
        line = _line(row)
    except (TypeError, ValueError) as error:  # a key that JSON has not, or a circle
        _writer.lose(1, f"a row of {row.kind}: {error}")
        return
    _writer.append(_path(os.path.join(directory, FOLDER), row.kind), line)


def write_told(kind: type[kinds.Row], told: Mapping) -> None:
    """The same with what another process told, which may lack what this release knows: then it is lost and counted."""
    try:
        row = kind.of(told)
    except ValueError as error:
        _writer.lose(1, f"a row of {error}")
        return
    write(row)


def save(file: str, make: Callable[[], object], indent: int | None = None) -> None:
    """Have `make()`, called in the writer's thread, written to `file` as JSON; the newest call for a file counts."""
    _writer.save(file, make, indent)


def flush(seconds: float = WAIT_S) -> bool:
    """Wait, at most so long, for what is queued; not on an event loop. True when all of it is written or given up."""
    return _writer.flush(seconds)


def new_run() -> str:
    return uuid.uuid4().hex[:RUN_ID_DIGITS]


def named(run: str, restart: int) -> dict[str, str]:
    """The environment by which every process knows its run."""
    return {ENV_RUN_ID: run, ENV_RESTART: str(restart)}


def begun(run_dir: str, goes_on: bool) -> dict[str, str]:
    """Count one more start of the run in this directory, or begin another run there; returns its environment.

    A directory that cannot be written to gets a new run every time, which its rows, if any, can be told by. What hooks
    were in before goes: a start that dies before its processes have answered is in no state of theirs.
    """
    with contextlib.suppress(OSError):
        os.remove(os.path.join(run_dir, FOLDER, HOOKS))
    file = os.path.join(run_dir, FOLDER, RUN_FILE)
    run, restart = new_run(), 0
    if goes_on:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(file, encoding="utf-8") as stream:
                state = json.load(stream)
            run, restart = str(state["run"]), int(state["restart"]) + 1
    save(file, lambda: {"run": run, "restart": restart})
    flush()
    return named(run, restart)


def dropped() -> int:
    """Rows that this process has lost so far."""
    return _writer.dropped


def read(run_dir: str, kind: str) -> list[kinds.Row]:
    """All rows of a kind (`algo.rows.KINDS`), in order of time."""
    return read_counted(run_dir, kind)[0]


def read_counted(run_dir: str, kind: str) -> tuple[list[kinds.Row], int]:
    """All rows of a kind, in order of time, and the number of lines that are none: cut where a process was killed.

    What this process has written itself is there. Rows of older releases have neither run nor restart nor node: they
    are of run "", start 0.
    """
    flush()
    directory = os.path.join(run_dir, FOLDER)
    rows, torn = [], 0
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        path = os.path.join(directory, name)
        if name.startswith(f"{kind}-") and name.endswith(".jsonl") and os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                for line in filter(str.strip, file):
                    row = parsed(kinds.KINDS[kind], line)
                    if row is None:
                        torn += 1
                    else:
                        rows.append(row)
    return sorted(rows, key=lambda row: row["time"]), torn


def parsed(kind: type[kinds.Row], line: str) -> kinds.Row | None:
    """The row that a line is; None where it is none."""
    try:
        found = json.loads(line)
        row = kind.of({**UNTOLD, **found}) if isinstance(found, dict) else None
    except (ValueError, RecursionError):  # brackets without end
        return None
    return row if row is not None and all(row[name] is not None for name in ("time", *UNTOLD)) else None
