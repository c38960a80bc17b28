"""`esgrpo top RUN_DIR`: the loop of a run, live in a terminal, from its rows alone. Needs rich; no torch, no verl.

follow.py reads what is written, state.py makes the state of the loop of it, screen.py draws.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from importlib.util import find_spec

from esgrpo.errors import EsgrpoError
from esgrpo.tools import run_dirs

NOTHING = "nothing was shown"
PERIOD_S = 1.0
WIDTH, NARROWEST = 100, 80  # of what is no terminal; drawn for at least so many columns


def main(run_dir: str, once: bool, period: float = PERIOD_S) -> int:
    """Draw until Ctrl-C, or one frame: `once`, or where nothing can be drawn over. Raises EsgrpoError."""
    if find_spec("rich") is None:
        raise EsgrpoError("top", f"rich is not installed in {sys.prefix}", "rich 13 or later", NOTHING,
                          "pip install 'esgrpo[top]', or pip install rich")
    run_dirs.check("top", run_dir, NOTHING)
    run_dir = _one_run(run_dir)
    from rich.console import Console

    follower, loop = _read(run_dir)
    console = Console(highlight=False)
    if once or not console.is_terminal or console.is_dumb_terminal:  # a dumb one shows nothing of a live screen
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console = Console(highlight=False, width=WIDTH)
        console.print(_frame(run_dir, follower, loop, console.width, waits=False))
        return 0 if loop.last is not None else 1
    _live(run_dir, follower, loop, console, period)
    return 0


def _live(run_dir: str, follower, loop, console, period: float) -> None:
    """Until Ctrl-C or SIGTERM; the terminal is then as it was."""
    from rich.live import Live

    from esgrpo.tools.top import screen

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                loop.take(follower.poll())
                frame = _frame(run_dir, follower, loop, console.width)
                live.update(screen.fitted(console, frame), refresh=True)
                time.sleep(period)
    finally:
        signal.signal(signal.SIGTERM, before)


def _one_run(directory: str) -> str:
    """Of a directory of several runs the one that is alive, or the only one. Raises EsgrpoError."""
    found = run_dirs.runs_in(directory, run_dirs.has_rows)
    if len(found) == 1:
        return found[0]
    alive = [path for path in found if _alive(_read(path)[1])]
    if len(alive) == 1:
        return alive[0]
    names = ", ".join(os.path.basename(path) for path in alive or found)
    raise EsgrpoError("top", f"{len(alive or found)} runs in {directory}: {names}", "one run", NOTHING,
                      f"esgrpo top {(alive or found)[-1]}")


def _read(run_dir: str):
    """What follows a run, and its loop as it is now."""
    from esgrpo.tools.top import follow, state

    follower, loop = follow.Follower(run_dir, state.FOLLOWED), state.Loop()
    loop.take(follower.poll())
    return follower, loop


def _alive(loop) -> bool | None:
    """A process of the run is left; None where that cannot be known."""
    from esgrpo.tools.top import follow

    found = [follow.running(*writer) for writer in loop.writers]
    return True if True in found else None if None in found else False


def _frame(run_dir: str, follower, loop, width: int, waits: bool = True):
    from esgrpo.tools.top import screen

    broken = follower.broken + loop.broken
    problems = [*([("broken", {"count": broken})] if broken else []),
                *([("unreadable", {"what": follower.unreadable})] if follower.unreadable else [])]
    return screen.frame(run_dir, loop, time.time(), _alive(loop), problems, max(width, NARROWEST), waits)
