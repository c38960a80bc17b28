"""Control calls come through to a vLLM server however many responses it is generating."""

from __future__ import annotations

import functools

from esgrpo.engine import MARKER, Hook

HOOK = Hook(
    slug="server-slots",
    target="verl.workers.rollout.replica:RolloutReplica.max_concurrency",
    process=("rollouter", "v1-task-runner"),  # where the servers are created
    kind="add",  # the target is a property, which carries no mark of its own
    why="a server runs at most max(1000, max_num_seqs + 16) calls at once and every generate() holds one until its "
        "response is whole: with 256 prompts x 8 in flight on a replica the weight sync's own calls, and ours, wait "
        "for a slot that no response gives back. Ray's concurrency groups would not do: each has an event loop of its "
        "own, and vLLM's client is bound to one",
    remove_when="verl gives control calls slots of their own",
    relies_on=("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica.launch_servers",),
    without=(("==0.7.0", "its recipe sends a replica 16 prompts at once at most, and Ray gives it 1,000 slots"),),
)

# More than a replica is ever sent: in an asynchronous actor a slot is a number, which costs nothing until a call is in
# it, and how many calls run in the engine is max_num_seqs.
SLOTS = 1 << 20


def apply(module) -> None:
    original = inspect_property(module)

    @functools.wraps(original)
    def max_concurrency(self):
        from esgrpo.hooks.verl.server.control_slots import SLOTS

        return max(original(self), SLOTS)

    setattr(max_concurrency, MARKER, HOOK.slug)
    module.RolloutReplica.max_concurrency = property(max_concurrency)


def inspect_property(module):
    return vars(module.RolloutReplica)["max_concurrency"].fget


def installed(module) -> bool:
    return getattr(inspect_property(module), MARKER, None) == HOOK.slug
