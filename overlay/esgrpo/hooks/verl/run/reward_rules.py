"""What cannot decide where rewards come after sampling, that is, with verl's colocated reward model. No hook.

There a response ends without a score: no rule would ever see an outcome, and no sampler learn of one. verl asserts
against it for its own group filter, its separate_async and its fully async trainer; sync and colocate_async go on.
"""

from __future__ import annotations

import dataclasses

from esgrpo import conditions
from esgrpo.config import PREFIX, PROFILES, Segment
from esgrpo.hooks.verl.run.plan import Plan, refuse

POOL = "reward.reward_model.enable_resource_pool"
WHY = "a colocated reward model scores responses after sampling"
# what reads the reward of a response when it ends; the audit last, because others need it
SWITCHES = ("prune.verdict.enable", "prune.resolved.enable", "prune.finish_group_after", "sampler.enable",
            "prune.audit.enable")


def after_sampling(config) -> bool:
    """As verl's RewardLoopManager.reward_loop_worker_handles decides it. Other releases keep these keys elsewhere."""
    model = (config.get("reward") or {}).get("reward_model") or {}
    return bool(model.get("enable") and not model.get("enable_resource_pool"))


def lines(config, found: Plan):
    """Takes back what a profile has switched on, and says so; raises ConfigError for what was set by hand."""
    segment = found.segment
    if not segment.enable or not after_sampling(config):
        return
    for key in SWITCHES:
        value = conditions.value_of(segment, key)
        if value == conditions.value_of(Segment(), key):
            continue
        if _by_hand(config, segment, key):
            refuse(f"{PREFIX}.{key}", value, f"{POOL}=True with it", f"{WHY}, and it could decide nothing: set "
                   f"{POOL}=True, or drop the key")
        section = key.rpartition(".")[0]
        segment = _with(segment, section, conditions.value_of(Segment(), section))
        yield f"{PREFIX}.{key}: {value} -> False, because {WHY}; {POOL}=True leaves it on"
    if found.segment.weighted:
        treatment = segment.prune.treatment
        refuse(f"{PREFIX}.prune.treatment", treatment, f"{POOL}=True with it", f"{WHY}, and no reward is known "
               f"when a response is cut: set {POOL}=True, or prune.treatment=failed")
    found.segment = segment
    if segment.history.enable:
        yield (f"{PREFIX}.history.enable: lengths of prompts are learned and their correctness is not, because {WHY}; "
               f"{POOL}=True lets both be learned")


def _by_hand(config, segment: Segment, key: str) -> bool:
    """Said by the user, or nothing that the profile switches on."""
    from omegaconf import OmegaConf

    return (OmegaConf.select(config, f"{PREFIX}.{key}") is not None
            or OmegaConf.select(OmegaConf.create(PROFILES[segment.profile]), key) is None)


def _with(node, path: str, value):
    """The dataclass with another value at a dotted path."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(node, **{name: _with(getattr(node, name), rest, value) if rest else value})
