"""grpo_segment with agent loops that give several outputs: verl looks at the final ones for `grpo` only."""

from __future__ import annotations

import functools

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


def build(original):
    @functools.wraps(original)
    def compute_advantage_for_multi_trajectories(*args, **kwargs):
        import inspect

        from esgrpo.hooks.verl.v1.rows import keep_probabilities
        from esgrpo.hooks.verl.v1.rows.queue_rows import final_keys

        bound = inspect.signature(original).bind(*args, **kwargs)
        keys = list(bound.arguments["batch_keys"])
        keep_probabilities.add_column(bound.arguments["data"], keys)
        final = final_keys(keys)
        if bound.arguments["adv_estimator"] != "grpo_segment" or len(final) == len(keys):
            return original(*bound.args, **bound.kwargs)
        return of_final_outputs(original, bound, keys, final)

    return compute_advantage_for_multi_trajectories


def of_final_outputs(original, bound, keys, final):
    """Advantages of the final rows, given to every output of the same session under that output's own mask."""
    import torch

    data = bound.arguments["data"]
    rows = {key: index for index, key in enumerate(keys)}
    bound.arguments.update(data=data.select_idxs([rows[key] for key in final]), batch_keys=final)
    part = original(*bound.args, **bound.kwargs)
    first = part.batch["response_mask"].argmax(dim=1)
    scores = part.batch["advantages"][torch.arange(len(final)), first]
    place = {key.rpartition("_")[0]: index for index, key in enumerate(final)}
    spread = scores[[place[key.rpartition("_")[0]] for key in keys]].unsqueeze(-1) * data.batch["response_mask"]
    data.batch["advantages"] = data.batch["returns"] = spread
    return data
