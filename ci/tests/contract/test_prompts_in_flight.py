"""A restart of verl's real rollouter: its feed, checkpoint and data loader are upstream's, Ray is a fake."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("ray")

from ci.tests.contract.test_replaced_groups import rollouter_class  # noqa: E402, F401
from esgrpo.algo.experience import ExperienceBuffer  # noqa: E402
from esgrpo.algo.terms import Status  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl.prompts import (  # noqa: E402
    in_flight,
    in_flight_checkpoint,
    in_flight_reissued,
    trained_checkpoint,
    trained_prompts,
)
from esgrpo.records import read  # noqa: E402

PROMPTS, BATCH, SIZE = 24, 4, 2


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": True}))


def collate(rows):
    return {"raw_prompt": np.array([[{"role": "user", "content": f"prompt {row}"}] for row in rows], dtype=object),
            "number": np.array(rows, dtype=object), "dummy": torch.zeros(len(rows), 1)}


def number_of(batch) -> int:
    return int(batch["number"][0])


def rollouter_of(kind, directory, hooked: bool, total: int = PROMPTS, required: int = BATCH):
    """A rollouter as after __init__ with its checkpoint loaded. `required`: the batch of its configuration."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    subclass = type("Rollouter", (kind,), {})
    if hooked:
        for hook in (in_flight, in_flight_checkpoint, in_flight_reissued):
            name = hook.HOOK.target.rpartition(".")[2]
            setattr(subclass, name, wrapped(hook, inspect.getattr_static(kind, name)))
    made = object.__new__(subclass)
    made.config = SimpleNamespace(
        trainer=SimpleNamespace(total_epochs=1, resume_mode="auto", default_hdfs_dir=None, resume_from_path=None,
                                default_local_dir=str(directory)),
        async_training=SimpleNamespace(trigger_parameter_sync_step=1),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=SIZE, multi_turn=SimpleNamespace(enable=False))))
    generator = torch.Generator().manual_seed(5)
    made.train_dataloader = StatefulDataLoader(list(range(PROMPTS)), batch_size=1, collate_fn=collate,
                                               sampler=torch.utils.data.RandomSampler(range(PROMPTS),
                                                                                      generator=generator))
    made.required_samples, made.total_rollout_steps, made.global_steps = required, total, 1
    made.dataloader_lock = asyncio.Lock()
    made.load_checkpoint()
    made.pending_queue = asyncio.Queue(maxsize=3)
    return made


async def train(made, directory, version: int, dies_after: int, uids=lambda made, samples: None) -> tuple[list, list]:
    """Trains batches of finished samples, saves after each, and dies after so many of them with more in flight."""
    feed, trained, saved, taken = asyncio.ensure_future(made._feed_samples()), [], [], []
    while len(saved) < dies_after:
        sample = await made.pending_queue.get()
        if sample is None:
            break
        taken.append(sample)
        if len(taken) < BATCH + 2:  # two prompts more than trained are always running
            continue
        batch = taken[:1] + taken[2:BATCH + 1]  # not in the order of the data
        taken = [taken[1], *taken[BATCH + 1:]]
        version += 1
        trained += batch
        uids(made, batch)
        folder = directory / f"global_step_{version}"
        folder.mkdir(parents=True)
        await made.save_checkpoint(str(folder))
        (directory / "latest_checkpointed_iteration.txt").write_text(str(version))
        saved.append(folder)
    if len(saved) < dies_after:  # the end of the data: what is left is trained, too
        trained += taken
        uids(made, taken)
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
    return trained, saved


def chain(kind, directory, hooked: bool) -> tuple[Counter, list]:
    """Three starts that die and one that ends: prompt -> times trained in what the checkpoints kept."""
    def tell(made, samples):
        if hooked:
            in_flight.trained(made, [f"uid_{sample.sample_id}" for sample in samples])

    numbers, names, version = [], [], 0
    for dies_after in (1, 2, 1, PROMPTS):
        made = rollouter_of(kind, directory, hooked)
        trained, saved = asyncio.run(asyncio.wait_for(train(made, directory, version, dies_after, tell), 60))
        version += len(saved)
        numbers += [int(sample.full_batch.non_tensor_batch["number"][0]) for sample in trained]
        names.append([sample.sample_id for sample in trained])
    return Counter(numbers), names


