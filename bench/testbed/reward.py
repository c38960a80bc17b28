"""Reward function of the testbed for verl (``reward.custom_reward_function.path``, name ``compute_score``)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _load_task():
    """The sibling module `task`. verl loads this file by path, where the package may not be importable."""
    name = "es_grpo_testbed_task"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("task.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while the class is made
    spec.loader.exec_module(module)
    return module


_TASK = _load_task()  # at import: verl calls the reward from several threads at once


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Score one response. Returns ``{"score": 0.0 or 1.0, "acc": bool}``."""
    value = _TASK.score(solution_str, ground_truth)
    return {"score": value, "acc": value == 1.0}
