"""Masks the rows of pruned responses, so that no loss and no group statistic sees them."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="pruned-rows-are-masked",
    target="verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess",
    process=("agent-loop-worker",),
    kind="wrap",
    why="nothing in verl marks a row as invalid; dropping rows would break mini-batch and data-parallel divisibility, "
        "a zero response_mask is understood everywhere",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "81da94eff5f05a87"}),),
    remove_when="verl's batches carry a validity mask per row",
    features=("prune",),
    relies_on=("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._agent_loop_postprocess",),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


def build(original):
    @functools.wraps(original)
    def _postprocess(self, *args, **kwargs):
        import inspect

        from esgrpo.hooks.verl.group_rows import mask_pruned

        bound = inspect.signature(original).bind(self, *args, **kwargs)
        mask_pruned(bound.arguments["inputs"])
        return original(*bound.args, **bound.kwargs)

    return _postprocess


def mask_pruned(rows) -> None:
    """Zero the response_mask of pruned rows, group by group.

    A group whose members were all pruned stays as it is: there is no sibling whose statistics it would disturb, and
    masking it whole could empty a mini-batch (division by zero tokens). Mostly its rewards are equal and give no
    gradient; where they differ, the shortened responses are trained like any others. Not so where a coin was tossed:
    a row that it fell against must not be trained, and the coin leaves two members of a group alone.
    """
    from esgrpo import config

    keep_loops = config.current().prune.repetition.keep_row
    groups: dict[str, list] = {}
    for row in rows:
        summary = row.extra_fields.get("esgrpo")
        if summary is not None:
            groups.setdefault(summary["group"], []).append((row, summary))
    for members in groups.values():
        pruned = [row for row, summary in members if summary["outcome"] == "prune"
                  and not (keep_loops and summary["rule"] == "repetition")]
        if len(pruned) == len(members):
            pruned = [row for row in pruned if row.extra_fields["esgrpo"].get("keep_probability", 1) < 1]
        for row in pruned:
            row.response_mask.zero_()
