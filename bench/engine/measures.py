"""What a run reports: bubble with causes, quantiles, and the books of driver and engines, which must agree exactly."""

from __future__ import annotations

import functools
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from bench.policies import SYNC, baseline
from esgrpo.algo.accounting import quantile
from esgrpo.errors import EsgrpoError

CAUSES = ("no_work", "barrier", "below_capacity", "sync")
CURVE_S = 0.25  # between two points of the curve of running requests
OURS = "es-grpo"  # and every policy whose name begins with it
PREEMPTIONS_MATTER = 0.02  # tokens computed again for them, per decoded token: above it admission could gain
NO_RIVAL = ("verl", "oracle")  # the baseline, and what knows the lengths


class Bubble:
    """Request-seconds of one replica that were missing to `capacity`, by cause; times are seconds.

    sync            paused for new weights, or nothing runs because clients sleep after the abort
    barrier         nothing runs, and the next weights are waited for: other replicas still work on this step (sync), or
                    the staleness bound is reached (async)
    no_work         nothing runs for another reason: the policy or the driver holds requests back
    below_capacity  fewer requests than `capacity` run and nobody waits for memory

    A replica with requests that wait for memory is full. used + sum(causes) == capacity * seconds.
    """

    def __init__(self, capacity: int, now: float):
        self.capacity, self.since, self.seconds, self.used = capacity, now, 0.0, 0.0
        self.causes = dict.fromkeys(CAUSES, 0.0)
        self.running = self.waiting = 0
        self.paused = False
        self.curve: list[tuple[float, int]] = []  # (time, running requests), for a plot

    def until(self, now: float, idle_cause: str) -> None:
        """Account for the time until `now`; `idle_cause` is charged while nothing runs."""
        span, self.since = max(0.0, now - self.since), max(now, self.since)
        used = self.capacity if self.waiting and self.running else min(self.running, self.capacity)
        used = 0 if self.paused else used
        cause = "sync" if self.paused else "below_capacity" if self.running else idle_cause
        self.seconds += span
        self.used += used * span
        self.causes[cause] += (self.capacity - used) * span

    def load(self, running: int, waiting: int, paused: bool) -> None:
        if not self.curve or running == 0 or self.since - self.curve[-1][0] >= CURVE_S:
            self.curve.append((self.since, running))
        self.running, self.waiting, self.paused = running, waiting, paused


