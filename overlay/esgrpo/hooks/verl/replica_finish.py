"""Group abort on verl's replica: the same call as on a server, for all servers of the replica."""

from __future__ import annotations

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="replica-finish-group",
    target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica",
    process=("rollouter", "v1-task-runner"),
    kind="add",
    why="verl's replica offers abort_request and abort_all_requests only",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "6f45720b4ca71081"}),),
    remove_when="verl's replica offers a group abort with a reason",
    features=("observe",),
    without=(("==0.7.0", "the agent-loop worker asks the servers itself"),),
)


async def finish_group(self, group, members=None, rule="group"):
    """End these members of a group (None: all running ones); returns how many were running on this replica."""
    from esgrpo.hooks.verl.server_calls import answers
    from esgrpo.hooks.verl.server_control import methods

    calls = methods(self.servers, "esgrpo_finish_group")
    return sum(await answers([call.remote(group, members, rule) for call in calls], "finish_group"))


def apply(module) -> None:
    module.vLLMReplica.finish_group = finish_group


def installed(module) -> bool:
    return getattr(module.vLLMReplica, "finish_group", None) is finish_group
