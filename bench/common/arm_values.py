"""An arm of a training comparison with values of its own, so that a baseline can be tuned.

`plain staleness=4 workers=8` is plain with these two. A value that an arm does not name is that of the comparison, the
same for all of its arms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.common import modules, stack
from bench.common.algorithms import ACTOR, AGGREGATIONS, FILTERED, LOSSES

TRAINERS = ("fully_async", "separate_async")
NAMES = {"plain": "off", "overlay": "all"}  # for arms of bench.common.modules
_NUMBER, _COUNT, _RATE = r"\d+(\.\d+)?", r"[1-9]\d*", r"\d+(\.\d+)?(e-\d+)?"
# name -> (what it must look like, in words, trainers that have it)
VALUES = {
    "staleness": (_NUMBER, "a number from 0 on: async_training.staleness_threshold", ("fully_async",)),
    "concurrent": (_COUNT, "prompts in flight on a replica, from 1 on", ("fully_async",)),
    "warmup": (_NUMBER, "batches in flight before the first step, from 0 on", ("separate_async",)),
    "off_policy": (_COUNT, "weight versions that a response may span, from 1 on", ("separate_async",)),
    "workers": (_COUNT, "processes of the agent loop and of the reward loop, from 1 on", TRAINERS),
    "gpus": (rf"{_COUNT}/{_COUNT}", "TRAINER/ROLLOUT GPUs, as in 2/2", TRAINERS),
    "lr": (_RATE, "a learning rate, as in 1e-4", TRAINERS),
    "steps": (_COUNT, "optimiser steps a weight version, from 1 on", TRAINERS),
    "loss_agg_mode": ("|".join(AGGREGATIONS), f"one of {', '.join(AGGREGATIONS)}", TRAINERS),
    "loss": ("|".join(map(re.escape, LOSSES)), f"one of {', '.join(LOSSES)}", TRAINERS),
    "age_scale": (_NUMBER, "a number: overlap.age_scale, of an arm with overlap", TRAINERS),
    "history": ("cold|warm", "cold or warm", TRAINERS),
    "dynamic": ("on|off", "on or off: verl lends the trainer's GPUs to the rollout", ("fully_async",)),
    "switch": ("on|off", "on or off: verl lends the trainer's GPUs to the rollout", ("separate_async",)),
    "filter_groups": ("on|off", "on or off: verl replaces groups whose responses all score alike", ("separate_async",)),
}
_SIZES = {"staleness": ("staleness", float), "concurrent": ("concurrent", int), "warmup": ("warmup", float),
          "off_policy": ("off_policy", int), "steps": ("sync_every", int),
          "lr": ("learning_rate", float)}  # of the functions of bench.common.stack
_SLEEP = ("actor_rollout_ref.rollout.free_cache_engine=True", "actor_rollout_ref.rollout.enable_sleep_mode=True")
_LENT = {"dynamic": ("async_training.use_dynamic_resource_scheduling=True",),
         "switch": ("trainer.v1.separate_async.hybrid_rollout.enable_switch=True",
                    "actor_rollout_ref.hybrid_engine=True")}


@dataclass(frozen=True)
class Arm:
    """`text` as the user wrote it, `module` an arm of bench.common.modules."""

    text: str
    module: str
    values: dict[str, str] = field(default_factory=dict)

    @property
    def warm(self) -> bool:
        return self.values.get("history") == "warm"

    def gpus(self, default: tuple[int, int]) -> tuple[int, int]:
        """(of the trainer, of the rollout)."""
        trainer, _, rollout = self.values.get("gpus", "").partition("/")
        return (int(trainer), int(rollout)) if rollout else default

    def sizes(self) -> dict[str, float | int]:
        """Arguments of a function of bench.common.stack that this arm names."""
        return {_SIZES[name][0]: _SIZES[name][1](value) for name, value in self.values.items() if name in _SIZES}

    def overrides(self) -> list[str]:
        """Lines for verl that are not among `sizes`."""
        lines = list(LOSSES[self.values["loss"]]) if "loss" in self.values else []
        if "loss_agg_mode" in self.values:
            lines.append(f"{ACTOR}.loss_agg_mode={self.values['loss_agg_mode']}")
        if "workers" in self.values:
            lines += [f"actor_rollout_ref.rollout.agent.num_workers={self.values['workers']}",
                      f"reward.num_workers={self.values['workers']}"]
        if "age_scale" in self.values:
            lines += modules.switches(f"overlap.age_scale={self.values['age_scale']}")
        if "filter_groups" in self.values:
            lines += FILTERED if self.values["filter_groups"] == "on" else ["algorithm.filter_groups.enable=False"]
        for name, lent in _LENT.items():
            if self.values.get(name) == "on":
                lines += [*lent, *(_SLEEP if stack.DEVICE == "cuda" else ())]  # vLLM on a CPU has no sleep mode
        return lines


def parse(text: str, known: Iterable[str], trainer: str) -> Arm:
    """Raises ValueError, in one line, for an arm or a value that is not known or that `trainer` has not."""
    name, *rest = re.split(r" (?=\w+=)", text.strip())
    if NAMES.get(name, name) not in known:
        raise ValueError(f"unknown arm {text!r}; known: {', '.join([*NAMES, *known])}")
    values: dict[str, str] = {}
    for part in rest:
        key, _, value = part.partition("=")
        if key not in VALUES:
            raise ValueError(f"arm {text!r}: unknown value {key!r}; known: {', '.join(VALUES)}")
        form, words, trainers = VALUES[key]
        if trainer not in trainers:
            raise ValueError(f"arm {text!r}: {key} is a value of --trainer {trainers[0]}, this is {trainer}")
        if not re.fullmatch(form, value):
            raise ValueError(f"arm {text!r}: {key} is {words}")
        if key == "age_scale" and not name.endswith("overlap"):
            raise ValueError(f"arm {text!r}: age_scale is {words}")
        if key in values:
            raise ValueError(f"arm {text!r}: {key} is said twice")
        values[key] = value
    return Arm(text.strip(), NAMES.get(name, name), values)
