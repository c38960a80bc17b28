"""Says and counts what a restart of verl's v1 trainers generates a second time."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.errors import say
from esgrpo.hooks.verl.v1.rows import queue_rows

HOOK = Hook(
    slug="v1-reissued-groups",
    target="verl.trainer.ppo.v1.trainer_base:PPOTrainer._reissue_inflight_prompts",
    process=("v1-task-runner",),
    kind="wrap",
    why="a restored TransferQueue holds the finished members of unfinished groups; this method throws them away and "
        "generates the whole group again, which only verl's log at INFO says, in rows",
    remove_when="verl's v1 checkpoint holds the tokens of responses that are being generated",
    features=("v1",),
    relies_on=("verl.trainer.ppo.v1.trainer_base:PPOTrainer.fit",),
    without=(("==0.7.0", "no v1 trainers"),),
)


def around(call):
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.v1.prompts import carried_groups, drawn_prompts

    trainer = call.owner
    carried_groups.pool_of(trainer)  # now: the replay buffer's first look would take what came back for news
    partition = call.argument("partition_id")
    drawn_prompts.started(trainer, tags_of(trainer, partition))
    lost = unfinished(trainer, partition)
    result = call()
    if lost["groups"]:
        tell(lost)
        owned.of(trainer, owned.Restarted).lost = lost
    return result


def tags_of(trainer, partition: str) -> dict[str, dict]:
    """Tags of all keys in the restored queue; under `sync` verl restores none."""
    return {} if trainer.trainer_mode == "sync" else queue_rows.tags_in(partition)


def unfinished(trainer, partition: str) -> dict[str, int]:
    """Groups without an end in the queue, their members that had ended, the tokens of these, and all other members.

    The finished ones are not kept on purpose. They are the short ones of their group, and those that were running have
    lost their tokens: drawn again, they would come out shorter than the ones they stand for. Starting the group as a
    whole costs tokens and leaves every group a sample of n.
    """
    group_of, tags = queue_rows.group_of, queue_rows.tags_in(partition)
    groups = {key for key, tag in tags.items()
              if tag.get("is_prompt", False) and tag.get("status") in ("pending", "running")}
    rows = {key: tag for key, tag in tags.items() if not tag.get("is_prompt", False) and group_of(key) in groups}
    ended = {key.rpartition("_")[0] for key in rows}  # a session may have given several rows
    tokens = sum(tag.get("response_len", 0) for tag in rows.values())
    return {"groups": len(groups), "finished": len(ended), "tokens": tokens,
            "running": len(groups) * trainer.config.actor_rollout_ref.rollout.n - len(ended)}


def tell(lost: dict[str, int]) -> None:
    from esgrpo import records
    from esgrpo.algo.resuming import reissued_words
    from esgrpo.algo.rows import Restart

    records.write(Restart(**lost))
    say(f"esgrpo: {reissued_words(**lost)}")
