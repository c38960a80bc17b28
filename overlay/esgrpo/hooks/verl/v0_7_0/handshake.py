"""verl 0.7.0: the handshake of worker-handshake, with the recipe's task runner and rollouter."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.run.handshake import around as around
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER

HOOK = Hook(
    slug="partial-handshake",
    target="recipe.fully_async_policy.fully_async_main:FullyAsyncTaskRunner._create_trainer",
    process=("task-runner",),
    kind="wrap",
    why="as worker-handshake; the recipe creates its trainer last, and syncs weights before the training loop",
    remove_when="never: it checks the overlay itself",
    relies_on=(
        "recipe.fully_async_policy.fully_async_main:FullyAsyncTaskRunner.run",
        "recipe.fully_async_policy.fully_async_main:FullyAsyncTaskRunner._initialize_components",
        "recipe.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter._init_async_rollout_manager",
        "recipe.fully_async_policy.agent_loop.agent_loop:FullyAsyncAgentLoopManager._async_init",
    ),
    without=((LATER, ELSEWHERE),),
)
