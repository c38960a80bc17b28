"""Which settings of verl a feature implies or forbids: a plan from the composed config, which the driver carries out.

Nothing here touches the config it is given, a file or the environment: `esgrpo lint` asks for the same plan.
"""

from __future__ import annotations

import dataclasses
import os

from esgrpo.algo.null_groups import a_batch_can_wait, alike_is_null
from esgrpo.algo.terms import Feature, NullGroups
from esgrpo.config import PREFIX, Segment
from esgrpo.config import features as config_features
from esgrpo.hooks.verl.run import overlap_rules, pruning_rules, reward_rules
from esgrpo.hooks.verl.run.plan import ROLLOUT, Plan, Setting, refuse
from esgrpo.hooks.verl.run.trainers import V1_MODES, is_fully_async, is_recipe, is_separate, is_v1, of_fully_async


def features_of(config, segment: Segment) -> frozenset[str]:
    """Names that the hooks of a run are switched on by."""
    loss_mode = (config.actor_rollout_ref.actor.get("policy_loss") or {}).get("loss_mode", "vanilla")
    found = config_features(segment, loss_mode, pruning_rules.weighs_cut_rows(config, segment))
    return found | {Feature.V1} if found and is_v1(config) else found


def fill(found: Plan, config, features: frozenset[str], run_dir: str = "RUN_DIR",
         disabled: frozenset[str] = frozenset()) -> None:
    """Add to `found` what this config needs; raises ConfigError for combinations that cannot be right.

    `run_dir` is where the run keeps its own files; `disabled` are the slugs of hooks that the user switched off.
    """
    import pickle

    from omegaconf import OmegaConf

    found.segment = _seeded(config, found.segment)
    # later rules see what earlier ones set; OmegaConf's own deepcopy takes ten times as long
    config = pickle.loads(pickle.dumps(config))
    for item in _rules(config, found, features):
        if isinstance(item, Setting):
            old = OmegaConf.select(config, item.key)
            OmegaConf.update(config, item.key, item.value, force_add=True)
            found.settings[item.key] = item.value
            found.lines.append(f"{item.key}: {'null' if old is None else old} -> {item.value}, because {item.why}")
        else:
            found.lines.append(item)
    if "tails" in features and not disabled & {TAIL_ROUTER, "*"}:
        _router(config, found, run_dir)


def _seeded(config, segment: Segment) -> Segment:
    """With the seed of verl's data, where it has one: else runs of different seeds would draw the same prompts."""
    seed = config.data.get("seed") or 0
    return dataclasses.replace(segment, seed=seed) if segment.seed == 0 < seed else segment


def check_model_path(path: str) -> None:
    """A local path that is not there ends in three tracebacks of transformers; a hub name is left to it."""
    local = path.startswith(("/", "./", "../", "~"))
    if local and not os.path.isdir(os.path.expanduser(path)):
        refuse("actor_rollout_ref.model.path", path, "a directory with a model", "correct the path")


def _rules(config, found: Plan, features: frozenset[str]):
    """Yields settings to change and lines to say."""
    yield from reward_rules.lines(config, found)  # may take switches back
    segment = found.segment
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    yield from pruning_rules.lines(config, segment)
    if "v1" in features:
        yield from _v1(config, segment, features)
    if segment.pois.anchor != "auto" and "pois" not in features:
        refuse(f"{PREFIX}.pois.anchor", segment.pois.anchor, "actor.policy_loss.loss_mode pois with it",
               "set the loss_mode, or drop it: no other loss reads it")
    if features & {"pois", "sais"}:
        yield from _losses(config, found, features)
    if "dmmpt" in features:
        if not features & {"pois", "sais"}:
            refuse(f"{PREFIX}.dmmpt.enable", True, "actor.policy_loss.loss_mode pois or sais", "set the loss_mode")
        if not actor.get("calculate_entropy", False):
            yield Setting("actor_rollout_ref.actor.calculate_entropy", True, "DMMPTs need the entropy")
    if "keep" in features:
        yield from _kept_requests(config)
    yield from _null_groups(config, found)
    if segment.sampler.enable:
        yield from _sampler(config)
    if segment.overlap.enable:
        yield from overlap_rules.lines(config, segment)
    if (segment.enable or segment.observe) and rollout.name != "vllm":
        refuse("actor_rollout_ref.rollout.name", rollout.name, "vllm with segment.enable or segment.observe",
               "use the vllm rollout")


