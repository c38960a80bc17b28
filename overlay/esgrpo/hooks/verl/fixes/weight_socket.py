"""The socket through which a vLLM engine gets its weights belongs to this run, whatever else runs on the host."""

from __future__ import annotations

import functools
import inspect
import os

from esgrpo.engine import Hook
from esgrpo.records import ENV_RESTART, ENV_RUN_ID

CLASSES = ("BucketedWeightSender", "BucketedWeightReceiver")
PREFIX = "ipc:///tmp/rl-colocate-zmq-"

HOOK = Hook(
    slug="weight-socket-of-this-run",
    target="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender.__init__",
    process=("rollout-worker",),  # the engine imports the same source at its first sync
    kind="add",  # both ends of the socket, in one place
    why="verl names the socket after Ray's job id, and the first job of every local Ray cluster is 01000000: of two "
        "runs on one host each unlinks the other's socket, and engines wait for ever or take the other run's weights",
    remove_when="verl's socket name is unique on the host, or the socket is passed on",
    features=("observe",),
    without=(("==0.7.0", "its rollout gets the weights through a collective"),),
    relies_on=("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightReceiver.__init__",),
)


def of_this_run(handle: str) -> str:
    """The socket's address with the run's id in it; unchanged where it has none or is named in another way."""
    run = "-".join(filter(None, (os.environ.get(ENV_RUN_ID), os.environ.get(ENV_RESTART))))
    return handle.replace(PREFIX, f"{PREFIX}{run}-", 1) if run else handle


def named_apart(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        call = inspect.signature(original).bind(self, *args, **kwargs)
        call.arguments["zmq_handle"] = of_this_run(call.arguments["zmq_handle"])
        return original(*call.args, **call.kwargs)

    __init__.esgrpo_socket = True
    return __init__


def apply(module) -> None:
    for name in CLASSES:
        cls = getattr(module, name)
        cls.__init__ = named_apart(cls.__init__)


def installed(module) -> bool:
    return all(getattr(getattr(module, name).__init__, "esgrpo_socket", False) for name in CLASSES)
