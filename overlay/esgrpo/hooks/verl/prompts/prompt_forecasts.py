"""Attaches a forecast to every row of a prompt before it is generated, and learns from the responses after."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="prompt-forecasts",
    target="verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter"
           "._process_single_sample_streaming",
    process=("rollouter",),
    kind="wrap",
    why="the only method that holds a prompt before and its scored responses after generation, in the process that "
        "orders the prompts; the message queue gets a pickle of them",
    remove_when="verl's rollouter offers callbacks before a prompt is generated and after it was scored",
    features=("history",),
    relies_on=("verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter._processor_worker",
               "verl.experimental.fully_async_policy.detach_utils:RolloutSample",
               "verl.experimental.agent_loop.agent_loop:AgentLoopWorker.generate_sequences",
               "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess"),
    without=(("==0.7.0", "the recipe has another rollouter, which keeps no history"),),
)

KEY = "esgrpo_forecast"  # in non_tensor_batch, and so in the kwargs of AgentLoopWorker._run_agent_loop


async def around(call):
    rollouter, sample = call.owner, call.arguments["rollout_sample"]
    visit = attach(rollouter, sample)
    result = await call()
    # The original has replaced full_batch by the scored responses and sent a pickle of them: nothing of ours has
    # to travel with them, so they are read after that, when a failure of the queue has not been a visit.
    learn(rollouter, sample, visit)
    return result


def key_of(sample) -> str | None:
    """Key of a sample's prompt; None when the data set gives no raw_prompt."""
    from esgrpo.algo.history import prompt_key

    prompts = sample.full_batch.non_tensor_batch.get("raw_prompt")
    return None if prompts is None or not len(prompts) else prompt_key(prompts[0])


def attach(owner, sample) -> tuple[str, dict] | None:
    """Put the forecast into every row; returns what `learn` needs."""
    import numpy as np

    from esgrpo.hooks.verl.prompts.prompt_history import history_of

    key = key_of(sample)
    if key is None:
        return None
    forecast = history_of(owner).forecast(key)
    batch = sample.full_batch
    rows = np.empty(len(batch), dtype=object)
    rows[:] = [dict(forecast) for _ in range(len(batch))]
    batch.non_tensor_batch[KEY] = rows
    return key, forecast


def learn(owner, sample, visit: tuple[str, dict] | None) -> None:
    """Observe the responses of a sample under the weight version that made their last tokens."""
    from esgrpo.hooks.verl.prompts.prompt_history import history_of

    if visit is None or "esgrpo" not in sample.full_batch.non_tensor_batch:
        return
    key, forecast = visit
    rows = outcomes(sample.full_batch)
    history_of(owner).observe(key, [row["tokens"] for row in rows], [row["correct"] for row in rows],
                              [row["capped"] for row in rows], max(row["version"] for row in rows))
    ended = [row for row in rows if row["ended"]]
    calibration_of(owner).add(forecast, [row["tokens"] for row in ended], [row["capped"] for row in ended])


def outcomes(batch) -> list[dict]:
    """What each response says: tokens, correct (a probability; None: nothing), capped (the length is a lower bound),
    version.

    A response that filled the budget or was cut is capped. Only one that was not cut (`ended`) says by its reward
    whether it is correct: the reward of a shortened response is that of another one.
    """
    from esgrpo import config
    from esgrpo.algo.history import came_to_its_end, chance_of_correct
    from esgrpo.losses import correct_rows

    tensors, extra = batch.batch, batch.non_tensor_batch
    budget = tensors["responses"].shape[1]
    filled = (tensors["attention_mask"][:, -budget:].sum(dim=-1) >= budget).tolist()
    verdicts = [None] * len(filled)
    if "rm_scores" in tensors.keys():
        scores = tensors["rm_scores"].sum(dim=-1)
        verdicts = correct_rows(scores, config.current().success_threshold, extra.get("acc")).tolist()
    rows = []
    for summary, full, verdict in zip(extra["esgrpo"], filled, verdicts, strict=True):
        ended = came_to_its_end(summary["outcome"], full)
        rows.append({"tokens": summary["tokens"], "ended": ended, "correct": chance_of_correct(summary, verdict, full),
                     "capped": full or not ended, "version": max([-1, *(span[0] for span in summary["spans"])])})
    return rows


def calibration_of(owner):
    from esgrpo.hooks.verl import owned

    return owned.of(owner, owned.Prompts).calibration
