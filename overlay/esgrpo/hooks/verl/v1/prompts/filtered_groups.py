"""Under verl's v1 trainers another prompt takes the place of a group that pruning left without a gradient.

With verl's group filter (DAPO's dynamic sampling) the filter judges a group by the rows that would be trained. Without
it, the asynchronous buffer replaces what the resolved rule ended, as a fully-async run does. Under `sync` nothing is
replaced then: the other prompt would begin when all others have nearly ended, and verl's loop submits none.
"""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v1.rows.queue_rows import TRAIN

_BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"

HOOK = Hook(
    slug="v1-filter-trained-rows",
    target=f"{_BUFFER}._dapo_filtered_keys",
    process=("v1-task-runner",),
    kind="wrap",
    why="the filter evicts groups whose rows all have the same metric; a pruned row was cut off and is mostly wrong, "
        "so that a group without a gradient would pass and take the place of one that has. What it names is evicted, "
        "and the asynchronous buffer submits a prompt for each",
    remove_when="verl's filter leaves out rows that are not trained",
    features=("prune",),
    relies_on=(f"{_BUFFER}.__init__", f"{_BUFFER}._clear_groups", f"{_BUFFER}._evict_terminal_groups",
               "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync"),
    without=(("==0.7.0", "no v1 trainers"),),
)



def around(call):
    from collections import Counter

    buffer = call.owner
    filtered, counts = call()
    partition = call.arguments["partition_id"]
    if buffer.filter_groups_metric is None:
        return filtered | foreseen(buffer, partition), counts
    more = passed_without_gradient(buffer, partition)
    return filtered | more.keys(), counts + Counter(more.values())


def passed_without_gradient(buffer, partition: str) -> dict[str, float]:
    """uid -> common metric of groups that passed since the last call, although pruning left them no gradient.

    verl's cache of verdicts is told, so that its next look counts them itself.
    """
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.metrics import decision_counts

    groups = owned.of(buffer, owned.Groups)
    passed = {uid for uid, verdict in buffer._dapo_classification_cache.get(partition, {}).items() if verdict is None}
    new, groups.passed = passed - groups.passed, passed
    found = _judge(buffer, partition, new) if new else {}
    decision_counts.add("replaced", groups=len(found))
    buffer._dapo_classification_cache[partition].update(found)
    return found


def foreseen(buffer, partition: str) -> set[str]:
    """Finished groups that the resolved rule ended without a gradient; each is judged, noted and recorded once."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

    from esgrpo import config, records
    from esgrpo.algo.rows import Replaced
    from esgrpo.algo.treatment import is_resolved_null
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.metrics import decision_counts, prune_metrics

    refills = isinstance(buffer, ReplayBufferAsync) and buffer.refill_fn is not None
    if partition != TRAIN or not refills or not config.current().prune.resolved.enable:
        return set()
    finished = buffer.finished_keys[partition]
    groups = owned.of(buffer, owned.Groups)
    groups.judged = judged = {uid: groups.judged[uid] for uid in finished & groups.judged.keys()}
    new = finished - judged.keys()
    judged.update(dict.fromkeys(new, False))
    for uid, members in _groups(buffer, partition, _resolved(buffer, partition, new)).items():
        rows, kept = _summaries(members)
        judged[uid] = is_resolved_null(rows, kept)
        if judged[uid]:
            prune_metrics.note(buffer, rows, True)
            decision_counts.add("replaced", groups=1)
            records.write(Replaced(group=uid, rows=rows))
    return {uid for uid, replaced in judged.items() if replaced}


def _resolved(buffer, partition: str, uids: set[str]) -> set[str]:
    """Those of which the resolved rule pruned somebody; of the others no tensor is fetched."""
    from esgrpo.algo.terms import Rule
    from esgrpo.hooks.verl.v1.rows.queue_rows import final_keys, group_of, with_summaries

    keys = final_keys(key for key in buffer.partitions[partition] if group_of(key) in uids)
    rows = with_summaries(keys, partition) if keys else []
    return {group_of(row.key) for row in rows if row.extra_fields["esgrpo"]["rule"] == Rule.RESOLVED}


def _groups(buffer, partition: str, uids: set[str]) -> dict[str, list]:
    """uid -> its rows with summaries, with the masks that they would be trained with."""
    from esgrpo.hooks.verl.groups.masked_rows import mask_pruned
    from esgrpo.hooks.verl.v1.rows.queue_rows import final_keys, group_of, with_summaries

    keys = final_keys(key for key in buffer.partitions[partition] if group_of(key) in uids)
    rows = with_summaries(keys, partition, "response_mask", "rm_scores") if keys else []
    for row in rows:
        row.response_mask = row.response_mask.clone()  # a view into the fetched batch
    mask_pruned(rows)
    groups: dict[str, list] = {}
    for row in rows:
        groups.setdefault(group_of(row.key), []).append(row)
    return groups


def _summaries(members: list) -> tuple[list[dict], list[bool]]:
    """What the rules of `esgrpo.algo.treatment` are asked with: rows, and which of them would be trained."""
    return ([{**row.extra_fields["esgrpo"], "score": float(row.rm_scores.sum())} for row in members],
            [bool(row.response_mask.any()) for row in members])


def _judge(buffer, partition: str, uids: set[str]) -> dict[str, float]:
    from esgrpo.algo.treatment import is_null

    found = {}
    for uid, members in _groups(buffer, partition, uids).items():
        rows, kept = _summaries(members)
        if any(kept) and not all(kept) and is_null(rows, kept):
            found[uid] = _metric(buffer, members[kept.index(True)])
    return found


def _metric(buffer, row) -> float:
    """REWARD is rm_scores, other metrics are in reward_extra_info."""
    from esgrpo.algo.null_groups import REWARD

    name = buffer.filter_groups_metric
    return float(row.rm_scores.sum()) if name == REWARD else float(row.extra_fields["reward_extra_info"][name])
