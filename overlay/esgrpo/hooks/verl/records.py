"""Append-only JSON lines under RUN_DIR/esgrpo, one file per kind and process, so that writers never meet."""

from __future__ import annotations

import json
import os
import time


def write(kind: str, row: dict) -> None:
    """Append one row to RUN_DIR/esgrpo/<kind>-<pid>.jsonl; without a run directory nothing is written."""
    directory = os.environ.get("ESGRPO_RUN_DIR")
    if not directory:
        return
    directory = os.path.join(directory, "esgrpo")
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, f"{kind}-{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), **row}) + "\n")


def read(run_dir: str, kind: str) -> list[dict]:
    """All rows of a kind, in order of time."""
    directory = os.path.join(run_dir, "esgrpo")
    rows = []
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        if name.startswith(f"{kind}-") and name.endswith(".jsonl"):
            with open(os.path.join(directory, name), encoding="utf-8") as file:
                rows += [json.loads(line) for line in file]
    return sorted(rows, key=lambda row: row["time"])
