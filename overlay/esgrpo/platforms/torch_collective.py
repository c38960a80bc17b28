"""The collective group "hccl" of ray.util.collective, on a process group of torch.distributed.

Ray >= 2.60 gets it registered by the hook add-hccl-collective-group; for ray 2.51.1, which has no registry, the patch
add-hccl-collective-group of that release adds the same class to ray itself.
"""

import datetime
import os
import time

import ray
import ray.experimental.internal_kv as internal_kv
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllReduceOptions,
    Backend,
    BroadcastOptions,
    RecvOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    SendOptions,
)

TORCH_REDUCE_OP_MAP = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}
# The backend of torch.distributed. Any other than "hccl" is for tests without NPUs.
PROCESS_GROUP_BACKEND_ENV = "RAY_HCCL_PROCESS_GROUP_BACKEND"
RENDEZVOUS_TIMEOUT_S = 180
RENDEZVOUS_POLL_S = 0.05
OPERATION_TIMEOUT = datetime.timedelta(minutes=30)


def get_process_group_backend() -> str:
    """The name of the torch.distributed backend, "hccl" by default."""
    return os.environ.get(PROCESS_GROUP_BACKEND_ENV, "hccl")


class HCCLGroup(BaseGroup):
    """A collective group of its own, whatever process groups the actors have.

    Trainers have initialized torch.distributed with the ranks of their own world.
    Thus neither the default process group nor a subgroup of it can be used.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        group_name: str,
        process_group_backend=None,
    ):
        super().__init__(world_size, rank, group_name)
        self._pg_backend = process_group_backend or get_process_group_backend()
        if not self._is_available(self._pg_backend):
            raise RuntimeError(
                f"torch.distributed has no backend {self._pg_backend!r} for the "
                f"collective group {group_name!r}. Please install torch_npu."
            )
        self._store = self._rendezvous()
        self._pg, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(self._pg_backend),
            self._store,
            group_name=f"ray_collective_{group_name}",
            timeout=OPERATION_TIMEOUT,
        )
        c10d._world.pg_group_ranks[self._pg] = {i: i for i in range(world_size)}

    @staticmethod
    def _is_available(process_group_backend: str) -> bool:
        if process_group_backend == "hccl":
            try:
                import torch_npu  # noqa: F401  (registers the backend)
            except ImportError:
                return False
        return process_group_backend in dist.Backend.backend_list

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Whether this process could be a member; the driver, too, is asked."""
        return dist.is_available() and cls._is_available(get_process_group_backend())

    def _rendezvous(self) -> dist.TCPStore:
        """Rank 0 serves the store and publishes its address until all have joined."""
        key = f"collective_group_hccl_address_{self._group_name}"
        timeout = datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
        if self._rank == 0:
            host = ray.util.get_node_ip_address()
            store = dist.TCPStore(
                host, 0, is_master=True, timeout=timeout, wait_for_workers=False
            )
            internal_kv._internal_kv_put(key, f"{host} {store.port}", overwrite=True)
        else:
            host, port = self._wait_for_address(key)
            store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        store.set(f"joined/{self._rank}", "")
        if self._rank == 0:
            try:
                store.wait([f"joined/{i}" for i in range(self._world_size)])
            finally:
                # A later group of the same name must not find this address.
                internal_kv._internal_kv_del(key)
        return store

    def _wait_for_address(self, key: str):
        deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        while True:
            address = internal_kv._internal_kv_get(key)
            if address is not None:
                host, port = address.decode().split()
                return host, int(port)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Rank {self._rank} of the HCCL group {self._group_name!r} waited "
                    f"{RENDEZVOUS_TIMEOUT_S} seconds for the address of rank 0."
                )
            time.sleep(RENDEZVOUS_POLL_S)

    def destroy_group(self):
        """Release the communicator and the store."""
        if self._pg is not None:
            dist.destroy_process_group(self._pg)
            self._pg = self._store = None

    @classmethod
    def backend(cls):
        """The backend of this collective group."""
        return Backend.HCCL

    @staticmethod
    def _check_tensors(tensors: list) -> list:
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    f"The HCCL group only accepts torch.Tensor, received {type(tensor)}"
                )
        return tensors

    def allreduce(self, tensor, allreduce_options=None):
        options = c10d.AllreduceOptions()
        options.reduceOp = TORCH_REDUCE_OP_MAP[
            (allreduce_options or AllReduceOptions()).reduceOp
        ]
        self._pg.allreduce(self._check_tensors(tensor), options).wait()

    def barrier(self, barrier_options=None):
        # Waiting for an operation of HCCL holds up the stream only, reading its result
        # holds up this process.
        device = "npu" if self._pg_backend == "hccl" else "cpu"
        tensor = torch.zeros(1, device=device)
        self.allreduce([tensor])
        tensor.item()

    def reduce(self, tensor, reduce_options=None):
        reduce_options = reduce_options or ReduceOptions()
        options = c10d.ReduceOptions()
        options.reduceOp = TORCH_REDUCE_OP_MAP[reduce_options.reduceOp]
        options.rootRank = reduce_options.root_rank
        tensor = self._check_tensors(tensor)
        if self._rank != reduce_options.root_rank:
            # Backends may use the tensor of any rank as a buffer.
            tensor = [t.detach().clone() for t in tensor]
        self._pg.reduce(tensor, options).wait()

    def allgather(self, tensor_list, tensor, allgather_options=None):
        for tensors in tensor_list:
            self._check_tensors(tensors)
        self._pg.allgather(tensor_list, self._check_tensors(tensor)).wait()

    def broadcast(self, tensor, broadcast_options=None):
        options = c10d.BroadcastOptions()
        options.rootRank = (broadcast_options or BroadcastOptions()).root_rank
        options.rootTensor = 0
        self._pg.broadcast(self._check_tensors(tensor), options).wait()

    def reducescatter(self, tensor, tensor_list, reducescatter_options=None):
        options = c10d.ReduceScatterOptions()
        options.reduceOp = TORCH_REDUCE_OP_MAP[
            (reducescatter_options or ReduceScatterOptions()).reduceOp
        ]
        for tensors in tensor_list:
            self._check_tensors(tensors)
        self._pg.reduce_scatter(
            self._check_tensors(tensor), tensor_list, options
        ).wait()

    def send(self, tensor, send_options: SendOptions):
        self._pg.send(self._check_tensors(tensor), send_options.dst_rank, 0).wait()

    def recv(self, tensor, recv_options: RecvOptions):
        self._pg.recv(self._check_tensors(tensor), recv_options.src_rank, 0).wait()