@pytest.mark.hook("prompts-in-flight", "prompts-in-flight-are-saved", "prompts-in-flight-are-reissued")
def test_each_prompt_is_trained_once(rollouter_class, tmp_path, monkeypatch, capfd):  # noqa: F811
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    counts, names = chain(rollouter_class, tmp_path / "checkpoints", hooked=True)
    assert counts == Counter(range(PROMPTS))
    assert all(len(set(start)) == len(start) for start in names), "a sample id came twice in one start"
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("esgrpo: restart")]
    assert len(said) == 3 and all("prompt groups were unfinished and start anew" in line for line in said)
    for groups, finished, _, running in (map(int, re.findall(r"\d+", line)) for line in said):
        assert finished + running == groups * SIZE  # all responses of theirs, whatever had become of each
    rows = read(str(tmp_path), "reissued")
    assert len(rows) >= 6 and all(row["prompt"] and row["was"].startswith("uid_sample_0_") for row in rows)
    assert all(1 <= row["draw"] <= PROMPTS for row in rows)


def test_plain_verl_loses_them(rollouter_class, tmp_path):  # noqa: F811
    """Negative control."""
    counts, _ = chain(rollouter_class, tmp_path / "checkpoints", hooked=False)
    assert len(counts) <= PROMPTS - 6  # two running ones and those that waited, at each of three restarts


def test_a_run_that_is_only_observed_goes_on_as_plain_verl_does(rollouter_class, tmp_path, monkeypatch, capfd):  # noqa: F811
    """The same prompts under the same names, at each of three restarts; what is lost is said and stands in the rows."""
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"observe": True}))
    observed, plain = (chain(rollouter_class, tmp_path / str(hooked), hooked) for hooked in (True, False))
    assert observed == plain
    assert capfd.readouterr().err.count("prompts that were in flight are not trained in this epoch") == 3
    starts = read(str(tmp_path), "start")
    assert [bool(row["gives_back"]) for row in starts] == [False] * 4 and read(str(tmp_path), "reissued") == []
    assert all(row["drawn"] > 0 for row in starts[1:])