def _null_groups(config, found: Plan):
    """verl's v1 trainers have a group filter of their own, its fully async loop has ours, all others none."""
    segment, fully_async = found.segment, config.get("async_training")
    asked, mode, key = config.algorithm.get("filter_groups") or {}, segment.null_groups, f"{PREFIX}.null_groups"
    on, missing = segment.enable and mode != NullGroups.TRAIN, _no_filter(config, mode)
    if on and missing:
        why, instead = missing
        if mode == NullGroups.REPLACE:
            refuse(key, mode, f"{NullGroups.TRAIN}: {why}", instead)
        found.segment, on = dataclasses.replace(segment, null_groups=NullGroups.TRAIN), False
        off = is_v1(config) and not asked.get("enable")
        yield (f"{key}: {mode} -> {NullGroups.TRAIN}, because {why}"
               + ("; it is off, so that groups whose rewards are all alike are trained "
                  "(algorithm.filter_groups.enable=True leaves them out)" if off else ""))
    if fully_async is not None and asked.get("enable") and not (on and mode == NullGroups.REPLACE):
        yield ("algorithm.filter_groups.enable=True does nothing in verl's fully async loop: groups without a gradient "
               f"are trained{' unless a whole batch of others waits' if on else ''}"
               + ("" if missing else f"; {key}={NullGroups.REPLACE} always replaces them"))
    if on and mode == NullGroups.SPARE and not is_v1(config) and not segment.overlap.enable:  # which moves the bound
        bound, batches = fully_async.staleness_threshold, fully_async.trigger_parameter_sync_step
        if not a_batch_can_wait(bound, batches):
            yield (f"{key}={mode} will hardly leave a group out: with async_training.staleness_threshold={bound:g} and "
                   f"trigger_parameter_sync_step={batches} no whole batch of others waits for the trainer; a bound of "
                   "1 or more lets it")


def _no_filter(config, mode: str) -> tuple[str, str] | None:
    """Why no group can be left out here, and what to do instead; None where one can."""
    if is_v1(config):
        filters = (config.algorithm.get("filter_groups") or {}).get("enable")
        if mode == NullGroups.SPARE and filters and is_separate(config):
            return None  # verl's filter leaves out, what it will is begun ahead
        return ("verl's own filter does it with this trainer",
                "drop the key and set algorithm.filter_groups.enable=True")
    if not is_fully_async(config):
        return "groups can be replaced in verl's fully async loop, from 0.9.0 on", "drop the key"
    estimator, kl_in_reward = str(config.algorithm.adv_estimator), bool(config.algorithm.get("use_kl_in_reward"))
    if not alike_is_null(estimator, kl_in_reward):
        return ("with algorithm.use_kl_in_reward=True" if kl_in_reward else
                f"with algorithm.adv_estimator={estimator}") + " rewards that are alike have a gradient", "drop the key"
    return None


def _kept_requests(config):
    """Requests stay in the engines of standalone replicas only, and only where nothing frees their KV cache."""
    rollout = config.actor_rollout_ref.rollout
    replicas = config.get("rollout") or rollout  # v1 trainers have the sizes in the actor's section
    aborts = "segment.sync.requests=keep: every weight sync aborts, because "
    if is_recipe(config):
        yield aborts + "the servers of this verl cancel requests by themselves"
    elif not replicas.get("nnodes") or not replicas.get("n_gpus_per_node"):
        yield aborts + "there are no standalone replicas (rollout.nnodes, rollout.n_gpus_per_node)"
    elif rollout.free_cache_engine and not _has_hybrids(config):
        yield Setting(f"{ROLLOUT}.free_cache_engine", False,
                      "segment.sync.requests=keep leaves requests with their KV cache in the engine")


def _has_hybrids(config) -> bool:
    """Replicas that share the trainer's memory and free it for training: their setting stays (`standalone_cache`)."""
    fully_async = config.get("async_training")
    if fully_async is not None:
        return bool(fully_async.get("use_dynamic_resource_scheduling") or fully_async.get("use_trainer_do_validate"))
    return bool(config.actor_rollout_ref.get("hybrid_engine", True))


def _sampler(config):
    if is_recipe(config):
        refuse(f"{PREFIX}.sampler.enable", True, "False with verl 0.7.0", "its rollouter learns of no outcome, and "
               "prompts would be drawn from priors: use verl 0.9.1")
    data = config.data
    workers = data.get("dataloader_num_workers", 0)
    if workers:
        yield (f"data.dataloader_num_workers: {workers} -> 0 for training prompts, because workers ask for them long "
               "before the outcomes that they should be chosen by")
    if not data.shuffle:
        yield Setting("data.shuffle", True, f"with {PREFIX}.sampler.enable prompts are chosen, not read in order")


