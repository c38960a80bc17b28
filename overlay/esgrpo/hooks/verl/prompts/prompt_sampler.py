"""Prompts of a fully-async run are chosen by expected gradient, each at the moment the rollouter asks for one."""

from __future__ import annotations

from esgrpo.engine import Hook

_ROLLOUTER = "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"

HOOK = Hook(
    slug="prompt-sampler",
    target=f"{_ROLLOUTER}.__init__",  # _create_dataloader is inherited, and Ray has copied it when the class was made
    process=("rollouter",),
    kind="wrap",
    why="verl took the key data.sampler away in 0.8.0. The rollouter's iterator, its checkpoint and its count of "
        "prompts all follow from the data loader that is made here",
    after=("prompt-queue",),
    remove_when="verl takes a sampler class from the config again",
    features=("sampler",),
    relies_on=(f"{_ROLLOUTER}._create_continuous_iterator", f"{_ROLLOUTER}._feed_samples",
               f"{_ROLLOUTER}.save_checkpoint", f"{_ROLLOUTER}.load_checkpoint",
               "verl.trainer.ppo.ray_trainer:RayPPOTrainer._create_dataloader"),
    without=(("==0.7.0", "the recipe has another rollouter; segment.sampler is refused"),),
)


def around(call):
    from esgrpo.hooks.verl.prompts.prompt_order import with_prompt_order

    rollouter = call.owner
    call()
    rollouter.train_dataloader = with_prompt_order(rollouter, rollouter.train_dataloader)
