"""The port of a worker group on one node is still free when its workers bind it."""

from __future__ import annotations

import random
from pathlib import Path

from esgrpo.algo import ports
from esgrpo.engine import Hook

CLIENTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

HOOK = Hook(
    slug="master-port-stays-free",
    target="verl.single_controller.ray.base:RayWorkerGroup._get_master_addr_port",
    process=("rollouter", "trainer", "v1-task-runner"),
    kind="wrap",
    why="verl asks the kernel for any free port, gives it back, and tells it to workers that bind it once they are up: "
        "most of a minute later where several runs start on a host, and one of the sockets that were made meanwhile "
        "may have it (verl issues 3521 and 5889; three of 26 runs on H200s). Ports below the kernel's own range last. "
        "Between nodes they may be closed where those of that range are open, so that such a group keeps verl's",
    remove_when="verl holds the port until it is bound, or chooses below net.ipv4.ip_local_port_range",
    features=("observe",),
    without=(("==0.7.0", "its port is in no range"),),
    relies_on=("verl.single_controller.ray.base:get_master_addr_port",
               "verl.single_controller.ray.base:RayWorkerGroup._init_with_resource_pool",
               "verl.single_controller.ray.base:RayWorkerGroup._init_with_subresource_pool"),
)


def clients_from() -> int:
    """Where the kernel's own range begins on this host; 0 where it does not say."""
    try:
        return int(CLIENTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def on_one_node(group, pg, first: int) -> bool:
    """All workers of the group are in this placement group, from its bundle `first` on."""
    return first + group._world_size <= pg.bundle_count


def around(call):
    own = call.argument("master_port_range")
    if own is None and on_one_node(call.owner, call.argument("pg"), call.argument("bundle_index")):
        # verl seeds `random`: runs of one seed would choose the same
        call.arguments["master_port_range"] = ports.lasting(clients_from(), random.SystemRandom())
    return call()
