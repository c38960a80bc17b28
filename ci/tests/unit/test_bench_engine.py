"""The two engine benchmarks at toy size: that they count what they say. No timing is asserted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture
def run(forked_python, tmp_path):
    """The benchmark as its users start it, in a process of its own: it swaps classes and freezes the heap."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")

    def once(module: str, *options: str) -> dict:
        out = tmp_path / "out.json"
        forked_python("-m", module, *options, "--out", out, cwd=ROOT, path=(ROOT / "overlay", ROOT),
                      OMP_NUM_THREADS="1", ESGRPO_ENABLE="1", VERL_PLATFORM="cpu")
        return json.loads(out.read_text())

    return once


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_scheduler_cost_counts(run, kind):
    result = run("bench.scheduler_cost", "--requests", "16", "--rounds", "2", "--steps", "40",
                 "--classes", kind)
    assert result[kind]["class"] == {"sync": "Scheduler", "async": "AsyncScheduler"}[kind]
    steps = 3 * (40 + 2)  # with the warm-up round and the warm-up steps of a block
    for name, arm in result[kind]["arms"].items():
        assert arm["counts"]["steps"] == steps, name
        assert arm["counts"]["tokens"] == steps * 16, name  # one a step and request: nobody ended
        assert arm["counts"]["outcomes"] == 0, name
        assert arm["ratio_to_plain"]["n"] == 2
    counts = {name: arm["counts"]["boundaries"] for name, arm in result[kind]["arms"].items()}
    assert counts["plain"] == counts["plain_again"] == counts["nothing_due"] == counts["native_repetition"] == 0
    # 16 uniform phases, 126 steps, a boundary every 1024 tokens: 2 expected; the arms share the phases.
    assert counts["boundaries"] == counts["boundaries_and_repetition"] <= 10
    assert result[kind]["boundary"]["looks"] == 40 * 16 / 2
    assert result[kind]["repetition_check"]["looks"] == 40 * 16 / 2
    assert result[kind]["look_for_verdicts"]["looks"] == 40 * 16 / 2
    assert set(result[kind]["within"]) == {
        "boundary", "look_for_verdicts", "nothing_due", "boundaries_and_repetition", "verdicts"}
    assert {"command", "versions", "cpu", "seed"} <= set(result)


def test_decode_overhead_counts(run):
    result = run("bench.decode_overhead", "--requests", "4", "--tokens", "30", "--windows", "2")
    for name, arm in result["arms"].items():
        assert arm["tokens"] == 2 * 4 * 29, name  # the token of the prefill step is not timed
        segments = name.startswith("segments")
        assert arm["outcomes"] == ({"finish": 3 * 4} if segments else {})  # the warm-up round is counted here
        assert arm["boundaries"] == (2 * 4 * 2 if segments else 0)  # at 12 and 24 of 30 tokens
        assert arm["throughput_ratio_wall"]["n"] == 2
    assert {"command", "versions", "cpu", "seed"} <= set(result)
