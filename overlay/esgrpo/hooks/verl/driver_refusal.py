"""Turns our own refusals, which come back through Ray as tracebacks, into one line and exit code 1."""

from __future__ import annotations

import functools
import sys

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="driver-refusal-in-one-line",
    target="verl.trainer.main_ppo:run_ppo",
    process=("driver",),
    kind="wrap",
    why="an error raised in the task runner reaches the user as RayTaskError with three tracebacks",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "50252b1e87358984"}),),
    remove_when="never: it presents our own errors",
)


def build(original):
    @functools.wraps(original)
    def run_ppo(*args, **kwargs):
        from esgrpo.errors import EsgrpoError

        try:
            return original(*args, **kwargs)
        except Exception as error:
            cause = error
            while cause is not None and not isinstance(cause, EsgrpoError):
                cause = getattr(cause, "cause", None) or cause.__cause__
            if cause is None:
                raise
            sys.exit(str(cause))

    return run_ppo
