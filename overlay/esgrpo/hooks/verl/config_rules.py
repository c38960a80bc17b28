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
    yield from _pruning(config, segment)
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
    if "keep" in features:
        yield from _kept_requests(config)
    if "routing" in features:
        yield from _router(config, segment)
    if segment.sampler.enable:
        yield from _sampler(config)
    if (segment.enable or segment.observe) and rollout.name != "vllm":
        _refuse("actor_rollout_ref.rollout.name", rollout.name, "vllm with segment.enable or segment.observe",
                "use the vllm rollout")


def _kept_requests(config):
    """Requests stay in the engines of standalone replicas only, and only where nothing frees their KV cache."""
    fully_async, rollout = config.get("async_training") or {}, config.actor_rollout_ref.rollout
    replicas = config.get("rollout") or rollout  # v1 trainers have the sizes in the actor's section
    aborts = "segment.sync.requests=keep: every weight sync aborts, because "
    if "compute_prox_log_prob" in fully_async:
        yield aborts + "the servers of this verl cancel requests by themselves"
    elif not replicas.get("nnodes") or not replicas.get("n_gpus_per_node"):
        yield aborts + "there are no standalone replicas (rollout.nnodes, rollout.n_gpus_per_node)"
    elif fully_async.get("use_dynamic_resource_scheduling") and rollout.free_cache_engine:
        yield aborts + "hybrid replicas (async_training.use_dynamic_resource_scheduling) need free_cache_engine=True"
    elif rollout.free_cache_engine:
        rollout.free_cache_engine = False
        yield ("actor_rollout_ref.rollout.free_cache_engine: True -> False, because segment.sync.requests=keep leaves "
               "requests with their KV cache in the engine")


# denominators that do not depend on which rows were kept; their losses are sums over a row's tokens
FIXED_DENOMINATORS = ("seq-mean-token-sum-norm", "seq-mean-token-sum", "token-sum")
# clip_cov and kl_cov rank tokens by covariance with the advantage; dro adds a penalty that has none
NOT_HOMOGENEOUS = ("clip_cov", "kl_cov", "dro")


def _pruning(config, segment: Segment):
    """What weights for pruned rows need: a fixed denominator and a loss that is proportional to the advantage."""
    actor = config.actor_rollout_ref.actor
    legacy = "compute_prox_log_prob" in (config.get("async_training") or {})  # verl 0.7.0
    if legacy and segment.weighted:
        _refuse(f"{PREFIX}.prune.audit.enable", True, "False with verl 0.7.0", "its agent loops ask no replica for "
                "progress and its estimator gets no weights: switch the rules off, or use verl 0.9.1")
    if not segment.weighted:
        return
    loss_mode = actor.policy_loss.get("loss_mode", "vanilla")
    if loss_mode in NOT_HOMOGENEOUS:
        _refuse("actor_rollout_ref.actor.policy_loss.loss_mode", loss_mode, "another loss with audited pruning",
                "it is not proportional to the advantage, which carries the row weights: choose pois, sais or vanilla")
    mode = actor.get("loss_agg_mode", "token-mean")
    if mode not in FIXED_DENOMINATORS:
        yield (f"actor.loss_agg_mode: {mode} divides by what pruning leaves, so the weighted gradient is biased; "
               "seq-mean-token-sum-norm is not")
    elif mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor") is None:
        actor.loss_scale_factor = config.data.max_response_length
        yield (f"actor.loss_scale_factor: None -> {config.data.max_response_length} (data.max_response_length), "
               "because verl would divide by the longest response of each micro-batch, which pruning changes")
    if config.algorithm.get("norm_adv_by_std_in_grpo", True):
        yield ("algorithm.norm_adv_by_std_in_grpo: the estimated standard deviation of a pruned group leaves a bias "
               "(python -m bench.estimator_bias measures it); False has none")


def _sampler(config):
    data = config.data
    workers = data.get("dataloader_num_workers", 0)
    if workers:
        yield (f"data.dataloader_num_workers: {workers} -> 0 for training prompts, because workers ask for them long "
               "before the outcomes that they should be chosen by")
    if not data.shuffle:
        data.shuffle = True
        yield f"data.shuffle: False -> True, because with {PREFIX}.sampler.enable prompts are chosen, not read in order"


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
    steps = optimizer_steps_per_version(config, "v1" in features)
    steps = optimizer_steps_per_version(config, "v1" in features)
    if segment.pois.anchor == "token" and steps > 1:
        yield (f"loss_mode=pois: nothing clips how far the {steps} optimiser steps of a weight version go, and trials "
               "with 4 lost their reward (bench/results/robustness_losses.json); watch "
               "esgrpo/pois/log_kl_rollout_current, or take pois.anchor=version, sais or one step")


def optimizer_steps_per_version(config, v1: bool) -> int:
    """Between two weight syncs."""
    actor, fully_async = config.actor_rollout_ref.actor, config.get("async_training")
    steps = actor.ppo_epochs
    if v1:
        steps *= max(1, config.data.train_batch_size // actor.ppo_mini_batch_size)
    if fully_async is not None:
        steps *= fully_async.require_batches * fully_async.trigger_parameter_sync_step
    return steps


def _router(config, segment: Segment):
    """verl's plugin for routers, where it has one; the user's own is never replaced silently."""
    from esgrpo import engine
    from esgrpo.hooks.verl import tail_router

    rollout = config.actor_rollout_ref.rollout
    if tail_router.HOOK.slug in engine.disabled_slugs() or "*" in engine.disabled_slugs():
        return
    if "router_config_path" not in rollout:
        yield "routing: this verl has no rollout.router_config_path, so prompts are ordered and replicas are not chosen"
        return
    key = "actor_rollout_ref.rollout"
    directory = os.environ.get("ESGRPO_RUN_DIR") or os.path.abspath(config.trainer.default_local_dir)
    ours = tail_router.config_path(directory)
    if rollout.router_config_path not in (None, "", ours):
        _refuse(f"{key}.router_config_path", rollout.router_config_path, f"null with {PREFIX}.routing.enable",
                f"drop your router, or set {PREFIX}.routing.enable=False")
    if rollout.get("full_determinism", False):
        _refuse(f"{key}.full_determinism", True, f"False with {PREFIX}.routing.enable",
                "routing follows the load: drop one of the two")
    tail_router.write_config(ours, segment)
    if rollout.router_config_path != ours:
        rollout.router_config_path = ours
        yield f"{key}.router_config_path: null -> {ours}, because routing keeps replicas for the tail"
