"""Driver: two real actors in a collective group "hccl"; prints what each saw, as JSON. Arguments: a group name.

Started by tests in a Python of their choice, with whatever patch or hook they test; imports nothing of ours.
"""

import json
import sys
import time

import ray
from ray.util import collective

WORLD = 2
PAUSE_SECONDS = 1.0


@ray.remote(num_cpus=0)
class Member:
    def __init__(self, rank):
        self.rank = rank

    def join_a_world_of_its_own(self, path):
        """What a trainer has done before: torch.distributed is initialised, with other ranks than the group's."""
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)

    def use(self, group):
        import numpy
        import torch

        seen, one = {}, torch.full((3,), float(self.rank + 1))
        total = one.clone()
        collective.allreduce(total, group_name=group)
        seen["allreduce"] = total.tolist()
        largest = one.clone()
        collective.allreduce(largest, group_name=group, op=collective.types.ReduceOp.MAX)
        seen["max"] = largest.tolist()
        for dtype in ("uint8", "bfloat16", "int64"):
            value = torch.full((2, 2), 7 + self.rank, dtype=getattr(torch, dtype))
            collective.broadcast(value, src_rank=1, group_name=group)
            seen[f"broadcast-{dtype}"] = value.flatten().tolist()
        to_root = one.clone()
        collective.reduce(to_root, dst_rank=1, group_name=group)
        seen["reduce"] = to_root.tolist()
        parts = [torch.zeros(3) for _ in range(WORLD)]
        collective.allgather(parts, one, group_name=group)
        seen["allgather"] = [part.tolist() for part in parts]
        message = torch.arange(4.0) if self.rank == 0 else torch.zeros(4)
        if self.rank == 0:
            collective.send(message, 1, group_name=group)
        else:
            collective.recv(message, 0, group_name=group)
        seen["send-recv"] = message.tolist()
        if self.rank == 1:
            time.sleep(PAUSE_SECONDS)
        start = time.monotonic()
        collective.barrier(group_name=group)
        seen["barrier"] = time.monotonic() - start
        try:
            collective.allreduce(numpy.zeros(1), group_name=group)
        except ValueError as error:
            seen["numpy"] = str(error)
        seen["rank"] = [collective.get_rank(group), collective.get_collective_group_size(group)]
        return seen

    def leave(self, group):
        collective.destroy_collective_group(group)


def main(group, path):
    ray.init(num_cpus=WORLD, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    members = [Member.remote(rank) for rank in range(WORLD)]
    ray.get(members[1].join_a_world_of_its_own.remote(path))
    answers = []
    for _ in range(2):  # a second group of the same name, after the first is gone
        collective.create_collective_group(members, WORLD, list(range(WORLD)), backend="hccl", group_name=group)
        answers.append(ray.get([member.use.remote(group) for member in members], timeout=60))
        ray.get([member.leave.remote(group) for member in members], timeout=60)
        while True:  # the group's named actor dies a moment later
            try:
                ray.get_actor(f"info_{group}")
                time.sleep(0.1)
            except ValueError:
                break
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
