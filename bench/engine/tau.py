"""tau(b): milliseconds per decode step at batch b and context length c, and the prefill rate.

    python -m bench.engine.tau --model random:273M --out FILE [--replicas 2 --contexts 512,4096 --deadline 500]

Median of three windows after warm-up, measured inside the replica's process. With several replicas on one device each
point is taken twice: one replica alone, and all of them at the same batch, which is what a benchmark with them sees.
The results are the simulator's input. A point that does not fit into the KV cache is left out and named.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from bench.common import console
from bench.engine import options as common
from bench.engine.fleet import Fleet
from esgrpo.errors import EsgrpoError

WINDOWS = 3
STEPS = 40  # of a window
WARM_UP = ((1, 64), (8, 64))  # batch, context: kernels that are compiled at first use
PEAK_SHARE = 0.9  # of the peak rate: where a replica counts as full
LEAST_SHARE = 0.2  # of the fastest step: what is left of one when the KV cache's part is taken off
FILLED = 0.9  # of the KV blocks at most
SPARE = 64  # tokens of a request beyond what is timed: settling and lagging steps


def batches(limit: int) -> list[int]:
    """Powers of two up to the limit, and the limit."""
    found, batch = [], 1
    while batch < limit:
        found.append(batch)
        batch *= 2
    return [*found, limit]


def growth(fleet: Fleet, batch: int, context: int, steps: int) -> int:
    """Tokens that a request may make: those that are timed, and those of the steps in which others are prefilled."""
    return steps * WINDOWS + SPARE + 2 * -(-batch * context // fleet.batched_tokens)


def point(fleet: Fleet, only: list[int], batch: int, context: int, steps: int, seed: int) -> dict:
    """One (batch, context) on the replicas `only` at the same time; the slowest of them counts."""
    length = growth(fleet, batch, context, steps)
    prefilled = fleet.ask(("prefill", batch, context, length, seed), "prefilled", only)
    decoded = fleet.ask(("decode", steps, WINDOWS), "decoded", only)
    fleet.ask(("clear",), "cleared", only)
    if any(running != batch for _, running, _ in decoded):
        raise RuntimeError(f"{[running for _, running, _ in decoded]} of {batch} requests ran to the end of the window")
    windows = max((found for found, *_ in decoded), key=statistics.median)
    step = statistics.median(windows)
    return {"batch": batch, "context": context, "replicas": len(only),
            "kv_tokens": round(statistics.mean(tokens for _, _, tokens in decoded)), "ms_per_step": round(step, 4),
            "spread_ms": round(max(windows) - min(windows), 4), "tokens_per_s": round(batch / step * 1e3, 1),
            "prefill_tokens_per_s": round(min(rate for rate, _ in prefilled), 1)}


def fits(fleet: Fleet, batch: int, context: int, steps: int) -> bool:
    """Do context and KV cache hold so many requests to the end of the measurement? One block in ten stays free."""
    tokens = context + growth(fleet, batch, context, steps)
    return tokens <= fleet.longest and batch * -(-tokens // fleet.block_size) <= FILLED * fleet.blocks


def capacity(points: list[dict], limit: int) -> int:
    """The smallest measured batch with PEAK_SHARE of the peak rate, at most `limit`; all replicas at work."""
    together = max(row["replicas"] for row in points)
    context = min(row["context"] for row in points)
    rows = sorted((row for row in points if row["replicas"] == together and row["context"] == context),
                  key=lambda row: row["batch"])
    peak = max(row["tokens_per_s"] for row in rows)
    return min(limit, next(row["batch"] for row in rows if row["tokens_per_s"] >= PEAK_SHARE * peak))


def record(points: list[dict], facts: dict, options) -> dict:
    """bench.sim's description of a device, from the points with all replicas at work.

    ms per step = f(b) + k * b * tokens in the KV cache of each request; k by least squares over pairs of contexts.
    """
    together = max(row["replicas"] for row in points)
    rows = [row for row in points if row["replicas"] == together]
    pairs = [(b, a) for a in rows for b in rows if a["batch"] == b["batch"] and a["kv_tokens"] < b["kv_tokens"]]
    spans = [(more["batch"] * (more["kv_tokens"] - less["kv_tokens"]), more["ms_per_step"] - less["ms_per_step"])
             for more, less in pairs]
    slope = max(0.0, sum(x * y for x, y in spans) / sum(x * x for x, _ in spans)) if spans else 0.0
    flat = {}
    for row in rows:
        flat.setdefault(row["batch"], []).append(row["ms_per_step"] - slope * row["batch"] * row["kv_tokens"])
    least = min(row["ms_per_step"] for row in rows) * LEAST_SHARE
    return {"device": facts["device"], "model": facts["model"],
            "source": f"measured, {together} replicas on {max(1, facts['devices'])} device(s) at the same batch",
            "ms_per_step": {str(batch): round(max(least, statistics.mean(found)), 4)
                            for batch, found in sorted(flat.items())},
            "ns_per_kv_token": round(slope * 1e6, 4),
            "prefill_tokens_per_s": statistics.median(row["prefill_tokens_per_s"] for row in rows
                                                      if row["batch"] > 1 or len(rows) == 1),
            "kv_tokens": facts["kv_tokens"], "weight_sync_s": options.sync_s}


def measure(fleet: Fleet, limit: int, contexts: list[int], steps: int, end: float, say,
            alone: bool = True) -> tuple[list[dict], list]:
    """(points, what was left out and why); stops cleanly at the monotonic time `end`."""
    everyone = list(range(len(fleet.pipes)))
    for number, (batch, context) in enumerate(WARM_UP):
        point(fleet, everyone, min(batch, limit), min(context, *contexts), steps, number)
    points, left = [], []
    settings = [everyone, [0]] if alone and len(everyone) > 1 else [everyone]
    for context in contexts:
        for only in settings:
            for batch in batches(limit):
                where = {"batch": batch, "context": context, "replicas": len(only)}
                if not fits(fleet, batch, context, steps):
                    left.append({**where, "why": "context or KV cache too small"})
                elif time.monotonic() > end:
                    left.append({**where, "why": "out of time"})
                else:
                    points.append(point(fleet, only, batch, context, steps, len(points) + len(WARM_UP)))
                    say(f"tau: context {context:6} batch {batch:4} x {len(only)}: {points[-1]['ms_per_step']:8.3f} ms, "
                        f"{points[-1]['tokens_per_s']:9.1f} tokens/s each")
    return points, left


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.engine.tau", __doc__.partition("\n")[0])
    common.add_engine_options(parser)
    parser.add_argument("--contexts", type=console.counts, default="512,4096",
                        help="tokens in the KV cache of every request")
    parser.add_argument("--steps", type=console.count, default=STEPS,
                        help=f"decode steps of each of the {WINDOWS} windows")
    parser.add_argument("--sync-s", type=console.not_negative, default=1.0,
                        help="seconds of a weight sync, for the simulator")
    parser.add_argument("--out", type=console.output_file, required=True)
    options = parser.parse_args(argv)
    began = time.monotonic()
    contexts = options.contexts
    options.prompt = max(contexts)
    prefill_steps = -(-options.max_num_seqs * max(contexts) // options.batched_tokens)
    options.cap = options.steps * WINDOWS + SPARE + 2 * prefill_steps
    with common.start(options) as (fleet, facts):
        points, left = measure(fleet, options.max_num_seqs, contexts, options.steps, began + options.deadline,
                               common.say)
    if not points:
        raise EsgrpoError("bench.engine.tau", "no point was measured", "room for one and time for it",
                          "nothing was written", "raise --kv-gb or --deadline")
    console.write(options.out, json.dumps({"tau": record(points, facts, options), **facts,
                                           "capacity": capacity(points, options.max_num_seqs), "points": points,
                                           "left_out": left}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
