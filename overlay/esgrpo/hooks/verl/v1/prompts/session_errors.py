"""Tells a v1 trainer why a prompt group failed: the error of its agent loop, in the tag of its prompt."""

from __future__ import annotations

from esgrpo.engine import Hook
from esgrpo.hooks.verl.v1.rows.queue_rows import TRAIN

HOOK = Hook(
    slug="v1-session-errors",
    target="verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
    process=("agent-loop-worker",),
    kind="wrap",
    why="verl's v1 agent loop logs the error of a session and hands on the status `failure`; the trainer, which counts "
        "failed prompts, could not name what raised",
    after=("group-members",),
    remove_when="verl's v1 prompts carry the error that made them fail",
    features=("v1",),
    relies_on=("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._run_prompt",),
    without=(("==0.7.0", "no v1 trainers"),),
)

TAG = "esgrpo_failed"  # {"error": class and message, "prompt": key, "words": how a user finds the prompt}


async def around(call):
    try:
        return await call()
    except Exception as error:
        if not call.arguments["trajectory"]["validate"]:
            await tell(call.arguments.get("kwargs", {}), error)
        raise


async def tell(prompt: dict, error) -> None:
    """verl publishes the group's status after the last of its sessions has settled, and so after this."""
    import transfer_queue

    from esgrpo.algo import endings
    from esgrpo.algo.failures import brief, is_of_one_prompt
    from esgrpo.algo.history import prompt_key
    from esgrpo.hooks.verl.prompts.failed_prompts import words
    from esgrpo.hooks.verl.run import reports

    raw, index = prompt.get("raw_prompt"), prompt.get("index")
    key = None if raw is None else prompt_key(raw)
    alone = is_of_one_prompt(error)
    said = brief(error) if alone else str(endings.of_error(type(error).__name__, str(error), reports.actor_names()))
    found = {"error": said, "prompt": key, "words": words(key, None if index is None else [index]), "alone": alone}
    # no deadline of ours: verl publishes the group's status by the same call, and waits for it without one
    await transfer_queue.async_kv_put(key=prompt["uid"], partition_id=TRAIN, tag={TAG: found})
