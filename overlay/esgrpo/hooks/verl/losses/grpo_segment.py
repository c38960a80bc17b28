"""Register the advantage estimator `grpo_segment`: GRPO whose group statistics leave pruned rows out.

Use with `algorithm.adv_estimator=grpo_segment`. Upstream offers a registry for this, so nothing is wrapped.
"""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="register-grpo-segment",
    target="verl.trainer.ppo.core_algos:register_adv_est",
    process=("trainer", "v1-task-runner"),
    kind="add",
    why="verl's grpo takes the mean and the standard deviation of a group over all rows, also over pruned ones",
    remove_when="verl's grpo leaves out rows whose response_mask is empty",
    # on whenever the group `segment` is used at all: the baseline arm of a comparison names the same estimator
    features=("observe",),
    # compute_advantage decides which arguments arrive; compute_grpo_outcome_advantage is what we must equal bit for bit
    relies_on=(
        "verl.trainer.ppo.core_algos:get_adv_estimator_fn",
        "verl.trainer.ppo.core_algos:compute_grpo_outcome_advantage",
        "verl.trainer.ppo.ray_trainer:compute_advantage",
    ),
)


def grpo_segment(token_level_rewards, response_mask, index, config=None, **_unused):
    """verl's estimator contract: returns (advantages, returns), both [B, T], the same tensor for outcome rewards.

    verl passes `norm_adv_by_std_in_grpo` only to its own grpo branch, so it is read from `config` (the `algorithm`
    group) here; what else verl passes to estimators (`reward_baselines`) has no meaning for GRPO.
    """
    from esgrpo import losses
    from esgrpo.hooks.verl.losses import weighted_rows

    norm_by_std = True if config is None else bool(config.get("norm_adv_by_std_in_grpo", True))
    advantages = losses.grpo_segment_advantage(token_level_rewards, response_mask, index, norm_by_std=norm_by_std,
                                               tossed=weighted_rows.current())
    return advantages, advantages


def apply(module) -> None:
    """Register; verl itself raises when the name belongs to another function, so a clash cannot pass unnoticed."""
    module.register_adv_est("grpo_segment")(grpo_segment)


def installed(module) -> bool:
    return module.ADV_ESTIMATOR_REGISTRY.get("grpo_segment") is grpo_segment
