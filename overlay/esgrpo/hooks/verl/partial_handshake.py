"""verl 0.7.0: the handshake of worker-handshake, with the recipe's task runner and rollouter."""

from __future__ import annotations

from esgrpo.engine import Hook, Release
from esgrpo.hooks.verl.handshake import build as build
from esgrpo.hooks.verl.partial_group import ELSEWHERE, LATER

HOOK = Hook(
    slug="partial-handshake",
    target="recipe.fully_async_policy.fully_async_main:FullyAsyncTaskRunner._run_training_loop",
    process=("task-runner",),
    kind="wrap",
    why="as worker-handshake; every process exists here, and no prompt has been fed yet",
    releases=(Release("verl", "==0.7.0", {"0.7.0": "d37b11ee39f9bf64"}),),
    remove_when="never: it checks the overlay itself",
    relies_on=(
        "recipe.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter._init_async_rollout_manager",
        "recipe.fully_async_policy.agent_loop.agent_loop:FullyAsyncAgentLoopManager._async_init",
    ),
    without=((LATER, ELSEWHERE),),
)
