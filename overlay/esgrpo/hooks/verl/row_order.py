"""Prompts of a synchronous step are submitted in complementary order; the rows come back as verl sent them."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

_WORKER = "verl.experimental.agent_loop.agent_loop:AgentLoopWorker"

HOOK = Hook(
    slug="prompts-in-complementary-order",
    target=f"{_WORKER}.generate_sequences",
    process=("agent-loop-worker",),
    kind="wrap",
    why="the legacy trainer submits prompts as the data loader gave them and joins the responses by position. "
        "AgentLoopManager.generate_sequences looks at its caller's frame (auto_await), so a wrap around it would "
        "change what it returns; each worker orders its own piece instead, and the pieces run side by side",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "ccec177dddf73c82"}),),
    remove_when="verl orders the prompts of a step by predicted length",
    features=("routing",),
    relies_on=(f"{_WORKER}._postprocess", "verl.experimental.agent_loop.agent_loop:AgentLoopManager.generate_sequences",
               "verl.experimental.agent_loop.agent_loop:AgentLoopManager._performance_metrics"),
    without=(("==0.7.0", "only the recipe fully_async_policy is supported, which submits prompts one by one"),),
)

PER_ROW = "metrics"  # the one list in meta_info that verl reads by row


def build(original):
    @functools.wraps(original)
    async def generate_sequences(self, *args, **kwargs):
        import inspect

        from esgrpo.algo.routing_order import inverse
        from esgrpo.hooks.verl.row_order import order_of, rows

        bound = inspect.signature(original).bind(self, *args, **kwargs)
        order = order_of(bound.arguments["batch"])
        if order is None:
            return await original(*bound.args, **bound.kwargs)
        bound.arguments["batch"] = rows(bound.arguments["batch"], order)
        return rows(await original(*bound.args, **bound.kwargs), inverse(order))

    return generate_sequences


def order_of(batch) -> list[int] | None:
    """Row numbers in the order of submission; None where there is nothing to order."""
    from esgrpo.algo.routing_order import by_group
    from esgrpo.hooks.verl import prompt_rows

    columns = batch.non_tensor_batch
    predicted = prompt_rows.tokens_of(columns.get(prompt_rows.FORECAST))
    if predicted is None or "uid" not in columns or batch.meta_info.get("validate", False):
        return None
    order = by_group(list(columns["uid"]), batch.meta_info.get("global_steps", 0), predicted)
    return None if order == list(range(len(order))) else order


def rows(batch, order: list[int]):
    """These rows of a DataProto, in this order, with what its meta_info says of each row."""
    chosen = batch.select_idxs(order)
    metrics = batch.meta_info.get(PER_ROW)
    if isinstance(metrics, list) and len(metrics) == len(order):
        chosen.meta_info = {**batch.meta_info, PER_ROW: [metrics[row] for row in order]}
    return chosen
