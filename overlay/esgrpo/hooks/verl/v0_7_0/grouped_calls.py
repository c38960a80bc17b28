"""verl 0.7.0: gives the n responses of one call a group, before verl knows their uid."""

from __future__ import annotations

import contextvars

from esgrpo.engine import Hook

LATER = ">=0.7.1"
ELSEWHERE = "the recipe fully_async_policy is gone; the hooks of verl.experimental do its part"

HOOK = Hook(
    slug="partial-group",
    target="recipe.fully_async_policy.agent_loop.agent_loop:FullyAsyncAgentLoopWorker.generate_sequences_no_post",
    process=("agent-loop-worker",),
    kind="wrap",
    why="uid is set only after generation; one call of this method is one group, also when it comes back after a "
        "weight sync with some of its responses interrupted",
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    without=((LATER, ELSEWHERE),),
)

STATE = "esgrpo_member"  # key in extra_fields under which an interrupted response carries its state
current: contextvars.ContextVar[str | None] = contextvars.ContextVar("esgrpo_partial_group", default=None)


async def around(call):
    worker = call.owner
    batch = call.arguments["batch"]
    if batch.meta_info.get("validate", False):
        return await call()
    group = open_group(worker, len(batch), call.arguments.get("partial_output_list"))
    token = current.set(group)  # inherited by the tasks that the original creates
    try:
        return await call()
    finally:
        current.reset(token)


def open_group(worker, size: int, outputs) -> str:
    """The id of the group of this call: a new one, or the one that its earlier outputs carry."""
    import uuid

    from esgrpo.algo import rollout
    from esgrpo.algo.terms import Outcome
    from esgrpo.hooks.verl.groups import rollout_driver

    group, ended = None, {}
    for output in outputs or ():
        if output is None:
            continue
        state, row = output.extra_fields.get(STATE), output.extra_fields.get("esgrpo")
        known = state or row
        group = known["group"] if known else group
        if row:
            ended[row["member"]] = Outcome(row["outcome"])
    group = group or uuid.uuid4().hex
    driver = rollout_driver.of_worker(worker, worker.config.actor_rollout_ref.rollout.response_length)
    with rollout_driver.collisions_in_one_line(group):
        driver.on(rollout.Reopened(group, size, ended))
    return group
