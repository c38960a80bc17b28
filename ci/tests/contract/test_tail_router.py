"""The router on verl's real load balancer, in this process and on a clock of its own."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("ray")
router = pytest.importorskip("verl.workers.rollout.router")

from esgrpo.algo.routing import PERIOD_S  # noqa: E402
from esgrpo.hooks.verl.server import tail_router  # noqa: E402

pytestmark = pytest.mark.hook("tail-router")
TAIL = {"extra_args": {"segment": {"length_class": "tail"}}}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def made(replicas: int, **settings):
    servers = {f"r{number}": f"h{number}" for number in range(replicas)}
    return tail_router.router_class(router.GlobalRequestLoadBalancer)(servers, settings or None)


def test_a_request_counts_from_its_acquisition_to_its_release(clock):
    balancer = made(2)
    server, handle = balancer.acquire_server("q", TAIL)
    assert handle == f"h{server[1:]}" and balancer.acquire_server("body")[0] != server
    clock[0] += 10
    taken = balancer.esgrpo_take_metrics()
    assert (taken["in_flight/tail"], taken["in_flight/body"], taken["tail_share"]) == (1.0, 1.0, 0.0)
    balancer.release_server(server, "q")
    clock[0] += 10
    taken = balancer.esgrpo_take_metrics()
    assert (taken["in_flight/tail"], taken["in_flight/body"]) == (0.0, 1.0)
    assert balancer._inflight_requests[server] == 0  # verl's own count


def test_replicas_serve_the_tail_where_the_share_allows_it_only(clock):
    """Without a share, the default of a router without settings, none does: the control."""
    for settings, expected in (({}, 0), ({"tail_share": 0.5}, 2)):
        balancer = made(4, **settings)
        for _ in range(4):
            for number in range(8):
                balancer.acquire_server(f"q{number}", TAIL)
            clock[0] += PERIOD_S
        taken = balancer.esgrpo_take_metrics()
        assert (taken["tail_replicas"], taken["tail_share"]) == (expected, expected / 4)


def test_without_replicas_there_is_no_share(clock):
    assert made(0).esgrpo_take_metrics()["tail_share"] == 0.0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_single_replica_is_said(clock, capsys, replicas):
    made(replicas)
    assert ("there is one replica" in capsys.readouterr().err) == (replicas == 1)
