"""verl 0.7.0: masks the rows of pruned responses, in the class that the recipe's worker inherits from."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.groups.masked_rows import around as around
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER

HOOK = Hook(
    slug="partial-rows-are-masked",
    target="verl.experimental.agent_loop.agent_loop:AgentLoopWorkerBase._postprocess",
    process=("agent-loop-worker",),
    kind="wrap",
    why="as pruned-rows-are-masked; the class has another name",
    remove_when="verl 0.7.0 is no longer supported",
    features=("prune",),
    relies_on=("verl.experimental.agent_loop.agent_loop:AgentLoopWorkerBase._agent_loop_postprocess",),
    without=((LATER, ELSEWHERE),),
)
