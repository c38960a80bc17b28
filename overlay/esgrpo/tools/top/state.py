"""What the rows of a run say about its loop now: one `Loop` that takes rows and answers. Pure; time is passed in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from esgrpo.algo import decisions
from esgrpo.algo import rows as kinds

FOLLOWED = ("start", "checkpoint", "events", "windows", "moves", "decisions", "responses", "carry", "dropped")
RECENT = 10  # weight versions in means and little curves
MOVES = 20  # of the controller
SIDES = ("train", "rollout")
SIGNALS = ("loss", "grad_norm", "entropy", "kl")


@dataclass
class Replica:
    """One replica in one weight version: the windows of its engines together."""

    name: str
    version: int
    seconds: float = 0.0
    tokens: int = 0
    capacity: int = 0
    lost: dict[str, float] = field(default_factory=dict)  # used, sync, idle, tail: request-seconds
    surprisal: float = 0.0
    surprisal_tokens: int = 0
    kept: int = 0
    aborted: int = 0
    devices: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def running(self) -> float:
        """Requests, mean."""
        return self.lost.get("used", 0.0) / self.seconds if self.seconds > 0 else 0.0

    def share(self, cause: str) -> float:
        """Of its capacity."""
        whole = sum(self.lost.values())
        return self.lost.get(cause, 0.0) / whole if whole > 0 else 0.0

    @property
    def surprise(self) -> float | None:
        """Nats a token."""
        return self.surprisal / self.surprisal_tokens if self.surprisal_tokens else None

    def add(self, window: kinds.EngineWindow) -> None:
        """Another engine of the same replica: they run side by side."""
        lost = {name: _number(window[name]) for name in ("used", "sync", "idle", "tail")}
        devices = _devices(window.devices)
        self.seconds = max(self.seconds, window.seconds)
        self.tokens += window.tokens
        self.capacity += window.capacity
        self.lost = {name: self.lost.get(name, 0.0) + value for name, value in lost.items()}
        self.surprisal += window.surprisal
        self.surprisal_tokens += window.surprisal_tokens
        self.kept += window.kept
        self.aborted += int(_number(window.outcomes.get("abort", 0)))
        self.devices.update(devices)


class Loop:
    """Everything that is shown of the newest run in a directory.

    Rows come in order of time. A row whose contents are not what its kind says is counted in `broken` and left out.
    """

    def __init__(self):
        self.broken = 0
        self._past: set[str | None] = set()  # runs that were followed by another one
        self._begin(None)

    def _begin(self, run: str | None) -> None:
        self.run, self.restart, self.last = run, 0, None
        self.dropped = self.checkpoint = self.prompts_waiting = 0
        self.ended, self.ended_tokens = 0, 0  # responses since the newest window
        self.writers: dict[tuple, float] = {}  # (node, pid) -> time of its newest row
        self.no_devices: dict[str, str] = {}  # side or replica -> why its newest row has none
        self.devices: dict[str, list[float]] = {}
        self.moves: deque[kinds.Move] = deque(maxlen=MOVES)
        self._events: dict[str, deque[kinds.LoopEvent]] = {side: deque() for side in SIDES}
        self._replicas: dict[str, deque[Replica]] = {}
        self._decided: dict[tuple, kinds.Decisions] = {}

    def take(self, rows: Iterable[kinds.Row]) -> None:
        for row in rows:
            try:
                self._take(row)
            except (TypeError, ValueError, KeyError, AttributeError):
                self.broken += 1

    def _take(self, row: kinds.Row) -> None:
        if row.run != self.run:
            if row.run in self._past:
                return  # what a process of it had still to write
            self._past.add(self.run)
            self._begin(row.run)
        if (row.restart or 0) > self.restart:
            self.restart = row.restart
            self._replicas.clear()
            for events in self._events.values():  # it goes back to a version that the start before has left
                events.clear()
        if isinstance(row, kinds.LoopEvent):
            self._take_event(row)
        elif isinstance(row, kinds.EngineWindow):
            self._take_window(row)
        elif isinstance(row, kinds.Move):
            self.moves.append(row)
        elif isinstance(row, kinds.Decisions):
            key = (*(row.get(name) for name in decisions.WHO), row.settings is None)
            self._decided.pop(key, None)
            self._decided[key] = row
        elif isinstance(row, kinds.Response):
            self.ended += 1
            self.ended_tokens += row.tokens
        elif isinstance(row, kinds.Checkpoint):
            self.checkpoint = row.step
        elif isinstance(row, kinds.Carry):
            self.prompts_waiting = len(row.waiting)
        elif isinstance(row, kinds.Dropped):
            self.dropped += row.rows
        self.writers[row.node, row.pid] = row.time
        self.last = max(self.last or row.time, row.time)

    def _take_event(self, row: kinds.LoopEvent) -> None:
        if row.side not in SIDES or not all(math.isfinite(_number(seconds)) for seconds in row.spent.values()):
            raise ValueError(row.side)
        if row.devices:
            self.devices = _devices(row.devices)
        self.no_devices[row.side] = row.no_devices
        mine = self._events[row.side]
        mine.append(row)
        while len({event.version for event in mine}) > RECENT:
            mine.popleft()

    def _take_window(self, row: kinds.EngineWindow) -> None:
        mine = self._replicas.setdefault(row.replica, deque(maxlen=RECENT))
        if not mine or mine[-1].version != row.version:
            replica = Replica(row.replica, row.version)
            replica.add(row)
            mine.append(replica)
        else:
            mine[-1].add(row)
        self.ended = self.ended_tokens = 0
        self.no_devices[f"replica {row.replica}"] = row.no_devices

    # What is asked

    @property
    def version(self) -> int | None:
        """Of the weights that are trained on or rolled out with; None before the first."""
        trained = [event.version for event in self._events["train"]]
        rolled = [event.version + 1 for event in self._events["rollout"]]
        ended = [mine[-1].version + 1 for mine in self._replicas.values()]
        return max((*trained, *rolled, *ended), default=None)

    def replicas(self) -> list[Replica]:
        """Each in the newest version that ended, by number."""
        newest = [mine[-1] for mine in self._replicas.values()]
        return sorted(newest, key=lambda one: (len(one.name), one.name))

    def rates(self) -> list[float]:
        """Tokens a second of all replicas together, by version, oldest first."""
        sums: dict[int, float] = {}
        for mine in self._replicas.values():
            for one in mine:
                sums[one.version] = sums.get(one.version, 0.0) + one.rate
        return [sums[version] for version in sorted(sums)]

    def newest(self, side: str) -> kinds.LoopEvent | None:
        return self._events[side][-1] if self._events[side] else None

    def of_version(self, side: str) -> list[kinds.LoopEvent]:
        """The events of the newest version: a trainer has one a trigger."""
        newest = self.newest(side)
        return [event for event in self._events[side] if newest and event.version == newest.version]

    def spent(self, side: str, recent: bool) -> dict[str, float]:
        """Shares of the time of a side, which sum to 1: of its newest version, or of the recent ones. {}: not known."""
        events = list(self._events[side]) if recent else self.of_version(side)
        sums: dict[str, float] = {}
        for event in events:
            for name, seconds in event.spent.items():
                sums[name] = sums.get(name, 0.0) + seconds
        whole = sum(sums.values())
        return {name: seconds / whole for name, seconds in sums.items()} if whole > 0 else {}

    def versions(self, side: str) -> int:
        """How many `spent(side, True)` is about."""
        return len({event.version for event in self._events[side]})

    def seconds(self, side: str) -> float | None:
        """Of its newest version."""
        events = self.of_version(side)
        return sum(event.seconds for event in events) if events else None

    def signals(self) -> dict[str, list[float]]:
        """Loss, gradient norm, entropy and KL of the recent triggers, oldest first; those that were measured."""
        found = {name: [event[name] for event in self._events["train"] if event[name] is not None] for name in SIGNALS}
        return {name: values for name, values in found.items() if values}

    def decided(self) -> list[kinds.Decisions]:
        """The newest row of each process, and the driver's settings, in order of time."""
        return sorted(self._decided.values(), key=lambda row: row.time)

    def facts(self) -> Mapping:
        """What the driver wrote down of the run: trainer, devices, replicas."""
        return next((row.facts for row in reversed(self.decided()) if row.facts), {})

    def trainer_devices(self) -> dict[str, list[float]]:
        """Accelerators of the trainer's node that no replica has."""
        theirs = {name for one in self.replicas() for name in one.devices}
        return {name: share for name, share in self.devices.items() if name not in theirs}


def _number(value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(value)
    return value


def _devices(told: Mapping) -> dict[str, list[float]]:
    return {str(name): [float(_number(share)) for share in shares] for name, shares in told.items()}
