"""One simulated run from its settings: the workload, the policy, and what came out."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from bench import policies
from bench.common import workload
from bench.common.workload import Group
from bench.policies import ASYNC, SYNC, Limits
from bench.sim.device import Device
from bench.sim.simulation import Course, Simulation
from esgrpo.algo.accounting import bubble, quantile, tail_ratio

DIGITS = 9  # significant digits of reported numbers: what is behind them is rounding


@dataclass(frozen=True)
class Setting:
    """`groups` of `members` per update; `warm`: epochs that policies with a history remember before the run."""

    workload: str = "math"
    replicas: int = 8
    groups: int = 64
    members: int = 8
    cap: int = 16384
    sequences: int = 256
    updates: int = 4
    scenario: str = SYNC
    seed: int = 1
    prompts: int = 0  # 0: as many as the updates need, so that each comes once a run
    warm: int = 1
    scale: float = 1.0
    tail: float = 1.0
    train_s: float = 0.0
    staleness: float = 0.5

    def limits(self, device: Device) -> Limits:
        return Limits(self.replicas, self.sequences, device.capacity(self.sequences), self.cap, self.members,
                      self.groups, self.scenario, device.kv_tokens)

    @property
    def all_prompts(self) -> int:
        return self.prompts or self.groups * self.updates

    def groups_of(self, spare: int, **chosen) -> Iterator[Group]:
        return workload.stream(self.workload, self.all_prompts, self.members, self.cap, self.seed, spare=spare,
                               scale=self.scale, tail=self.tail, **chosen)


def policy_for(setting: Setting, policy: str, replayed: bool) -> type[policies.Policy]:
    """Raises KeyError for an unknown policy, ValueError for one that does not know the scenario, or that chooses
    prompts where there are only recorded ones."""
    cls = policies.policy(policy)
    if setting.scenario not in cls.scenarios:
        raise ValueError(f"{policy} has no {setting.scenario} scenario, only {', '.join(cls.scenarios)}")
    if replayed and cls.chooses:
        raise ValueError(f"{policy} chooses prompts, a recorded trace has its own")
    return cls


def run(setting: Setting, policy: str, device: Device, groups: Iterator[Group] | None = None) -> dict:
    """Simulate; `groups` replaces the generated workload (a replay). Raises what `policy_for` raises."""
    cls = policy_for(setting, policy, groups is not None)
    chosen = cls(setting.limits(device), random.Random(f"policy {setting.seed}"))
    if groups is None:
        prompts, spare = setting.all_prompts, math.ceil(cls.spare * setting.members)
        groups = setting.groups_of(spare)
        chosen.remember(list(itertools.islice(groups, prompts * setting.warm)))
        if cls.chooses:
            groups = setting.groups_of(spare, first=prompts * setting.warm, choose=lambda: chosen.choose(prompts))
    if setting.scenario == ASYNC:  # the same work for everybody, to its end: longest first would leave the short ones
        groups = itertools.islice(groups, setting.updates * setting.groups)
    simulation = Simulation(chosen, setting.limits(device), device,
                            Course(setting.updates, setting.train_s, setting.staleness),
                            lambda count: list(itertools.islice(groups, count)))
    simulation.run()
    return summary(simulation)


def summary(simulation: Simulation) -> dict:
    """What a run comes to: seconds, tokens per second, shares; token counts are exact."""
    ledger, replicas, times = simulation.ledger, simulation.replicas, simulation.update_times
    decoded = sum(replica.decoded for replica in replicas)
    total = times[-1]
    spans = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    found = {
        "makespan_s": total, "update_s": {"mean": total / len(times), "max": max(spans), "each": spans},
        "tokens_per_s": decoded / total, "trained_tokens_per_s": ledger.trained / total,
        "used_tokens_per_s": (ledger.trained + ledger.waste["zero_variance"]) / total,
        "tokens_per_trained_sample": (ledger.trained + ledger.waste["zero_variance"]) / max(1, ledger.trained_samples),
        "samples_per_s": ledger.trained_samples / total,
        "bubble": bubble(simulation.windows, simulation.paused_s),
        "completion_s": {f"p{q}": quantile(simulation.latencies, q / 100) for q in (50, 90, 99)},
        "tail_ratio": tail_ratio(simulation.latencies),
        "decoded": decoded, "trained": ledger.trained, "waste": dict(ledger.waste),
        "trained_samples": ledger.trained_samples, "pruned_samples": ledger.pruned_samples,
        "gradient_groups": ledger.gradient_groups, "trained_groups": len(ledger.closed),
        "staleness": ledger.stale(), "decisions": simulation.policy.decided(),
        "note": simulation.policy.note,
        "prefilled": sum(replica.prefilled for replica in replicas),
        "reprefilled": sum(replica.recomputed for replica in replicas),
        "preemptions": sum(replica.preemptions for replica in replicas),
    }
    return _rounded(found)


def _rounded(value):
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def describe(setting: Setting, device: Device, source: str) -> dict:
    """What a result says of its origin."""
    return {"simulated": True, "device": f"simulated: {device.name}", "tau": source,
            "capacity": setting.limits(device).capacity, "setting": asdict(setting)}


