"""One replica: vLLM's EngineCore with the overlay's scheduler hook in a process of its own, driven over a pipe.

The loop is EngineCoreProc's: take commands, step, hand over what came out. A sample is a group of one for the hook, so
that its control plane (segment length, finish) reaches single samples; at a soft boundary the request goes on and the
driver is told, which asks the policy. Nothing is sent for a step without an event.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

PARENT_DIES = 1  # PR_SET_PDEATHSIG of prctl(2)
NEVER = 1 << 40  # a boundary that no response reaches
TOKEN_TEMPERATURE = 1.0  # as in training
REPORT_S = 0.05  # between two messages while nothing happens but tokens
IDLE_S = 0.05  # between two looks at the pipe while nothing runs
REQUIRED = ("segment-scheduler", "engine-core-utilities")


@dataclass(slots=True)
class Attempt:
    """One request in this engine; `tokens` are those of the attempt alone."""

    sample: str
    prompt: int  # tokens of the prompt, without those of earlier attempts
    done: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0


def build_core(options: dict):
    """vLLM's EngineCore as the options say; the hooks came with sitecustomize."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    config = EngineArgs(
        skip_tokenizer_init=True, seed=0, distributed_executor_backend="uni", disable_log_stats=True,
        enable_prefix_caching=True, logprobs_mode="processed_logprobs", **options).create_engine_config()
    return EngineCore(config, Executor.get_class(config), log_stats=False)


def missing_hooks(core) -> list[str]:
    """What is not in place in this engine; empty when the benchmark may go on."""
    from esgrpo.hooks.vllm.segment_mixin import SegmentMixin

    if not hasattr(core, "esgrpo_report"):
        return [f"{slug}: EngineCore has no hooks" for slug in REQUIRED]
    states = {row["slug"]: row for row in core.esgrpo_report()["hooks"]}
    wrong = [f"{slug}: {states[slug]['state']} ({states[slug]['detail']})" for slug in REQUIRED
             if states[slug]["state"] != "APPLIED"]
    if not isinstance(core.scheduler, SegmentMixin):
        wrong.append(f"the scheduler is a plain {type(core.scheduler).__name__}")
    return wrong


