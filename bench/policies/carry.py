"""Partial rollout: unfinished responses are carried into the next step with their tokens. verl's own carry-over, UloRL
and APRIL.

All run only under sync: under async verl carries partial responses by itself.
"""

from __future__ import annotations

import math
from collections import deque

from bench.common.workload import Sample
from bench.policies import SYNC, Abort, Action, EndStep, Load, Policy, Restart, Yield
from bench.policies.order import Verl


class ColocateAsync(Verl):
    """verl 0.9.1's own carry-over, its v1 trainer `colocate_async`: what anything else under a barrier has to beat.

    Before the first step num_warmup_batches (1) more batches than an update's begin
    (PPOTrainerColocateAsync.on_train_begin, PPOTrainer._add_async_warmup_batches), every step begins one
    (PPOTrainer.prepare_step). As soon as an update's groups are whole the oldest of them are trained
    (ReplayBuffer._select_prompt_uids); all other requests are aborted (PPOTrainerColocateAsync.on_sample_end) and
    resume with their tokens where they were, under the new weights (on_step_end, FullyAsyncLLMServerClient.generate,
    sticky by request id in GlobalRequestLoadBalancer). A whole group that would span more than max_off_policy_threshold
    (8) versions is dropped and another prompt begins in its place (ReplayBufferAsync._stale_terminal_keys,
    wait_for_sampleable); with max_off_policy_strategy=wait ("colocate_async/wait") an update waits for every unfinished
    group that spans as many (_has_enough_samples). Requests go as verl's do (see Verl).

    In its favour: the second that a client sleeps after an abort passes while the trainer works, which no policy here
    is charged for. Simplified: nothing else.
    """

    name = "colocate_async"
    scenarios = (SYNC,)
    carries, sleeps = True, False
    WARMUP, THRESHOLD = 1, 8
    waits = False  # max_off_policy_strategy=wait

    def __init__(self, limits, rng):
        super().__init__(limits, rng)
        self.fresh += self.WARMUP * limits.groups
        self.version = 0
        self.born: dict[int, int] = {}  # group that is not trained -> version in which it began

    def begin(self, group):
        super().begin(group)
        self.born[group.index] = self.version

    def span(self, group: int) -> int:
        """Versions that it would span if it were trained now."""
        return self.version - self.born[group] + 1

    def place(self, now: float, load: Load) -> list[Action]:
        dropped = [] if self.waits else [index for index in self.whole if self.span(index) > self.THRESHOLD]
        for index in dropped:
            self.whole.remove(index)
            del self.born[index]
            self.fresh += 1
        return [*map(Restart, dropped), *super().place(now, load)]

    def step_is_over(self) -> bool:
        late = self.waits and any(self.span(index) >= self.THRESHOLD for index in self.missing)
        return super().step_is_over() and not late

    def end_step(self) -> EndStep:
        self.whole = deque(sorted(self.whole, key=self.born.__getitem__))
        begins = self.fresh + self.limits.groups
        action = super().end_step()
        self.fresh = begins
        for index in action.groups:
            del self.born[index]
        return action

    def weights_changed(self, now: float) -> None:
        self.version += 1


class ColocateAsyncWaits(ColocateAsync):
    """With max_off_policy_strategy=wait: no group is dropped."""

    name = "colocate_async/wait"
    waits = True


class Carrying(Policy):
    scenarios = (SYNC,)
    carries = True

    def __init__(self, limits, rng):
        super().__init__(limits, rng)
        self.flying: dict[int, tuple[Sample, int]] = {}  # sample key -> replica
        self.paused: list[tuple[Sample, int]] = []  # with their tokens, oldest first

    def launch(self, segment: int | None) -> list[Action]:
        """Submit what was carried first, then all groups that are visible."""
        actions: list[Action] = [self.fly(sample, segment, done) for sample, done in self.paused]
        self.paused.clear()
        while self.waiting:
            group = self.waiting.popleft()
            self.begin(group)
            actions.extend(self.fly(sample, segment, 0) for sample in group.samples[:self.limits.members])
        return actions

    def fly(self, sample: Sample, segment: int | None, done: int) -> Action:
        replica = self.pool.least()
        self.flying[sample.key] = sample, replica
        return self.submit(sample, replica, segment, done)

    def finished(self, sample, replica, now):
        del self.flying[sample.key]
        super().finished(sample, replica, now)

    def aborted(self, sample, replica, tokens, now):
        del self.flying[sample.key]
        self.paused.append((sample, tokens))
        super().aborted(sample, replica, tokens, now)


class UloRL(Carrying):
    """UloRL (arXiv 2507.19766): every response is handed back after a segment of fixed length; an update after a round.
    (The overlay's profile `static` is not this: it submits what was handed back again at once.)

    A round resumes the unfinished pool and adds fresh groups, and ends when every response has ended or reached its
    boundary. Four segments, their fastest setting (2.06 x at 64k). Simplified: the paper does not say how many prompts
    refill a round; here one update's worth, less what is whole already. A round that leaves too few whole groups for an
    update is followed by another one, so that every update has the same number of groups as everybody's.
    """

    name = "ulorl"
    SEGMENTS = 4

    def next(self, now: float, load: Load) -> list[Action]:
        if self.flying:
            return []
        if len(self.whole) >= self.limits.groups:
            action = self.end_step()
            self.fresh = max(0, self.limits.groups - len(self.whole))
            return [action]
        return self.launch(math.ceil(self.limits.cap / self.SEGMENTS))

    def demand(self) -> int:
        return 0 if self.flying else super().demand()

    def boundary(self, sample: Sample, replica: int, tokens: int) -> Yield:
        del self.flying[sample.key]
        self.paused.append((sample, tokens))
        self.left(replica)
        if not self.flying and len(self.whole) < self.limits.groups:
            self.fresh = self.limits.groups - len(self.whole)
        return Yield()

    def finished(self, sample, replica, now):
        super().finished(sample, replica, now)
        if not self.flying and len(self.whole) < self.limits.groups:
            self.fresh = self.limits.groups - len(self.whole)


class April(Carrying):
    """APRIL (arXiv 2509.18521): more groups than needed run; when enough are whole, the rest is aborted and resumed
    first in the next step with its tokens.

    Twice as many as needed are open, as Seer ran it for its comparison; "april/1.5" is another factor. Simplified:
    nothing.
    """

    name = "april"
    OVER = 2.0

    def __init__(self, limits, rng):
        super().__init__(limits, rng)
        self.fresh = self.wanted()

    def wanted(self) -> int:
        """Fresh groups so that OVER times as many as needed are open or whole."""
        return max(0, round(self.OVER * self.limits.groups) - len(self.missing) - len(self.whole) - len(self.waiting))

    def next(self, now: float, load: Load) -> list[Action]:
        if len(self.whole) < self.limits.groups:
            return self.launch(None)
        actions: list[Action] = [Abort(sample, True) for sample, _ in self.flying.values()]
        actions.append(self.end_step())
        self.fresh = self.wanted()
        return actions


def variant(factor: str) -> type[April]:
    """APRIL with `factor` times as many groups open as needed. Raises KeyError for what is no number from 1 on."""
    try:
        over = float(factor)
    except ValueError:
        over = 0.0
    if over < 1:
        raise KeyError(f"{April.name}/{factor}: wanted a factor from 1 on")
    return type("Variant", (April,), {"name": f"{April.name}/{factor}", "OVER": over})


POLICIES = (ColocateAsync, ColocateAsyncWaits, UloRL, April)
