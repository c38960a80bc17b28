"""A vLLM general plugin for the tests: lets them look into the spawned EngineCore.

It comes through vLLM's own entry points, so that the negative control without the overlay can look as well.
"""

from __future__ import annotations

from pathlib import Path


def probe(self) -> dict:
    """Utility method on EngineCore: what its scheduler holds between two steps."""
    scheduler = self.scheduler
    seen = {"class": type(scheduler).__name__, "counts": list(scheduler.get_request_counts()),
            "requests": len(scheduler.requests), "kv": scheduler.get_kv_cache_usage()}
    book = getattr(scheduler, "segment_book", None)
    if book is not None:
        seen["book"] = [len(book.tracked), len(book.pending), len(book._groups)]
        seen["late"] = len(scheduler.segment_logprobs._late)
    return seen


def new_weights(self, factor: float) -> float:
    """Utility method on EngineCore: other weights in the first layer, which K and V of every token depend on."""
    model = self.model_executor.driver_worker.worker.model_runner.model
    weight = model.model.layers[0].input_layernorm.weight
    weight.data[::2] *= factor  # every other one: a common factor would be divided out again
    return float(weight.data.sum())


def step_log(self) -> list:
    """Utility method on EngineCore: the scheduled batches since the last call, as [[request, tokens], ...] a step."""
    scheduler = self.scheduler
    log, scheduler.step_log = getattr(scheduler, "step_log", []), []
    return log


def _logged(schedule):
    def logging_schedule(self, *args, **kwargs):
        output = schedule(self, *args, **kwargs)
        if output.num_scheduled_tokens and hasattr(self, "step_log"):  # vLLM adds a random suffix to the caller's id
            self.step_log.append([[key.rpartition("-")[0], n] for key, n in output.num_scheduled_tokens.items()])
        return output

    return logging_schedule


def register() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    EngineCore.probe, EngineCore.new_weights, EngineCore.step_log = probe, new_weights, step_log
    Scheduler.schedule = _logged(Scheduler.schedule)


def install(folder: Path) -> None:
    """Write the metadata of a distribution that declares the plugin; `folder` goes on PYTHONPATH."""
    info = folder / "engine_probe-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nengine_probe = engine_probe:register\n")
