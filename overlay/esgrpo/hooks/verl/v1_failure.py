"""A v1 run in which every group fails ends: verl would replace failed groups for ever."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="v1-failure-is-loud",
    target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._evict_terminal_groups",
    process=("v1-task-runner",),
    kind="wrap",
    why="the asynchronous replay buffer evicts a group whose agent loop raised and submits another one; with a dead "
        "vLLM server or a reward function that raises it does so without an end and without an error",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "8de0d27ce8256444"}),),
    remove_when="verl's replay buffer gives up after a number of failed groups",
    relies_on=("verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync",),
    without=(("==0.7.0", "no v1 trainers"),),
)


def build(original):
    @functools.wraps(original)
    def _evict_terminal_groups(self, *args, **kwargs):
        import inspect

        from esgrpo.hooks.verl.v1_failure import failed_of, look

        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        look(self, failed_of(arguments["eviction_reasons"]), self.finished_keys[arguments["partition_id"]])
        return original(self, *args, **kwargs)

    return _evict_terminal_groups


def failed_of(eviction_reasons):
    """verl's tuple is (stale, filtered, failed, counts of the filtered)."""
    _stale, _filtered, failed, _counts = eviction_reasons
    return failed


def look(buffer, failed, good) -> None:
    from esgrpo.algo.failures import FailureStreak
    from esgrpo.errors import EsgrpoError

    if not hasattr(buffer, "esgrpo_failures"):
        buffer.esgrpo_failures = FailureStreak()
    if buffer.esgrpo_failures.observe(failed, good):
        raise EsgrpoError("rollout", f"{buffer.esgrpo_failures.in_a_row} prompt groups failed in a row",
                          "groups that end well", "verl would submit new ones for ever, the run stops",
                          "the cause is in the log of the agent loop workers above; resume from the last checkpoint")
