"""Checkpoint engine "cpu_zmq": actor rank 0 pushes named tensors, bucket by bucket, to every rollout worker.

Wire format per bucket: the receiver's token, one JSON frame {"tensors": [[name, dtype, shape], ...], "last": bool},
then one raw frame per tensor. Weights therefore arrive bit for bit. Workers may be on several nodes, so that the socket
listens on the node's address; the token, which travels through Ray with the address, tells the trainer from others.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets

import torch

from esgrpo.errors import RunError, say

TOKEN_BYTES = 32
BUCKETS_AHEAD = 1  # of a socket at either end: by ZeroMQ's own 1,000 both would hold all weights at once
SEND_DEADLINE_S = 300.0  # for a worker to take a bucket


def register(base) -> None:
    """Register the engine; `base` is verl.checkpoint_engine.base."""
    import ray
    import zmq

    class CpuZmqCheckpointEngine(base.CheckpointEngine):
        def __init__(self, bucket_size: int, is_master: bool = False, **_unused):
            self.bucket_size = bucket_size  # bytes
            self.is_master = is_master
            self.context = zmq.Context.instance()
            self.pull, self.address, self.push, self.rank = None, None, [], None  # push: (socket, token) of each peer
            self.token = secrets.token_hex(TOKEN_BYTES)

        def prepare(self):
            if self.pull is None:  # the same socket serves every sync
                self.pull = self.context.socket(zmq.PULL)
                self.pull.setsockopt(zmq.RCVHWM, BUCKETS_AHEAD)
                ip = ray.util.get_node_ip_address().strip("[]")
                self.address = f"tcp://{ip}:{self.pull.bind_to_random_port(f'tcp://{ip}')}"
            return {"address": self.address, "token": self.token}

        @classmethod
        def build_topology(cls, actor_world_size, rollout_world_size, metadata):
            peers = [(entry["address"], entry["token"]) for entry in metadata[actor_world_size:]]
            actors = {"rank": [0] + [-1] * (actor_world_size - 1), "peers": [peers] * actor_world_size}
            rollouts = {"rank": list(range(1, rollout_world_size + 1)), "peers": [[]] * rollout_world_size}
            return actors, rollouts

        def init_process_group(self, rank, peers):
            self.rank = rank
            for address, token in peers if rank == 0 else []:
                socket = self.context.socket(zmq.PUSH)
                socket.setsockopt(zmq.LINGER, -1)
                socket.setsockopt(zmq.SNDHWM, BUCKETS_AHEAD)
                socket.setsockopt(zmq.SNDTIMEO, int(SEND_DEADLINE_S * 1000))
                socket.connect(address)
                self.push.append((socket, token.encode()))

        def finalize(self):
            for socket, _ in self.push:
                socket.close()
            self.push = []

        def _send(self, bucket, last: bool) -> None:
            header = {"tensors": [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in bucket],
                      "last": last}
            frames = [json.dumps(header).encode()]
            frames += [t.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for _, t in bucket]
            for socket, token in self.push:
                try:
                    socket.send_multipart([token, *frames])
                except zmq.Again:
                    socket.setsockopt(zmq.LINGER, 0)  # what nobody reads does not hold up the end, too
                    raise RunError("cpu-checkpoint-engine",
                                   f"a rollout worker took no weights for {SEND_DEADLINE_S:.0f} s",
                                   "each bucket taken by every worker", "this weight sync, and the run, end",
                                   "look in the worker's log for what stopped it") from None

        @torch.no_grad()
        async def send_weights(self, weights, global_steps=None):
            bucket, size = [], 0
            for name, tensor in weights:
                if self.rank != 0:
                    continue  # the generator all-gathers: every rank has to consume it
                bucket.append((name, tensor.detach().contiguous()))
                size += tensor.nbytes
                if size >= self.bucket_size:
                    self._send(bucket, last=False)
                    bucket, size = [], 0
            if self.rank == 0:
                self._send(bucket, last=True)

        async def receive_weights(self, global_steps=None):
            last = False
            while not last:
                token, *frames = await asyncio.to_thread(self.pull.recv_multipart)
                if not hmac.compare_digest(token, self.token.encode()):
                    say(f"esgrpo: cpu-checkpoint-engine: {self.address} got a message that is not from this run's "
                        "trainer; it is dropped")
                    continue
                header, *frames = frames
                header = json.loads(header)
                for (name, dtype, shape), frame in zip(header["tensors"], frames, strict=True):
                    flat = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
                    yield name, flat.view(getattr(torch, dtype)).view(shape)
                last = header["last"]

    base.CheckpointEngineRegistry.register("cpu_zmq")(CpuZmqCheckpointEngine)
