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

PERIOD_S = 1.0
WIDTH, NARROWEST = 100, 80  # of what is no terminal; drawn for at least so many columns


def main(run_dir: str, once: bool, period: float = PERIOD_S) -> int:
    """Draw until Ctrl-C, or one frame: `once`, or where the output is no terminal. Raises EsgrpoError."""
    if find_spec("rich") is None:
        raise EsgrpoError("top", f"rich is not installed in {sys.prefix}", "rich 13 or later", "nothing was shown",
                          "pip install 'esgrpo[top]', or pip install rich")
    if os.path.exists(run_dir) and not os.path.isdir(run_dir):
        raise EsgrpoError("top", f"{run_dir} is a file", "a run directory", "nothing was shown",
                          "give the run's trainer.default_local_dir")
    from rich.console import Console

    from esgrpo.tools.top import follow, state

    follower, loop = follow.Follower(run_dir, state.FOLLOWED), state.Loop()
    console = Console(highlight=False)
    if once or not console.is_terminal:
        loop.take(follower.poll())
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console = Console(highlight=False, width=WIDTH)
        console.print(_frame(run_dir, follower, loop, console.width))
        return 0 if loop.last is not None else 1
    _live(run_dir, follower, loop, console, period)
    return 0


def _live(run_dir: str, follower, loop, console, period: float) -> None:
    """Until Ctrl-C or SIGTERM; the terminal is then as it was."""
    from rich.live import Live

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                loop.take(follower.poll())
                live.update(_frame(run_dir, follower, loop, console.width), refresh=True)
                time.sleep(period)
    finally:
        signal.signal(signal.SIGTERM, before)


def _frame(run_dir: str, follower, loop, width: int):
    from esgrpo.tools.top import follow, screen

    found = [follow.running(*writer) for writer in loop.writers]
    alive = True if True in found else None if None in found else False
    broken = follower.broken + loop.broken
    problems = [*([("broken", {"count": broken})] if broken else []),
                *([("unreadable", {"what": follower.unreadable})] if follower.unreadable else [])]
    return screen.frame(run_dir, loop, time.time(), alive, problems, max(width, NARROWEST))
