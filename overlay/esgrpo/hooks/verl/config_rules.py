"""Which settings of verl a feature implies or forbids. Called by the driver with the composed config."""

from __future__ import annotations

import os

from esgrpo.config import PREFIX, Segment
from esgrpo.errors import ConfigError

STOPS = "the run does not start"


def _refuse(key: str, found, wanted: str, todo: str):
    raise ConfigError(key, f"{found!r}", wanted, STOPS, todo)


def check_model_path(path: str) -> None:
    """A local path that is not there ends in three tracebacks of transformers; a hub name is left to it."""
    local = path.startswith(("/", "./", "../", "~"))
    if local and not os.path.isdir(os.path.expanduser(path)):
        _refuse("actor_rollout_ref.model.path", path, "a directory with a model", "correct the path")


def adjust(config, segment: Segment, features: frozenset[str]):
    """Yields one line per changed setting; raises ConfigError for combinations that cannot be right."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if segment.prunes:
        if segment.prune.finish_group_after > rollout.n:
            _refuse(f"{PREFIX}.prune.finish_group_after", segment.prune.finish_group_after,
                    f"at most rollout.n = {rollout.n}", "lower it")
        estimator = str(config.algorithm.adv_estimator)
        if estimator == "grpo":
            config.algorithm.adv_estimator = "grpo_segment"
            yield "algorithm.adv_estimator: grpo -> grpo_segment, because pruned rows must leave the group statistics"
        elif estimator != "grpo_segment":
            _refuse("algorithm.adv_estimator", estimator, "grpo or grpo_segment with pruning on",
                    f"set it, or switch {PREFIX}.prune off")
    if "v1" in features:
        yield from _v1(config, features)
    if features & {"pois", "sais"}:
        yield from _losses(config, segment, features)
    if "dmmpt" in features:
        if not features & {"pois", "sais"}:
            _refuse(f"{PREFIX}.dmmpt.enable", True, "actor.policy_loss.loss_mode pois or sais", "set the loss_mode")
        if not actor.get("calculate_entropy", False):
            actor.calculate_entropy = True
            yield "actor.calculate_entropy: False -> True, because DMMPTs need the entropy"
    if (segment.enable or segment.observe) and rollout.name != "vllm":
        _refuse("actor_rollout_ref.rollout.name", rollout.name, "vllm with segment.enable or segment.observe",
                "use the vllm rollout")


def _v1(config, features: frozenset[str]):
    """verl's sync trainer ends a step with nothing unfinished: what carries over is its colocate_async trainer."""
    v1 = config.trainer.v1
    if "yield" in features and v1.trainer_mode == "sync":
        v1.trainer_mode = "colocate_async"
        yield ("trainer.v1.trainer_mode: sync -> colocate_async, because boundary=yield carries unfinished groups over "
               f"({v1.colocate_async.num_warmup_batches} batches ahead, trainer.v1.colocate_async.num_warmup_batches)")
    if v1.trainer_mode == "sync":
        return
    sampler = v1.sampler
    warmup = v1[v1.trainer_mode].num_warmup_batches
    if sampler.max_off_policy_threshold is not None and sampler.max_off_policy_strategy == "wait" and warmup > 0:
        yield (f"trainer.v1.sampler.max_off_policy_strategy=wait lets a complete group queue for up to {warmup} more "
               f"steps: a trained group spans at most {sampler.max_off_policy_threshold} + {warmup} weight versions")


def _losses(config, segment: Segment, features: frozenset[str]):
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    correction = config.algorithm.get("rollout_correction") or {}
    if "sais" in features and not rollout.calculate_log_probs:
        _refuse("actor_rollout_ref.rollout.calculate_log_probs", False, "True with loss_mode=sais",
                "set it: SAIS needs the log-probs of the version that made each token")
    fully_async = config.get("async_training") or {}
    legacy = "compute_prox_log_prob" in fully_async  # verl 0.7.0: the loss is handed the stored log-probs
    if "sais" in features and not legacy and not correction.get("bypass_mode", False):
        _refuse("algorithm.rollout_correction.bypass_mode", correction.get("bypass_mode"), "True with loss_mode=sais",
                "set it: else verl recomputes the log-probs that SAIS must read as stored")
    if "pois" not in features:
        return
    if actor.ppo_epochs > 1:
        _refuse("actor_rollout_ref.actor.ppo_epochs", actor.ppo_epochs, "1 with loss_mode=pois",
                "nothing clips drift under POIS: set it to 1")
    if segment.pois.anchor == "version" and legacy:
        if not fully_async.use_rollout_log_probs:
            _refuse("async_training.use_rollout_log_probs", False, "True with pois.anchor=version",
                    "set it: else old log-probs are those of the current weights")
        if not fully_async.compute_prox_log_prob:
            fully_async.compute_prox_log_prob = True
            yield ("async_training.compute_prox_log_prob: False -> True, because pois.anchor=version needs log-probs "
                   "under the last synced weights")
    elif segment.pois.anchor == "version" and correction.get("bypass_mode", False):
        config.algorithm.rollout_correction.bypass_mode = False
        yield ("algorithm.rollout_correction.bypass_mode: True -> False, because pois.anchor=version needs log-probs "
               "under the last synced weights")
