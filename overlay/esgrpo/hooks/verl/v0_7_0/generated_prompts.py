"""verl 0.7.0: notes what a prompt in flight has cost once its group is whole, for what a restart says."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER
from esgrpo.hooks.verl.v0_7_0.in_flight import ROLLOUTER

HOOK = Hook(
    slug="partial-generated-prompts",
    target=f"{ROLLOUTER}._process_single_sample_streaming",
    process=("rollouter",),
    kind="wrap",
    why="groups that wait in verl's message queue are generated a second time after a restart; nothing else sees a "
        "group when it is put there",
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    relies_on=("recipe.fully_async_policy.agent_loop.agent_loop:FullyAsyncAgentLoopManager"
               ".generate_single_sample_async",),
    without=((LATER, ELSEWHERE),),
)


async def around(call):
    from esgrpo.hooks.verl.prompts import in_flight

    rollouter = call.owner
    sample = call.arguments["rollout_sample"]
    result = await call()
    if not sample.agent_loop_output_list:  # else interrupted by a weight sync: it goes on later
        in_flight.generated(rollouter, sample)
    return result
