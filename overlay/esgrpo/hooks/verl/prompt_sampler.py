"""Prompts of a fully-async run are chosen by expected gradient, each at the moment the rollouter asks for one."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"

HOOK = Hook(
    slug="prompt-sampler",
    target="verl.trainer.ppo.ray_trainer:RayPPOTrainer._create_dataloader",
    process=("rollouter",),
    kind="wrap",
    why="verl took the key data.sampler away in 0.8.0. This method is handed the sampler; the rollouter's iterator, "
        "its checkpoint and its count of prompts all follow from it",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "becb0f30e3323700"}),),
    remove_when="verl takes a sampler class from the config again",
    features=("sampler",),
    relies_on=(f"{_ROLLOUTER}._create_continuous_iterator", f"{_ROLLOUTER}._feed_samples",
               f"{_ROLLOUTER}.save_checkpoint", f"{_ROLLOUTER}.load_checkpoint"),
    without=(("<=0.7.1", "data.sampler.class_path names a sampler class there (esgrpo.hooks.verl.curriculum)"),),
)


def build(original):
    @functools.wraps(original)
    def _create_dataloader(self, *args, **kwargs):
        import inspect

        from esgrpo.hooks.verl.prompt_order import PromptOrder

        bound = inspect.signature(original).bind(self, *args, **kwargs)
        dataset = bound.arguments["train_dataset"]
        if dataset is not None:  # the legacy trainer with its own data set: verl makes both itself
            bound.arguments["train_sampler"] = PromptOrder(dataset, self)
        return original(*bound.args, **bound.kwargs)

    return _create_dataloader
