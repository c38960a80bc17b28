"""v1: tells how many responses a training prompt gets, where the prompt says it by itself (`__rollout_n__`)."""

from __future__ import annotations

import contextvars
import operator

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-group-size",
    target="verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._run_prompt",
    process=("agent-loop-worker",),
    kind="wrap",
    why="it takes the field out of the prompt before it starts the group's sessions, which see rollout.n alone: more "
        "members would collide with each other and a group of fewer would never end",
    remove_when="verl hands a session the size of its group",
    features=("v1",),
    relies_on=("verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",),
    without=(("==0.7.0", "no v1 trainers"),),
)

FIELD = "__rollout_n__"
_size: contextvars.ContextVar[int | None] = contextvars.ContextVar("esgrpo_group_size", default=None)


async def around(call):
    token = _size.set(said_by(call.arguments["prompt"]))
    try:
        return await call()  # each session is a task, and has a copy of this context
    finally:
        _size.reset(token)


def said_by(prompt) -> int | None:
    """As a plain integer. What is none verl refuses itself: the prompt fails before a session begins."""
    try:
        return operator.index(prompt.get(FIELD))
    except TypeError:
        return None


def of_prompt(worker) -> int:
    """Responses of the prompt whose session runs in this context."""
    said = _size.get()
    return worker.rollout_config.n if said is None else said
