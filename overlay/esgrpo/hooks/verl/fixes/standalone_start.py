"""v1 separate_async with hybrid_engine=False starts: verl calls logger.info(..., flush=True), a TypeError."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-standalone-start",
    target="verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync._setup",
    process=("v1-task-runner",),
    kind="wrap",
    why="the last statement of _setup passes print's flush to a logger; with verl's default log level every run "
        "without hybrid replicas ends there",
    remove_when="PPOTrainerSeparateAsync._setup no longer passes flush to the logger",
    without=(("==0.7.0", "no v1 trainers"),),
)


def around(call):
    logger = call.original.__globals__["logger"]
    logger.info, info = without_flush(logger.info), logger.info
    try:
        return call()
    finally:
        logger.info = info


def without_flush(log):
    @functools.wraps(log)
    def info(*args, flush=None, **kwargs):
        return log(*args, **kwargs)

    return info