class Replica:
    def __init__(self, core, send: Callable[[tuple], None]):
        self.core, self.scheduler, self.send = core, core.scheduler, send
        self.open: dict[str, Attempt] = {}
        self.current: dict[str, str] = {}  # sample -> its open attempt
        self.events: list[tuple] = []
        self.load: tuple = ()
        self.next_report, self.steps = 0.0, 0  # steps whose outputs came out: each gives a token to all that run
        self.crossed: list[str] = []  # samples at a soft boundary in this step
        self.resume_at: float | None = None
        self.held = False  # steps only on command
        self.count, self.version = 0, 0
        self.counters: dict[str, int] = {}
        self.windows: list[dict] = []
        self._count_scheduled()
        self.do_reset({})

    def _count_scheduled(self) -> None:
        """Tokens that went through the model, and requests that lost their KV blocks."""
        schedule, preempt = self.scheduler.schedule, self.scheduler._preempt_request

        def counted_schedule(*args, **kwargs):
            output = schedule(*args, **kwargs)
            self.counters["computed"] += output.total_num_scheduled_tokens
            self.counters["steps"] += output.total_num_scheduled_tokens > 0
            return output

        def counted_preempt(request, *args, **kwargs):
            self.counters["preemptions"] += 1
            self.counters["preempted_tokens"] += request.num_computed_tokens
            return preempt(request, *args, **kwargs)

        self.scheduler.schedule, self.scheduler._preempt_request = counted_schedule, counted_preempt

    # Commands of the driver.

    def do_reset(self, segment: dict) -> None:
        """A new run: nothing may be open. Prefix cache, book and counters start empty."""
        from esgrpo import config

        if self.open:
            raise RuntimeError(f"{len(self.open)} requests are left of the run before")
        if self.resume_at is not None:
            self.resume()
        while self.has_work():
            self.step()
        self.core.reset_prefix_cache()
        self.scheduler._segment_start(config.parse({"enable": True, "segment_length": NEVER, **segment}))
        self._observe_boundaries()
        self.counters = dict.fromkeys(("computed", "steps", "preemptions", "preempted_tokens"), 0)
        self.windows.clear()
        self.current.clear()
        self.do_version(0)
        self.windows.clear()
        gc.collect()
        self.tell("reset")

    def _observe_boundaries(self) -> None:
        """The driver hears of boundaries; until it answers there is no next one."""
        book = self.scheduler.segment_book
        decide = book._at_boundary

        def at_boundary(item):
            decision = decide(item)
            if decision.outcome == "continue":
                item.next_boundary = None
                self.crossed.append(item.group)
            return decision

        book._at_boundary = at_boundary
        book._may_end_at_boundary = lambda item: item.next_boundary is not None

    def do_submit(self, sample: str, prompt: list[int], response: list[int], target: int, boundary: int | None) -> None:
        """Decode up to `target` response tokens; `boundary` is the place of the first one in the whole response."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self.count += 1
        key = f"{sample}#{self.count}"
        self.core.esgrpo_set_segment_length(sample, boundary or NEVER, False)
        parameters = SamplingParams(
            temperature=TOKEN_TEMPERATURE, max_tokens=target - len(response), ignore_eos=True, logprobs=0,
            extra_args={"segment": {"group": sample, "member": 0, "done_before": len(response), "move": True,
                                    "length_class": "body"}})
        request = EngineCoreRequest(
            request_id=key, prompt_token_ids=prompt + response, mm_features=None, sampling_params=parameters,
            pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None,
            data_parallel_rank=None)
        self.open[key] = Attempt(sample, len(prompt), len(response))
        self.current[sample] = key
        self.core.add_request(*self.core.preprocess_add_request(request))

    def _count_of(self, sample: str) -> int | None:
        """Tokens of the whole response so far; None when the sample is not here any more."""
        key = self.current.get(sample)
        return None if key is None else self.open[key].done + len(self.open[key].tokens)

    def do_tell(self, sample: str, segment: int) -> None:
        """The next boundary comes after so many more tokens, if that is earlier."""
        count = self._count_of(sample)
        if count is not None:
            self.core.esgrpo_set_segment_length(sample, count + max(1, segment), False)

    def do_segment(self, sample: str, boundary: int) -> None:
        """After a boundary: the place of the next one in the whole response."""
        count = self._count_of(sample)
        if count is not None:
            self.core.esgrpo_set_segment_length(sample, max(boundary, count + 1), False)

    def do_yield(self, sample: str) -> None:
        """Hand the response back at its next token, by the hook's own move to the tail class."""
        count = self._count_of(sample)
        if count is not None:
            self.core.esgrpo_set_segment_length(sample, count + 1, True)

    def do_prune(self, sample: str, rule: str) -> None:
        if sample in self.current:
            self.core.esgrpo_finish(sample, [0], rule)

    def do_abort(self, sample: str) -> None:
        key = self.current.get(sample)
        if key is not None:
            self.core.abort_requests([key])
            self._end(key, "abort")

    def do_sync(self, mode: str, seconds: float) -> None:
        """New weights in verl's order: freeze or abort, load (simulated by waiting), drop stale prefixes, go on."""
        if mode == "abort":
            for key in list(self.open):
                self.do_abort(self.open[key].sample)
        self.core.pause_scheduler(mode="keep", clear_cache=False)
        while self.has_work():  # what is in flight settles
            self.step()
        self.resume_at = time.monotonic() + seconds
        self.tell("paused", mode)

    def do_version(self, version: int) -> None:
        self.version = version
        self.windows.append(self.core.esgrpo_set_version(version))

    def do_counters(self) -> None:
        """What this engine counted since the reset, by itself: the driver's books must agree."""
        last = dataclasses.asdict(self.scheduler.segment_occupancy.close())
        windows = [*self.windows, last]
        self.tell("counters", {**self.counters, "decoded": sum(window["tokens"] for window in windows),
                               "seconds": sum(window["seconds"] for window in windows),
                               **{name: sum(window[name] for window in windows)
                                  for name in ("used", "sync", "idle", "tail")}})

    def do_stop(self) -> None:
        raise SystemExit

    # One turn of the loop.

    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.core.batch_queue)

    def step(self) -> bool:
        """One engine step; True when its outputs came out (under async scheduling they lag)."""
        outputs, executed = self.core.step_fn()
        self.steps += bool(outputs)
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                self._absorb(output)
        for sample in self.crossed:
            if sample in self.current:
                self.tell("boundary", sample, self._count_of(sample))
        self.crossed.clear()
        self.core.post_step(executed)
        return bool(outputs)

    def _absorb(self, output) -> None:
        attempt = self.open.get(output.request_id)
        if attempt is None:
            return
        if output.new_token_ids and not attempt.tokens:
            stats = output.prefill_stats
            attempt.cached = stats.num_cached_tokens if stats is not None else 0
            self.tell("first", attempt.sample)
        attempt.tokens += output.new_token_ids
        if output.finish_reason is not None:
            self._end(output.request_id, {"segment": "yield", "pruned": "prune"}.get(output.stop_reason, "finish"))

    def _end(self, key: str, outcome: str) -> None:
        attempt = self.open.pop(key)
        del self.current[attempt.sample]
        self.tell("end", attempt.sample, outcome, attempt.tokens, attempt.cached)

    def tell(self, kind: str, *values) -> None:
        self.events.append((kind, time.monotonic(), *values))

    def blocks(self) -> tuple[int, int]:
        """(free, all) KV blocks."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.get_num_free_blocks(), pool.num_gpu_blocks

    def flush(self) -> None:
        """Send (time, load, free blocks, steps, events): at events, at a change of load, and now and then."""
        load = (len(self.scheduler.running), len(self.scheduler.waiting), self.resume_at is not None)
        now = time.monotonic()
        if self.events or load != self.load or (load[0] and now >= self.next_report):
            self.load, self.next_report = load, now + REPORT_S
            self.send((now, load, self.blocks()[0], self.steps, self.events))
            self.events = []

    def resume(self) -> None:
        self.resume_at = None
        self.core.reset_prefix_cache()
        self.do_version(self.version + 1)
        self.core.resume_scheduler()
        self.tell("resumed")

    def run(self, pipe) -> None:
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=_receive, args=(pipe, inbox), daemon=True).start()
        while True:
            self._obey(inbox, wait=self.held or not self.has_work())
            self.turn()

    def turn(self) -> None:
        """What is done between two looks at the commands."""
        if self.resume_at is not None and time.monotonic() >= self.resume_at:
            self.resume()
        if self.has_work() and not self.held:
            self.step()
        self.flush()

    def _obey(self, inbox: queue.SimpleQueue, wait: bool) -> None:
        """Carry out all commands that are there; `wait` a little for the first one."""
        with contextlib.suppress(queue.Empty):
            while True:
                for name, *arguments in inbox.get(wait, self._patience()) if wait else inbox.get_nowait():
                    getattr(self, f"do_{name}")(*arguments)
                wait = False

    def _patience(self) -> float:
        """Seconds to wait for commands while nothing runs."""
        return IDLE_S if self.resume_at is None else max(0.0, min(IDLE_S, self.resume_at - time.monotonic()))


def _receive(pipe, inbox: queue.SimpleQueue) -> None:
    """Thread: reads while the engine computes, or two ends that send much at once would wait for each other."""
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError):  # the driver has gone
        os._exit(1)


def serve(pipe, options: dict, environment: dict[str, str]) -> None:
    """Main of the replica process. Ctrl-C is the parent's business, and nobody survives the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
    os.environ.update(environment)
    from bench.engine.probe import Probe

    try:
        core = build_core(options)
        wrong = missing_hooks(core)
        if wrong:
            pipe.send(("hooks", wrong))
            return
        replica = Probe(core, pipe.send)
        gc.collect()
        gc.freeze()  # as EngineCoreProc does
        pipe.send(("ready", type(core.scheduler).__name__, replica.blocks()[1], core.scheduler.block_size))
        replica.run(pipe)
    except SystemExit:
        core.shutdown()
    except BaseException as error:
        import traceback

        traceback.print_exc()
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
