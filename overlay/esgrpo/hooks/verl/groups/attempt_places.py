"""Remembers which server an attempt goes to, so that messages about a group reach the servers that hold it, only."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="attempt-places",
    target="verl.workers.rollout.llm_server:LLMServerClient._acquire_server",
    process=("agent-loop-worker",),
    kind="wrap",
    why="the load balancer chooses the server inside generate, which tells nobody; asking every server about every "
        "group costs a call a replica for each response that ends",
    remove_when="verl's client hands the chosen server to a callback, or returns it with the output",
    features=("observe",),
    relies_on=("verl.workers.rollout.llm_server:FullyAsyncLLMServerClient._acquire_server",
               "verl.workers.rollout.llm_server:LLMServerClient.generate"),
    without=(("==0.7.0", "no group rule acts there: audited pruning is refused"),),
)


async def around(call):
    from esgrpo.hooks.verl.groups import rollout_driver

    server_id, handle = await call()
    seat = rollout_driver.current.get()
    if seat is not None and seat.follows(call.owner):
        seat.placed(server_id, handle)
    return server_id, handle
