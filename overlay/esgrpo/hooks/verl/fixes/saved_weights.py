"""Makes the saved weights of decoupled PPO a copy: on the host `.detach().cpu()` is the weights themselves."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="saved-weights-are-a-copy",
    target="verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu",
    process=("actor-worker",),
    kind="wrap",
    why="with bypass_mode=False and several updates a weight version verl saves the weights, goes back to those of the "
        "version for old log-probs, and returns. Where they are on the host (FSDP2 with param_offload=True, a CPU) its "
        "copy is overwritten when it goes back: the updates since the version are undone",
    remove_when="fsdp2_sharded_save_to_cpu clones",
    without=(("==0.7.0", "the recipe has a function of its own (partial-saved-weights-are-a-copy)"),),
)


def around(call):
    from verl.utils.device import get_torch_device

    live = {name: getattr(weight, "_local_tensor", weight) for name, weight in
            call.arguments["model"].named_parameters()}
    state, spec = call()
    on_host = {name for name in state if live[name].device.type == "cpu"}
    if on_host and get_torch_device().is_available():
        get_torch_device().synchronize()  # verl offloads without waiting for the copy to the host
    return {name: (tensor.clone() if name in on_host else tensor, tensor_spec)
            for name, (tensor, tensor_spec) in state.items()}, spec
