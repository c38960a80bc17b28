"""Masks rows of responses that are cut and left out (`prune.treatment=masked`): no loss, no statistic sees them."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="pruned-rows-are-masked",
    target="verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess",
    process=("agent-loop-worker",),
    kind="wrap",
    why="nothing in verl marks a row as invalid; dropping rows would break mini-batch and data-parallel divisibility, "
        "a zero response_mask is understood everywhere",
    remove_when="verl's batches carry a validity mask per row",
    features=("prune",),
    relies_on=("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._agent_loop_postprocess",),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


def around(call):
    mask_pruned(call.arguments["inputs"])
    return call()


def mask_pruned(rows) -> list:
    """Zero the response_mask of the rows that no loss may see; returns them."""
    from esgrpo.algo.treatment import masked

    gone = masked([row.extra_fields.get("esgrpo") for row in rows])
    found = [row for row, is_masked in zip(rows, gone, strict=True) if is_masked]
    for row in found:
        row.response_mask.zero_()
    return found
