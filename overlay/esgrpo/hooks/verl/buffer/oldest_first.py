"""A sample goes to verl's queue with its name and the weight version of its first token, by which the queue orders."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="oldest-sample-first",
    target="verl.experimental.fully_async_policy.message_queue:MessageQueueClient.put_sample",
    process=("rollouter",),
    kind="wrap",
    why="verl trains samples in the order in which they end: a long group that began under old weights waits behind "
        "short ones of newer weights and grows older still; and nobody can tell what is in the queue",
    remove_when="verl's MessageQueue orders by weight version",
    features=("observe",),
    relies_on=("verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"
               "._process_single_sample_streaming",
               "verl.experimental.fully_async_policy.detach_utils:assemble_batch_from_rollout_samples"),
    without=(("==0.7.0", "the recipe has another queue"),),
)


async def around(call):
    from esgrpo import config
    from esgrpo.algo.experience import SentSample
    from esgrpo.hooks.verl.buffer import in_hand

    data, sample = call.arguments["sample"], in_hand.sample()
    if isinstance(data, bytes) and sample is not None:
        version = first_version(sample.full_batch) if config.current().enable else None  # else in order of arrival
        return await call(sample=SentSample.of(data, sample.sample_id, version))
    return await call()


def first_version(batch) -> int | None:
    """Weight version of the oldest token of a group; None where no server told it."""
    versions = [version for version in batch.non_tensor_batch.get("min_global_steps", ()) if version is not None]
    return int(min(versions)) if versions else None
