"""Recorded groups of responses: tokens, how surprising the model found each, and how they ended. Standard library only.

One file, gzip of JSON: {"command", "commit", "seed", "task", "model", "cap", "temperature", "groups"}. A group is
{"version": weight version that sampled it, "responses": [{"tokens": ids, "surprisal": hundredths of nats, one a token,
"correct": bool}]}, and "family" where a record has several kinds of prompts. A response of `cap` tokens was ended by
the budget. Recorded by bench.testbed.record_groups and bench.pretrained.record_groups.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

NATS = 0.01  # of one unit of a recorded surprisal
LARGEST = 2000  # units: what a rounded probability of zero counts


def response(tokens: Sequence[int], log_probs: Sequence[float], correct: bool) -> dict:
    """One response as it is recorded; `log_probs` of its tokens, nats."""
    units = [min(LARGEST, max(0, round(-value / NATS))) for value in log_probs]
    return {"tokens": list(tokens), "surprisal": units, "correct": bool(correct)}


def write(path: Path, facts: dict, groups: Sequence[dict]) -> None:
    """`facts`: everything beside the groups; the bytes depend on nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**facts, "groups": list(groups)}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> dict:
    """Raises OSError when there is no such file, ValueError when it is none of these."""
    record = json.loads(gzip.decompress(path.read_bytes()))
    if not isinstance(record.get("cap"), int) or not record.get("groups"):
        raise ValueError(f"{path.name} holds no recorded groups")
    return record
