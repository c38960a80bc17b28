"""Sends what a response lived through to the trainer with its row in the TransferQueue."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

HOOK = Hook(
    slug="v1-response-rows",
    target="verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._agent_loop_postprocess",
    process=("agent-loop-worker",),
    kind="wrap",
    why="under v1 a worker writes each response into the TransferQueue as soon as it ends and hands nothing back: "
        "what the row is to carry must be in extra_fields before that",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "3716999d2f3e59c3"}),),
    remove_when="verl's client keeps stop_reason and versions per token in the row",
    features=("v1",),
    relies_on=("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._run_prompt",
               "verl.experimental.agent_loop.agent_loop:AgentLoopOutput.as_dict"),
    without=(("==0.7.0", "no v1 trainers"),),
)


def build(original):
    @functools.wraps(original)
    async def _agent_loop_postprocess(self, *args, **kwargs):
        import inspect

        from esgrpo.hooks.verl import attempts, group_decisions, v1_response_rows

        member = attempts.current.get()
        output = inspect.signature(original).bind(self, *args, **kwargs).arguments["output"]
        outputs = output if isinstance(output, list) else [output]
        if member is None or not outputs:  # validation, or a loop that gave nothing
            return await original(self, *args, **kwargs)
        v1_response_rows.attach(member, outputs, group_decisions.report(self, member))
        result = await original(self, *args, **kwargs)
        member.score, member.acc = group_decisions.reward_of(outputs[-1])
        return result

    return _agent_loop_postprocess


def attach(member, outputs, report: dict) -> None:
    """Every output of a session carries the session's summary and what the audit knows of its rule; verl's version
    range starts at its first token."""
    summary = {**member.summary(), **report}
    for output in outputs:
        output.extra_fields["esgrpo"] = summary
        if member.spans and member.spans[0][0] >= 0:  # verl's range starts with the version at the end of an attempt
            output.extra_fields["min_global_steps"] = member.spans[0][0]
