"""One audit for the run: a named Ray actor that hears what the audit of each agent-loop worker learned. No hook.

It keeps what was learned in one file beside the prompt history, so that a restarted run goes on from it.
"""

from __future__ import annotations

import os
import random
import sys

from esgrpo.errors import EsgrpoError, say

NAME = "esgrpo-audit"


class AuditPool:
    """`exchange` is all that workers call; answers are (lessons, state): state for a worker that is new here."""

    def __init__(self, budget: int):
        from esgrpo import config
        from esgrpo.algo.audit import Audit
        from esgrpo.algo.group_pruning import GroupPruner
        from esgrpo.algo.lessons import LessonPool
        from esgrpo.algo.verdict import VerdictPool, verdicts_of

        settings = config.current()
        pruner = GroupPruner(settings, Audit(settings.prune.audit, random.Random(settings.seed)), budget)
        self._file = taken_over("prune-audit", file(), pruner.restore)
        self._pool = LessonPool(pruner)

        self._verdicts = self._verdict_file = None
        if settings.prune.verdict.enable:
            verdicts = verdicts_of(settings, random.Random(settings.seed))
            self._verdict_file = taken_over("prune-verdict", file("verdict"), verdicts.restore)
            self._verdicts = VerdictPool(verdicts)

    def teach(self, worker: int, lessons: list | None) -> dict:
        """What all workers know of verdicts, with what this one saw since the last weight sync."""
        from esgrpo import records

        state = self._verdicts.exchange(worker, lessons)
        if lessons is not None and self._verdict_file is not None:
            records.save(self._verdict_file, lambda: state)
        return state

    def exchange(self, worker: int, lessons: list) -> tuple[list, dict | None]:
        from esgrpo import records

        answer = self._pool.exchange(worker, lessons)
        if lessons and self._file is not None:
            state = self._pool.state()  # now: the writer thread must not read what the next call changes
            records.save(self._file, lambda: state)
        return answer


def taken_over(who: str, path: str | None, parse) -> str | None:
    """Takes over what an earlier start learned; the file to write, None where it is there and cannot be read. It stops
    no run: the pool is an actor of its own, and workers would miss its answers one by one."""
    from esgrpo.hooks.verl import state_files

    try:
        state_files.restored(who, path, parse)
        return path
    except EsgrpoError as error:
        _, found, wanted, _, todo = error.args
        say(EsgrpoError(who, found, wanted, "the run goes on without it and keeps nothing of what it learns", todo))
        return None


def file(of: str = "audit") -> str | None:
    """In the run directory, also where history.path brings prompts from elsewhere: what was proven of a rule is the
    run's own. None without one, then nothing is kept."""
    run_dir = os.environ.get("ESGRPO_RUN_DIR")
    return os.path.join(run_dir, "esgrpo", f"history-{of}.json") if run_dir else None


def of_run(budget: int):
    """Handle of the run's pool, made by the first worker that asks; None outside Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return ray.remote(AuditPool).options(name=NAME, get_if_exists=True, num_cpus=0).remote(budget)
