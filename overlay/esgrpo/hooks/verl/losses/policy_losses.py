"""Register the policy losses `pois` and `sais` (`actor.policy_loss.loss_mode`), each with optional DMMPTs.

Upstream offers a registry for this, so nothing is wrapped. The losses are in `esgrpo.losses`; here verl's contract is
translated: seven arguments in, `(scalar loss, metrics)` out, aggregation through verl's own `agg_loss`.
"""

from __future__ import annotations

import functools

from esgrpo.engine import Hook

HOOK = Hook(
    slug="register-policy-losses",
    target="verl.trainer.ppo.core_algos:register_policy_loss",
    process=("actor-worker",),
    kind="add",
    why="verl has no loss whose ratio is 1 at every optimiser step, nor one that masks mastered positive tokens",
    patches=(("==0.7.0", ("segment-keys-through-legacy-actors", "tolerate-masked-micro-batches")),),
    remove_when="verl registers pois and sais itself",
    features=("pois", "sais", "dmmpt"),
    # ppo_loss decides which arguments arrive; vanilla is the loss that sais must equal
    relies_on=(
        "verl.trainer.ppo.core_algos:get_policy_loss_fn",
        "verl.trainer.ppo.core_algos:agg_loss",
        "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla",
        "verl.workers.utils.losses:ppo_loss",
    ),
)

# columns of the batch that a patched legacy actor hands over
BATCH_KEYS = ("rollout_log_probs", "token_level_scores", "rm_scores", "acc")
# verl 0.7.0 has no other path to a loss than these; joint fingerprint with segment-keys-through-legacy-actors applied
LEGACY_ACTORS = (
    "verl.workers.actor.dp_actor:DataParallelPPOActor.update_policy",
    "verl.workers.actor.megatron_actor:MegatronPPOActor.make_minibatch_iterator",
    "verl.workers.actor.megatron_actor:MegatronPPOActor.forward_backward_batch",
    "verl.workers.actor.megatron_actor:MegatronPPOActor.update_policy",
)
LEGACY_RELEASE, LEGACY_PATCHED = "0.7.0", "d9612d0668558084"


def _takes_micro_batch(loss):
    """Declare what `loss` needs of the batch, and take what a patched legacy actor hands over as keywords."""

    @functools.wraps(loss)
    def with_micro_batch(*args, micro_batch=None, entropy=None, **kwargs):
        if micro_batch is None:
            return loss(*args, **kwargs)
        from esgrpo.hooks.verl.losses import loss_context

        with loss_context.handed_over(micro_batch, entropy):
            return loss(*args, **kwargs)

    with_micro_batch.batch_keys = BATCH_KEYS
    return with_micro_batch


