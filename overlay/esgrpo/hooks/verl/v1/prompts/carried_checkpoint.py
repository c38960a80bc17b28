"""Saves the pool of carried groups with every checkpoint of a v1 trainer."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-carry-checkpoint",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint",
    process=("v1-task-runner",),
    kind="wrap",
    why="verl saves the TransferQueue and re-issues what was unfinished, but nobody would notice a group that did not "
        "come back; written before the checkpoint is marked as the latest one",
    remove_when="verl checks a restored TransferQueue against the checkpoint",
    features=("v1",),
    relies_on=("verl.trainer.ppo.v1.trainer_base:PPOTrainer._load_checkpoint",
               "verl.trainer.ppo.v1.trainer_base:PPOTrainer._reissue_inflight_prompts"),
    without=(("==0.7.0", "no v1 trainers"),),
)


def around(call):
    from esgrpo.hooks.verl.v1.prompts import drawn_prompts
    from esgrpo.hooks.verl.v1.prompts.carried_groups import save

    trainer = call.owner
    save(trainer)
    drawn_prompts.saved(trainer)
    return call()
