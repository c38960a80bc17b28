"""Keeps linear weights loadable after the first load, so that a weight sync can write them."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="cpu-linear-reloads",
    target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    process=("engine-core",),
    kind="replace",  # the original is never called: packing the weight is the very thing to avoid
    why="vLLM's CPU backend packs a linear weight and leaves a parameter of shape (0,); the next load_weights fails "
        "with AssertionError. There is no setting to keep it",
    remove_when="vLLM's CPU linear layers accept a second load_weights",
    features=("cpu",),
)


def around(call):
    from torch.nn.functional import linear

    call.arguments["layer"].cpu_linear = linear