def _v1(config, segment: Segment, features: frozenset[str]):
    """verl's sync trainer ends a step with nothing unfinished: what carries over is its colocate_async trainer."""
    v1 = config.trainer.v1
    if v1.trainer_mode not in V1_MODES:
        refuse("trainer.v1.trainer_mode", v1.trainer_mode, " or ".join(V1_MODES), "use one of them")
    if "yield" in features and v1.trainer_mode == "sync":
        yield Setting("trainer.v1.trainer_mode", "colocate_async", "boundary=yield carries unfinished groups over "
                      f"({v1.colocate_async.num_warmup_batches} batches ahead, "
                      "trainer.v1.colocate_async.num_warmup_batches)")
    if v1.trainer_mode == "sync":
        filtered = (config.algorithm.get("filter_groups") or {}).get("enable", False)
        if segment.prune.resolved.enable and not filtered:
            yield ("segment.prune.resolved: foreseen groups are trained as they are, not replaced, because under "
                   "trainer.v1.trainer_mode=sync verl submits no other prompt in their place (algorithm.filter_groups "
                   "does, and so do the asynchronous modes)")
        return
    sampler = v1.sampler
    warmup = v1[v1.trainer_mode].num_warmup_batches
    if sampler.max_off_policy_threshold is not None and sampler.max_off_policy_strategy == "wait" and warmup > 0:
        yield (f"trainer.v1.sampler.max_off_policy_strategy=wait lets a complete group queue for up to {warmup} more "
               f"steps: a trained group spans at most {sampler.max_off_policy_threshold} + {warmup} weight versions")


def _losses(config, found: Plan, features: frozenset[str]):
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    correction = config.algorithm.get("rollout_correction") or {}
    if "sais" in features and not rollout.calculate_log_probs:
        refuse("actor_rollout_ref.rollout.calculate_log_probs", False, "True with loss_mode=sais",
               "set it: SAIS needs the log-probs of the version that made each token")
    fully_async = of_fully_async(config)
    legacy = is_recipe(config)  # the loss is handed the stored log-probs
    if "sais" in features and not legacy and not correction.get("bypass_mode", False):
        refuse("algorithm.rollout_correction.bypass_mode", correction.get("bypass_mode"), "True with loss_mode=sais",
               "set it: else verl recomputes the log-probs that SAIS must read as stored")
    if "pois" not in features:
        return
    if actor.ppo_epochs > 1:
        refuse("actor_rollout_ref.actor.ppo_epochs", actor.ppo_epochs, "1 with loss_mode=pois",
               "nothing clips drift under POIS: set it to 1")
    anchor, lines = _anchor(config, found.segment.pois.anchor)
    found.segment = dataclasses.replace(found.segment, pois=dataclasses.replace(found.segment.pois, anchor=anchor))
    yield from lines
    if older := _lets_in_older_tokens(config):
        yield f"loss_mode=pois: {UNCORRECTED.format(older)}"
    if anchor == "version" and legacy:
        lost = _cannot_go_back(config)
        if lost:
            refuse(f"{PREFIX}.pois.anchor", anchor, f"token here: {lost}", "set it to token, or change that")
        if not fully_async.use_rollout_log_probs:
            refuse("async_training.use_rollout_log_probs", False, "True with pois.anchor=version",
                   "set it: else old log-probs are those of the current weights")
        if not fully_async.compute_prox_log_prob:
            yield Setting("async_training.compute_prox_log_prob", True, VERSION_NEEDS)
    elif anchor == "version" and correction.get("bypass_mode", False):
        yield Setting("algorithm.rollout_correction.bypass_mode", False, VERSION_NEEDS)


VERSION_NEEDS = "pois.anchor=version needs log-probs under the last synced weights"
UNCLIPPED = ("nothing clips how far the {} optimiser steps of a weight version go, and three trials of three with 4 "
             "lost their reward (bench/results/robustness_losses.json); watch esgrpo/pois/log_kl_rollout_current")
UNCORRECTED = ("nothing corrects for tokens of older weights, which {} lets in; at a staleness of 2 SmolLM2 learned "
               "nothing with it in 45 steps, in which it learned with verl's loss and with sais (one run each, bench/"
               "results/train_h200_smollm2_losses_one_step.json): take one of these")


def _lets_in_older_tokens(config) -> str:
    """The setting by which rollout runs ahead of the weights; "" where it does not, or verl's own importance weights
    correct for it (`rollout_is`, which bypass_mode leaves out)."""
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("rollout_is") not in (None, "null", "None") and not correction.get("bypass_mode", False):
        return ""
    bound = of_fully_async(config).get("staleness_threshold") or 0.0
    if bound > 0:
        return f"async_training.staleness_threshold={bound:g}"
    mode = config.trainer.v1.trainer_mode if is_v1(config) else ""
    return f"trainer.v1.trainer_mode={mode}" if "async" in mode else ""


