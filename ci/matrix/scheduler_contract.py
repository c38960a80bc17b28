"""Contract of the vLLM hooks with one vLLM release: its real scheduler classes, sync and async, with the mixin.

    python -m ci.matrix.scheduler_contract VERSION      unpack that release and check it in a process of its own
    python -m ci.matrix.scheduler_contract              check the vLLM on the path (as vllm_environment sets it up)

One JSON line a case: {"vllm", "scheduler": "sync" | "async" | "both", "case", "ok", "detail"}. Exit 0 when all are ok.
"""

from __future__ import annotations

import functools
import json
import sys

from bench.common.scripted_scheduler import make_config, upstream_class
from ci.matrix import vllm_environment
from ci.matrix.scheduler_cases import CASES, Unsupported
from ci.matrix.scheduler_player import BLOCKS, Player, expect

RUNNING = 4  # requests at once
LONGEST = 512  # tokens


def one_line(error: BaseException) -> str:
    text = str(error) or "no message"
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text.splitlines()[0]}"


class Report:
    """Prints the lines and remembers whether all were ok."""

    def __init__(self, **fields):
        self.fields, self.ok = fields, True

    def line(self, scheduler: str, case: str, ok: bool | None, detail: str = "") -> None:
        self.ok = self.ok and ok is not False
        print(json.dumps({**self.fields, "scheduler": scheduler, "case": case, "ok": ok, "detail": detail}), flush=True)

    def run(self, scheduler: str, case, *arguments) -> None:
        """`case(*arguments)` returns the detail of success, or raises; what a release has not makes no line."""
        name = case.__name__.replace("_", "-")
        try:
            detail = case(*arguments) or ""
        except Unsupported:
            return
        except Exception as error:
            self.line(scheduler, name, False, one_line(error))
        else:
            self.line(scheduler, name, True, detail)


def hooks_are_applied() -> str:
    """Import what the hooks wait for, and read their states back."""
    import vllm.config  # noqa: F401
    import vllm.v1.engine.core  # noqa: F401

    from esgrpo import engine

    rows = [row for row in engine.states("engine-core") if row["upstream"] == "vllm"]
    wrong = [f"{row['slug']} {row['state']} ({row['detail']})" for row in engine.not_in_place(rows)]
    if wrong:
        raise AssertionError("; ".join(wrong))
    return "; ".join(f"{row['slug']} {row['state']}" for row in rows)


def _no_worker(self, vllm_config):
    """Instead of EngineCore._initialize_kv_caches: there is no worker to profile."""
    return 0, 0, None


def hooked_class(config) -> type:
    """The class that EngineCore gets: asked for the way this release asks, with the hook in place."""
    settings = config.scheduler_config
    if hasattr(settings, "get_scheduler_cls"):
        return settings.get_scheduler_cls()
    from esgrpo.call import wrapped
    from esgrpo.hooks.vllm import scheduler_cls

    before = settings.scheduler_cls
    wrapped(scheduler_cls, _no_worker)(None, config)
    try:
        return settings.scheduler_cls
    finally:
        settings.scheduler_cls = before


class Factory:
    """Makes the players of one scheduler class, plain (segment None) or mixed; configs are made once."""

    def __init__(self, base: type, configure, lag: int):
        self.base, self.configure, self.lag = base, functools.cache(configure), lag

    def __call__(self, segment: dict | None, blocks: int = BLOCKS, budget: int | None = None,
                 caching: bool = False) -> Player:
        config = self.configure(budget)
        cls = self.base if segment is None else hooked_class(config)
        return Player(config, cls, segment, self.lag, blocks, caching)


def configure(asynchronous: bool, budget: int | None):
    """A config in which this release picks its sync or its async scheduler."""
    config = make_config(asynchronous, RUNNING, LONGEST, budget)
    if not hasattr(config.scheduler_config, "get_scheduler_cls"):  # what EngineArgs and __post_init__ of 0.11 write
        base = upstream_class(asynchronous)
        config.scheduler_config.scheduler_cls = f"{base.__module__}.{base.__qualname__}"
    return config


def the_mixin_is_in_front(new: Factory) -> str:
    from esgrpo.hooks.vllm.segment_mixin import SegmentMixin, mixed_with

    cls = hooked_class(new.configure(None))
    expect(cls.__mro__[1:3], (SegmentMixin, new.base), "the first bases")
    expect(mixed_with(cls) is cls and mixed_with(new.base) is cls, True, "mixing again gives the same class")
    expect(issubclass(new.base, SegmentMixin), False, "upstream's class has the mixin")
    return " < ".join(base.__name__ for base in cls.__mro__[:4])


def check_class(report: Report, scheduler: str, new: Factory) -> None:
    for case in (the_mixin_is_in_front, *CASES):
        report.run(scheduler, case, new)


def main() -> int:
    from esgrpo import engine, releases

    engine.boot()
    report = Report(vllm=releases.installed("vllm"))
    report.run("both", hooks_are_applied)
    for asynchronous, scheduler in enumerate(("sync", "async")):
        check_class(report, scheduler, Factory(
            upstream_class(bool(asynchronous)), functools.partial(configure, bool(asynchronous)), lag=asynchronous))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(vllm_environment.run("ci.matrix.scheduler_contract", sys.argv[1]) if sys.argv[1:] else main())
