"""What this process has decided: rows of kind `decisions`, and esgrpo/decisions/* for verl's Tracking. No hook.

Counts run from the start of the process (`algo/decisions.py` names them). Those of agent-loop workers travel with the
rows of their responses, so that the trainer learns of them without a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from esgrpo import config, records
from esgrpo.algo import decisions
from esgrpo.algo.rows import Decisions

ROLLOUTER = "rollouter"
counts: Counter = Counter()  # of a rollouter, a fully-async trainer, or v1's task runner
_written: dict[str, tuple] = {}  # process -> what its last row said
_tracked = decisions.Gathered()  # for Tracking: this process, and the workers whose rows came


def add(module: str, **what: int) -> None:
    counts.update({f"{module}/{name}": int(number) for name, number in what.items()})


def add_windows(windows: Iterable[Mapping]) -> None:
    """What engines did until a weight sync closed these windows."""
    for window in windows:
        add("keep", kept=window["kept"], aborted=window["outcomes"].get("abort", 0), syncs=1)
        add("kv_headroom", held=window.get("held", 0))
        add("token_outputs", **window.get("token_outputs", {}))


def write(process: str, now: Mapping[str, int], audit: Mapping | None = None) -> None:
    """A row, if anything has changed since the last one of this process."""
    found = dict(+Counter(now)), dict(audit or {})
    if found != _written.get(process, ({}, {})):
        _written[process] = found
        records.write(Decisions(process=process, counts=found[0], audit=found[1]))


def _take_in(rows: Iterable[Mapping]) -> None:
    """A group that a restart brought back whole was counted in the start that made it."""
    restart = records.identity()["restart"]
    for row in rows:
        if "decisions" in row and row.get("restart") == restart:
            _tracked.add((row.get("restart"), row.get("node"), row.get("pid")), row["decisions"])


def _metrics(names: Iterable[str]) -> dict[str, float]:
    found = decisions.decided(config.current(), _tracked.take(), names)
    return {f"esgrpo/decisions/{name}": float(number) for name, number in found.items()}


def _own(process: str, owner) -> None:
    """Once a weight version: what this process decided since, into its row and for Tracking."""
    from esgrpo.hooks.verl.prompts import prompt_order

    add("sampler", **prompt_order.take_counts(owner))
    write(process, counts)
    _tracked.add(process, counts)


def finish() -> None:
    """The run is over: what came after the last weight version."""
    if ROLLOUTER in _written:
        write(ROLLOUTER, counts)


def of_rollouter(rollouter) -> dict[str, float]:
    _own(ROLLOUTER, rollouter)
    return _metrics(set(decisions.NAMES) - set(decisions.OF_TRAINER))


def of_v1(trainer, rows: Iterable[Mapping]) -> dict[str, float]:
    """`rows` of the responses that were trained in a weight version."""
    _own("v1-task-runner", trainer)
    _take_in(rows)
    return _metrics(decisions.NAMES)


def of_trainer(rows: Iterable[Mapping], last: bool) -> dict[str, float]:
    """Of the workers, with the `last` batch of a weight version: verl logs the mean over the batches that have one."""
    _take_in(rows)
    _tracked.add("trainer", counts)
    return _metrics(decisions.OF_TRAINER) if last else {}
