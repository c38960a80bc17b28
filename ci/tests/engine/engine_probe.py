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


def register() -> None:
    from vllm.v1.engine.core import EngineCore

    EngineCore.probe = probe


def install(folder: Path) -> None:
    """Write the metadata of a distribution that declares the plugin; `folder` goes on PYTHONPATH."""
    info = folder / "engine_probe-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nengine_probe = engine_probe:register\n")
