"""Keeps the prefix esgrpo/ of metrics that our losses return; verl would log them as actor/esgrpo/..."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="metrics-keep-prefix",
    target="verl.utils.py_functional:rename_dict",
    process=("trainer", "v1-task-runner"),
    kind="wrap",
    why="every metric of a policy loss is renamed to actor/<name>; a loss has no other way to report",
    remove_when="a policy loss can return metrics under a name of its own",
    features=("pois", "sais", "dmmpt"),
    rebinds=("verl.trainer.ppo.ray_trainer:rename_dict", "verl.trainer.ppo.v1.trainer_base:rename_dict"),
    without=(("==0.7.0", "metrics of a loss keep their names"),),
)


def around(call):
    ours = {key: value for key, value in call.arguments["data"].items() if key.startswith("esgrpo/")}
    call.arguments["data"] = {k: v for k, v in call.arguments["data"].items() if k not in ours}
    return {**call(), **ours}
