"""Turns our own refusals, which come back through Ray as tracebacks, into one line and exit code 1.

The last place before Ray starts, too: a config with `segment` that nothing has read ends here.
"""

from __future__ import annotations

import sys

from esgrpo.engine import Hook

HOOK = Hook(
    slug="driver-refusal-in-one-line",
    target="verl.trainer.main_ppo:run_ppo",
    process=("driver",),
    kind="wrap",
    why="an error raised in the task runner reaches the user as RayTaskError with three tracebacks",
    after=("driver-ending-in-one-line",),
    remove_when="never: it presents our own errors",
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


def around(call):
    from esgrpo import guard
    from esgrpo.algo.failures import first_of
    from esgrpo.errors import EsgrpoError

    try:
        guard.check_config(call.arguments["config"])
        return call()
    except Exception as error:
        cause = first_of(error, EsgrpoError)
        if cause is None:
            raise
        sys.exit(str(cause))