@pytest.mark.parametrize("enabled, more", [(True, 0), (False, 1)])
def test_a_run_that_is_complete_draws_nothing_more(rollouter_class, tmp_path, monkeypatch, enabled, more):  # noqa: F811
    """Plain verl, and so a run that is only observed, generates one prompt more: the feed looks at its limit late."""
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps({"enable": enabled, "observe": not enabled}))
    steps = PROMPTS - BATCH

    async def drawn(made) -> int:
        made.total_rollout_steps = steps
        feed, found = asyncio.ensure_future(made._feed_samples()), 0
        while await made.pending_queue.get() is not None:
            found += 1
        await feed
        return found

    made = rollouter_of(rollouter_class, tmp_path, hooked=True)
    assert asyncio.run(drawn(made)) == steps
    in_flight.trained(made, [f"uid_{name}" for name in in_flight.buffer_of(made).open])
    folder = tmp_path / f"global_step_{steps // BATCH}"
    folder.mkdir()
    asyncio.run(made.save_checkpoint(str(folder)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(steps // BATCH))
    again = rollouter_of(rollouter_class, tmp_path, hooked=True)
    assert asyncio.run(drawn(again)) == more and in_flight.drawn_of(again) == steps + more


@pytest.mark.parametrize("required", [BATCH // 2, BATCH, 2 * BATCH])
def test_a_restart_counts_what_was_trained(rollouter_class, tmp_path, required):  # noqa: F811
    """Two batches of BATCH are trained and two prompts replaced, whatever batch the configuration speaks of."""
    total, replaced = 4 * BATCH, 2

    async def start(made) -> None:
        feed = asyncio.ensure_future(made._feed_samples())
        names = [(await made.pending_queue.get()).sample_id for _ in range(2 * BATCH + replaced)]
        for name in names[:replaced]:
            in_flight.ended(made, SimpleNamespace(sample_id=name), Status.PRUNED)
            made.total_rollout_steps += 1
        in_flight.trained(made, [f"uid_{name}" for name in names[replaced:]])
        folder = tmp_path / "global_step_2"
        folder.mkdir()
        await made.save_checkpoint(str(folder))
        feed.cancel()

    async def rest(made) -> int:
        feed, found = asyncio.ensure_future(made._feed_samples()), 0
        while await made.pending_queue.get() is not None:
            found += 1
        await feed
        return found

    asyncio.run(start(rollouter_of(rollouter_class, tmp_path, True, total, required)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    again = rollouter_of(rollouter_class, tmp_path, True, total, required)
    assert again.total_rollout_steps == total + replaced  # what another replacement may still draw is what is left
    assert asyncio.run(rest(again)) == total - 2 * BATCH


def test_more_than_the_data_is_not_fed(rollouter_class, tmp_path):  # noqa: F811
    """A prompt that failed near the end of the data found no other in its place."""
    made = rollouter_of(rollouter_class, tmp_path, hooked=True)
    in_flight_reissued.count_on(made, ExperienceBuffer(8, ended={Status.TRAINED: 6, Status.DROPPED: 2}))
    assert (made.global_steps, made.total_rollout_steps) == (9, PROMPTS)


def test_an_older_checkpoint_leaves_the_count_to_verl(rollouter_class, tmp_path):  # noqa: F811
    made = rollouter_of(rollouter_class, tmp_path, hooked=True)
    made.global_steps = 5
    in_flight_reissued.count_on(made, ExperienceBuffer(8))
    assert (made.global_steps, made.total_rollout_steps) == (5, PROMPTS)


def test_a_checkpoint_without_ours_is_said(rollouter_class, tmp_path, capfd):  # noqa: F811
    made = rollouter_of(rollouter_class, tmp_path, hooked=False)
    asyncio.run(train(made, tmp_path, 0, 1))
    again = rollouter_of(rollouter_class, tmp_path, hooked=True)
    said = capfd.readouterr().err
    assert "does not say which prompts were in flight (it was written without esgrpo" in said
    assert in_flight.restored(again) == BATCH and not in_flight.buffer_of(again).waiting
    (tmp_path / "global_step_1" / in_flight_checkpoint.FILE).write_bytes(b"torn")
    rollouter_of(rollouter_class, tmp_path, hooked=True)
    assert "does not say which prompts were in flight (" + str(tmp_path) in capfd.readouterr().err


def test_from_scratch_nothing_is_said(rollouter_class, tmp_path, capfd):  # noqa: F811
    made = rollouter_of(rollouter_class, tmp_path, hooked=True)
    assert "restart" not in capfd.readouterr().err and in_flight.restored(made) == in_flight.drawn_of(made) == 0


def test_a_batch_without_text_has_no_key():
    assert in_flight._key({}) is in_flight._key({"raw_prompt": []}) is None and in_flight._key({"raw_prompt": ["p"]})


def test_a_failed_write_costs_the_prompts_and_not_the_checkpoint(rollouter_class, tmp_path, capfd):  # noqa: F811
    made = rollouter_of(rollouter_class, tmp_path, hooked=True)
    (tmp_path / (in_flight_checkpoint.FILE + ".new")).mkdir()
    asyncio.run(made.save_checkpoint(str(tmp_path)))
    assert (tmp_path / "data.pt").exists() and "0 prompts would not be trained" in capfd.readouterr().err


@pytest.mark.hook("trained-prompts", "trained-prompts-before-checkpoint")
def test_the_trainer_tells_what_it_has_trained_before_it_saves(monkeypatch):
    """Batch after batch: told when the next is asked for; all before a checkpoint; none that was not trained."""
    import ray

    told, order = [], []
    rollouter = SimpleNamespace()

    def call(function, uids):
        told.append((function, tuple(uids)))
        return len(told)

    monkeypatch.setattr(ray, "wait", lambda under_way, num_returns, timeout: ([], list(under_way)))
    monkeypatch.setattr(ray, "get", lambda references, timeout: order.append(("waited", list(references))))
    rollouter.__ray_call__ = SimpleNamespace(remote=call)
    batches = iter([["uid_b", "uid_a", "uid_a"], ["uid_c"], None])

    class Trainer:
        current_param_version = 0

        def __init__(self):
            self.rollouter = rollouter

        async def _get_samples_from_queue(self):
            uids = next(batches)
            if uids is None:
                return None, None
            return 0, SimpleNamespace(non_tensor_batch={"uid": np.array(uids, dtype=object)})

        def _save_checkpoint(self):
            order.append("saved")

    Trainer._get_samples_from_queue = wrapped(trained_prompts, Trainer._get_samples_from_queue)
    Trainer._save_checkpoint = wrapped(trained_checkpoint, Trainer._save_checkpoint)
    trainer = Trainer()
    asyncio.run(trainer._get_samples_from_queue())
    assert told == []
    asyncio.run(trainer._get_samples_from_queue())
    assert told == [(in_flight.trained, ("uid_a", "uid_b"))]
    trainer._save_checkpoint()
    assert told[1:] == [(in_flight.trained, ("uid_c",))] and order == [("waited", [1, 2]), "saved"]
    assert asyncio.run(trainer._get_samples_from_queue()) == (None, None)
    trainer._save_checkpoint()
    assert len(told) == 2 and order[2:] == [("waited", []), "saved"]
