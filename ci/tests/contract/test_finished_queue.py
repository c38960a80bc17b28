"""Finished samples in verl's real queue: its class and its client, without Ray's calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("ray")

from ci.tests.contract.test_replaced_groups import PLAIN, rollouter, rollouter_class  # noqa: E402, F401
from esgrpo.algo.experience import SentSample  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl.buffer import in_hand, nothing_dropped, oldest_first  # noqa: E402
from esgrpo.hooks.verl.prompts import failed_prompts  # noqa: E402

LIMIT = 3


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": True}))


@pytest.fixture(scope="module")
def module():
    return pytest.importorskip("verl.experimental.fully_async_policy.message_queue")


def queue_of(module, hooked: bool):
    kind = module.MessageQueue.__ray_metadata__.modified_class
    if hooked:
        kind = type("MessageQueue", (kind,), {"put_sample": wrapped(nothing_dropped, kind.put_sample)})
    return kind(config=None, max_queue_size=LIMIT)


async def fill_and_drain(queue, samples) -> list:
    """Puts all, the signal that ends the data last; what comes out until that signal."""
    for sample in [*samples, None]:
        await queue.put_sample(sample)
    found = []
    while (sample := (await queue.get_sample())[0]) is not None:
        found.append(sample)
    return found


@pytest.mark.hook("queue-drops-nothing")
def test_a_run_that_is_only_observed_drops_as_verl_does(module, monkeypatch):
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"observe": True}))
    samples = [bytes([number]) for number in range(LIMIT + 2)]
    plain, observed = (asyncio.run(fill_and_drain(queue_of(module, hooked), samples)) for hooked in (False, True))
    assert observed == plain != samples


@pytest.mark.hook("queue-drops-nothing")
def test_a_full_queue_drops_nothing(module, capfd):
    queue = queue_of(module, hooked=True)
    samples = [bytes([number]) for number in range(LIMIT + 2)]
    assert asyncio.run(fill_and_drain(queue, samples)) == samples
    assert queue.dropped_samples == 0 and queue.total_produced == queue.total_consumed == LIMIT + 3
    assert nothing_dropped.overflow_of(queue) == {"beyond_limit": 3.0, "beyond_limit_most": 3.0}
    assert capfd.readouterr().err.count("queue of finished samples: full at 3") == 1
    asyncio.run(fill_and_drain(queue, samples[:LIMIT - 1]))
    assert nothing_dropped.overflow_of(queue)["beyond_limit"] == 3.0  # below the bound nothing is counted
    assert [asyncio.run(queue.put_sample(sample)) for sample in samples] == [True] * len(samples)  # verl counts these
    asyncio.run(queue.clear_queue())
    queue.max_queue_size = 1  # a bound that is set while it runs counts from then on
    asyncio.run(fill_and_drain(queue, samples[:1]))
    assert nothing_dropped.overflow_of(queue)["beyond_limit"] == 6.0


def test_what_waited_before_stays(module):
    queue = queue_of(module, hooked=True)
    queue.queue.append(b"before")
    assert asyncio.run(fill_and_drain(queue, [b"after"])) == [b"before", b"after"]


def test_plain_verl_drops_the_oldest(module):
    """Negative control; with as many samples as it has room for, the signal that ends the data costs one."""
    samples = [bytes([number]) for number in range(LIMIT + 2)]
    queue = queue_of(module, hooked=False)
    assert asyncio.run(fill_and_drain(queue, samples)) == samples[3:] and queue.dropped_samples == 3
    queue = queue_of(module, hooked=False)
    assert asyncio.run(fill_and_drain(queue, samples[:LIMIT])) == samples[1:LIMIT]


def test_puts_at_the_same_time_lose_nothing(module):
    """All of them pass the hook before the first has the queue's lock."""
    async def scene(queue):
        async with queue._lock:
            puts = [asyncio.ensure_future(queue.put_sample(bytes([number]))) for number in range(LIMIT + 2)]
            await asyncio.sleep(0)
        await asyncio.gather(*puts)
        return len(queue.queue)

    queue = queue_of(module, hooked=True)
    assert asyncio.run(scene(queue)) == LIMIT + 2
    assert nothing_dropped.overflow_of(queue) == {"beyond_limit": 2.0, "beyond_limit_most": 2.0}


