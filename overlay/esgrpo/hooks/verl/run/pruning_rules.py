"""What pruning needs of verl's settings, and where a rule for it could cut nothing; `config_rules` asks."""

from __future__ import annotations

import math

from esgrpo.algo.audit import AT_LEAST, has_room, provable_by, wilson_upper
from esgrpo.algo.looks import distance
from esgrpo.algo.loops import first_proof
from esgrpo.algo.terms import Treatment
from esgrpo.config import PREFIX, Segment
from esgrpo.hooks.verl.run import reward_rules
from esgrpo.hooks.verl.run.plan import ROLLOUT, Setting, refuse
from esgrpo.hooks.verl.run.trainers import is_recipe

# denominators that do not depend on which rows were kept; their losses are sums over a row's tokens
FIXED_DENOMINATORS = ("seq-mean-token-sum-norm", "seq-mean-token-sum", "token-sum")
# clip_cov and kl_cov rank tokens by covariance with the advantage; dro adds a penalty that has none
NOT_HOMOGENEOUS = ("clip_cov", "kl_cov", "dro")
EACH_BY_ITSELF = "seq-mean-token-mean"  # divides every row by its own tokens
FINEST = 10_000  # parts of 1 in which a message gives a bound


def lines(config, segment: Segment):
    """Yields settings to change and lines to say; raises ConfigError for what cannot be right."""
    if segment.prunes:
        _can_cut(config, segment)
        estimator, treatment = str(config.algorithm.adv_estimator), segment.prune.treatment
        if treatment == Treatment.FAILED:
            pass  # rows as all others
        elif estimator == "grpo":
            yield Setting("algorithm.adv_estimator", "grpo_segment",
                          f"{PREFIX}.prune.treatment={treatment} changes the group statistics")
        elif estimator != "grpo_segment":
            refuse("algorithm.adv_estimator", estimator, f"grpo or grpo_segment with {PREFIX}.prune.treatment="
                   f"{treatment}", f"set it, or {PREFIX}.prune.treatment=failed")
    yield from _weights(config, segment)
    yield from _cut_rows(config, segment)
    if segment.enable and segment.prune.repetition.enable:
        yield from loops(config, segment)
    if segment.enable and segment.prune.verdict.enable:
        yield from _needs_log_probs(config, "prune.verdict tells failures by the log-probs of tokens, too")
        size, fraction = config.actor_rollout_ref.rollout.n, segment.prune.audit.max_fraction
        if not has_room(fraction, size):  # a profile switches them on for responses without siblings, too
            yield (f"{PREFIX}.prune.verdict: nothing will be cut, because prune.audit.max_fraction = {fraction:g} of "
                   f"rollout.n = {size} is not one response")


def _up(value: float) -> float:
    """Rounded so that what a message asks for is enough."""
    return math.ceil(FINEST * value) / FINEST


def _can_cut(config, segment: Segment) -> None:
    """Refuses a rule that is on and could never cut anything."""
    prune, size, budget = segment.prune, config.actor_rollout_ref.rollout.n, config.data.max_response_length
    audit, masked = prune.audit, prune.treatment == Treatment.MASKED
    forecasts = prune.resolved.enable or prune.finish_group_after > 0
    if prune.finish_group_after >= size:
        refuse(f"{PREFIX}.prune.finish_group_after", prune.finish_group_after,
               f"less than rollout.n = {size}: whom it could cut is done by then", "lower it")
    if forecasts and size <= AT_LEAST:
        refuse(f"{ROLLOUT}.n", size, f"at least {AT_LEAST + 1} with group rules of {PREFIX}.prune",
               f"raise it, or switch the rules off: {AT_LEAST} members of a group are never cut")
    # a loop whose row is trained is not capped
    if (forecasts or (masked and segment.audited)) and not has_room(audit.max_fraction, size):
        refuse(f"{PREFIX}.prune.audit.max_fraction", audit.max_fraction,
               f"at least {_up(1 / size):g}, one of rollout.n = {size}",
               "raise it: not one member of a group could be cut")
    needed = provable_by(audit.max_false_rate)
    if forecasts and needed > audit.window:
        bound = _up(wilson_upper(0, audit.window))
        refuse(f"{PREFIX}.prune.audit.max_false_rate", audit.max_false_rate,
               f"at least {bound:g} with {PREFIX}.prune.audit.window={audit.window}, the bound without one false prune",
               f"raise it{f', or the window to {needed}' * math.isfinite(needed)}: no group rule could ever cut")
    if prune.verdict.enable and distance(prune.verdict.check_interval, budget) >= budget:
        refuse(f"{PREFIX}.prune.verdict.check_interval", prune.verdict.check_interval,
               f"less than data.max_response_length = {budget}", "lower it: no response would be looked at")


