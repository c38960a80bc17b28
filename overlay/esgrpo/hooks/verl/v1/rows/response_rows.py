"""Sends what a response lived through to the trainer with its row in the TransferQueue."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-response-rows",
    target="verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._agent_loop_postprocess",
    process=("agent-loop-worker",),
    kind="wrap",
    why="under v1 a worker writes each response into the TransferQueue as soon as it ends and hands nothing back: "
        "what the row is to carry must be in extra_fields before that",
    remove_when="verl's client keeps stop_reason and versions per token in the row",
    features=("v1",),
    relies_on=("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._run_prompt",
               "verl.experimental.agent_loop.agent_loop:AgentLoopOutput.as_dict"),
    without=(("==0.7.0", "no v1 trainers"),),
)


async def around(call):
    import time

    from esgrpo.algo import rollout
    from esgrpo.hooks.verl.groups import rollout_driver

    seat = rollout_driver.current.get()
    output = call.arguments["output"]
    outputs = output if isinstance(output, list) else [output]
    if seat is None or not outputs:  # validation, or a loop that gave nothing
        return await call()
    row = rollout_driver.row_of(seat.on(rollout.Sealed, now=time.time()), seat.driver)
    for each in outputs:  # every output of a session carries the session's row
        rollout_driver.attach(each, row)
    result = await call()
    seat.driver.rewards[seat.group, seat.number] = rollout_driver.reward_of(outputs[-1])
    return result
