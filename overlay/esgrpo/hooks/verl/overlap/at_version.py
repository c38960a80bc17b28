"""What a trainer does with the overlap controller at a weight version: observe, decide, move, record. No hook."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


def follow(control, window, left: int | None, move: Callable) -> None:
    """`left`: groups that will still be trained; None: nobody knows. `move` takes the wanted setting and returns
    whether it is in force from now on; where it is not, the next version tries again."""
    from esgrpo.algo import overlap_signals
    from esgrpo.hooks.verl.metrics import decision_counts

    controller = control.controller
    control.change = controller.observe(window) or control.change
    wanted = controller.setting
    if left is not None:
        wanted = overlap_signals.at_the_end(wanted, controller.start, controller.limits, left)
    moved = wanted != control.applied and move(wanted)
    if moved:
        _record(window.version, control, wanted)
        control.applied = wanted
    decision_counts.add("overlap", versions=1, measured=controller.rates is not None, moves=moved)


def _record(version: int, control, after) -> None:
    """A row of the move that was made, and a line: it changes what the user's command line says."""
    from esgrpo import records
    from esgrpo.algo.overlap import Cause
    from esgrpo.algo.rows import Move
    from esgrpo.errors import say

    decided = control.change
    if decided is None or decided.after != after:
        cause, forecast = Cause.END, None
    else:
        cause, forecast = decided.cause, decided.forecast
    before = control.applied
    records.write(Move(
        version=version, cause=str(cause), before=dataclasses.asdict(before), after=dataclasses.asdict(after),
        trust=control.controller.trust, forecast=forecast and dataclasses.asdict(forecast)))
    moved = [f"{name} {old:g} -> {new:g}" for (name, old), new
             in zip(dataclasses.asdict(before).items(), dataclasses.astuple(after), strict=True) if old != new]
    say(f"esgrpo: overlap at version {version} ({cause}): {', '.join(moved)}")
