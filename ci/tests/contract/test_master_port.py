"""verl chooses the port of a worker group, and its workers bind it when they are up: others may have it by then."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from esgrpo.algo import ports
from esgrpo.call import wrapped
from esgrpo.hooks.verl.fixes import master_port

pytest.importorskip("ray")
base = pytest.importorskip("verl.single_controller.ray.base")


class Here:
    """verl's function for the node of a worker, run here."""

    def __init__(self, function):
        self.remote = function

    def options(self, **_):
        return self


@pytest.fixture
def chosen(monkeypatch):
    """Port of a new worker group, by verl's method or what stands in its place."""
    method = base.RayWorkerGroup._get_master_addr_port
    monkeypatch.setattr(base.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(base.ray, "get", lambda found: found)
    monkeypatch.setattr(base, "PlacementGroupSchedulingStrategy", lambda **_: None)
    monkeypatch.setattr(base, "get_master_addr_port", Here(base.get_master_addr_port._function))

    def choose(hooked: bool, workers: int = 8, **own) -> int:
        """Of a group of so many workers; its first placement group has eight bundles."""
        group = base.RayWorkerGroup.__new__(base.RayWorkerGroup)
        group._master_addr = group._master_port = None
        group._world_size = workers
        (wrapped(master_port, method) if hooked else method)(group, SimpleNamespace(bundle_count=8), **own)
        return int(group._master_port)

    return choose


@pytest.fixture
def clients(monkeypatch, tmp_path):
    file = tmp_path / "ip_local_port_range"
    file.write_text("32768\t60999\n")
    monkeypatch.setattr(master_port, "CLIENTS", file)
    return file


def test_plain_verl_chooses_one_that_anybody_may_get(chosen, clients):
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(chosen(hooked=False) >= low for _ in range(20))


@pytest.mark.hook("master-port-stays-free")
def test_the_port_is_one_that_the_kernel_gives_nobody(chosen, clients):
    found = {chosen(hooked=True) for _ in range(20)}
    assert all(ports.AFTER_RAY <= port < ports.NODE_PORTS for port in found) and len(found) > 15


def test_runs_of_one_seed_choose_ports_of_their_own(chosen, clients):
    found = set()
    for _ in range(4):
        random.seed(1)
        found.add(chosen(hooked=True))
    assert len(found) > 1


@pytest.mark.parametrize("workers, first, kept", [(16, 0, True), (4, 5, True), (4, 4, False), (1, 7, False)])
def test_a_group_of_several_nodes_keeps_a_port_of_the_kernels_range(chosen, clients, workers, first, kept):
    clients_own = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert (chosen(hooked=True, workers=workers, bundle_index=first) >= clients_own) is kept


def test_one_that_is_taken_now_is_passed_over(chosen, clients, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "lasting", lambda *_: [port, port + 50])
        assert port < chosen(hooked=True) < port + 50


def test_a_range_of_the_callers_own_stays(chosen, clients):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    assert chosen(hooked=True, master_port_range=[port, port + 50]) in range(port, port + 50)


@pytest.mark.parametrize("text", ["1024 65535", "", "none", None])
def test_where_the_kernel_leaves_no_room_it_is_verls_own_choice(chosen, clients, text):
    clients.unlink() if text is None else clients.write_text(text)
    assert ports.lasting(master_port.clients_from(), random.Random(0)) is None
    assert chosen(hooked=True) > 0


@pytest.mark.parametrize("low, end", [(32768, 30_000), (25_000, 25_000), (21_000, 21_000)])
def test_a_range_begins_at_random_and_has_room(low, end):
    found = [ports.lasting(low, random.Random(seed)) for seed in range(200)]
    assert all(ports.AFTER_RAY <= first <= end - ports.ROOM and last == end for first, last in found)
    assert len({first for first, _ in found}) > (1 if end - ports.ROOM > ports.AFTER_RAY else 0)
    assert ports.lasting(ports.AFTER_RAY + ports.ROOM - 1, random.Random(0)) is None
