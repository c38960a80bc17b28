"""verl's load balancer with replicas kept for the tail class: a plugin of rollout.router_config_path.

`TailRouter` is made from verl's own class when it is asked for. verl asks it again whenever a response is submitted
again, so a yield is where a response that turned out long can move to a tail replica.
"""

from __future__ import annotations

import functools
import os

from esgrpo.engine import MARKER, Hook
from esgrpo.errors import say

HOOK = Hook(
    slug="tail-router",
    target="verl.workers.rollout.router:GlobalRequestLoadBalancer",
    process=("rollouter",),
    kind="add",
    why="verl's load balancer counts requests alike, however long they will run, and keeps a response where it "
        "started; the class is looked up by name from the file that the driver writes",
    remove_when="verl's load balancer takes the expected length of a request into account",
    features=("tails",),
    relies_on=("verl.workers.rollout.router:_create_plugin_extension",
               "verl.workers.rollout.llm_server:LLMServerClient._acquire_server",
               "verl.workers.rollout.llm_server:LLMServerClient._release_server",
               "verl.workers.rollout.llm_server:LLMServerClient.generate",
               "verl.workers.rollout.llm_server:LLMServerManager._init_global_load_balancer"),
    without=(("<0.9.1", "routers cannot be plugged in by config"),),
)

NAME = "TailRouter"
FILE = "router.yaml"
ATTRIBUTE = "EsgrpoTailRouter"  # under which verl's module shows that it was made and fits


def apply(module) -> None:
    setattr(module, ATTRIBUTE, router_class(module.GlobalRequestLoadBalancer))


def installed(module) -> bool:
    return getattr(getattr(module, ATTRIBUTE, None), MARKER, None) == HOOK.slug


def __getattr__(name: str):
    if name == NAME:
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        return router_class(GlobalRequestLoadBalancer)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def config_path(run_dir: str) -> str:
    """Where the file lies that rollout.router_config_path names."""
    return os.path.join(run_dir, "esgrpo", FILE)


def config_text(segment) -> str:
    """What stands in that file."""
    return f"router_class: {__name__}.{NAME}\nseed: {segment.seed}\ntail_share: {segment.routing.tail_share}\n"


def class_of(sampling_params) -> str:
    """Length class of a request; one without a forecast is of the body."""
    from esgrpo.algo.routing import BODY, CLASSES

    segment = ((sampling_params or {}).get("extra_args") or {}).get("segment") or {}
    length = segment.get("length_class")
    return length if length in CLASSES else BODY


@functools.lru_cache(maxsize=1)
def router_class(base):
    """The subclass of verl's load balancer, under a name that a Ray worker finds in this module."""

    class TailRouter(base):
        def __init__(self, servers, yaml_config=None):
            import random
            import time

            from esgrpo.algo.routing import ClassLoad, TailShare

            super().__init__(servers)
            settings = yaml_config or {}
            self._rng = random.Random(settings.get("seed", 0))
            self._share = TailShare(settings.get("tail_share", 0), time.monotonic)
            self._load = ClassLoad(time.monotonic)
            if len(servers) == 1:
                say("esgrpo: routing: there is one replica, so every request goes to it; a tail replica needs a "
                    "second one")

        def require_acquire_fields(self) -> list[str]:
            return ["sampling_params"]

        def require_release_fields(self) -> list[str]:
            return ["request_id"]

        def acquire_server(self, request_id, sampling_params=None):
            from esgrpo.algo.routing import choose_replica

            pool = self._inflight_requests
            if pool:
                length, tail = class_of(sampling_params), self._tail()
                sticky = self._request_id_to_server.get(request_id)
                chosen = choose_replica(length, pool, tail, self._rng, sticky)
                self._load.start(request_id, length, chosen in tail, sticky in pool and sticky != chosen)
                self._request_id_to_server[request_id] = chosen  # verl's own class takes it from there
            return super().acquire_server(request_id)

        def release_server(self, server_id, request_id=None):
            self._load.end(request_id)
            self._tail()
            super().release_server(server_id, request_id)

        def _tail(self) -> frozenset:
            """The tail replicas from now on."""
            from esgrpo.algo.routing import tail_set

            pool = self._inflight_requests
            return tail_set(pool, self._share.observe(len(pool), *self._load.tail_and_rest()))

        def esgrpo_take_metrics(self) -> dict:
            """Since the last call, without the prefix."""
            pool = len(self._inflight_requests)
            return {**self._load.take_metrics(), "tail_replicas": self._share.replicas,
                    "tail_share": self._share.replicas / pool if pool else 0.0}

    TailRouter.__module__, TailRouter.__qualname__ = __name__, NAME
    setattr(TailRouter, MARKER, HOOK.slug)
    return TailRouter
