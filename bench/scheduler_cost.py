"""CPU time that SegmentMixin adds to a step of vLLM's real scheduler classes, fed with scripted model output.

    PYTHONPATH=overlay python -m bench.scheduler_cost [--requests 1024 --rounds 150 --steps 6]

One process, one scheduler object per class, and the same running requests for all arms: an arm is chosen by swapping
the object's class and the mixin's state between short blocks, so that memory layout, config and block pool are shared
and a busy machine slows all arms alike. A round runs one block of every arm in random order and is reduced to ratios to
its own plain block; `plain_again` is the A/A control. Sharper than the ratio, a clock between mixin and upstream splits
each step into `own` and upstream time (it cannot see what the mixin does to caches; the ratio can). Prefix caching is
off: it would only make the plain step slower.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common import console
from bench.common.scripted_scheduler import (
    PROMPT,
    VOCABULARY,
    make_config,
    make_request,
    make_scheduler,
    model_output,
    upstream_class,
)
from bench.common.swapped_classes import bootstrap, environment, plain_class, timed_class

RESULT = Path(__file__).parent / "results" / "scheduler_cost.json"
HISTORY = 1000  # response tokens at the start; a repetition check looks at up to 256
WARM_UP = 2  # untimed steps after a change of class, for the interpreter's inline caches
CERTAIN = 1e9  # nats: whatever the log-probs are
HUGE = 1 << 40  # a segment length that no response reaches
# microseconds a look; shares of upstream's time
LIMITS = {"boundary": 5.0, "look_for_verdicts": 5.0, "nothing_due": 0.01,
          "boundaries_and_repetition": 0.01, "verdicts": 0.01}
NATIVE = {"max_pattern_size": 32, "min_pattern_size": 1, "min_count": 8}  # of 256 tokens, as in our defaults


@dataclass(frozen=True)
class Arm:
    """How the scheduler runs in a block. `segment` None: upstream's own class."""

    segment: dict | None = None
    native_repetition: bool = False


def _segment(length: int, repetition: dict | None = None) -> dict:
    return {"enable": True, "segment_length": length, "prune": {"repetition": repetition or {}}}


def _verdicts(check_interval: int) -> dict:
    return {"enable": True, "segment_length": HUGE, "prune": {
        "audit": {"enable": True}, "verdict": {"enable": True, "check_interval": check_interval}}}


ARMS = {
    "plain": Arm(),
    "plain_again": Arm(),
    "nothing_due": Arm(_segment(HUGE)),
    "boundaries": Arm(_segment(1024)),
    "boundaries_and_repetition": Arm(_segment(1024, {"enable": True})),
    "verdicts": Arm(_verdicts(128)),  # the distance at a budget of 2,048 tokens
    "native_repetition": Arm(native_repetition=True),
}


