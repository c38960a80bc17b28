"""What the overlap control may move in a run, by its configuration; said before Ray starts. No hook."""

from __future__ import annotations

import os

from esgrpo.algo.overlap_signals import CONCURRENCY, STALENESS, THRESHOLD, TRIGGER
from esgrpo.config import PREFIX, Segment
from esgrpo.hooks.verl.run.trainers import is_fully_async, is_separate


def lines(config, segment: Segment):
    """What is moved, and what is not."""
    control = f"{PREFIX}.overlap.enable"
    if not (is_fully_async(config) or is_separate(config)):
        yield (f"{control}: nothing is moved, because only verl 0.9.1's fully-async trainer and its v1 trainer "
               "separate_async have settings that can be")
        return
    for name, why in overlap_fixed(config, segment).items():
        yield f"{control}: {name} is not moved, because {why}"
    if is_separate(config) and config.trainer.v1.separate_async.hybrid_rollout.enable_switch:
        yield f"{control}: when the trainer's replicas are lent stays with verl's hybrid_rollout.enable_switch"


# of a user's setting: ours -> verl's key under async_training
OVERLAP_KEYS = {"concurrency": "concurrent_samples_per_replica", "staleness": "staleness_threshold",
                "trigger": "require_batches"}
V1_OVERLAP_KEYS = {STALENESS: "separate_async.num_warmup_batches", THRESHOLD: "sampler.max_off_policy_threshold"}


def overlap_fixed(config, segment: Segment) -> dict[str, str]:
    """Settings that the overlap control leaves alone, and why. By hand: another value than verl's own config file has,
    or named on the command line."""
    if not segment.overlap.enable:
        return {}
    if is_separate(config):
        return _fixed_of_separate(config, segment)
    return _fixed_of_fully_async(config, segment) if is_fully_async(config) else {}


def _by_hand(given, own, section: str, keys: dict[str, str], segment: Segment) -> dict[str, str]:
    """`given`, `own`: this section of the run's config and of verl's own file."""
    from omegaconf import OmegaConf

    said, fixed = _command_line(), {}
    for name, key in () if segment.overlap.override else keys.items():
        value = OmegaConf.select(given, key)
        if value != OmegaConf.select(own, key) or f"{section}.{key}" in said:
            fixed[name] = f"{section}.{key}={value} was set by hand (overlap.override=True)"
    return fixed


def _fixed_of_fully_async(config, segment: Segment) -> dict[str, str]:
    from omegaconf import OmegaConf

    fully_async, optimizer = config.async_training, config.actor_rollout_ref.actor.get("optim") or {}
    own = OmegaConf.load(_file_of_verl(FULLY_ASYNC_CONFIG)).async_training
    fixed = _by_hand(fully_async, own, "async_training", OVERLAP_KEYS, segment)
    schedule = optimizer.get("lr_scheduler_type") or optimizer.get("lr_decay_style") or "constant"
    warmup = max(optimizer.get(key) or 0 for key in ("lr_warmup_steps", "lr_warmup_steps_ratio"))
    if config.actor_rollout_ref.actor.policy_loss.get("loss_mode") == "pois":
        fixed["trigger"] = "the anchor of loss_mode=pois depends on the optimiser steps of a weight version"
    elif schedule != "constant" or warmup > 0:
        fixed["trigger"] = "the learning rate follows a schedule, of which verl takes one step a trigger"
    elif fully_async.get("use_dynamic_resource_scheduling"):
        fixed["trigger"] = "verl lends the trainer's devices by counts of groups that it sums over the whole run"
    return fixed


def _fixed_of_separate(config, segment: Segment) -> dict[str, str]:
    """Of v1's separate_async, where prompts in process (verl's batches ahead) and the age that drops them can move."""
    from omegaconf import OmegaConf

    v1, own = config.trainer.v1, OmegaConf.load(_file_of_verl(V1_CONFIG)).trainer.v1
    fixed = {CONCURRENCY: "v1 trainers begin every prompt at once: what is in process is their only bound",
             TRIGGER: "v1 trainers count steps, epochs, checkpoints and the learning rate in batches of one size",
             **_by_hand(v1, own, "trainer.v1", V1_OVERLAP_KEYS, segment)}
    custom = v1.sampler.get("custom_sampler") or {}
    if custom.get("path"):
        fixed[STALENESS] = fixed[THRESHOLD] = "trainer.v1.sampler.custom_sampler keeps its own account of prompts"
    elif OmegaConf.select(config, "skip.rollout_tq.enable"):
        fixed[STALENESS] = "skip.rollout_tq reads what another run generated"
    elif v1.sampler.max_off_policy_threshold is None:
        fixed.pop(THRESHOLD, None)  # there is none
    return fixed


FULLY_ASYNC_CONFIG = "experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml"
V1_CONFIG = "trainer/config/ppo_trainer.yaml"


def _file_of_verl(path: str) -> str:
    import importlib.util

    return os.path.join(os.path.dirname(importlib.util.find_spec("verl").origin), path)


def _command_line() -> set[str]:
    """Keys of Hydra's overrides; empty where the config was not composed by Hydra's main."""
    from hydra.core.hydra_config import HydraConfig

    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
    return {override.partition("=")[0].lstrip("+~") for override in overrides}
