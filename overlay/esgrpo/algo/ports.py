"""Ports that are chosen now and bound later. Pure."""

from __future__ import annotations

import random

AFTER_RAY = 20_000  # Ray's workers have 10002 to 19999
NODE_PORTS = 30_000  # from here on Kubernetes has its services
ROOM = 1_000  # fewer to choose from, and two groups too often choose the same


def lasting(clients_from: int, rng: random.Random) -> list[int] | None:
    """[first, end) of ports that the kernel gives nobody who asks for just any, begun at random; None: there are none.

    clients_from: lower end of net.ipv4.ip_local_port_range. `rng` must differ between runs of the same seed.
    """
    end = min(clients_from, NODE_PORTS)
    last = end - ROOM
    return None if last < AFTER_RAY else [rng.randint(AFTER_RAY, last), end]