def _anchor(config, given: str) -> tuple[str, list[str]]:
    """`pois.anchor` with auto resolved, and what there is to say about it.

    With one optimiser step between two weight syncs the anchor of the token is the policy that made it, up to
    staleness, and costs no forward pass; with more nothing would hold the later ones.
    """
    steps = optimizer_steps_per_version(config)
    blind = is_recipe(config) and ("async_training.use_rollout_log_probs=False leaves no other"
                                   if not of_fully_async(config).use_rollout_log_probs else _cannot_go_back(config))
    anchor = ("token" if steps == 1 or blind else "version") if given == "auto" else given
    lines = []
    if given == "auto":
        why = blind if blind and steps > 1 else f"a weight version has {steps} optimiser step{'s' * (steps > 1)}"
        cost = "; it clips the ratio and takes one forward pass more" if anchor == "version" else ""
        lines.append(f"{PREFIX}.pois.anchor: auto -> {anchor}, because {why}{cost}")
    if anchor == "token" and steps > 1:
        lines.append("loss_mode=pois: " + UNCLIPPED.format(steps) + ", or take pois.anchor=version, sais or one step")
    return anchor, lines


def _cannot_go_back(config) -> str:
    """Why the recipe of verl 0.7.0 has not the log-probs of the version for a later step of it; "" where it has.

    It keeps the version's weights with save_model_to_cpu while the actor may be offloaded: megatron's copy of offloaded
    buffers is empty, of FSDP1 it makes none. FSDP2's is cured (v0_7_0/saved_weights.py).
    """
    actor = config.actor_rollout_ref.actor
    strategy = actor.get("strategy")
    if strategy == "fsdp":
        return "actor.strategy=fsdp: verl 0.7.0 keeps the version's weights of FSDP2 and megatron alone"
    if strategy == "megatron" and (actor.get("megatron") or {}).get("param_offload"):
        return "actor.megatron.param_offload=True: verl 0.7.0 cannot keep a version's weights that are offloaded"
    return ""


def optimizer_steps_per_version(config) -> int:
    """Between two weight syncs. verl's v1 trainers round a batch up to whole mini-batches."""
    actor, fully_async = config.actor_rollout_ref.actor, config.get("async_training")
    steps = actor.ppo_epochs
    if is_v1(config):
        trainer = config.trainer.v1
        updates = (trainer.get(trainer.trainer_mode) or {}).get("parameter_sync_step", 1)
        steps *= updates * max(1, -(-(config.data.train_batch_size // updates) // actor.ppo_mini_batch_size))
    if fully_async is not None:
        steps *= fully_async.require_batches * fully_async.trigger_parameter_sync_step
    return steps


def prompts_per_version(config) -> int:
    """Trained between two weight syncs."""
    fully_async = config.get("async_training")
    if fully_async is None:
        return config.data.train_batch_size
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    return mini_batch * fully_async.require_batches * fully_async.trigger_parameter_sync_step


TAIL_ROUTER = "tail-router"  # slug of the hook that makes the class


def _router(config, found: Plan, run_dir: str) -> None:
    """verl's plugin for routers, where it has one. verl mounts one router and hands it all replicas."""
    from esgrpo.hooks.verl.server import tail_router

    rollout, share = config.actor_rollout_ref.rollout, f"{PREFIX}.routing.tail_share"
    if "router_config_path" not in rollout:
        found.lines.append("routing: this verl has no rollout.router_config_path, so prompts are ordered and replicas "
                           "are not chosen")
        return
    ours = tail_router.config_path(run_dir)
    if rollout.router_config_path not in (None, "", ours):
        refuse(f"{ROLLOUT}.router_config_path", rollout.router_config_path, f"null with {share} above 0",
               f"verl mounts one router, and two cannot both choose the replica: drop yours, or set {share}=0, which "
               "leaves yours alone")
    if rollout.get("full_determinism", False):
        refuse(f"{ROLLOUT}.full_determinism", True, f"False with {share} above 0",
               f"replicas for the tail follow the load: drop it, or set {share}=0")
    found.files[ours] = tail_router.config_text(found.segment)
    if rollout.router_config_path != ours:
        found.settings[f"{ROLLOUT}.router_config_path"] = ours
        found.lines.append(f"{ROLLOUT}.router_config_path: null -> {ours}, because routing keeps replicas for the tail")
