"""Which checkpoint a restart of this run would go on from."""

from __future__ import annotations

import os
import re

TRACKER = "latest_checkpointed_iteration.txt"  # verl writes it when a checkpoint is whole
WORKING_DIR = "ray_kwargs.ray_init.runtime_env.working_dir"


def latest(folder: str) -> str | None:
    """The folder of the last whole checkpoint under `folder`; None when there is none that this node can read."""
    try:
        with open(os.path.join(folder, TRACKER), encoding="utf-8") as file:
            path = os.path.join(folder, f"global_step_{int(file.read().strip())}")
    except (OSError, ValueError):
        return None
    return path if os.path.isdir(path) else None


def step_of(folder: str) -> int:
    """The number of a checkpoint .../global_step_N; 0 for anything else."""
    _, _, step = folder.rstrip("/").rpartition("global_step_")
    return int(step) if step.isdecimal() else 0


def check(config) -> None:
    """verl takes resume_from_path apart after a minute of start-up, in a worker. Raises ConfigError.

    A path with a scheme is a remote store's, which only verl can ask; a relative one begins where Ray puts its workers.
    """
    from omegaconf import OmegaConf

    from esgrpo.errors import ConfigError

    trainer = config.trainer
    if trainer.get("resume_mode", "auto") != "resume_path":
        return
    path = trainer.get("resume_from_path")
    if not isinstance(path, str) or not re.search(r"global_step_\d+$", path):
        found = f"{path!r}, which does not end in global_step_N"
    elif "://" not in path and not os.path.isdir(path) and (
            os.path.isabs(path) or OmegaConf.select(config, WORKING_DIR) is None):
        found = f"{path!r}, which is not there"
    else:
        return
    raise ConfigError("trainer.resume_from_path", found, "a checkpoint's directory .../global_step_N",
                      "the run does not start",
                      "correct the path, or trainer.resume_mode=auto goes on from the newest checkpoint")


def advice(config) -> str:
    """How to go on with a run that ended: words of `algo.endings`, facts of this node."""
    import socket

    from esgrpo.algo import endings

    trainer = config.trainer
    folder = os.path.abspath(trainer.default_local_dir)
    return endings.advice(latest(folder), folder, socket.gethostname(), trainer.resume_mode, trainer.save_freq)
