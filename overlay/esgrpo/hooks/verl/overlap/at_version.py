"""What a trainer does with the overlap controller at a weight version: observe, decide, move, record. No hook."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


def follow(control, window, left: int | None, move: Callable) -> None:
    """`left`: groups that will still be trained; None: nobody knows. `move` takes the wanted setting and returns what
    else it had to move, name -> (before, after); None where the setting is not in force, and the next version tries
    again."""
    from esgrpo.algo import overlap_signals
    from esgrpo.hooks.verl.metrics import decision_counts, loop_events

    controller = control.controller
    control.change = controller.observe(window) or control.change
    wanted = controller.setting
    if left is not None:
        wanted = overlap_signals.at_the_end(wanted, controller.start, controller.limits, left)
    also = move(wanted) if wanted != control.applied else None
    if also is not None:
        _record(window.version, control, wanted, also)
        control.applied = wanted
    decision_counts.add("overlap", versions=1, measured=controller.rates is not None, moves=also is not None)
    loop_events.tell({**dataclasses.asdict(control.applied), "trust": controller.trust})


def _record(version: int, control, after, also: dict) -> None:
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
    before, also = control.applied, {name: change for name, change in also.items() if change[0] != change[1]}
    records.write(Move(
        version=version, cause=str(cause), before=dataclasses.asdict(before), after=dataclasses.asdict(after),
        also={name: list(change) for name, change in also.items()},
        trust=control.controller.trust, forecast=forecast and dataclasses.asdict(forecast)))
    setting = {name: (old, new) for (name, old), new
               in zip(dataclasses.asdict(before).items(), dataclasses.astuple(after), strict=True)}
    moved = [f"{name} {old:g} -> {new:g}" for name, (old, new) in {**setting, **also}.items() if old != new]
    say(f"esgrpo: overlap at version {version} ({cause}): {', '.join(moved)}")