@_takes_micro_batch
def pois(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """Policy gradient with ratio 1. `old_log_prob` enters the loss only under `segment.pois.anchor=version`."""
    from esgrpo import losses
    from esgrpo.config import current

    old_log_prob = _stored(old_log_prob)
    if current().pois.anchor == "version":
        matrix, metrics = _clipped(log_prob, old_log_prob, advantages, response_mask, config)
    else:
        matrix, metrics = losses.pois_matrix(log_prob, advantages), {}
    metrics |= _drift("pois", log_prob, _rollout_log_prob(old_log_prob), response_mask)
    return _aggregate("pois", matrix, metrics, log_prob, response_mask, loss_agg_mode, config, rollout_is_weights)


@_takes_micro_batch
def sais(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """Clipped ratio against the version that made each token, whether or not verl recomputed `old_log_prob`."""
    behaviour = _rollout_log_prob(old_log_prob, required_by="sais")
    matrix, metrics = _clipped(log_prob, behaviour, advantages, response_mask, config)
    metrics |= _drift("sais", log_prob, behaviour, response_mask)
    return _aggregate("sais", matrix, metrics, log_prob, response_mask, loss_agg_mode, config, rollout_is_weights)


def _stored(old_log_prob):
    """The batch's own old_log_probs: the legacy FSDP actor replaces them by log_prob.detach() when it holds one
    mini-batch and actor.use_rollout_log_probs is off, and every ratio and drift would read 1 and 0."""
    from esgrpo.hooks.verl.losses import loss_context

    batch = loss_context.current()
    stored = batch.column("old_log_probs") if isinstance(batch, loss_context.LegacyMicroBatch) else None
    return old_log_prob if stored is None else stored


def _rollout_log_prob(old_log_prob, required_by: str = ""):
    """The micro-batch's rollout log-probs; verl's `old_log_prob` stands in for them (bypass_mode makes them equal).

    Inside `ppo_loss` a loss that is *defined* by them must not fall back: recomputed log-probs are another loss.
    """
    from esgrpo.errors import HookError
    from esgrpo.hooks.verl.losses import loss_context

    batch = loss_context.current()
    stored = None if batch is None else batch.column("rollout_log_probs")
    if stored is None and batch is not None and required_by:
        raise HookError(HOOK.slug, "the batch has no rollout_log_probs", f"stored log-probs for {required_by}",
                        "the ratio would not be against the version that made the token",
                        "set actor_rollout_ref.rollout.calculate_log_probs=True")
    return old_log_prob if stored is None else stored


def _clipped(log_prob, old_log_prob, advantages, response_mask, config):
    """Clipped loss matrix under verl's clip settings, and verl's clip metrics."""
    from esgrpo import losses

    low, high = config.clip_ratio_low, config.clip_ratio_high
    matrix, events = losses.clipped_matrix(
        log_prob,
        old_log_prob,
        advantages,
        clip_low=config.clip_ratio if low is None else low,
        clip_high=config.clip_ratio if high is None else high,
        clip_c=config.clip_ratio_c,
    )
    return matrix, losses.clip_metrics(events, response_mask)


def _drift(name, log_prob, rollout_log_prob, response_mask) -> dict:
    """Drift of the current policy from the one that made the tokens, under the overlay's metric prefix."""
    from esgrpo import losses

    metrics = losses.drift_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"esgrpo/{name}/{key}": value for key, value in metrics.items()}


def _aggregate(name, matrix, metrics, log_prob, response_mask, loss_agg_mode, config, weights):
    """Weights, DMMPTs, verl's aggregation. The response mask stays whole: masked tokens count in the denominator."""
    from verl.trainer.ppo.core_algos import agg_loss

    from esgrpo import losses
    from esgrpo.config import current

    if weights is not None:
        matrix = matrix * weights
    if current().dmmpt.enable:
        masked = _mastered(current(), log_prob, response_mask)
        matrix = matrix.masked_fill(masked, 0.0)
        counts = losses.dmmpt_metrics(masked, response_mask)
        metrics |= {f"esgrpo/dmmpt/{key}": value for key, value in counts.items()}
    loss = agg_loss(
        loss_mat=matrix, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    return loss, {key: value.item() for key, value in metrics.items()}


def _mastered(segment, log_prob, response_mask):
    """The DMMPT mask [B, T] of the running micro-batch; raises when what it needs did not arrive."""
    from esgrpo import losses
    from esgrpo.errors import HookError
    from esgrpo.hooks.verl.losses import loss_context

    batch = loss_context.current()
    found = {
        "micro-batch": batch,
        "entropy": None if batch is None else batch.entropy(),
        "scores": None if batch is None else batch.scores(),
    }
    absent = [what for what, value in found.items() if value is None]
    if absent:
        raise HookError(HOOK.slug, f"the loss was called without {', '.join(absent)}", "all of them for segment.dmmpt",
                        "no token could be masked", "set actor_rollout_ref.actor.calculate_entropy=True and keep the "
                        "policy-loss-context hook")
    correct = losses.correct_rows(found["scores"], segment.success_threshold, batch.acc())
    return losses.dmmpt_mask(log_prob, found["entropy"], response_mask, correct,
                             tau=segment.dmmpt.tau, sigma=segment.dmmpt.sigma)


def _check_legacy_actors() -> None:
    """Without the patch, the legacy actors of 0.7.0 would call the losses without what they are computed from."""
    from esgrpo import fingerprint, releases
    from esgrpo.errors import HookError

    if releases.public(releases.installed("verl") or "") != LEGACY_RELEASE:
        return
    found, missing = fingerprint.of_targets(LEGACY_ACTORS)
    if found != LEGACY_PATCHED:
        raise HookError(HOOK.slug, f"the legacy actors have fingerprint {found or missing}",
                        f"{LEGACY_PATCHED}: git patch segment-keys-through-legacy-actors",
                        "pois and sais would be computed without the batch's log-probs and scores",
                        "apply the patches for verl v0.7.0 with ./apply.sh")


def apply(module) -> None:
    """Register both. verl would overwrite silently, so a name that upstream has taken is refused."""
    from esgrpo.errors import HookError

    _check_legacy_actors()
    for name, loss in (("pois", pois), ("sais", sais)):
        taken = module.POLICY_LOSS_REGISTRY.get(name)
        if taken not in (None, loss):
            raise HookError(HOOK.slug, f"{name} is {taken.__module__}.{taken.__qualname__}", "a free name",
                            "the loss would be replaced without a word", "retire this hook or rename the loss")
        module.register_policy_loss(name)(loss)


def installed(module) -> bool:
    return all(module.POLICY_LOSS_REGISTRY.get(name) is loss for name, loss in (("pois", pois), ("sais", sais)))
