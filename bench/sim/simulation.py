"""The driver: virtual time, replicas, updates and weight syncs around one policy."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.common.ledger import Ledger
from bench.common.workload import Group, Sample
from bench.policies import (
    ASYNC,
    KEEP,
    Abort,
    Continue,
    EndStep,
    Limits,
    Policy,
    Prune,
    Restart,
    Submit,
    Tell,
    Yield,
)
from bench.sim.device import BLOCK, Device
from bench.sim.replica import NEVER, Replica, Run
from esgrpo.errors import EsgrpoError

RESUMED, TRAINED = -1, -2  # events that are no replica's
UNBOUNDED = 1 << 60


class Stuck(RuntimeError):
    """Nothing runs and nothing will happen, but the run is not over."""


@dataclass(frozen=True)
class Course:
    """What a run is: `updates` weight updates; `train_s` seconds of training per update (async); `staleness` as verl's
    staleness_threshold (async): groups begun per version = groups of an update * (1 + staleness)."""

    updates: int
    train_s: float = 0.0
    staleness: float = 0.5


class View:
    """bench.policies.Load."""

    def __init__(self, simulation: Simulation, replicas: int):
        self._simulation = simulation
        self.running, self.waiting, self.free_blocks = [0] * replicas, [0] * replicas, [0] * replicas
        self.allowance = UNBOUNDED

    def progress(self, sample: Sample) -> int:
        return self._simulation.progress(sample)


class Simulation:
    """One policy over one course. `source(n)` hands out the next n groups (fewer at the end of the workload)."""

    def __init__(self, policy: Policy, limits: Limits, device: Device, course: Course,
                 source: Callable[[int], Sequence[Group]]):
        self.policy, self.limits, self.device, self.course, self.source = policy, limits, device, course, source
        self.now = 0.0
        self.replicas = [Replica(device, limits.sequences, limits.capacity, lambda: self.now, policy.headroom)
                         for _ in range(limits.replicas)]
        self.ledger = Ledger(limits.members, policy.trains_cut)
        self.view = View(self, limits.replicas)
        self.where: dict[int, tuple[int, Run]] = {}  # sample key -> (replica, submission)
        self.last_place: dict[int, int] = {}  # of a response that yielded: its KV cache is still there
        self.visible: dict[int, float] = {}  # group -> when it became visible
        self.begun: dict[int, float] = {}  # group -> when its first sample was submitted
        self.ready: deque[int] = deque()  # whole groups, not trained (async)
        self.update_times: list[float] = []
        self.latencies: list[float] = []  # from the time a group is visible to the end of each of its samples
        self.windows: list[dict] = []
        self.paused_s, self._blocked_since, self._training = 0.0, None, False
        self._events: list[tuple[float, int, int, int]] = []
        self._stamps = [0] * limits.replicas
        self._dirty: set[int] = set()
        self._order = 0

    def run(self) -> None:
        """To the end of the course. Raises Stuck, and AssertionError when tokens do not add up."""
        self._new_version()
        while not self._over:
            self._decide()
            if self._over:
                break
            self._consume()  # what the policy pruned may have completed the last group
            time, _, what, stamp = self._next_event()
            self.now = max(self.now, time)
            if what == RESUMED:
                for replica in self.replicas:
                    replica.occupancy.pause(False)
            elif what == TRAINED:
                self._training = False
                self._update()
            else:
                self._fire(what)
            self._consume()
        self._finish()

    @property
    def _over(self) -> bool:
        return len(self.update_times) >= self.course.updates

    def _push(self, time: float, what: int, stamp: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, what, stamp))

    def _next_event(self) -> tuple[float, int, int, int]:
        while self._events:
            event = heapq.heappop(self._events)
            if event[2] < 0 or event[3] == self._stamps[event[2]]:
                return event
        raise Stuck(f"{self.policy.name}: nothing happens after {self.now:.3f} s, {len(self.update_times)} of "
                    f"{self.course.updates} updates")

    # what the policy wants

    def _decide(self) -> None:
        self._show(self.policy.demand())
        while actions := self.policy.next(self.now, self.view):
            for action in actions:
                if isinstance(action, Submit):
                    self._submit(action)
                elif isinstance(action, EndStep):
                    self.ledger.train(action.groups)
                    self._forget(action.groups)
                    self._update()
                    if self._over:
                        return
                elif isinstance(action, Abort):
                    self._stop(action.sample, lambda tokens, a=action: self._aborted(a, tokens))
                elif isinstance(action, Tell):
                    self._tell(action)
                elif isinstance(action, Restart):
                    self.ledger.restart(action.group)
                else:
                    self._stop(action.sample, lambda tokens, a=action: self._pruned(a.sample, tokens))
            self._settle()
            self._show(self.policy.demand())

    def _show(self, wanted: int) -> None:
        if wanted > 0:
            groups = self.source(wanted)
            for group in groups:
                self.visible[group.index] = self.now
            if groups:
                self.policy.admit(groups)

    def _submit(self, action: Submit) -> None:
        sample = action.sample
        self.ledger.resumes(sample, action.done)
        if sample.key in self.where:
            raise ValueError(f"sample {sample.key} is submitted twice")
        if sample.prompt_tokens + sample.tokens + 2 * BLOCK > self.device.kv_tokens:
            raise EsgrpoError("bench.sim", f"a KV cache of {self.device.kv_tokens} tokens",
                              f"room for a response of {sample.tokens} and its prompt", "nothing was simulated",
                              "raise --kv-tokens, or lower --cap")
        if sample.group not in self.begun:
            self.begun[sample.group] = self.now
            self.view.allowance -= 1
            if self.limits.scenario == ASYNC and self.view.allowance == 0:
                self._blocked_since = self.now
        replica = self.replicas[action.replica]
        run = Run(sample, action.done, action.segment, self.last_place.pop(sample.key, None) == action.replica)
        replica.advance(self.now)
        replica.submit(run)
        self.where[sample.key] = action.replica, run
        self._dirty.add(action.replica)

    def _stop(self, sample: Sample, then: Callable[[int], None]) -> None:
        """Take a response out of its replica, if it is in one, and pass on how many tokens it has."""
        self.last_place.pop(sample.key, None)
        if sample.key in self.where:
            place, run = self.where.pop(sample.key)
            self.replicas[place].advance(self.now)
            tokens = self.replicas[place].take(run)
            self._dirty.add(place)
            then(tokens)
            self.policy.aborted(sample, place, tokens, self.now)
        else:
            raise ValueError(f"sample {sample.key} is stopped, but is not on a replica")

    def _aborted(self, action: Abort, tokens: int) -> None:
        self.ledger.stopped(action.sample, tokens, action.keep_tokens)

    def _pruned(self, sample: Sample, tokens: int) -> None:
        self._member_ended(sample, self.ledger.prunes(sample, tokens))

    def _tell(self, action: Tell) -> None:
        place, run = self.where[action.sample.key]
        self.replicas[place].advance(self.now)
        self.replicas[place].tell(run, action.segment)
        self._dirty.add(place)

    def progress(self, sample: Sample) -> int:
        """Tokens of a response so far."""
        if sample.key not in self.where:
            return self.ledger.held.get(sample.key, 0)
        place, run = self.where[sample.key]
        self.replicas[place].advance(self.now)
        return self.replicas[place].tokens_of(run)

    # what happens

    def _settle(self) -> None:
        """Let requests in where something changed, and note when these replicas have to be looked at again."""
        for number in sorted(self._dirty):
            self.replicas[number].advance(self.now)
            self.replicas[number].admit(self.now)
        if self.device.alone:
            self._dirty |= self._crowd()
        for number in sorted(self._dirty):
            replica = self.replicas[number]
            self.view.running[number], self.view.waiting[number] = len(replica.running), replica.waits
            self.view.free_blocks[number] = int(self.device.kv_tokens - replica.kv_used) // BLOCK
            self._stamps[number] += 1
            time = replica.next_event()
            if time != NEVER:
                self._push(time, number, self._stamps[number])
        self._dirty.clear()

    def _crowd(self) -> set[int]:
        """Replicas that share a device slow each other down; returns those whose speed changed."""
        changed = set()
        spread = self.device.devices or len(self.replicas)
        for device in range(spread):
            sharing = range(device, len(self.replicas), spread)
            busy = sum(bool(self.replicas[number].running) for number in sharing)
            for number in sharing:
                replica = self.replicas[number]
                others = busy - bool(replica.running)
                company = others / (len(sharing) - 1) if len(sharing) > 1 else 0.0
                if company != replica.company:
                    replica.advance(self.now)
                    replica.share(company)
                    changed.add(number)
        return changed

    def _fire(self, number: int) -> None:
        replica = self.replicas[number]
        replica.advance(self.now)
        for run in replica.fire():
            sample = run.sample
            if run.at_end:
                self._away(replica, run)
                self.latencies.append(self.now - self.visible[sample.group])
                self._member_ended(sample, self.ledger.finished(sample))
                self.policy.finished(sample, number, self.now)
                continue
            answer = self.policy.boundary(sample, number, run.base)
            if isinstance(answer, Continue):
                replica.go_on(run, answer.segment)
                continue
            self._away(replica, run)
            if isinstance(answer, Yield):
                self.ledger.stopped(sample, run.base, True)
                self.last_place[sample.key] = number
            elif isinstance(answer, Prune):
                self._pruned(sample, run.base)
                self.policy.aborted(sample, number, run.base, self.now)
            else:
                raise TypeError(f"boundary answered {answer!r}")
        self._dirty.add(number)
        self._settle()

    def _away(self, replica: Replica, run: Run) -> None:
        replica.drop(run)
        del self.where[run.sample.key]

    def _member_ended(self, sample: Sample, ended: int) -> None:
        if self.limits.scenario == ASYNC and ended == self.limits.members:
            self.ready.append(sample.group)

    def _forget(self, groups: Sequence[int]) -> None:
        for group in groups:
            self.begun.pop(group, None)

    # updates

    def _consume(self) -> None:
        """Async: the trainer takes the oldest whole groups as soon as it is free and there are enough."""
        if self.limits.scenario == ASYNC and not self._training and len(self.ready) >= self.limits.groups:
            groups = [self.ready.popleft() for _ in range(self.limits.groups)]
            self.ledger.train(groups)
            self._forget(groups)
            self._training = True
            self._push(self.now + self.course.train_s, TRAINED)

    def _update(self) -> None:
        """New weights come in: every replica pauses for the sync."""
        self.update_times.append(self.now)
        if self._over:
            return
        keep = self.policy.sync == KEEP
        for replica in self.replicas:
            replica.advance(self.now)
        for place, run in list(self.where.values()):
            tokens = self.replicas[place].tokens_of(run)
            self.ledger.reached(run.sample, tokens)
            if not keep:
                self._resume(run, place, self.policy.resumed(run.sample, place, tokens, self.now))
        for number, replica in enumerate(self.replicas):
            self.windows.append(_window(replica, number))
            replica.occupancy.pause(True)
            replica.pause(self.now, self.device.weight_sync, keep, self.policy.sleeps)
            self._dirty.add(number)
        self._push(self.now + self.device.weight_sync, RESUMED)
        self.last_place.clear()
        self.policy.weights_changed(self.now)
        self._new_version()
        self._settle()

    def _resume(self, run: Run, old: int, new: int) -> None:
        """An aborted response goes on at another replica; at its own it is prefilled there (`Replica.pause`)."""
        if new != old:
            run = Run(run.sample, self.replicas[old].take(run), None, False)
            self.replicas[new].submit(run)
            self.where[run.sample.key] = new, run

    def _new_version(self) -> None:
        """The staleness bound opens anew: what is begun and not trained counts against it, as in verl's rollouter."""
        self.ledger.version = len(self.update_times)
        if self.limits.scenario == ASYNC:
            if self._blocked_since is not None:
                self.paused_s += self.now - self._blocked_since
                self._blocked_since = None
            bound = int(self.limits.groups * (1 + self.course.staleness))
            self.view.allowance = max(0, bound - len(self.begun))

    def _finish(self) -> None:
        """Stop what still runs, close the books."""
        if self._blocked_since is not None:
            self.paused_s += self.now - self._blocked_since
        for number, replica in enumerate(self.replicas):
            replica.advance(self.now)
            self.windows.append(_window(replica, number))
        for sample_key, (place, run) in list(self.where.items()):
            self.ledger.held[sample_key] = self.replicas[place].take(run)
        self.where.clear()
        self.ledger.close(sum(replica.decoded for replica in self.replicas))


def _window(replica: Replica, number: int) -> dict:
    window = replica.occupancy.close()
    return {"replica": number, "start": window.start, "seconds": window.seconds, "capacity": window.capacity,
            "used": window.used, "idle": window.idle, "tail": window.tail, "sync": window.sync}