def bubble_rates(replicas: Iterable[Bubble]) -> dict[str, float]:
    """Shares of all capacity-seconds; the causes sum to `rate`."""
    replicas = list(replicas)
    total = sum(replica.capacity * replica.seconds for replica in replicas)
    rates = {cause: sum(replica.causes[cause] for replica in replicas) / total if total else 0.0 for cause in CAUSES}
    return {"rate": sum(rates.values()), **rates}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {name: round(quantile(values, q), 4) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


def record(driver, counters: Sequence[Mapping]) -> dict:
    """What is kept of a run: the driver's measures and the counters of every engine. Seconds and tokens."""
    ledger, times = driver.ledger, driver.update_times
    makespan = times[-1]
    in_updates = ledger.trained + ledger.waste["zero_variance"]
    return {"kind": "run", "policy": driver.policy.name, "scenario": driver.limits.scenario,
            "sync": driver.policy.sync, "makespan_s": round(makespan, 4),
            "s_per_update": round(makespan / len(times), 4), "update_times": [round(at, 4) for at in times],
            "tokens_per_s": round(in_updates / makespan, 1), "decoded_per_s": round(driver.decoded / makespan, 1),
            "decoded": driver.decoded, "trained": ledger.trained, "waste": ledger.waste,
            "trained_samples": ledger.trained_samples, "pruned_samples": ledger.pruned_samples,
            "gradient_groups": ledger.gradient_groups, "versions_old": ledger.stale(),
            "decisions": driver.policy.decided(), "note": driver.policy.note,
            "bubble": {name: round(rate, 4) for name, rate in bubble_rates(driver.bubbles).items()},
            "completion_s": quantiles(driver.latencies), "attempts": driver.attempts,
            "preemptions": sum(counted["preemptions"] for counted in counters),
            "preempted_tokens": sum(counted["preempted_tokens"] for counted in counters),
            "reprefill_tokens": driver.reprefill, "engines": list(counters),
            "running": [[[round(at - driver.begin, 3), count] for at, count in bubble.curve]
                        for bubble in driver.bubbles]}


def reconcile(policy: str, decoded: int, engines: int, trained: int, waste: Mapping[str, int]) -> None:
    """Raises EsgrpoError when a token is missing: engines count tokens as they are made, the driver as they come back,
    and the ledger by what became of them."""
    if not decoded == engines == trained + sum(waste.values()):
        raise EsgrpoError(f"policy {policy}", f"{engines} tokens counted by the engines, {decoded} by the driver, "
                          f"{trained} trained + {sum(waste.values())} wasted", "three equal numbers",
                          "this run is not recorded", "report this with the command line")


def ratios(runs: Sequence[Mapping], base: str, key: str = "s_per_update") -> dict[str, dict]:
    """For every policy: how many times faster than `base` in the same repeat of the same seed with the same KV
    headroom; median, smallest, largest, count. Beside it what a speed alone does not say: the median share of its
    trained rows that are stale, and its decisions."""
    def pair(run: Mapping) -> tuple:
        return run["scenario"], run["repeat"], run.get("seed"), run["policy"].partition("@")[2]

    bases = {pair(run): run[key] for run in runs if run["policy"].partition("@")[0] == base.partition("@")[0]}
    found: dict[str, list[Mapping]] = {}
    for run in runs:
        if pair(run) in bases:
            found.setdefault(f"{run['scenario']} {run['policy']}", []).append(run)
    return {name: {**_spread([bases[pair(run)] / run[key] for run in mine]),
                   "stale_rows": round(statistics.median(run["versions_old"]["rows"]["share"] for run in mine), 4),
                   "decisions": dict(sum((Counter(run["decisions"]) for run in mine), Counter()))}
            for name, mine in found.items()}


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def costs(runs: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """For every policy of every scenario what its speed rests on; medians over its runs.

    preemptions      a request lost its KV blocks: times an update
    recomputed       tokens that had been computed and were lost so, per decoded token; a prefix that is still cached
                     is not computed again, so that this is the most it can have cost
    prefilled_again  tokens of prompts and responses prefilled again after an abort or a hand-back, per decoded token
    stale_rows       share of trained rows that have a token of older weights
    row_age          weight versions between the oldest token of a trained row and the weights that trained on it
    """
    found: dict[str, list[Mapping]] = {}
    for run in runs:
        found.setdefault(f"{run['scenario']} {run['policy']}", []).append(run)
    return {name: {"runs": len(mine), "s_per_update": _median(run["s_per_update"] for run in mine),
                   "preemptions": _median(run["preemptions"] / len(run["update_times"]) for run in mine),
                   "recomputed": _median(run["preempted_tokens"] / max(1, run["decoded"]) for run in mine),
                   "prefilled_again": _median(run["reprefill_tokens"] / max(1, run["decoded"]) for run in mine),
                   "stale_rows": _median(run["versions_old"]["rows"]["share"] for run in mine),
                   "row_age": _median(run["versions_old"]["rows"]["mean"] for run in mine)}
            for name, mine in found.items()}


def table(summary: Mapping) -> list[list[str]]:
    """Rows of text, the first one is the header: a policy, its speed against the others, and what it rests on."""
    bases = {key.removeprefix("against_"): summary[key] for key in summary if key.startswith("against_")}
    rows = [["policy", "runs", "s an update", *[f"x {name}" for name in bases], "preemptions an update",
             "recomputed / decoded", "prefilled again / decoded", "stale rows", "versions old"]]
    for name, cost in summary["costs"].items():
        speeds = [f"{base[name]['median']:.3f} [{base[name]['low']:.3f}, {base[name]['high']:.3f}]"
                  if name in base else "-" for base in bases.values()]
        rows.append([name, str(cost["runs"]), f"{cost['s_per_update']:.2f}", *speeds, f"{cost['preemptions']:.1f}",
                     f"{cost['recomputed']:.2%}", f"{cost['prefilled_again']:.1%}", f"{cost['stale_rows']:.1%}",
                     f"{cost['row_age']:.2f}"])
    return rows


def preempted(summary: Mapping) -> str:
    """One line when preemptions cost enough for KV headroom to gain something, else an empty one."""
    names = [f"{name} {cost['recomputed']:.1%}" for name, cost in summary["costs"].items()
             if cost["recomputed"] > PREEMPTIONS_MATTER]
    return (f"preemptions lost {', '.join(names)} of the decoded tokens, of which a prefix cache may have kept a part: "
            f"above {PREEMPTIONS_MATTER:.0%} KV headroom (NAME@0.05), or more of it, could gain something"
            if names else "")


def _spread(values: list[float]) -> dict:
    return {"median": round(statistics.median(values), 4), "low": round(min(values), 4),
            "high": round(max(values), 4), "n": len(values)}


def best_rival(runs: Sequence[Mapping]) -> str | None:
    """The fastest policy that is neither ours, nor the baseline, nor knows the lengths; None when none ran."""
    times: dict[str, list[float]] = {}
    for run in runs:
        if run["policy"].partition("@")[0] not in NO_RIVAL and not run["policy"].startswith(OURS):
            times.setdefault(run["policy"], []).append(run["s_per_update"])
    return min(times, key=lambda name: statistics.median(times[name]), default=None)


def summary(runs: Sequence[Mapping]) -> dict:
    rival, own = best_rival(runs), baseline(SYNC)
    return {"kind": "summary", "against_verl": ratios(runs, "verl"), f"against_{own}": ratios(runs, own),
            "best_rival": rival, "against_best_rival": ratios(runs, rival) if rival else {}, "costs": costs(runs)}


@functools.lru_cache(maxsize=4096)
def prompt_of(group: int, tokens: int, vocabulary: int, seed: int) -> list[int]:
    """The prompt of a group, which its samples share; random tokens, none of the first few, which may be special."""
    rng = random.Random(f"{seed} {group}")
    return [rng.randrange(16, vocabulary) for _ in range(tokens)]
