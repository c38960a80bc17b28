"""Remembers which groups verl's v1 replay buffer evicts and why; a run in which every group fails ends.

verl gives numbers of evicted groups only, and not always to the step that needs them (`prepare_step` has metrics of its
own), and would replace failed groups for ever.
"""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v1.rows.queue_rows import TRAIN, group_of, tags_in

HOOK = Hook(
    slug="v1-failure-is-loud",
    target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._evict_terminal_groups",
    process=("v1-task-runner",),
    kind="wrap",
    why="the asynchronous replay buffer evicts a group whose agent loop raised and submits another one; with a dead "
        "vLLM server or a reward function that raises it does so without an end and without an error",
    remove_when="verl's replay buffer gives up after a number of failed groups",
    relies_on=("verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync",),
    without=(("==0.7.0", "no v1 trainers"),),
)


def around(call):
    from esgrpo import records
    from esgrpo.algo.carry_over import FILTERED, remember
    from esgrpo.algo.rows import Evicted
    from esgrpo.hooks.verl import owned

    buffer = call.owner
    reasons = reasons_of(call.arguments["eviction_reasons"])
    groups = owned.of(buffer, owned.Groups)
    remember(groups.evicted, reasons)
    partition = call.arguments["partition_id"]
    if partition == TRAIN:
        # the hook on the filter has recorded those that it replaced
        for group in [group for group in reasons if not groups.judged.get(group)]:
            records.write(Evicted(group=group, reason=reasons[group]))
        groups.filtered += sum(why == FILTERED for why in reasons.values())
        groups.evicted_tokens += sum(tag.get("response_len", 0) for key, tag in buffer.partitions[TRAIN].items()
                                     if group_of(key) in reasons)
        count(buffer, call.arguments["global_steps"])
    look(buffer, [group for group, why in reasons.items() if why == "failed"],
         buffer.finished_keys[partition])
    return call()


def count(buffer, version: int) -> None:
    """Failed groups of this version against `segment.max_failed_prompts`; those that no process answered stop the run.

    Under `sync` failed groups stay in the buffer: all of the partition are looked at, each counts once.
    """
    from esgrpo import config
    from esgrpo.algo.failures import Failed
    from esgrpo.errors import RunError
    from esgrpo.hooks.verl.prompts import failed_prompts
    from esgrpo.hooks.verl.v1.prompts.session_errors import TAG

    groups = buffer.failure_keys[TRAIN]
    if not groups or not config.current().enable:
        return
    tags = tags_in(TRAIN)
    found = {group: tags.get(group, {}).get(TAG) for group in sorted(groups)}
    found = {group: told for group, told in found.items() if told is not None}
    gone = [told["error"] for told in found.values() if not told["alone"]]
    if gone:
        raise RunError("rollout", gone[0], "processes that answer", "no group can end well any more, the run stops",
                       "the cause stands in the log above")
    failures = [Failed(group, told["words"], told["error"]) for group, told in found.items()]
    failed_prompts.note(failed_prompts.bound_of(buffer), version, failures,
                        {group: (told["prompt"], None) for group, told in found.items()})


def reasons_of(eviction_reasons) -> dict[str, str]:
    """Group -> why it is evicted, from verl's tuple (stale, filtered, failed, counts of the filtered)."""
    from esgrpo.algo.carry_over import FAILED, FILTERED, STALE

    stale, filtered, failed, _counts = eviction_reasons
    return {group: why for groups, why in ((filtered, FILTERED), (stale, STALE), (failed, FAILED)) for group in groups}


def take_evicted(buffer) -> dict[str, str]:
    """Groups that were evicted since the last call, with the reason."""
    from esgrpo.hooks.verl import owned

    groups = owned.of(buffer, owned.Groups)
    taken, groups.evicted = groups.evicted, {}
    return taken


def look(buffer, failed, good) -> None:
    from esgrpo.errors import RunError
    from esgrpo.hooks.verl import owned

    streak = owned.of(buffer, owned.Failures).streak
    if streak.observe(failed, good):
        raise RunError("rollout", f"{streak.in_a_row} prompt groups failed in a row",
                       "groups that end well", "verl would submit new ones for ever, the run stops",
                       "the cause stands in the log of the agent-loop workers above")
