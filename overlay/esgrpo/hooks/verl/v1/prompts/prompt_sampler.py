"""Prompts of verl's v1 trainers are chosen by expected gradient, in the same way as in a fully-async run."""

from __future__ import annotations

from esgrpo.engine import Hook

_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"

HOOK = Hook(
    slug="v1-prompt-sampler",
    target=f"{_TRAINER}._init_dataloader",
    process=("v1-task-runner",),
    kind="wrap",
    why="the method makes the sampler itself, from data.shuffle and nothing else; new prompts and the replay buffer's "
        "refill both draw from the data loader that it makes",
    remove_when="verl takes a sampler class from the config again",
    features=("sampler",),
    relies_on=(f"{_TRAINER}._fetch_one_gen_batch", f"{_TRAINER}._save_checkpoint", f"{_TRAINER}._load_checkpoint"),
    without=(("<0.9", "these releases have no v1 trainers"),),
)


def around(call):
    from esgrpo.hooks.verl.prompts.prompt_order import with_prompt_order

    trainer = call.owner
    result = call()
    trainer.train_dataloader = with_prompt_order(trainer, trainer.train_dataloader, lambda: trainer.global_steps)
    return result
