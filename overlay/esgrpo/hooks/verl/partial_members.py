"""verl 0.7.0: follows one response of a group through the partial agent loop, over interruptions and workers."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release
from esgrpo.hooks.verl.partial_group import ELSEWHERE, LATER

HOOK = Hook(
    slug="partial-members",
    target="recipe.fully_async_policy.agent_loop.agent_loop:FullyAsyncAgentLoopWorker._partial_run_agent_loop",
    process=("agent-loop-worker",),
    kind="wrap",
    why="the only method that sees one response of a call from start to end or to its interruption; the class is "
        "shipped by value, which a plain function on it survives",
    releases=(Release("verl", "==0.7.0", {"0.7.0": "51dd53c3a1c8936a"}, patches=(
        "partial-server-honours-response-length", "pass-dataset-to-partial-agent-loops")),),
    remove_when="verl 0.7.0 is no longer supported",
    features=("observe",),
    relies_on=("recipe.fully_async_policy.agent_loop.partial_single_turn_agent_loop:PartialSingleTurnAgentLoop.run",),
    without=((LATER, ELSEWHERE),),
)


def build(original):
    @functools.wraps(original)
    async def _partial_run_agent_loop(self, *args, **kwargs):
        import inspect

        from esgrpo.hooks.verl import partial_group, partial_members

        group = partial_group.current.get()
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments["kwargs"]
        output = given.get("output")
        complete = output is not None and not output.extra_fields.get("is_cancel", False)
        if group is None or complete:
            return await original(self, *args, **kwargs)
        return await partial_members.run_member(original, self, group, given, args, kwargs)

    return _partial_run_agent_loop


def _member(worker, group: str, given: dict):
    """The member of this call: new, or resumed from the state that its interrupted output carries."""
    from esgrpo.algo.grouping import GroupCollision
    from esgrpo.hooks.verl import attempts
    from esgrpo.hooks.verl.group_members import collision, coordinator_of, prompt_of

    coordinator = coordinator_of(worker)
    output, version = given.get("output"), given.get("param_version")
    version = None if version is None else int(version)  # a numpy integer would not go into a record
    state = None if output is None else output.extra_fields.get(attempts.STATE)
    size = worker.config.actor_rollout_ref.rollout.n
    try:
        number = coordinator.join(group, size, None if state is None else state["number"])
    except GroupCollision:
        raise collision(group) from None
    if state is not None:
        return attempts.Member.resumed(state, version)
    return attempts.Member(group, number, version=version, prompt=prompt_of(worker, group, given.get("raw_prompt")))


async def run_member(original, worker, group: str, given: dict, args, kwargs):
    from esgrpo.algo.grouping import CARRIED, FAILED, FINISHED, PRUNED
    from esgrpo.hooks.verl import attempts
    from esgrpo.hooks.verl.group_decisions import reward_of
    from esgrpo.hooks.verl.group_members import coordinator_of
    from esgrpo.records import write

    member = _member(worker, group, given)
    worker.esgrpo_members[group, member.number] = member
    token = attempts.current.set(member)
    outcome = FAILED
    try:
        output = await original(worker, *args, **kwargs)
        interrupted = output.extra_fields.get("is_cancel", False)
        if not interrupted and member.outcome == "abort":
            member.outcome = "finish"  # interrupted with its last token: the budget is spent
        outcome = CARRIED if interrupted else PRUNED if member.outcome == "prune" else FINISHED
    finally:
        attempts.current.reset(token)
        del worker.esgrpo_members[group, member.number]
        coordinator_of(worker).leave(group, member.number, outcome)
        if group not in coordinator_of(worker).groups:
            worker.__dict__.get("esgrpo_prompts", {}).pop(group, None)
    if interrupted:
        output.extra_fields[attempts.STATE] = member.state()
        return output
    summary = member.summary()
    output.extra_fields["esgrpo"] = summary
    write("responses", {**summary, "score": reward_of(output)[0]})
    return output
