"""verl 0.7.0: validates `segment` and prepares every process where the recipe's main starts Ray."""

from __future__ import annotations

import sys

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER

HOOK = Hook(
    slug="partial-driver-start",
    target="verl.trainer.main_ppo:run_ppo",
    process=("driver",),
    kind="wrap",
    why="as driver-start; the recipe's main of 0.7.0 never calls auto_set_device. It imports run_ppo inside main()",
    remove_when="verl 0.7.0 is no longer supported",
    relies_on=("recipe.fully_async_policy.fully_async_main:main",),
    without=((LATER, ELSEWHERE),),
)


def around(call):
    from esgrpo.algo.failures import first_of
    from esgrpo.errors import EsgrpoError
    from esgrpo.hooks.verl.run.driver_start import prepare

    try:
        prepare(call.arguments["config"])
        return call()
    except Exception as error:
        cause = first_of(error, EsgrpoError)
        if cause is None:
            raise
        sys.exit(str(cause))  # one line and exit code 1, no traceback
