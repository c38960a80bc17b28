"""Fixtures of the engine tests: every scenario is played once, in processes of its own, one engine at a time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from esgrpo import config

HERE = Path(__file__).parent
OVERLAY = HERE.parents[2] / "overlay"
SEGMENT = {
    "bare": None,  # vLLM alone
    "quiet": {"enable": True, "segment_length": 16},
    "prune": {"enable": True, "prune": {"repetition": {
        "enable": True, "min_span": 32, "max_pattern_size": 8, "check_interval": 32}}},
    "yield": {"enable": True, "segment_length": 16, "boundary": "yield"},
    "off": {},  # the overlay is loaded and every feature is off
    "elastic": {"profile": "elastic", "segment_length": 16},
    "keep": {"enable": True, "segment_length": 16, "sync": {"requests": "keep"}},
    "rebuild": {"enable": True, "segment_length": 16, "sync": {"requests": "keep", "kv": "rebuild"}},
}


def features(scenario: str) -> str:
    return ",".join(sorted(config.features(config.parse(SEGMENT[scenario]), "")))



def _environment(scenario: str, probe: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ESGRPO_", "VERL_", "VLLM_"))}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(map(str, (OVERLAY, probe, HERE))), "OMP_NUM_THREADS": "1",
                   "VLLM_TARGET_DEVICE": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
                   "HF_HUB_OFFLINE": "1"}
    if SEGMENT[scenario] is not None:
        environment |= {"ESGRPO_ENABLE": "1", "VERL_PLATFORM": "cpu", "ESGRPO_FEATURES": features(scenario),
                        "ESGRPO_SEGMENT": json.dumps(SEGMENT[scenario])}
    return environment


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="session")
def played(tmp_path_factory):
    """played(scenario) -> what scenarios.py wrote."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    folder, answers = tmp_path_factory.mktemp("engine"), {}

    def play(scenario: str) -> dict:
        if scenario not in answers:
            if not answers:
                environment = _environment("bare", folder)
                _run(["-c", "import sys, pathlib, engine_probe; engine_probe.install(pathlib.Path(sys.argv[1]))",
                      str(folder)], environment)
                _run([str(HERE / "tiny_model.py"), str(folder / "model")], environment)
            out = folder / f"{scenario}.json"
            _run([str(HERE / "scenarios.py"), scenario, str(folder / "model"), str(out)],
                 _environment(scenario, folder))
            answers[scenario] = json.loads(out.read_text())
        return answers[scenario]

    return play
