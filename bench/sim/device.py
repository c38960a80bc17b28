"""What one replica's device does, as measured: time per decode step at b running requests, prefill, KV memory, sync."""

from __future__ import annotations

import bisect
import json
from dataclasses import dataclass
from pathlib import Path

DEFAULT = Path(__file__).with_name("h100.json")
FULL = 0.9  # of the highest rate: the smallest batch that reaches it is a replica's bubble capacity
LEAST_MS = 1e-3  # of a step, when what the KV cache costs is taken off
BLOCK = 16  # tokens of a KV block
ABORT_WAIT_S = 1.0  # verl's client sleeps so long before it resumes an aborted request


@dataclass(frozen=True)
class Device:
    """Times in seconds. `steps`: (b, seconds of a decode step), ascending in b, linear between and beyond the points;
    `per_kv_token`: seconds more per step and token in the KV cache of the running requests. Where several replicas
    share a device, `steps` is with all of them at work and `alone` with one (empty: nobody notices the others).
    """

    name: str
    steps: tuple[tuple[int, float], ...]
    prefill_rate: float  # tokens per second; a replica decodes nothing meanwhile
    kv_tokens: int  # that fit into the KV cache
    weight_sync: float
    per_kv_token: float = 0.0
    alone: tuple[tuple[int, float], ...] = ()
    devices: int = 0  # that the replicas are spread over, one after another; 0: each has its own

    def step(self, running: int, company: float = 1.0) -> float:
        """Seconds of a decode step with so many running requests, before what their KV cache costs. `company`: share of
        the other replicas on this device that are at work."""
        together = self._at(self.steps, running)
        if not self.alone or company >= 1:
            return together
        alone = self._at(self.alone, running)
        return alone + company * (together - alone)

    @staticmethod
    def _at(points: tuple[tuple[int, float], ...], running: int) -> float:
        if len(points) == 1 or running <= points[0][0]:
            return points[0][1]
        at = min(bisect.bisect_left(points, (running, 0.0)), len(points) - 1)
        (left, low), (right, high) = points[at - 1], points[at]
        return low + (high - low) * (running - left) / (right - left)

    def capacity(self, sequences: int) -> int:
        """Smallest b up to `sequences` whose tokens per second reach FULL of the highest."""
        rates = [b / self.step(b) for b in range(1, sequences + 1)]
        return next(b for b, rate in enumerate(rates, 1) if rate >= FULL * max(rates))

    @classmethod
    def from_record(cls, record: dict, **changes) -> Device:
        """From the JSON that the engine benchmark writes (`tau` of its record; bench/sim/h100.json is one).

        Raises KeyError when a number is missing, ValueError when there is no point or a time is not positive.
        """
        values = {"name": record["device"], "steps": _points(record["ms_per_step"]),
                  "alone": _points(record["ms_per_step_alone"]) if record.get("ms_per_step_alone") else (),
                  "prefill_rate": float(record["prefill_tokens_per_s"]), "kv_tokens": int(record["kv_tokens"]),
                  "weight_sync": float(record["weight_sync_s"]),
                  "per_kv_token": float(record.get("ns_per_kv_token", 0.0)) * 1e-9}
        return cls(**{**values, **{name: value for name, value in changes.items() if value is not None}})

    @classmethod
    def load(cls, path: str | Path = DEFAULT, **changes) -> Device:
        """`path`: JSON, or JSON lines of bench.engine, whose first one it is."""
        record, _ = json.JSONDecoder().raw_decode(Path(path).read_text(encoding="utf-8"))
        return cls.from_record(read_tau(record), **changes)


def _points(times: dict) -> tuple[tuple[int, float], ...]:
    points = sorted((int(b), float(ms) / 1000) for b, ms in times.items())
    if not points or points[0][0] < 1 or min(seconds for _, seconds in points) <= 0:
        raise ValueError(f"ms_per_step maps batch sizes from 1 on to positive times, got {times}")
    return tuple(points)


def read_tau(found: dict) -> dict:
    """The record of a device from what bench.engine.tau writes: `tau`, and `points` that may say how fast one of
    several replicas is while the others rest."""
    record = dict(found.get("tau", found))
    points = found.get("points", [])
    if "ms_per_step_alone" not in record and any(row["replicas"] > 1 for row in points):
        slope = record.get("ns_per_kv_token", 0.0) * 1e-6  # ms
        alone: dict[str, list[float]] = {}
        for row in points:
            if row["replicas"] == 1:
                alone.setdefault(str(row["batch"]), []).append(
                    row["ms_per_step"] - slope * row["batch"] * row["kv_tokens"])
        record["ms_per_step_alone"] = {b: max(LEAST_MS, sum(found) / len(found)) for b, found in alone.items()}
    return record
