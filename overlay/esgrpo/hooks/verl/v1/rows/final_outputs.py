"""grpo_segment with agent loops that give several outputs: verl looks at the final ones for `grpo` only."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="v1-final-outputs",
    target="verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories",
    process=("v1-task-runner",),
    kind="wrap",
    why="every estimator but verl's own grpo gets all outputs as if each were a response: a session with several "
        "outputs would count several times in its group",
    remove_when="compute_advantage_for_multi_trajectories selects final outputs for every group estimator",
    features=("v1",),
    rebinds=("verl.trainer.ppo.v1.trainer_base:compute_advantage_for_multi_trajectories",),
    without=(("==0.7.0", "no v1 trainers"),),
)


def around(call):
    from esgrpo.hooks.verl.v1.rows import keep_probabilities
    from esgrpo.hooks.verl.v1.rows.queue_rows import final_keys

    keys = list(call.arguments["batch_keys"])
    keep_probabilities.add_column(call.arguments["data"], keys)
    final = final_keys(keys)
    if call.arguments["adv_estimator"] != "grpo_segment" or len(final) == len(keys):
        return call()
    return of_final_outputs(call, keys, final)


def of_final_outputs(call, keys, final):
    """Advantages of the final rows, given to every output of the same session under that output's own mask."""
    import torch

    data = call.arguments["data"]
    rows = {key: index for index, key in enumerate(keys)}
    part = call(data=data.select_idxs([rows[key] for key in final]), batch_keys=final)
    first = part.batch["response_mask"].argmax(dim=1)
    scores = part.batch["advantages"][torch.arange(len(final)), first]
    place = {key.rpartition("_")[0]: index for index, key in enumerate(final)}
    spread = scores[[place[key.rpartition("_")[0]] for key in keys]].unsqueeze(-1) * data.batch["response_mask"]
    data.batch["advantages"] = data.batch["returns"] = spread
    return data
