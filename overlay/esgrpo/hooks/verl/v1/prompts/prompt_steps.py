"""Once per step of verl's v1 trainers: the prompt history is saved, and the prompt sampler's metrics are logged."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-prompt-steps",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._consume_sync_metrics",
    process=("v1-task-runner",),
    kind="wrap",
    why="the end of a step, and what it returns is logged; verl knows neither the history nor the sampler",
    remove_when="verl keeps a history of its prompts",
    features=("history",),
    relies_on=("verl.trainer.ppo.v1.trainer_base:PPOTrainer.fit",),
    without=(("<0.9", "these releases have no v1 trainers"),),
)


def around(call):
    from esgrpo.hooks.verl.prompts.prompt_history import save
    from esgrpo.hooks.verl.prompts.prompt_order import metrics_of

    trainer = call.owner
    save(trainer)
    return {**call(), **metrics_of(trainer)}
