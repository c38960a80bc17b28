"""Fixtures of the engine tests: every scenario is played once, in processes of its own, one engine at a time.

A start costs more than all that is played in it: what does not disturb each other shares an engine.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from ci.tests.engine import engine_probe
from esgrpo import config

HERE = Path(__file__).parent
OVERLAY = HERE.parents[2] / "overlay"
SEGMENT = {
    "bare": None,  # vLLM alone
    "quiet": {"enable": True, "segment_length": 16, "prune": {"repetition": {
        "enable": True, "min_span": 32, "max_pattern_size": 8, "check_interval": 32}}},  # of one request that loops
    "yield": {"enable": True, "segment_length": 16, "boundary": "yield"},
    "off": {},  # the overlay is loaded and every feature is off
    "elastic": {"profile": "elastic", "segment_length": 16},  # with sync.requests=keep
    "rebuild": {"enable": True, "segment_length": 16, "sync": {"requests": "keep", "kv": "rebuild"}},
}


def features(scenario: str) -> str:
    return ",".join(sorted(config.features(config.parse(SEGMENT[scenario]), "")))


def _environment(scenario: str) -> dict[str, str]:
    environment = {"OMP_NUM_THREADS": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                   "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if SEGMENT[scenario] is not None:
        environment |= {"ESGRPO_ENABLE": "1", "VERL_PLATFORM": "cpu", "ESGRPO_FEATURES": features(scenario),
                        "ESGRPO_SEGMENT": json.dumps(SEGMENT[scenario])}
    return environment


@pytest.fixture(scope="session")
def played(forked_python, tmp_path_factory):
    """played(scenario) -> what scenarios.py wrote."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    folder, answers = tmp_path_factory.mktemp("engine"), {}

    def play(scenario: str) -> dict:
        if scenario not in answers:
            if not answers:
                engine_probe.install(folder)
                forked_python(HERE / "tiny_model.py", folder / "model")
            out = folder / f"{scenario}.json"
            forked_python(HERE / "scenarios.py", scenario, folder / "model", out, path=(OVERLAY, folder, HERE),
                          **_environment(scenario))
            answers[scenario] = json.loads(out.read_text())
        return answers[scenario]

    return play