def versions_of(samples) -> list:
    return [sample.version for sample in samples]


def test_the_oldest_weights_leave_first(module):
    samples = [SentSample.of(bytes([place]), str(place), version)
               for place, version in enumerate((4, 2, 4, None, 2, 3))]
    found = asyncio.run(fill_and_drain(queue_of(module, hooked=True), samples))
    assert versions_of(found) == [None, 2, 2, 3, 4, 4]
    assert [sample[0] for sample in found] == [3, 1, 4, 5, 0, 2]  # among equals the first to come
    plain = asyncio.run(fill_and_drain(queue_of(module, hooked=False), samples))
    assert versions_of(plain) == [2, 3]  # negative control: in order of arrival, as far as they are there


def through_ray(value):
    """As an actor gets it: what Ray's own serialisation takes for bytes arrives as bytes, whatever its class."""
    from ray._private import worker
    from ray._private.serialization import SerializationContext

    sent = SerializationContext(worker.global_worker).serialize(value)
    return bytes(value) if type(sent).__name__ == "RawSerializedObject" else pickle.loads(pickle.dumps(value))


def test_a_class_of_bytes_would_not_arrive():
    """Negative control: why a sent sample is none."""
    kind = type("Kind", (bytes,), {})
    assert type(through_ray(kind(b"x"))) is bytes
    arrived = through_ray(SentSample.of(b"x", "sample_0_1", 3))
    assert (type(arrived), bytes(arrived), arrived.name, arrived.version) == (SentSample, b"x", "sample_0_1", 3)


def client_of(module, hooked: bool):
    """verl's client of an actor that answers at once; `sent` is what Ray would have brought there."""
    kind, sent = module.MessageQueueClient, []
    if hooked:
        kind = type("Client", (kind,), {"put_sample": wrapped(oldest_first, kind.put_sample)})

    def remote(sample):
        sent.append(through_ray(sample))
        done = concurrent.futures.Future()
        done.set_result(True)
        return SimpleNamespace(future=lambda: done)

    return kind(SimpleNamespace(put_sample=SimpleNamespace(remote=remote))), sent


@pytest.mark.hook("oldest-sample-first")
@pytest.mark.parametrize("hooked, enabled, versions", [(True, True, [3, None, None]), (True, False, [None] * 3),
                                                       (False, True, [])])
def test_a_sample_carries_the_version_of_its_first_token(module, rollouter_class, monkeypatch, hooked,  # noqa: F811
                                                         enabled, versions):
    """Through verl's real rollouter and client; without the hook (the negative control) it is bytes alone. A run that
    only observes keeps the order of arrival."""
    import ray

    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": enabled, "observe": not enabled}))

    told = iter([[5, 3, None, 4], [None] * 4, None])
    made = rollouter(rollouter_class, [PLAIN], limit=3)
    generate = made.async_rollout_manager.generate_sequences_single

    async def with_versions(batch):
        done, found = await generate(batch), next(told)
        if found is not None:
            done.non_tensor_batch["min_global_steps"] = np.array(found, dtype=object)
        return done

    made.async_rollout_manager.generate_sequences_single = with_versions
    client, sent = client_of(module, hooked)
    client.get_statistics = made.queue.get_statistics
    made.message_queue_client = client

    async def scene():
        process = wrapped(failed_prompts, rollouter_class._process_single_sample_streaming)
        feed = asyncio.ensure_future(made._feed_samples())
        while (sample := await made.pending_queue.get()) is not None:
            await process(made, sample)
        await feed
        await client.put_sample(sample=None)

    asyncio.run(scene())
    assert [sample.version for sample in sent if isinstance(sample, SentSample)] == versions
    assert [sample.name for sample in sent[:-1] if hooked] == [f"sample_0_{n}" for n in (1, 2, 3) if hooked]
    assert [ray.cloudpickle.loads(data).sample_id for data in sent[:-1]] == [f"sample_0_{n}" for n in (1, 2, 3)]
    assert sent[-1] is None and made.total_generated_samples == 3
    assert in_hand.sample() is None
