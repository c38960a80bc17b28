"""Prompts of verl's v1 trainers get their forecast; those of a synchronous step go out longest first."""

from __future__ import annotations

from esgrpo.engine import Hook

_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"

HOOK = Hook(
    slug="v1-prompt-order",
    target=f"{_TRAINER}._submit_batch_to_rollout",
    process=("v1-task-runner",),
    kind="wrap",
    why="the last place where a step's prompts are together before they are cut into one piece per agent-loop worker; "
        "verl submits them as the data loader gave them",
    remove_when="verl orders the prompts of a step by predicted length",
    features=("history",),
    relies_on=(f"{_TRAINER}._next_train_batch",
               "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences",
               "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.generate_sequences"),
    without=(("<0.9", "these releases have no v1 trainers"),),
)

SYNC = "sync"  # trainer.v1.trainer_mode


def around(call):
    trainer = call.owner
    call.arguments["batch"] = prepared(trainer, call.arguments["batch"])
    return call()


def prepared(trainer, batch):
    """The batch with forecasts, its rows in the order of submission. Results are found by uid, not by position."""
    from verl.utils import tensordict_utils as tu

    from esgrpo import engine
    from esgrpo.algo.routing_order import deal, inversions, longest_first
    from esgrpo.hooks.verl.metrics import decision_counts
    from esgrpo.hooks.verl.prompts import prompt_rows

    prompts = [getattr(prompt, "data", prompt) for prompt in batch["raw_prompt"]]
    found = prompt_rows.forecasts(trainer, prompts, trainer.global_steps)
    tu.assign_non_tensor_stack(batch, prompt_rows.FORECAST, found)
    if trainer.trainer_mode != SYNC or "routing" not in engine.active_features():
        return batch  # the asynchronous modes send a few prompts at a time, as others end
    order = longest_first(range(len(batch)), [forecast["tokens"] for forecast in found])
    decision_counts.add("routing", pops=len(order), choices=len(order) - 1, inversions=inversions(order),
                        known=sum(forecast["known"] for forecast in found))
    workers = len(getattr(trainer.agent_loop_manager, "agent_loop_workers", ()))
    return tu.index_select_tensor_dict(batch, deal(order, workers))
