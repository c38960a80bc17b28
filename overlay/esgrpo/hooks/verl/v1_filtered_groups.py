"""verl's group filter (DAPO's dynamic sampling) judges a group by the rows of it that would be trained."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

_BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"

HOOK = Hook(
    slug="v1-filter-trained-rows",
    target=f"{_BUFFER}._dapo_filtered_keys",
    process=("v1-task-runner",),
    kind="wrap",
    why="the filter evicts groups whose rows all have the same metric; a pruned row was cut off and is mostly wrong, "
        "so that a group without a gradient would pass and take the place of one that has",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "02bdeeaa76195148"}),),
    remove_when="verl's filter leaves out rows that are not trained",
    features=("prune",),
    relies_on=(f"{_BUFFER}.__init__", f"{_BUFFER}._clear_groups"),
    without=(("==0.7.0", "no v1 trainers"),),
)

CANONICAL = "reward"  # the metric that is rm_scores; others are in reward_extra_info


def build(original):
    @functools.wraps(original)
    def _dapo_filtered_keys(self, *args, **kwargs):
        import inspect
        from collections import Counter

        from esgrpo.hooks.verl import v1_filtered_groups

        filtered, counts = original(self, *args, **kwargs)
        partition = inspect.signature(original).bind(self, *args, **kwargs).arguments["partition_id"]
        more = v1_filtered_groups.without_gradient(self, partition)
        return filtered | more.keys(), counts + Counter(more.values())

    return _dapo_filtered_keys


def without_gradient(buffer, partition: str) -> dict[str, float]:
    """uid -> common metric of groups that passed since the last call, although pruning left them no gradient.

    verl's cache of verdicts is told, so that its next look counts them itself.
    """
    passed = {uid for uid, verdict in buffer._dapo_classification_cache.get(partition, {}).items() if verdict is None}
    new = passed - getattr(buffer, "esgrpo_filter_judged", set())
    buffer.esgrpo_filter_judged = passed
    found = _judge(buffer, partition, new) if new else {}
    buffer._dapo_classification_cache[partition].update(found)
    return found


def _judge(buffer, partition: str, uids: set[str]) -> dict[str, float]:
    from esgrpo.hooks.verl.group_rows import mask_pruned
    from esgrpo.hooks.verl.v1_rows import final_keys, group_of, with_summaries

    keys = final_keys(key for key in buffer.partitions[partition] if group_of(key) in uids)
    rows = with_summaries(keys, partition, "response_mask", "rm_scores")
    for row in rows:
        row.response_mask = row.response_mask.clone()  # a view into the fetched batch
    mask_pruned(rows)
    groups: dict[str, list] = {}
    for row in rows:
        groups.setdefault(group_of(row.key), []).append(row)
    found = {}
    for uid, members in groups.items():
        trained = [row for row in members if row.response_mask.any()]
        if 0 < len(trained) < len(members) and _is_null(members, trained):
            found[uid] = _metric(buffer, trained[0])
    return found


def _is_null(members: list, trained: list) -> bool:
    from esgrpo.algo.pruning import without_gradient

    summaries = [row.extra_fields["esgrpo"] for row in members]
    return without_gradient((float(row.rm_scores.sum()) for row in trained),
                            (one.get("pivot") for one in summaries if one.get("keep_probability", 1) < 1))


def _metric(buffer, row) -> float:
    name = buffer.filter_groups_metric
    return float(row.rm_scores.sum()) if name == CANONICAL else float(row.extra_fields["reward_extra_info"][name])
