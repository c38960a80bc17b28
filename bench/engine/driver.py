"""One run: a policy of bench.policies decides, real replicas decode. The driver owns the clock, the updates, the books.

Commands reach a replica between two of its steps, so an answer to a boundary takes effect a few tokens later. Whatever
a response did meanwhile counts: the driver submits it with the tokens that it really has, and one that ended before it
could be handed back is told to the policy as finished as soon as it is submitted again.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.common.ledger import Ledger
from bench.common.workload import Group, Sample
from bench.engine.fleet import Fleet
from bench.engine.measures import Bubble, prompt_of, reconcile, record
from bench.policies import ASYNC, KEEP, Abort, Continue, EndStep, Limits, Policy, Prune, Restart, Submit, Tell, Yield
from bench.sim.device import ABORT_WAIT_S
from esgrpo.algo.terms import Outcome
from esgrpo.errors import EsgrpoError

UNBOUNDED = 1 << 60
PATIENCE_S = 0.2  # at most this long between two looks at the clock
STUCK_S = 30.0  # without a request in any engine


class OutOfTime(Exception):
    """The deadline came; the run is given up and not recorded."""


@dataclass(frozen=True)
class Course:
    """What a run is; `limits` holds the scenario. Seconds; `staleness` as verl's staleness_threshold (async)."""

    updates: int
    train_s: float
    sync_s: float
    staleness: float
    vocabulary: int
    seed: int


@dataclass
class Flight:
    """An attempt in an engine. `boundary`: place of the next one in the whole response. `wanted`: what was decided and
    has not taken effect yet."""

    sample: Sample
    replica: int
    done: int
    boundary: int | None
    row: dict
    known: int  # the replica that the policy takes it to be on
    version: int  # of the weights when it began
    first_step: int | None = None
    wanted: object = None


class View:
    """bench.policies.Load."""

    def __init__(self, progress: Callable[[Sample], int], replicas: int):
        self.running, self.waiting, self.free_blocks = [0] * replicas, [0] * replicas, [0] * replicas
        self.allowance = UNBOUNDED
        self.progress = progress


