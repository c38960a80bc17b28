"""Gives every response its group and number, and records what happened to it."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="group-members",
    target="verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
    process=("agent-loop-worker",),
    kind="wrap",
    why="the only method that sees one response of a known group from start to end, in every agent loop; vLLM "
        "scatters a group over replicas and knows no groups",
    remove_when="verl offers a callback per response with its uid",
    features=("observe",),
    relies_on=("verl.experimental.agent_loop.agent_loop:AgentLoopWorker.generate_sequences",),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


async def around(call):
    given = call.arguments.get("kwargs", {})
    group = given.get("uid")
    if call.arguments["trajectory"]["validate"] or group is None:
        return await call()
    return await run_member(call, str(group), given.get("esgrpo_forecast"), given.get("raw_prompt"))


async def run_member(call, group: str, forecast=None, raw_prompt=None):
    import time

    from esgrpo import records
    from esgrpo.algo import rollout
    from esgrpo.hooks.verl.groups import rollout_driver
    from esgrpo.hooks.verl.v1.rows import group_size

    worker = call.owner
    driver = rollout_driver.of_worker(worker, worker.rollout_config.response_length)
    seat = rollout_driver.join(driver, group, group_size.of_prompt(worker), worker.llm_client, forecast=forecast,
                               prompt=driver.prompt(group, raw_prompt))
    token = rollout_driver.current.set(seat)
    ending = {"failed": True}
    try:
        output = await call()
        # verl's v1 hands nothing back: v1-response-rows has seen the output and put its reward aside
        reward = driver.rewards.get((group, seat.number), (None, None)) if output is None else (
            rollout_driver.reward_of(output))
        ending = dict(zip(("score", "acc"), reward, strict=True))
    finally:
        rollout_driver.current.reset(token)
        driver.rewards.pop((group, seat.number), None)
        record = seat.on(rollout.MemberEnded, now=time.time(), **ending)
    row = rollout_driver.row_of(record, driver)
    records.write(row)
    if output is not None:
        rollout_driver.attach(output, row)
    return output
