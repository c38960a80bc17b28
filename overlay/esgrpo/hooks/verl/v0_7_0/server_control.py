"""verl 0.7.0: control methods on the plain base class of its vLLM servers.

Ray takes the method table of vLLMHttpServerForPartial when the recipe's module is imported, which is after this module:
a method of the base class is in it, one that is added to the actor class later is not.
"""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.server.control_methods import METHODS
from esgrpo.hooks.verl.v0_7_0.grouped_calls import ELSEWHERE, LATER

HOOK = Hook(
    slug="partial-server-control",
    target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServerBase",
    process=("rollouter", "vllm-server"),
    kind="add",
    why="as server-control; in 0.7.0 the server that is an actor class inherits from a plain one",
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    without=((LATER, ELSEWHERE),),
)


def apply(module) -> None:
    for function in METHODS:
        setattr(module.vLLMHttpServerBase, function.__name__, function)


def installed(module) -> bool:
    return all(getattr(module.vLLMHttpServerBase, function.__name__, None) is function for function in METHODS)
