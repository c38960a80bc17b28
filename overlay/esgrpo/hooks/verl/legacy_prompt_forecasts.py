"""Prompts of the legacy synchronous trainer get their forecast before they are repeated and sent to the workers."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

_TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"

HOOK = Hook(
    slug="legacy-prompt-forecasts",
    target=f"{_TRAINER}._get_gen_batch",
    process=("legacy-trainer",),
    kind="wrap",
    why="the only step of fit() between the data loader and the rollout that is a method of its own",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "43673ce9053490c1"}),),
    remove_when="verl drops the legacy trainer",
    features=("history",),
    relies_on=(f"{_TRAINER}.fit", f"{_TRAINER}._validate"),
    without=(("==0.7.0", "only the recipe fully_async_policy is supported, which submits prompts one by one"),),
)

TRAINING = "temperature"  # fit() writes it into the batch's meta_info before this call, _validate() does not


def build(original):
    @functools.wraps(original)
    def _get_gen_batch(self, *args, **kwargs):
        import inspect

        from esgrpo.hooks.verl.legacy_prompt_forecasts import TRAINING, attach

        bound = inspect.signature(original).bind(self, *args, **kwargs)
        training = TRAINING in bound.arguments["batch"].meta_info
        result = original(*bound.args, **bound.kwargs)
        if training:
            attach(self, result)
        return result

    return _get_gen_batch


def attach(trainer, batch) -> None:
    import numpy as np

    from esgrpo.hooks.verl import prompt_rows

    found = prompt_rows.forecasts(trainer, batch.non_tensor_batch["raw_prompt"], trainer.global_steps)
    column = np.empty(len(found), dtype=object)
    column[:] = found
    batch.non_tensor_batch[prompt_rows.FORECAST] = column
    trainer.esgrpo_forecasts = True  # whose prompts were forecast here, their outcomes are observed here
