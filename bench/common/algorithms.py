"""GRPO and DAPO as verl has them, and the policy losses that a comparison can choose."""

from __future__ import annotations

from bench.common.modules import switches

ACTOR, REWARD = "actor_rollout_ref.actor", "+reward.reward_kwargs"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
ALGORITHMS = ("grpo", "dapo")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
FILTERED = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")
# verl's own by their names; `recomputed` is vanilla against log-probs under the last synced weights
_RECOMPUTED = "algorithm.rollout_correction.bypass_mode=False"
LOSSES = {
    **{name: (f"{LOSS}={name}",) for name in ("vanilla", "gspo", "sapo", "clip_cov", "kl_cov", "geo_mean", "cispo",
                                               "pois", "sais")},
    "recomputed": (f"{LOSS}=vanilla", _RECOMPUTED),
    **{f"{name}+dmmpt": (f"{LOSS}={name}", *switches("dmmpt.enable")) for name in ("pois", "sais")},
}


def overrides(algorithm: str, cap: int, overlong: int, filters: bool) -> tuple[str, ...]:
    """Of one algorithm; `cap` and `overlong` in tokens: the budget, and its end in which the penalty grows from 0 to 1.

    GRPO is verl's default: clip ratio 0.2 on both sides, token-mean, no KL term. `filters`: the trainer can sample
    dynamically, which verl 0.9.1 does under its v1 trainers only.
    """
    if algorithm == "grpo":
        return ()
    return (f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.loss_agg_mode=token-mean", "reward.reward_manager.name=dapo",
            f"{REWARD}.max_resp_len={cap}", f"{REWARD}.overlong_buffer_cfg.enable=True",
            f"{REWARD}.overlong_buffer_cfg.len={overlong}", f"{REWARD}.overlong_buffer_cfg.penalty_factor=1.0",
            f"{REWARD}.overlong_buffer_cfg.log=False", *(FILTERED if filters else ()))


def said(algorithm: str, overlong: int, filters: bool) -> str:
    """What is on, for the notes of a record."""
    if algorithm == "grpo":
        return "GRPO: clip ratio 0.2, token-mean where an arm names no loss_agg_mode, no KL term"
    sampling = "dynamic sampling on acc" if filters else "no dynamic sampling (v1 trainers of verl only)"
    return f"DAPO: clip ratio 0.2 and 0.28, token-mean, overlong penalty over the last {overlong} tokens, {sampling}"
