"""Makes the saved weights of decoupled PPO a copy: on a CPU, `.detach().cpu()` aliases the live ones."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="cpu-save-is-a-copy",
    target="verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu",
    process=("actor-worker",),
    kind="wrap",
    why="with bypass_mode=False verl saves, trains and restores version 1 of the weights; on a CPU the save is an "
        "alias, so the restore does nothing and old log-probs are silently wrong",
    remove_when="fsdp2_sharded_save_to_cpu clones",
    features=("cpu",),
)


def around(call):
    state, spec = call()
    return {name: (tensor.clone(), tensor_spec) for name, (tensor, tensor_spec) in state.items()}, spec
