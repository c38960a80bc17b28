"""The testbed's weight socket on verl's own registry: weights bit for bit, and from this run's trainer alone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import sys

import pytest

torch = pytest.importorskip("torch")
zmq = pytest.importorskip("zmq")
base = pytest.importorskip("verl.checkpoint_engine.base")

WEIGHTS = [("a", torch.arange(6, dtype=torch.float32).view(2, 3)),
           ("b", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))]


@pytest.fixture
def engines(monkeypatch):
    """(trainer, rollout worker, topology of the two), as verl makes them."""
    from esgrpo.platforms import cpu_checkpoint

    monkeypatch.setattr(base.CheckpointEngineRegistry, "_registry", dict(base.CheckpointEngineRegistry._registry))
    cpu_checkpoint.register(base)
    cls = base.CheckpointEngineRegistry.get("cpu_zmq")
    trainer, worker = cls(bucket_size=16, is_master=True), cls(bucket_size=16)
    actors, rollouts = cls.build_topology(1, 1, [trainer.prepare(), worker.prepare()])
    trainer.init_process_group(actors["rank"][0], actors["peers"][0])
    worker.init_process_group(rollouts["rank"][0], rollouts["peers"][0])
    yield trainer, worker
    trainer.finalize()
    for engine in (trainer, worker):
        engine.pull.close(linger=0)


async def sync(trainer, worker) -> dict:
    await trainer.send_weights(iter(WEIGHTS))
    return {name: tensor async for name, tensor in worker.receive_weights()}


def assert_same(found):
    assert list(found) == ["a", "b"] and all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS)


def test_weights_arrive_bit_for_bit(engines):
    for _ in range(2):  # the same socket serves every sync
        assert_same(asyncio.run(sync(*engines)))


def test_weights_wait_at_the_trainer_until_a_worker_takes_them(engines, monkeypatch):
    from esgrpo.platforms import cpu_checkpoint

    trainer, worker = engines
    parts = [(str(n), torch.full((2 * 2**20,), n, dtype=torch.float32)) for n in range(40)]  # more than kernels buffer
    trainer.push[0][0].setsockopt(zmq.SNDTIMEO, 500)  # ms
    with pytest.raises(cpu_checkpoint.RunError, match="took no weights"):  # by ZeroMQ's own limit all 320 MiB wait
        asyncio.run(trainer.send_weights(iter(parts)))


def test_more_weights_than_may_wait_arrive(engines):
    trainer, worker = engines
    parts = [(str(n), torch.full((2 * 2**20,), n, dtype=torch.float32)) for n in range(12)]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        sent = threads.submit(lambda: asyncio.run(trainer.send_weights(iter(parts))))

        async def received():
            return [(name, float(tensor[0]), float(tensor[-1])) async for name, tensor in worker.receive_weights()]

        assert asyncio.run(received()) == [(name, float(name), float(name)) for name, _ in parts]
        sent.result(timeout=60)


@pytest.mark.parametrize("token", [[], [b""], [b"0" * 64]], ids=["none", "empty", "wrong"])
def test_what_others_send_is_dropped(engines, capsys, token):
    trainer, worker = engines
    header = json.dumps({"tensors": [["a", "float32", [2, 3]]], "last": True}).encode()
    stranger = zmq.Context.instance().socket(zmq.PUSH)
    stranger.connect(worker.address)
    stranger.send_multipart([*token, header, bytes(24)])
    assert worker.pull.poll(10_000)  # it is there before the trainer's
    assert_same(asyncio.run(sync(trainer, worker)))
    stranger.close(linger=0)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "not from this run's trainer" in said


def test_a_module_that_verl_imports_brings_it_to_gpus(monkeypatch):
    """Where the CPU platform is off; `custom_backend_module` is imported in every process that makes an engine."""
    from verl.utils.import_utils import import_external_libs

    monkeypatch.setattr(base.CheckpointEngineRegistry, "_registry", {})
    monkeypatch.delitem(sys.modules, "bench.common.shared_gpu", raising=False)
    import_external_libs("bench.common.shared_gpu")
    assert list(base.CheckpointEngineRegistry._registry) == ["cpu_zmq"]