class Driver:
    def __init__(self, fleet: Fleet, policy: Policy, limits: Limits, course: Course,
                 source: Callable[[int], Sequence[Group]], end: float):
        self.fleet, self.policy, self.limits, self.course, self.source = fleet, policy, limits, course, source
        self.end = end
        self.ledger = Ledger(limits.members, policy.trains_cut)
        self.view = View(self.progress, limits.replicas)
        self.flights: dict[int, Flight] = {}
        self.responses: dict[int, list[int]] = {}  # tokens of what is not running
        self.asleep: dict[int, tuple[float, Flight]] = {}  # aborted by a sync: when its client submits it again
        self.later: dict[int, Submit] = {}  # submitted again before it left its engine
        self.outbox: dict[int, list[tuple]] = defaultdict(list)
        self.steps = [0] * limits.replicas
        self.visible: dict[int, float] = {}
        self.begun: set[int] = set()
        self.ready: deque[int] = deque()
        self.trained_at: float | None = None
        self.update_times: list[float] = []
        self.latencies: list[float] = []
        self.trace: dict[int, dict] = {}
        self.decoded = self.reprefill = self.attempts = 0
        self.closing = False

    def run(self) -> dict:
        """The record of the run. Raises OutOfTime, and EsgrpoError when the books do not agree."""
        keep = {"sync": {"requests": "keep"}} if self.policy.sync == KEEP else {}
        self.fleet.ask(("reset", {"kv_headroom": self.policy.headroom, **keep}), "reset")
        self.begin = self.active = time.monotonic()
        self.bubbles = [Bubble(self.limits.capacity, self.begin) for _ in range(self.limits.replicas)]
        try:
            self._new_version()
            while not self._over:
                self._decide()
                if not self._over:
                    self._hear(PATIENCE_S)
                    self._train()
                    self._wake()
                    self._check()
        finally:
            self._close()
        return self._record()

    @property
    def _over(self) -> bool:
        return len(self.update_times) >= self.course.updates

    @property
    def now(self) -> float:
        return time.monotonic() - self.begin

    def _check(self) -> None:
        if time.monotonic() > self.end:
            raise OutOfTime
        if self.flights or self.asleep or self.trained_at is not None:
            self.active = time.monotonic()
        elif time.monotonic() - self.active > STUCK_S:
            raise EsgrpoError(f"policy {self.policy.name}", f"no request in any engine for {STUCK_S:.0f} s, "
                              f"{len(self.update_times)} of {self.course.updates} updates", "a submission",
                              "this run is not recorded", "report this with the command line")

    # What the policy wants.

    def _decide(self) -> None:
        self._show()
        while actions := self.policy.next(self.now, self.view):
            for action in actions:
                if not isinstance(action, (Abort, Prune)):
                    self._settle()
                self._carry_out(action)
                if self._over:
                    return
            self._settle()
            self._show()
        self._flush()

    def _settle(self) -> None:
        """Wait until aborts and prunes have taken effect: what the policy wants next presumes it."""
        self._flush()
        while any(isinstance(flight.wanted, (Abort, Prune)) for flight in self.flights.values()):
            self._hear(PATIENCE_S)
            self._check()

    def _carry_out(self, action) -> None:
        if isinstance(action, Submit):
            self._submit(action)
        elif isinstance(action, EndStep):
            self._update(action.groups)
        elif isinstance(action, Tell):
            flight = self.flights.get(action.sample.key)
            if flight is not None and flight.wanted is None:
                flight.boundary = self.progress(action.sample) + action.segment
                self._command(flight, "tell", action.segment)
        elif isinstance(action, Restart):
            self.ledger.restart(action.group)
        elif isinstance(action, Abort):
            self._stop(action, "abort")
        elif isinstance(action, Prune):
            self._stop(action, "prune", action.rule)
        else:
            raise TypeError(f"{self.policy.name} wants {action!r}")

    def _stop(self, action, name: str, *arguments) -> None:
        key = action.sample.key
        flight = self.flights.get(key)
        if key in self.asleep:
            _, flight = self.asleep.pop(key)
            flight.wanted = action
            self._fate(flight, self.now, "abort", self.responses.pop(key))
        elif flight is not None:  # else it ended while the policy's other wishes were carried out
            later = self.later.pop(key, None)
            if later is not None:  # on its way from one replica to another
                flight.known = later.replica
            flight.wanted = action
            self._command(flight, name, *arguments)

    def _command(self, flight: Flight, name: str, *arguments) -> None:
        self.outbox[flight.replica].append((name, str(flight.sample.key), *arguments))

    def _flush(self) -> None:
        for replica, commands in self.outbox.items():
            self.fleet.send(replica, commands)
        self.outbox.clear()

    def _show(self) -> None:
        wanted = self.policy.demand()
        groups = self.source(wanted) if wanted > 0 else ()
        if groups:
            self.visible.update({group.index: self.now for group in groups})
            self.policy.admit(groups)

    def _submit(self, action: Submit) -> None:
        sample = action.sample
        if sample.key in self.asleep:
            raise ValueError(f"sample {sample.key} is submitted twice")
        if sample.key in self.flights:
            if not isinstance(self.flights[sample.key].wanted, Yield):
                raise ValueError(f"sample {sample.key} is submitted twice")
            self.later[sample.key] = action
            return
        if sample.group not in self.begun:
            self.begun.add(sample.group)
            self.view.allowance -= 1
        response = self.responses.pop(sample.key, [])
        self.ledger.resumes(sample, len(response))
        if len(response) == sample.tokens:  # it ended before it could be handed back
            self._finished(sample, action.replica, self.now)
            return
        boundary = None if action.segment is None else max(action.done, len(response)) + action.segment
        self._launch(sample, action.replica, response, boundary)

    def _launch(self, sample: Sample, replica: int, response: list[int], boundary: int | None) -> None:
        row = {"replica": replica, "submit": round(self.now, 4), "first": None, "done": len(response), "boundaries": []}
        about = self.trace.setdefault(sample.key, {"sample": sample.key, "group": sample.group, "member": sample.member,
                                                   "tokens": sample.tokens, "attempts": []})
        about["attempts"].append(row)
        self.attempts += 1
        flight = self.flights[sample.key] = Flight(sample, replica, len(response), boundary, row, replica,
                                                  self.ledger.version)
        prompt = prompt_of(sample.group, sample.prompt_tokens, self.course.vocabulary, self.course.seed)
        boundary = boundary if boundary is not None and boundary < sample.tokens else None
        self._command(flight, "submit", prompt, response, sample.tokens, boundary)
        self.responses[sample.key] = response

    def progress(self, sample: Sample) -> int:
        """Tokens of a response so far; of a running one what its engine's steps say, an event later than the truth."""
        flight = self.flights.get(sample.key)
        if flight is None or flight.first_step is None:
            return len(self.responses.get(sample.key, ()))
        return min(sample.tokens, flight.done + 1 + self.steps[flight.replica] - flight.first_step)

    # What the engines say.

    def _hear(self, seconds: float) -> None:
        if self.trained_at is not None:
            seconds = min(seconds, self.trained_at - self.now)
        if self.asleep:
            seconds = min(seconds, min(due for due, _ in self.asleep.values()) - self.now)
        for number, (at, load, free, steps, events) in self.fleet.poll(seconds):
            self._integrate(number, at)
            self.bubbles[number].load(*load)
            self.view.running[number], self.view.waiting[number], _ = load
            self.view.free_blocks[number], self.steps[number] = free, steps
            for kind, when, *values in events:
                if kind in ("first", "boundary", "end"):
                    flight = self.flights[int(values[0])]
                    getattr(self, f"_on_{kind}")(flight, when - self.begin, *values[1:])

    def _integrate(self, number: int, at: float) -> None:
        if self.limits.scenario == ASYNC:
            waits = self.view.allowance <= 0
        else:
            waits = any(other.running for index, other in enumerate(self.bubbles) if index != number)
        self.bubbles[number].until(at, "sync" if self.asleep else "barrier" if waits else "no_work")

    def _on_first(self, flight: Flight, when: float) -> None:
        flight.row["first"] = round(when, 4)
        flight.first_step = self.steps[flight.replica]

    def _on_boundary(self, flight: Flight, when: float, tokens: int) -> None:
        flight.row["boundaries"].append([round(when, 4), tokens])
        if flight.wanted is not None or self.closing:
            return
        answer = self.policy.boundary(flight.sample, flight.replica, tokens)
        flight.boundary = None
        if isinstance(answer, Continue):
            if answer.segment is not None:
                flight.boundary = tokens + answer.segment
                self._command(flight, "segment", flight.boundary)
        elif isinstance(answer, Yield):
            flight.wanted = answer
            self._command(flight, "yield")
        elif isinstance(answer, Prune):
            flight.wanted = answer
            self._command(flight, "prune", answer.rule)
        else:
            raise TypeError(f"boundary answered {answer!r}")

    def _on_end(self, flight: Flight, when: float, outcome: str, tokens: list[int], cached: int) -> None:
        sample = flight.sample
        del self.flights[sample.key]
        response = self.responses.pop(sample.key) + tokens
        self.decoded += len(tokens)
        if flight.done and tokens:
            self.reprefill += max(0, sample.prompt_tokens + flight.done - cached)
        flight.row.update(end=round(when, 4), outcome=outcome, decoded=len(tokens))
        self._fate(flight, when, outcome, response)

    def _fate(self, flight: Flight, when: float, outcome: str, response: list[int]) -> None:
        """What becomes of a response that is in no engine any more: what was wanted, else what its end says."""
        sample, wanted = flight.sample, flight.wanted
        if self.closing or isinstance(wanted, Yield) or (isinstance(wanted, Abort) and wanted.keep_tokens):
            self.responses[sample.key] = response
            self.ledger.stopped(sample, len(response), True, self._version(flight, when))
        if self.closing:
            return
        if wanted is None:
            self._ended_alone(flight, when, outcome, response)
        elif isinstance(wanted, Yield):
            if sample.key in self.later:
                self._submit(self.later.pop(sample.key))
        elif isinstance(wanted, Abort):
            if not wanted.keep_tokens:
                self.ledger.stopped(sample, len(response), False)
            self.policy.aborted(sample, flight.known, len(response), when)
        else:
            self._member_ended(sample, self.ledger.prunes(sample, len(response)))
            self.policy.aborted(sample, flight.known, len(response), when)

    def _ended_alone(self, flight: Flight, when: float, outcome: str, response: list[int]) -> None:
        """Finished, or aborted by a weight sync: then its client sleeps and submits it again."""
        sample = flight.sample
        if outcome == Outcome.ABORT:
            self.responses[sample.key] = response
            self.ledger.reached(sample, len(response), self._version(flight, when))
            self.asleep[sample.key] = when + ABORT_WAIT_S * self.policy.sleeps, flight
        elif outcome == Outcome.FINISH and len(response) == sample.tokens:
            self.ledger.reached(sample, len(response), self._version(flight, when))
            self._finished(sample, flight.replica, when)
        else:
            raise EsgrpoError(f"sample {sample.key}", f"{outcome} with {len(response)} tokens",
                              f"{sample.tokens} tokens", "this run is not recorded",
                              "is --prompt long enough for this workload?")

    def _finished(self, sample: Sample, replica: int, when: float) -> None:
        self.latencies.append(when - self.visible[sample.group])
        self._member_ended(sample, self.ledger.finished(sample))
        self.policy.finished(sample, replica, when)

    def _member_ended(self, sample: Sample, ended: int) -> None:
        if self.limits.scenario == ASYNC and ended == self.limits.members:
            self.ready.append(sample.group)

    def _wake(self) -> None:
        """Clients whose sleep is over."""
        for key in [key for key, (due, _) in self.asleep.items() if due <= self.now]:
            _, flight = self.asleep.pop(key)
            response = self.responses[key]
            replica = self.policy.resumed(flight.sample, flight.replica, len(response), self.now)
            self._launch(flight.sample, replica, response, flight.boundary)

    # Updates.

    def _train(self) -> None:
        """Async: the trainer takes the oldest whole groups as soon as it is free and there are enough."""
        if self.limits.scenario != ASYNC:
            return
        if self.trained_at is not None and self.now >= self.trained_at:
            self.trained_at = None
            self._update(self.taken)
        if self.trained_at is None and not self._over and len(self.ready) >= self.limits.groups:
            self.taken = [self.ready.popleft() for _ in range(self.limits.groups)]
            self.trained_at = self.now + self.course.train_s

    def _version(self, flight: Flight, when: float) -> int:
        """Weights that decoded the newest tokens of an attempt that ended at `when`. The report may come after an
        update; where an update aborts, no attempt outlives its weights."""
        return bisect.bisect_left(self.update_times, when) if self.policy.sync == KEEP else flight.version

    def _update(self, groups: Sequence[int]) -> None:
        """These groups are trained and new weights come in: every replica pauses for the sync."""
        self.ledger.train(groups)
        if self.policy.sync == KEEP:
            for flight in self.flights.values():  # an event later than the truth, as `progress` is
                self.ledger.reached(flight.sample, self.progress(flight.sample))
        self.begun.difference_update(groups)
        self.update_times.append(self.now)
        if self._over:
            return
        for number in range(self.limits.replicas):
            self.outbox[number].append(("sync", self.policy.sync, self.course.sync_s))
        self._flush()
        self.policy.weights_changed(self.now)
        self._new_version()
        if self.policy.sync != KEEP and not self.policy.sleeps:
            self._resume()

    def _resume(self) -> None:
        """Clients that wait at the paused engines: their requests come before anything new, as they do in verl, where
        generation resumes (PPOTrainerColocateAsync.on_step_end) before the next batch is added (prepare_step)."""
        while any(flight.version < self.ledger.version for flight in self.flights.values()):
            self._hear(PATIENCE_S)
            self._check()
        self._wake()

    def _new_version(self) -> None:
        self.ledger.version = len(self.update_times)
        if self.limits.scenario == ASYNC:
            bound = int(self.limits.groups * (1 + self.course.staleness))
            self.view.allowance = max(0, bound - len(self.begun))

    def _close(self) -> None:
        """Stop what still runs, so that the engines are free for the next run."""
        self.closing, self.finish = True, time.monotonic()
        for number in range(self.limits.replicas):
            self._integrate(number, self.finish)
        self._flush()
        for flight in self.flights.values():
            self._command(flight, "abort")
        self._flush()
        for _, flight in self.asleep.values():
            self._fate(flight, self.now, "abort", self.responses[flight.sample.key])
        self.asleep.clear()
        while self.flights:
            self._hear(PATIENCE_S)

    def _record(self) -> dict:
        counters = [counted for (counted,) in self.fleet.ask(("counters",), "counters")]
        with contextlib.suppress(AssertionError):  # said better by reconcile
            self.ledger.close(self.decoded)
        reconcile(self.policy.name, self.decoded, sum(counted["decoded"] for counted in counters),
                  self.ledger.trained, self.ledger.waste)
        return record(self, counters)
