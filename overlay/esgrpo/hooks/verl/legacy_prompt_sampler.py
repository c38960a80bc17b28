"""Prompts of the legacy synchronous trainer are chosen by expected gradient."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

_TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"

HOOK = Hook(
    slug="legacy-prompt-sampler",
    target=f"{_TRAINER}._create_dataloader",
    process=("legacy-trainer",),
    kind="wrap",
    why="verl took the key data.sampler away in 0.8.0; the trainer's checkpoint and its count of steps follow from the "
        "data loader that is made here",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "6ae81ad3727eb44c"}),),
    remove_when="verl drops the legacy trainer",
    features=("sampler",),
    relies_on=(f"{_TRAINER}._save_checkpoint", f"{_TRAINER}._load_checkpoint"),
    without=(("<=0.7.1", "data.sampler.class_path names a sampler class there (esgrpo.hooks.verl.curriculum)"),),
)


def build(original):
    @functools.wraps(original)
    def _create_dataloader(self, *args, **kwargs):
        from esgrpo.hooks.verl.prompt_order import with_prompt_order

        result = original(self, *args, **kwargs)
        self.train_dataloader = with_prompt_order(self, self.train_dataloader, lambda: self.global_steps)
        return result

    return _create_dataloader
