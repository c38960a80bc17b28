"""Gives every response its group and number, runs the group coordinator, and records what happened."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="group-members",
    target="verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
    process=("agent-loop-worker",),
    kind="wrap",
    why="the only method that sees one response of a known group from start to end, in every agent loop; vLLM "
        "scatters a group over replicas and knows no groups",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "e490f73ac961ab1d"}),),
    remove_when="verl offers a callback per response with its uid",
    features=("observe",),
    relies_on=("verl.experimental.agent_loop.agent_loop:AgentLoopWorker.generate_sequences",),
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)


def build(original):
    @functools.wraps(original)
    async def _run_agent_loop(self, *args, **kwargs):
        import inspect

        from esgrpo.hooks.verl import group_members

        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        group = arguments["kwargs"].get("uid") if "kwargs" in arguments else None
        if arguments["trajectory"]["validate"] or group is None:
            return await original(self, *args, **kwargs)
        forecast = arguments["kwargs"].get("esgrpo_forecast")
        prompt = group_members.prompt_of(self, str(group), arguments["kwargs"].get("raw_prompt"))
        return await group_members.run_member(original, self, str(group), args, kwargs, forecast, prompt)

    return _run_agent_loop


def coordinator_of(worker):
    """The coordinator of this worker process, made on first use."""
    from esgrpo.algo.grouping import GroupCoordinator

    if not hasattr(worker, "esgrpo_coordinator"):
        worker.esgrpo_coordinator = GroupCoordinator()
        worker.esgrpo_members = {}
    return worker.esgrpo_coordinator


def collision(group: str):
    from esgrpo.errors import EsgrpoError

    return EsgrpoError("group-members", f"group id {group} is in use by another prompt", "one uid per prompt",
                       "rewards of two prompts would be mixed, the run stops", "make non_tensor_batch['uid'] unique")


def prompt_of(worker, group: str, raw_prompt) -> str | None:
    """Key of a group's prompt, computed once a group; None when the data set gives no raw_prompt."""
    from esgrpo.algo.history import prompt_key

    known = worker.__dict__.setdefault("esgrpo_prompts", {})
    if group not in known:
        known[group] = None if raw_prompt is None else prompt_key(raw_prompt)
    return known[group]


async def run_member(original, worker, group: str, args, kwargs, forecast=None, prompt=None):
    from esgrpo.algo.grouping import FAILED, FINISHED, PRUNED, GroupCollision
    from esgrpo.hooks.verl import attempts, group_decisions, segment_length
    from esgrpo.records import write

    coordinator = coordinator_of(worker)
    size = worker.rollout_config.n
    try:
        number = coordinator.join(group, size)
    except GroupCollision:
        raise collision(group) from None
    member = attempts.Member(group, number, forecast=forecast, prompt=prompt)
    worker.esgrpo_members[group, number] = member
    group_decisions.watch(worker, member, size)
    token = attempts.current.set(member)
    judge = attempts.judge.set(functools.partial(group_decisions.judge_loop, worker))
    outcome, output = FAILED, None
    try:
        output = await original(worker, *args, **kwargs)
        outcome = PRUNED if member.doomed or member.outcome == "prune" else FINISHED
    finally:
        attempts.current.reset(token)
        attempts.judge.reset(judge)
        del worker.esgrpo_members[group, number]
        coordinator.leave(group, number, outcome)
        group_decisions.ended(worker, member, output)
        if group not in coordinator.groups:
            worker.__dict__.get("esgrpo_prompts", {}).pop(group, None)
    await group_decisions.checkpoint(worker, group)
    if group not in coordinator.groups:
        group_decisions.save(worker)
    await segment_length.after_leave(worker, group, coordinator, member)
    if output is None:  # verl's v1: v1-response-rows has put the summary into the row
        write("responses", {**member.summary(), "score": member.score})
        return None
    if member.spans and member.spans[0][0] >= 0:  # verl's range starts with the version at the end of an attempt
        output.extra_fields["min_global_steps"] = member.spans[0][0]
    score, _ = group_decisions.reward_of(output)
    summary = {**member.summary(), "score": score, **group_decisions.report(worker, member)}
    output.extra_fields["esgrpo"] = summary
    write("responses", summary)
    return output


async def servers_of(worker) -> list:
    from esgrpo.hooks.verl.server_calls import answers_if_any

    call = worker.llm_client._load_balancer.__ray_call__.remote(_handles)
    return sum(await answers_if_any([call], "handles of servers", "the group goes on without advice"), [])


async def finish_members(group: str, numbers: list[int], rule: str, servers: list) -> None:
    """Ask every replica to end these members with the tokens they have; a member lives on one of them."""
    from esgrpo.hooks.verl.server_calls import answers_if_any
    from esgrpo.hooks.verl.server_control import methods

    await answers_if_any([call.remote(group, numbers, rule) for call in methods(servers, "esgrpo_finish_group")],
                         "finish_group", "its members run to their end")


def _handles(balancer) -> list:
    """Runs inside the load balancer."""
    return list(balancer._servers.values())
