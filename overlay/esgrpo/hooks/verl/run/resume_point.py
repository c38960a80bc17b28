"""Which checkpoint a restart of this run would go on from."""

from __future__ import annotations

import os

TRACKER = "latest_checkpointed_iteration.txt"  # verl writes it when a checkpoint is whole


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


def advice(config) -> str:
    """How to go on with a run that ended: words of `algo.endings`, facts of this node."""
    import socket

    from esgrpo.algo import endings

    trainer = config.trainer
    folder = os.path.abspath(trainer.default_local_dir)
    return endings.advice(latest(folder), folder, socket.gethostname(), trainer.resume_mode, trainer.save_freq)
