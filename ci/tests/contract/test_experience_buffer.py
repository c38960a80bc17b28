"""Finished samples over restarts: verl's real rollouter and queue, Ray's calls are a fake."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import pickle
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("ray")

from ci.tests.contract import test_prompts_in_flight as restarts  # noqa: E402
from ci.tests.contract.test_finished_queue import module, queue_of, switched_on, through_ray  # noqa: E402, F401
from ci.tests.contract.test_replaced_groups import batch_of, rollouter_class, summaries  # noqa: E402, F401
from esgrpo import records  # noqa: E402
from esgrpo.algo.experience import SentSample  # noqa: E402
from esgrpo.algo.terms import Status  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl.buffer import oldest_first, whole_samples  # noqa: E402
from esgrpo.hooks.verl.metrics import trained_rows  # noqa: E402
from esgrpo.hooks.verl.prompts import failed_prompts, in_flight  # noqa: E402
from esgrpo.records import read  # noqa: E402
from esgrpo.tools import books  # noqa: E402


class Actor:
    """The queue's actor handle: verl's real queue in this process."""

    def __init__(self, queue):
        self.__dict__["__ray_call__"] = SimpleNamespace(remote=self.call)
        self.put_sample = SimpleNamespace(remote=lambda sample: self.later(queue.put_sample, sample))
        self.queue = queue

    async def call(self, function):
        return through_ray(function(self.queue))

    @staticmethod
    def later(function, sample):
        done = concurrent.futures.Future()
        task = asyncio.ensure_future(function(through_ray(sample)))
        task.add_done_callback(lambda _: done.set_result(task.result()))
        return SimpleNamespace(future=lambda: done)


BATCH, IN_FLIGHT = restarts.BATCH, 3


async def one_start(rollouter_class, module, directory, saves: int, whole: bool):  # noqa: F811
    """Generates two batches ahead of a trainer that dies after so many checkpoints.

    Returns the prompts generated and the prompts trained, each in order.
    """
    made = restarts.rollouter_of(rollouter_class, directory, hooked=True)
    kind = type(made)
    kind._process_single_sample_streaming = wrapped(failed_prompts, rollouter_class._process_single_sample_streaming)
    queue = queue_of(module, hooked=True)
    queue.max_queue_size = restarts.PROMPTS
    client = type("Client", (module.MessageQueueClient,), {
        "put_sample": wrapped(oldest_first, module.MessageQueueClient.put_sample)})(Actor(queue))
    client.get_statistics = queue.get_statistics
    made.message_queue_client, made.feed_task = client, None
    for name in ("staleness_samples", "total_generated_samples", "_step_generated_samples", "dropped_stale_samples",
                 "processed_sample_count", "max_required_samples", "staleness_threshold", "max_queue_size",
                 "max_concurrent_samples"):
        setattr(made, name, 0)
    made.active_tasks, generated, trained = set(), [], []

    async def generate(batch):
        generated.append(int(batch.non_tensor_batch["number"][0]))
        made_here = batch_of(summaries(resolved=False)[:restarts.SIZE])
        made_here.non_tensor_batch["number"] = batch.non_tensor_batch["number"]
        return made_here

    async def fit(_):
        assert made.staleness_samples == made.total_generated_samples == len(queue.queue)  # what came back whole
        feed = asyncio.ensure_future(made._feed_samples())
        running, fed, saved = [], True, 0
        folders = sorted(directory.glob("global_step_*"), key=lambda folder: int(folder.name.rpartition("_")[2]))
        version = int(folders[-1].name.rpartition("_")[2]) if folders else 0
        while saved < saves:
            while fed and len(running) < IN_FLIGHT + BATCH:
                sample = await made.pending_queue.get()
                fed = sample is not None
                running += [sample] if fed else []
            ready = running if not fed else running[1:1 + BATCH] if len(queue.queue) < 2 * BATCH else []
            chosen = {id(sample) for sample in ready}
            running = [sample for sample in running if id(sample) not in chosen]
            for sample in ready:
                await made._process_single_sample_streaming(sample)
            if fed and len(queue.queue) < 2 * BATCH:
                continue
            batch = [pickle.loads((await queue.get_sample())[0]) for _ in range(min(BATCH, len(queue.queue)))]
            if not batch:
                break
            trained.extend(int(sample.full_batch.non_tensor_batch["number"][0]) for sample in batch)
            groups = [f"uid_{sample.sample_id}" for sample in batch]
            trained_rows.begin(groups, step=version + 1)
            in_flight.trained(made, groups)
            version, saved = version + 1, saved + 1
            folder = directory / f"global_step_{version}"
            folder.mkdir(parents=True)
            await made.save_checkpoint(str(folder))
            (directory / "latest_checkpointed_iteration.txt").write_text(str(version))
            if not whole:
                (folder / whole_samples.FILE).unlink()
        feed.cancel()
        await asyncio.gather(feed, return_exceptions=True)

    made.async_rollout_manager = SimpleNamespace(generate_sequences_single=generate)
    kind.fit = wrapped(whole_samples, fit)
    await made.fit()
    assert made.dropped_stale_samples == 0
    assert sum(in_flight.buffer_of(made).counts().values()) == in_flight.drawn_of(made)
    assert in_flight.buffer_of(made).strays == 0
    return generated, trained


def chain(rollouter_class, module, directory, whole: bool, begin=lambda: None):  # noqa: F811
    generated, trained = [], []
    for saves in (1, 2, 1, restarts.PROMPTS):
        begin()
        made, done = asyncio.run(asyncio.wait_for(one_start(rollouter_class, module, directory, saves, whole), 60))
        generated, trained = generated + made, trained + done
    return Counter(generated), Counter(trained)


@pytest.mark.hook("finished-samples-come-back", "prompts-in-flight-are-saved")
def test_what_waits_in_the_queue_comes_back_whole(module, rollouter_class, tmp_path, monkeypatch, capfd):  # noqa: F811
    """Over three restarts each prompt is trained once, and generated once but for what was running; the books agree."""
    def begin():
        for name, value in records.begun(str(tmp_path), goes_on=True).items():
            monkeypatch.setenv(name, value)

    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    generated, trained = chain(rollouter_class, module, tmp_path / "checkpoints", True, begin)
    assert trained == generated == Counter(range(restarts.PROMPTS))
    records.flush()
    (settled,), _ = books.of_directory(str(tmp_path))
    assert settled.balanced, settled.problems
    assert settled.prompts == {"trained": restarts.PROMPTS, "drawn": restarts.PROMPTS}
    said = capfd.readouterr().err
    assert said.count("prompt groups come back whole, with") == 3
    rows = read(str(tmp_path), "restored")
    assert len(rows) == 3 and all(group.startswith("uid_sample_0_") for row in rows for group in row["groups"])
    saved = [(row["step"], row["drawn"]) for row in read(str(tmp_path), "checkpoint")]
    folders = list((tmp_path / "checkpoints").glob("global_step_*"))
    assert [step for step, _ in saved] == list(range(1, len(folders) + 1)) and saved[-1][1] == restarts.PROMPTS


def test_without_them_they_are_generated_again(module, rollouter_class, tmp_path):  # noqa: F811
    """Negative control: what a checkpoint without the file means; no prompt is lost or trained twice all the same."""
    generated, trained = chain(rollouter_class, module, tmp_path, whole=False)
    assert trained == Counter(range(restarts.PROMPTS)) and generated.total() > restarts.PROMPTS + 2 * BATCH


@pytest.mark.parametrize("damage, said", [
    (lambda path: path.write_bytes(b"torn"), "finished samples are generated again"),
    (lambda path: torch.save({"format": 1, "verl": "0.1", "samples": []}, path), "of verl 0.1, not 1 of verl"),
])
def test_a_file_that_cannot_be_used_costs_time_alone(module, rollouter_class, tmp_path, capfd, damage, said):  # noqa: F811
    asyncio.run(one_start(rollouter_class, module, tmp_path, 1, whole=True))
    damage(tmp_path / "global_step_1" / whole_samples.FILE)
    generated, trained = asyncio.run(one_start(rollouter_class, module, tmp_path, restarts.PROMPTS, whole=True))
    assert len(trained) == len(set(trained)) == restarts.PROMPTS - BATCH and len(generated) == len(trained)
    assert said in capfd.readouterr().err


def test_a_failed_write_costs_neither_checkpoint_nor_prompts(module, rollouter_class, tmp_path, capfd):  # noqa: F811
    (tmp_path / (whole_samples.FILE + ".new")).mkdir()
    whole_samples.save([SentSample.of(b"x", "sample_0_1", 1)], str(tmp_path))
    assert "1 samples would be generated again" in capfd.readouterr().err


def test_switched_off_nothing_is_saved_nor_taken_back(module, rollouter_class, tmp_path, monkeypatch):  # noqa: F811
    """Else what is taken from the checkpoint would wait for nobody."""
    from esgrpo import engine

    def counts():
        made = restarts.rollouter_of(rollouter_class, tmp_path, hooked=True)
        found = in_flight.buffer_of(made).counts()
        return found[Status.WAITING], found[Status.CARRIED]

    asyncio.run(one_start(rollouter_class, module, tmp_path, 1, whole=True))
    waiting, carried = counts()
    assert waiting and carried
    queue = queue_of(module, hooked=True)
    asyncio.run(queue.put_sample(SentSample.of(b"x", "sample_0_1", 1)))
    made = SimpleNamespace(message_queue_client=module.MessageQueueClient(Actor(queue)))
    assert [sample.name for sample in asyncio.run(whole_samples.in_queue(made))] == ["sample_0_1"]
    assert asyncio.run(whole_samples.in_queue(SimpleNamespace())) == []  # no queue yet
    with monkeypatch.context() as patch:
        patch.setattr(engine, "out_of_action", lambda slug: f"{slug} DISABLED")
        assert counts() == (waiting + carried, 0) and asyncio.run(whole_samples.in_queue(made)) == []
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"observe": True}))  # as plain verl: nothing comes back at all
    assert counts() == (0, 0) and asyncio.run(whole_samples.in_queue(made)) == []


def test_samples_of_a_checkpoint_without_weights_go(tmp_path, monkeypatch):
    """verl has removed its weights; the newest, and any that has weights, keep theirs. One folder never had any."""
    listed = os.listdir
    monkeypatch.setattr(whole_samples.os, "listdir", lambda folder: sorted(listed(folder)))
    (tmp_path / "global_step_0").mkdir()
    for number in (1, 2, 3):
        (tmp_path / f"global_step_{number}").mkdir()
        whole_samples.save([SentSample.of(b"x", "sample_0_1", 1)], str(tmp_path / f"global_step_{number}"))
        if number == 2:
            (tmp_path / "global_step_2" / whole_samples.WEIGHTS).mkdir()
    assert [(tmp_path / f"global_step_{number}" / whole_samples.FILE).exists() for number in (1, 2, 3)] == [
        False, True, True]


@pytest.mark.hook("rollouter-windows")
def test_every_status_is_a_metric(module, rollouter_class, tmp_path):  # noqa: F811
    made = restarts.rollouter_of(rollouter_class, tmp_path, hooked=True)
    queue = queue_of(module, hooked=True)
    made.message_queue_client = module.MessageQueueClient(Actor(queue))
    buffer = in_flight.buffer_of(made)
    for number in range(6):
        buffer.took(f"s{number}", 0, None)
    buffer.generated("s0", 2, 9)
    for name, status in (("s1", "trained"), ("s2", "pruned"), ("s3", "dropped")):
        buffer.ended([name], Status(status))
    found = asyncio.run(in_flight.next_version(made))
    assert found == {f"esgrpo/buffer/{name}": float(number) for name, number in {
        "waiting": 0, "running": 2, "finished": 0, "carried": 1, "trained": 1, "pruned": 1, "dropped": 1, "strays": 0,
        "beyond_limit": 0, "beyond_limit_most": 0}.items()}
