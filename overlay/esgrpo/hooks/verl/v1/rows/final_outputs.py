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
    """Advantages of sessions, each as one row with the reward of its final output and the tokens of all its outputs,
    one behind the other: what was decided in the middle of a response counts these."""
    import torch

    data = call.arguments["data"]
    mask, place = data.batch["response_mask"], {key: row for row, key in enumerate(keys)}
    outputs: dict[str, list[str]] = {}
    for key in sorted(keys, key=lambda key: int(key.rpartition("_")[2])):
        outputs.setdefault(key.rpartition("_")[0], []).append(key)
    part, width = data.select_idxs([place[key] for key in final]), mask.shape[1]
    wide = width * max(map(len, outputs.values()))
    part.batch["response_mask"] = mask.new_zeros(len(final), wide)
    part.batch["token_level_rewards"] = torch.nn.functional.pad(part.batch["token_level_rewards"],
                                                                (0, wide - width))
    windows = {key: (session, slice(number * width, (number + 1) * width))
               for session, last in enumerate(final)
               for number, key in enumerate(outputs[last.rpartition("_")[0]])}
    masked = [not mask[place[last]].any() for last in final]  # no loss may see such a session
    for key, window in windows.items():
        if not masked[window[0]]:
            part.batch["response_mask"][window] = mask[place[key]]
    found = call(data=part, batch_keys=final).batch["advantages"]
    advantages = torch.stack([found[windows[key]] for key in keys])
    data.batch["advantages"] = data.batch["returns"] = advantages
    return data
