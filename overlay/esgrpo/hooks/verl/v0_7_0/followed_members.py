"""verl 0.7.0: follows one response of a group through the partial agent loop, over interruptions and workers."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER, STATE

HOOK = Hook(
    slug="partial-members",
    target="recipe.fully_async_policy.agent_loop.agent_loop:FullyAsyncAgentLoopWorker._partial_run_agent_loop",
    process=("agent-loop-worker",),
    kind="wrap",
    why="the only method that sees one response of a call from start to end or to its interruption; the class is "
        "shipped by value, which a plain function on it survives",
    patches=(("==0.7.0", ("partial-server-honours-response-length", "pass-dataset-to-partial-agent-loops")),),
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    relies_on=("recipe.fully_async_policy.agent_loop.partial_single_turn_agent_loop:PartialSingleTurnAgentLoop.run",),
    without=((LATER, ELSEWHERE),),
)


async def around(call):
    from esgrpo.hooks.verl.v0_7_0 import grouped_calls

    group = grouped_calls.current.get()
    given = call.arguments["kwargs"]
    output = given.get("output")
    complete = output is not None and not output.extra_fields.get("is_cancel", False)
    if group is None or complete:
        return await call()
    return await run_member(call, group, given)


async def run_member(call, group: str, given: dict):
    import time

    from esgrpo import records
    from esgrpo.algo import rollout
    from esgrpo.hooks.verl.groups import rollout_driver

    worker = call.owner
    driver = rollout_driver.of_worker(worker, worker.config.actor_rollout_ref.rollout.response_length)
    size = worker.config.actor_rollout_ref.rollout.n
    seat = rollout_driver.join(driver, group, size, prompt=driver.prompt(group, given.get("raw_prompt")),
                               **_resumed(given))
    token = rollout_driver.current.set(seat)
    ending = {"failed": True}
    try:
        output = await call()
        if output.extra_fields.get("is_cancel", False):
            output.extra_fields[STATE] = seat.response.state()
            ending = {"carried": True}
        else:
            ending = dict(zip(("score", "acc"), rollout_driver.reward_of(output), strict=True))
    finally:
        rollout_driver.current.reset(token)
        record = seat.on(rollout.MemberEnded, now=time.time(), **ending)
    if record is not None:  # else it goes on later
        row = rollout_driver.row_of(record, driver)
        output.extra_fields["esgrpo"] = row.row()
        records.write(row)
    return output


def _resumed(given: dict) -> dict:
    """What the machine is told of a member: new, or with the state that its interrupted output carries."""
    output, version = given.get("output"), given.get("param_version")
    state = None if output is None else output.extra_fields.get(STATE)
    return {"version": None if version is None else int(version),  # a numpy integer would not go into a record
            "state": state, "member": None if state is None else state["number"]}
