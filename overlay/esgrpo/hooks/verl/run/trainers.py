"""Which of verl's trainers a run's configuration is of.

verl's v1 trainers and its fully async loop have configurations of their own; the recipe of 0.7.0 has fully async's
section with one key that 0.9.1 has not, and is told by that.
"""

from __future__ import annotations


def of_fully_async(config):
    """The section `async_training`, of 0.9.1's fully async loop or the recipe of 0.7.0; empty where there is none."""
    return config.get("async_training") or {}


def is_recipe(config) -> bool:
    """Fully async as a recipe, in verl 0.7.0."""
    return "compute_prox_log_prob" in of_fully_async(config)


def is_fully_async(config) -> bool:
    """Fully async of verl 0.9.1."""
    return bool(of_fully_async(config)) and not is_recipe(config)


def is_v1(config) -> bool:
    """verl's v1 trainers: main_ppo's own config, without the section that only the fully async main has."""
    return config.get("async_training") is None and bool(config.trainer.get("use_v1", False))


V1_MODES = ("sync", "colocate_async", "separate_async")


def is_separate(config) -> bool:
    """verl's v1 trainer with replicas of its own."""
    return is_v1(config) and config.trainer.v1.trainer_mode == "separate_async"
