"""verl 0.7.0 and 0.7.1: the prompt sampler as a class for `data.sampler`, which needs no hook.

    data.sampler.class_path=pkg://esgrpo.hooks.verl.curriculum data.sampler.class_name=PromptCurriculum
    data.dataloader_num_workers=0

Only the synchronous trainer tells such a class how its prompts ended (`update`); a fully-async rollouter of these
releases never does, and would draw from priors for ever. The key is gone from verl 0.8.0 on.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

NAME = "PromptCurriculum"


def __getattr__(name: str):
    """The class is made when verl asks for it: its base class is verl's."""
    if name == NAME:
        return _class()
    raise AttributeError(f"module {__name__} has no attribute {name}")


@functools.cache
def _class():
    from verl.experimental.dataset.sampler import AbstractCurriculumSampler

    from esgrpo.hooks.verl.prompt_order import PromptOrder

    class PromptCurriculum(PromptOrder, AbstractCurriculumSampler):
        def __init__(self, data_source, data_config):
            rollout = SimpleNamespace(n=None)  # the data section does not say; the first batch does
            config = SimpleNamespace(data=data_config, actor_rollout_ref=SimpleNamespace(rollout=rollout))
            self.updates = 0  # training steps: one weight version each
            PromptOrder.__init__(self, data_source, SimpleNamespace(config=config), lambda: self.updates)

        def update(self, batch) -> None:
            """verl calls this once per step with the rewarded batch."""
            from esgrpo.hooks.verl.legacy_prompt_outcomes import observe_batch
            from esgrpo.hooks.verl.prompt_history import save

            uids = list(batch.non_tensor_batch["uid"])
            self.prompts.responses = len(uids) // len(set(uids))
            self.updates += 1
            observe_batch(self.owner, batch, self.updates)
            save(self.owner)

    return PromptCurriculum
