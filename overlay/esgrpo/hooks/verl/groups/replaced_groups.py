"""A group without a gradient is not trained, and its place is given to another prompt: one that the resolved rule
ended, and, with `segment.null_groups`, any whose rewards are all alike."""

from __future__ import annotations

from esgrpo.algo.null_groups import REWARD
from esgrpo.algo.terms import NullGroups
from esgrpo.engine import Hook
from esgrpo.errors import RunError

HOOK = Hook(
    slug="resolved-groups-are-replaced",
    target="verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"
           "._process_single_sample_streaming",
    process=("rollouter",),
    kind="wrap",
    why="verl's fully async loop trains a group whatever it holds, and knows no group filter (its v1 trainers do): one "
        "without a gradient takes a place in the mini-batch, and one whose outcome was foreseen leaves an update fewer "
        "effective groups than without pruning",
    after=("prompt-forecasts",),
    remove_when="verl's rollouter asks a filter before it puts a group into the message queue",
    features=("prune", "null_groups"),
    relies_on=("verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter._feed_samples",
               "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter._processor_worker",
               "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter._async_monitor_loop",
               "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter.reset_staleness",
               "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter.get_statistics",
               "verl.experimental.fully_async_policy.message_queue:MessageQueueClient.put_sample"),
    without=(("==0.7.0", "audited pruning is refused"),),
)


async def around(call):
    from esgrpo.hooks.verl.buffer import in_hand

    rollouter, sample = call.owner, call.arguments["rollout_sample"]
    if not isinstance(rollouter.message_queue_client, Filter):
        rollouter.message_queue_client = Filter(rollouter, rollouter.message_queue_client)
    with in_hand.holding(sample):
        return await call()


class Filter:
    """The rollouter's message queue client, with a look at every group that is put."""

    def __init__(self, rollouter, client):
        self._rollouter, self._client = rollouter, client

    def __getattr__(self, name):
        return getattr(self._client, name)

    async def put_sample(self, *args, **kwargs):
        from esgrpo.hooks.verl.buffer import in_hand

        sample = in_hand.sample()
        if sample is not None and replace(self._rollouter, sample):
            return True  # "put": neither the group nor an older one was dropped for want of room
        return await self._client.put_sample(*args, **kwargs)


def replace(rollouter, sample) -> bool:
    """True when the group is not to be put, and its place was given back."""
    from esgrpo import config, records
    from esgrpo.algo.null_groups import costs_rollout
    from esgrpo.algo.rows import Replaced
    from esgrpo.algo.terms import Status
    from esgrpo.algo.treatment import is_resolved_null
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.metrics import decision_counts, prune_metrics
    from esgrpo.hooks.verl.prompts import in_flight

    batch = sample.full_batch
    rows = [row for row in batch.non_tensor_batch.get("esgrpo", ()) if row is not None]
    if len(rows) < len(batch):  # not made by this overlay's workers
        return False
    kept = batch.batch["response_mask"].bool().any(dim=-1).tolist()
    foreseen = is_resolved_null(rows, kept)
    replaced = (foreseen or _left_out(rollouter, sample, rows, kept)) and another_instead(rollouter)
    prune_metrics.note(rollouter, rows, replaced)
    owned.of(rollouter, owned.NullGroups).filter.note(replaced, rollouter.required_samples)
    if not replaced:
        return False
    decision_counts.add("replaced", groups=1)
    if costs_rollout(config.current().null_groups, foreseen):
        owned.of(rollouter, owned.RolloutSignals).left_out_tokens += sum(row["tokens"] for row in rows)
    in_flight.ended(rollouter, sample, Status.PRUNED)
    rollouter.staleness_samples -= 1
    begin_again(rollouter)
    # the original counts every group that was put: one of them was not
    rollouter.total_generated_samples -= 1
    rollouter._step_generated_samples -= 1
    records.write(Replaced(group=f"uid_{sample.sample_id}", sample_id=sample.sample_id, rows=rows))
    return True


def begin_again(rollouter) -> None:
    """Where a version's prompts had all begun: verl's monitor would look once in ten seconds whether there is room."""
    if rollouter.paused and rollouter.staleness_samples < rollouter.max_required_samples:
        rollouter.paused = False
        rollouter._resume_event.set()


def _left_out(rollouter, sample, rows: list[dict], kept: list[bool]) -> bool:
    """Whether `segment.null_groups` leaves this group out. verl has just asked how many wait, for the sample's own
    status."""
    from esgrpo import config
    from esgrpo.algo.treatment import is_null
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.metrics import decision_counts

    mode = config.current().null_groups
    if mode == NullGroups.TRAIN:
        return False
    null = is_null(rows, kept, _metric(rollouter, sample.full_batch))
    decision_counts.add("replaced", null=int(null))
    signals = owned.of(rollouter, owned.RolloutSignals)
    signals.judged += 1
    signals.nulls += null
    return owned.of(rollouter, owned.NullGroups).filter.leaves_out(
        mode, null, sample.rollout_status["monitor/queue/mq_queue_size"], rollouter.required_samples)


def _metric(rollouter, batch) -> list[float] | None:
    """Of every response what `algorithm.filter_groups` asks for, where it is on; None for the reward itself."""
    asked = rollouter.config.algorithm.get("filter_groups") or {}
    name = asked.get("metric") if asked.get("enable") else None
    if name in (None, REWARD):
        return None
    if name not in batch.non_tensor_batch:
        raise RunError("null groups", f"no {name} beside a response's reward", "algorithm.filter_groups.metric as the "
                       "reward function returns it", "no group could be judged, the run stops",
                       f"return it, or set algorithm.filter_groups.metric={REWARD}")
    return [float(value) for value in batch.non_tensor_batch[name]]


def another_instead(rollouter) -> bool:
    """The feed delivers one prompt more, where it will look at `total_rollout_steps` again and has one beyond it.

    It looks after every prompt that it has handed on; below the limit it cannot have seen the end.
    """
    from esgrpo import guard
    from esgrpo.hooks.verl.metrics import decision_counts

    feed = rollouter.feed_task
    prompts = len(rollouter.train_dataloader) * rollouter.config.trainer.total_epochs
    if rollouter.total_rollout_steps >= prompts and not decision_counts.counts["replaced/groups"]:
        guard.say_once("esgrpo: null_groups: no group is left out: rollout.total_rollout_steps asks for all of the "
                       f"{prompts} prompts that the data has over trainer.total_epochs, so that no other one could "
                       "take its place; set it lower, or raise trainer.total_epochs")
    goes_on = feed is not None and not feed.done() and rollouter.global_steps < rollouter.total_rollout_steps < prompts
    rollouter.total_rollout_steps += goes_on
    return goes_on
