"""Lets `+actor_rollout_ref.rollout.segment.*` through verl's RolloutConfig, and only where somebody has read it."""

from __future__ import annotations

import dataclasses

from esgrpo.engine import MARKER, Hook

HOOK = Hook(
    slug="segment-config-key",
    target="verl.workers.config.rollout:RolloutConfig",
    process=("driver", "task-runner", "rollouter", "trainer", "actor-worker", "rollout-worker", "agent-loop-worker",
             "vllm-server"),
    kind="add",
    why="hydra's instantiate rejects keys that RolloutConfig does not declare: InstantiationException, unexpected "
        "keyword argument 'segment'. rollout.custom would work from 0.7.0 on, but is not the promised key",
    remove_when="verl's RolloutConfig accepts a key `segment`, or arbitrary extension groups",
)


def apply(module) -> None:
    """Replace the class by a subclass with one more field, under the same name, so that pickles and _target_ agree."""
    base = module.RolloutConfig
    if installed(module):
        return

    def __post_init__(self):
        from esgrpo import guard

        base.__post_init__(self)
        guard.check_segment(self.segment)

    subclass = dataclasses.make_dataclass(
        base.__name__, [("segment", dict | None, dataclasses.field(default=None))], bases=(base,), frozen=False,
        namespace={"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
                   MARKER: HOOK.slug, "__post_init__": __post_init__},
    )
    subclass.__module__ = base.__module__
    module.RolloutConfig = subclass


def installed(module) -> bool:
    return any(f.name == "segment" for f in dataclasses.fields(module.RolloutConfig))