class Bench:
    """One scheduler object with its running requests; an arm is a class and the state of a mixin."""

    STATE = ("segment_book", "segment_logprobs", "segment_occupancy", "segment_outcomes")

    def __init__(self, asynchronous: bool, requests: int, total_steps: int, seed: int):
        self.rng, self.draws = random.Random(seed), np.random.default_rng(seed)
        length = PROMPT + HISTORY + total_steps + 8
        config = make_config(asynchronous, requests, length)
        self.base = timed_class(upstream_class(asynchronous))
        self.plain = plain_class(self.base)
        blocks = requests * (length // config.cache_config.block_size + 2)
        self.scheduler = make_scheduler(config, blocks, self.plain)
        self.lag = asynchronous
        self.phases = [self.rng.randrange(1 << 20) for _ in range(requests)]
        self.order = [f"request-{i}" for i in range(requests)]
        for i, key in enumerate(self.order):
            history = self.draws.integers(VOCABULARY, size=HISTORY).tolist()
            self.scheduler.add_request(make_request(key, self.phases[i], history=history, member=i))
        self.requests = list(self.scheduler.requests.values())
        self.steps = 0
        self.states = {name: self.begin(arm.segment) for name, arm in ARMS.items()}
        self.counts = {name: {"steps": 0, "tokens": 0, "boundaries": 0, "outcomes": 0} for name in ARMS}
        self.ahead = self.scheduler.schedule()  # the prefill of all

    def begin(self, segment: dict | None) -> dict:
        """The state of a mixin that tracks every request.

        The phases are uniform: boundaries are spread over the steps as in a long run, not all due in one step.
        """
        from esgrpo import config
        from esgrpo.hooks.vllm.segment_mixin import mixed_with

        if segment is None:
            return {"__class__": self.plain}
        scheduler = self.scheduler
        scheduler.__class__ = mixed_with(self.base)
        scheduler._segment_start(config.parse(segment))
        for i, key in enumerate(self.order):
            scheduler.segment_book.add(key, "g", i, self.phases[i])
            scheduler.segment_book.tracked[key].done_before -= len(self.requests[i]._output_token_ids)
        return {"__class__": scheduler.__class__, "left": self.steps,
                **{name: getattr(scheduler, name) for name in self.STATE}}

    def switch(self, state: dict, native: bool = False) -> None:
        from vllm.sampling_params import RepetitionDetectionParams

        for name, value in state.items():
            if name != "left":
                setattr(self.scheduler, name, value)
        if "segment_book" in state:  # what other arms made meanwhile was not there for this one: it would shift phases
            for item in state["segment_book"].tracked.values():
                item.done_before -= self.steps - state["left"]
        rule = RepetitionDetectionParams(**NATIVE) if native else None
        for request in self.requests:
            request.sampling_params.repetition_detection = rule

    def step(self) -> tuple[int, int, dict]:
        """CPU nanoseconds of schedule() + update_from_output() in one step, of it upstream's, and the step's output."""
        scheduler = self.scheduler
        scheduler.upstream_ns = 0
        spent, begin = 0, time.thread_time_ns()
        if self.lag:  # the next step is scheduled before this one's output is there
            following = scheduler.schedule()
            spent += time.thread_time_ns() - begin
        output = model_output(self.order, self.draws.integers(VOCABULARY, size=len(self.order)),
                              self.draws.normal(-1.0, 0.5, size=len(self.order)).astype(np.float32))
        begin = time.thread_time_ns()
        outputs = scheduler.update_from_output(self.ahead, output)
        if not self.lag:
            following = scheduler.schedule()
        spent += time.thread_time_ns() - begin
        self.ahead = following
        self.steps += 1
        return spent, scheduler.upstream_ns, outputs

    def block(self, name: str, steps: int) -> tuple[float, float]:
        """Mean CPU microseconds of a step of one arm, and of the part that is not upstream's.

        Before it, WARM_UP steps settle the interpreter on the class.
        """
        self.switch(self.states[name], ARMS[name].native_repetition)
        spent, own, count = 0, 0, self.counts[name]
        for number in range(-WARM_UP, steps):
            total, upstream, outputs = self.step()
            if number >= 0:
                spent += total
                own += total - upstream
            count["steps"] += 1
            count["tokens"] += sum(len(o.new_token_ids) for o in outputs[0].outputs)
        book = self.states[name].get("segment_book")
        if book is not None:
            book.looks.take(["g"])  # as agent-loop workers do, several times a second
            self.states[name]["left"] = self.steps
            for key, item in book.tracked.items():  # those that nothing has looked at, as at the end of a response
                book.count_boundaries(item, len(self.scheduler.requests[key]._output_token_ids))
            count["boundaries"] = sum(item.boundaries for item in book.tracked.values())
            count["outcomes"] = sum(self.states[name]["segment_outcomes"].values())
        return spent / steps / 1e3, own / steps / 1e3

    def look_cost(self, segment: dict, steps: int) -> dict:
        """CPU microseconds of one look at a response: the wheel, the decision and the next appointment.

        Boundaries are looked at as if they could end the response, and go on.
        """
        state, spent, looks = self.begin(segment), [0], [0]

        def timed(function, counting):
            def call(*args):
                begin = time.thread_time_ns()
                result = function(*args)
                spent[0] += time.thread_time_ns() - begin
                looks[0] += len(args[0]) if counting else 0
                return result
            return call

        self.switch(state)
        scheduler = self.scheduler
        book = scheduler.segment_book
        book._may_end_at_boundary = lambda item: True
        for request in self.requests:
            book._plan(request.request_id, book.tracked[request.request_id], len(request._output_token_ids))
        book.advance = timed(book.advance, False)
        scheduler._segment_act = timed(scheduler._segment_act, True)
        try:
            for _ in range(steps):
                self.step()
        finally:
            del scheduler._segment_act
        return {"looks": looks[0], "microseconds": spent[0] / max(1, looks[0]) / 1e3}


def measure(asynchronous: bool, requests: int, rounds: int, steps: int, seed: int) -> dict:
    """All arms of one scheduler class."""
    bench = Bench(asynchronous, requests, (rounds + 2) * (steps + WARM_UP) * len(ARMS) + 2 * steps, seed)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
    gc.collect()
    gc.freeze()  # as vLLM does after start-up
    for number in range(-1, rounds):  # the first round holds the prefill and warms the allocator
        for name in bench.rng.sample(list(ARMS), len(ARMS)):
            block = bench.block(name, steps)
            if number >= 0:
                times[name].append(block)
    plain, clock = np.asarray(times["plain"]).T  # what is not upstream's in the plain arm is the clock itself
    arms = {}
    for name, blocks in times.items():
        total, own = np.asarray(blocks).T
        own = own - np.median(clock)
        arms[name] = {"microseconds_per_step": bootstrap(total, seed),
                      "own_microseconds_per_step": bootstrap(own, seed),
                      "own_over_upstream": bootstrap(own / (total - own), seed),
                      "ratio_to_plain": bootstrap(total / plain, seed), "counts": bench.counts[name]}
    result = {"class": bench.base.__name__, "arms": arms, "boundary": bench.look_cost(_segment(2), steps),
              "look_for_verdicts": bench.look_cost(_verdicts(2), steps),
              "repetition_check": bench.look_cost(_segment(HUGE, {"enable": True, "check_interval": 2}), steps),
              # tokens are compared at every look, as when the model is certain of all of them
              "repetition_check_certain": bench.look_cost(_segment(HUGE, {
                  "enable": True, "check_interval": 2, "max_surprisal": CERTAIN}), steps)}
    gc.unfreeze()
    return result


def main(argv: list[str] | None = None) -> dict:
    parser = console.command_line("bench.scheduler_cost", __doc__.partition("\n")[0])
    parser.add_argument("--requests", type=console.count, default=1024)
    parser.add_argument("--rounds", type=console.count, default=150, help="blocks of every arm")
    parser.add_argument("--steps", type=console.count, default=6, help="timed steps in a block")
    parser.add_argument("--seed", type=console.whole, default=0)
    parser.add_argument("--classes", type=console.names(("sync", "async")), default="sync,async")
    parser.add_argument("--out", type=console.output_file, default=RESULT)
    options = parser.parse_args(argv)
    result = {**environment(options.seed), "requests": options.requests, "rounds": options.rounds,
              "steps": options.steps, "history_tokens": HISTORY, "load_average_before": os.getloadavg()[0]}
    for name in options.classes:
        result[name] = measure(name == "async", options.requests, options.rounds, options.steps, options.seed)
    result["load_average_after"] = os.getloadavg()[0]
    for name in options.classes:
        for arm, row in result[name]["arms"].items():
            ratio, own, share = row["ratio_to_plain"], row["own_microseconds_per_step"], row["own_over_upstream"]
            print(f"{name:5} {arm:26} {row['microseconds_per_step']['median']:8.0f} us, own {own['median']:6.1f} us = "
                  f"{share['median']:.2%} [{share['low']:.2%}, {share['high']:.2%}], paired ratio "
                  f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]")
        for what in ("boundary", "look_for_verdicts", "repetition_check",
                     "repetition_check_certain"):
            print(f"{name:5} {what:26} {result[name][what]['microseconds']:8.3f} us")
        for what, limit in LIMITS.items():
            found = result[name]["arms"][what]["own_over_upstream"]["high"] if what in ARMS else (
                result[name][what]["microseconds"])
            result[name].setdefault("within", {})[what] = found < limit
            print(f"{name:5} {what:26} {found:8.4f} {'is' if found < limit else 'is NOT'} below {limit}")
    console.write(options.out, json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
