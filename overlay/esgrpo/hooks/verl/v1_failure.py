"""Remembers which groups verl's v1 replay buffer evicts and why; a run in which every group fails ends.

verl gives numbers of evicted groups only, and not always to the step that needs them (`prepare_step` has metrics of its
own), and would replace failed groups for ever.
"""

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

        from esgrpo.algo.carry_over import remember
        from esgrpo.hooks.verl import v1_failure

        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        reasons = v1_failure.reasons_of(arguments["eviction_reasons"])
        remember(self.__dict__.setdefault("esgrpo_evicted", {}), reasons)
        v1_failure.look(self, [group for group, why in reasons.items() if why == "failed"],
                        self.finished_keys[arguments["partition_id"]])
        return original(self, *args, **kwargs)

    return _evict_terminal_groups


def reasons_of(eviction_reasons) -> dict[str, str]:
    """Group -> why it is evicted, from verl's tuple (stale, filtered, failed, counts of the filtered)."""
    from esgrpo.algo.carry_over import FAILED, FILTERED, STALE

    stale, filtered, failed, _counts = eviction_reasons
    return {group: why for groups, why in ((filtered, FILTERED), (stale, STALE), (failed, FAILED)) for group in groups}


def take_evicted(buffer) -> dict[str, str]:
    """Groups that were evicted since the last call, with the reason."""
    return buffer.__dict__.pop("esgrpo_evicted", {})


def look(buffer, failed, good) -> None:
    from esgrpo.algo.failures import FailureStreak
    from esgrpo.errors import EsgrpoError

    if not hasattr(buffer, "esgrpo_failures"):
        buffer.esgrpo_failures = FailureStreak()
    if buffer.esgrpo_failures.observe(failed, good):
        raise EsgrpoError("rollout", f"{buffer.esgrpo_failures.in_a_row} prompt groups failed in a row",
                          "groups that end well", "verl would submit new ones for ever, the run stops",
                          "the cause is in the log of the agent loop workers above; resume from the last checkpoint")