def _weights(config, segment: Segment):
    """What weights and predictions need: no estimated spread, a fixed denominator, a loss linear in the advantage.

    Nothing that is known to be biased is left as it is: each setting is changed, and said.
    """
    actor = config.actor_rollout_ref.actor
    if is_recipe(config) and segment.audited:
        refuse(f"{PREFIX}.prune.audit.enable", True, "False with verl 0.7.0", "its agent loops ask no replica for "
               "progress and its estimator gets no weights: switch the rules off, or use verl 0.9.1")
    if not segment.weighted:
        return
    loss_mode = actor.policy_loss.get("loss_mode", "vanilla")
    if loss_mode in NOT_HOMOGENEOUS:
        refuse("actor_rollout_ref.actor.policy_loss.loss_mode", loss_mode, "another loss with audited pruning",
               "it is not proportional to the advantage, which carries the row weights: choose pois, sais or vanilla")
    treatment = segment.prune.treatment
    if treatment == Treatment.VALUE and config.algorithm.get("use_kl_in_reward", False):
        refuse("algorithm.use_kl_in_reward", True, f"False with {PREFIX}.prune.treatment=value",
               "a predicted reward has no KL penalty: use actor.use_kl_loss, or prune.treatment=failed")
    mode = actor.get("loss_agg_mode", "token-mean")
    if mode not in FIXED_DENOMINATORS:
        yield Setting("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum-norm",
                      f"{mode} divides by what pruning leaves, and the weighted gradient would be biased")
        mode = "seq-mean-token-sum-norm"
    if mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor") is None:
        yield Setting("actor_rollout_ref.actor.loss_scale_factor", config.data.max_response_length,
                      "verl would divide by the longest response of each micro-batch, which pruning changes (now by "
                      "data.max_response_length)")
    if config.algorithm.get("norm_adv_by_std_in_grpo", True):
        yield Setting("algorithm.norm_adv_by_std_in_grpo", False,
                      f"{PREFIX}.prune.treatment={treatment} does not know a complete group's standard deviation")


def weighs_cut_rows(config, segment: Segment) -> bool:
    """Rows of cut responses get a factor, `algo.treatment.CutWeights`: a loss would weigh their tokens too much."""
    return (_divides_cut_rows(config, segment) and not is_recipe(config)
            and config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla") not in NOT_HOMOGENEOUS)


def _divides_cut_rows(config, segment: Segment) -> bool:
    return (segment.prunes and segment.prune.treatment == Treatment.FAILED
            and config.actor_rollout_ref.actor.get("loss_agg_mode", "token-mean") == EACH_BY_ITSELF)


def _cut_rows(config, segment: Segment):
    if weighs_cut_rows(config, segment):
        yield (f"{PREFIX}.prune: with loss_agg_mode={EACH_BY_ITSELF} a response that is cut weighs as much as that "
               "part of it would in the complete one (esgrpo/prune/cut_weight)")
    elif _divides_cut_rows(config, segment):
        yield (f"{PREFIX}.prune: loss_agg_mode={EACH_BY_ITSELF} weighs the tokens of a response that is cut more than "
               "those of a complete one, which favours short answers; here no factor takes that back (verl 0.7.0, or "
               f"policy_loss.loss_mode {', '.join(NOT_HOMOGENEOUS)}): seq-mean-token-sum-norm has no such weight")


def _needs_log_probs(config, why: str):
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield Setting("actor_rollout_ref.rollout.calculate_log_probs", True, f"{PREFIX}.{why}")


def loops(config, segment: Segment):
    """A loop is proven by the log-probs of its tokens, which verl asks its engines for only if it is told to."""
    rule = segment.prune.repetition
    yield from _needs_log_probs(config, "prune.repetition proves a loop by the log-probs of its tokens")
    if not segment.prune.audit.enable:
        pool = f" and {reward_rules.POOL}=True" if reward_rules.after_sampling(config) else ""
        yield (f"{PREFIX}.prune.repetition: nothing measures how many loops would have come out right; "
               f"prune.audit.enable=True{pool} exempts some of them by a coin (not with verl 0.7.0)")
    first, budget = first_proof(rule), config.data.max_response_length
    if first >= budget:
        yield (f"{PREFIX}.prune.repetition: no loop will be found, because with min_span = {rule.min_span} and "
               f"check_interval = {rule.check_interval} the first is proven at {first} tokens, and "
               f"data.max_response_length = {budget}")
