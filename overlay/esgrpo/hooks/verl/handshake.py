"""Before the first rollout, the task runner asks every process for its hook states and refuses if one differs."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="worker-handshake",
    target="verl.experimental.fully_async_policy.fully_async_main:FullyAsyncTaskRunner._run_training_loop",
    process=("task-runner",),
    kind="wrap",
    why="a hook can reach the driver and be lost in a Ray worker or in the spawned EngineCore without an error; this "
        "is the last point before the first rollout at which every process exists",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "05a5d26f80f8c899"}),),
    remove_when="never: it checks the overlay itself",
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


def build(original):
    @functools.wraps(original)
    def _run_training_loop(self):
        from esgrpo.hooks.verl import reports

        reports.collect_and_check(self)
        result = original(self)
        reports.flush_records(self)
        return result

    return _run_training_loop
