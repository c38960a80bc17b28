"""Is the gradient of audited pruning the gradient of the whole group? A simulation.

    python -m bench.estimator_bias --json bench/results/estimator_bias.json

A policy over four kinds of responses (short or long, right or wrong), one softmax parameter, groups of n. The real
GroupPruner decides at every ending, with the coin; what it prunes is never scored. Each estimator is compared with
its own value on the complete group, response by response the same, so that only pruning is left in the difference.
Unbiased: mean difference within three standard errors of 0. The controls must be off by more.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.common.provenance import commit
from esgrpo import config
from esgrpo.algo.audit import Audit
from esgrpo.algo.group_pruning import Finished, GroupPruner
from esgrpo.losses import KeepProbabilities, grpo_segment_advantage

KINDS = ("short-right", "short-wrong", "long-right", "long-wrong")
LOGITS = {"short-right": 1.2, "short-wrong": -0.5, "long-right": 0.3, "long-wrong": 0.0}
LENGTHS = {"short-right": (10, 40), "short-wrong": (10, 40), "long-right": (60, 200), "long-wrong": (60, 200)}
PARAMETER = "long-right"  # late bloomers: what pruning would take away first
SIZE, BATCH = 8, 4  # responses of a group, groups of an update (for the token-mean denominator)
BUDGET = 1000
WARM_UP_GROUPS = 40
LIMIT = 3.0  # standard errors
AUDIT = {"enable": True, "exempt_prob": 0.25, "max_fraction": 0.75, "window": 200, "min_candidates": 20,
         "max_false_rate": 1.0}
PAST = 40  # responses that the history of a prompt has seen


@dataclass(frozen=True)
class Scenario:
    """Rules, and the prompts they meet: by how much a prompt raises the logits of right responses."""

    prune: dict
    shifts: tuple[float, ...] = (0.0,)


SCENARIOS = {
    # prunes wherever finished members agree, right or wrong: the estimator must bear it
    "resolved, reckless": Scenario({"resolved": {"enable": True, "null_prob": 1.0}, "audit": AUDIT}),
    # easy, hard and mixed prompts, known from their history, the default bound of 5 % on false prunes
    "resolved, audited": Scenario({"resolved": {"enable": True, "null_prob": 0.2},
                                   "audit": {**AUDIT, "max_fraction": 0.5, "max_false_rate": 0.05}},
                                  (6.0, -6.0, 0.0)),
    "enough": Scenario({"finish_group_after": 3, "audit": AUDIT}),
}


@dataclass
class Row:
    score: float
    correct: bool
    tokens: int
    gradient: float  # d log p / d parameter of the whole response
    pi: float = 1.0
    kept: bool = True
    pivot: float | None = None


def probabilities(shift: float) -> dict[str, float]:
    weights = {kind: math.exp(LOGITS[kind] + shift * kind.endswith("right")) for kind in KINDS}
    return {kind: weight / sum(weights.values()) for kind, weight in weights.items()}


def sample_group(rng: random.Random, penalty: float, shift: float) -> list[Row]:
    """`penalty`: what the longest response loses, in proportion to its length: rewards that are not binary."""
    chance = probabilities(shift)
    rows = []
    for _ in range(SIZE):
        kind = rng.choices(KINDS, [chance[name] for name in KINDS])[0]
        tokens = rng.randint(*LENGTHS[kind])
        score = float(kind.endswith("right")) - penalty * tokens / max(LENGTHS[PARAMETER])
        rows.append(Row(score, kind.endswith("right"), tokens, float(kind == PARAMETER) - chance[PARAMETER]))
    return rows


def forecast(rng: random.Random, shift: float) -> dict:
    """What PAST earlier responses to the prompt tell: uniform prior, updated."""
    chance = probabilities(shift)
    right = sum(rng.random() < chance["short-right"] + chance["long-right"] for _ in range(PAST))
    return {"known": True, "low": 1.0, "alpha": 1.0 + right, "beta": 1.0 + PAST - right}


def prune(pruner: GroupPruner, name: str, rows: list[Row], known: dict) -> None:
    """Let the group run: the shortest ends first, everybody still running has as many tokens."""
    pruner.watch(name, SIZE, known)
    running = sorted(range(SIZE), key=lambda member: rows[member].tokens)
    while running:
        member = running.pop(0)
        row = rows[member]
        pruner.ended(name, member, Finished(row.tokens, row.correct, row.score))
        for other, item in pruner.checkpoint(name, dict.fromkeys(running, row.tokens)).items():
            rows[other].pi, rows[other].pivot = item.verdict.pi, item.pivot
            if item.verdict.prune:
                rows[other].kept = False
                running.remove(other)
    pruner.close(name)


def simulate(name: str, groups: int, seed: int, penalty: float = 0.0) -> list[list[Row]]:
    rng, scenario = random.Random(seed), SCENARIOS[name]
    settings = config.parse({"enable": True, "prune": scenario.prune})
    pruner = GroupPruner(settings, Audit(settings.prune.audit, random.Random(seed + 1)), BUDGET)
    made = []
    for number in range(WARM_UP_GROUPS + groups):
        shift = rng.choice(scenario.shifts)
        rows = sample_group(rng, penalty, shift)
        prune(pruner, f"group-{number}", rows, forecast(rng, shift))
        made.append(rows)
    return made[WARM_UP_GROUPS:]


def advantages(groups: list[list[Row]], complete: bool, norm: bool, pivoted: bool = True) -> list[list[float]]:
    """Of the code under test, for the complete groups or for what pruning left."""
    flat = [row for rows in groups for row in rows]
    index = [number for number, rows in enumerate(groups) for _ in rows]
    mask = torch.tensor([[complete or row.kept] for row in flat]).long()
    pivot = [row.pivot if pivoted or row.pivot is None else 0.0 for row in flat]
    keep = None if complete else KeepProbabilities([row.pi for row in flat], pivot)
    rewards = torch.tensor([[row.score if complete or row.kept else torch.nan] for row in flat], dtype=torch.float64)
    rewards = torch.where(mask.bool(), rewards, 0.0)
    values = grpo_segment_advantage(rewards, mask, index, norm_by_std=norm, keep=keep)[:, 0].tolist()
    return [values[start:start + SIZE] for start in range(0, len(values), SIZE)]


def self_inclusive(rows: list[Row], self_normalised: bool) -> list[float]:
    """Negative controls: the weighted mean over all kept rows, own row included."""
    weights = [row.kept / row.pi for row in rows]
    divisor = sum(weights) if self_normalised else len(rows)
    mean = sum(w * row.score for w, row in zip(weights, rows, strict=True)) / divisor
    return [w * (row.score - mean) for w, row in zip(weights, rows, strict=True)]


def unweighted(rows: list[Row]) -> list[float]:
    """Negative control: what is left is taken for the whole group."""
    mean = statistics.fmean(row.score for row in rows if row.kept)
    return [row.score - mean if row.kept else 0.0 for row in rows]


def gradients(groups: list[list[Row]], values: list[list[float]]) -> list[float]:
    """One number per group: sum of advantage times score function, over n."""
    return [sum(a * row.gradient for a, row in zip(advantage, rows, strict=True)) / SIZE
            for advantage, rows in zip(values, groups, strict=True)]


def token_mean(groups: list[list[Row]], values: list[list[float]], complete: bool) -> list[float]:
    """Per update of BATCH groups: the same sum over the number of kept tokens."""
    sums = [value * SIZE for value in gradients(groups, values)]
    tokens = [sum(row.tokens for row in rows if complete or row.kept) for rows in groups]
    return [sum(sums[i:i + BATCH]) / sum(tokens[i:i + BATCH]) for i in range(0, len(sums) - BATCH + 1, BATCH)]


def compare(estimate: list[float], whole: list[float]) -> dict[str, float]:
    """Bias in units of the whole group's mean gradient, its z value, and variance relative to the whole group's."""
    differences = [a - b for a, b in zip(estimate, whole, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return {"bias": statistics.fmean(differences) / abs(statistics.fmean(whole)),
            "z": statistics.fmean(differences) / error,
            "variance": statistics.variance(estimate) / statistics.variance(whole)}


def table(name: str, groups: int, seed: int, penalty: float = 0.0) -> dict[str, dict[str, float]]:
    """Name of the estimator -> bias, z, variance; plus the share of rows pruned."""
    made = simulate(name, groups, seed, penalty)
    whole, whole_std = (advantages(made, True, norm) for norm in (False, True))
    target, left = gradients(made, whole), advantages(made, False, False)
    result = {
        "leave-one-out, weighted": compare(gradients(made, left), target),
        "the same, pivot 0": compare(gradients(made, advantages(made, False, False, pivoted=False)), target),
        "divided by std": compare(gradients(made, advantages(made, False, True)), gradients(made, whole_std)),
        "control: self-normalised mean": compare(gradients(made, [self_inclusive(r, True) for r in made]), target),
        "control: mean including self": compare(gradients(made, [self_inclusive(r, False) for r in made]), target),
        "control: token-mean": compare(token_mean(made, left, False), token_mean(made, whole, True)),
        "control: no weights": compare(gradients(made, [unweighted(rows) for rows in made]), target),
    }
    rows = [row for group in made for row in group]
    result["pruned rows"] = {"share": sum(not row.kept for row in rows) / len(rows)}
    return result


def over_seeds(scenario: str, groups: int, seeds: list[int], penalty: float) -> dict[str, dict]:
    """Of every estimator: mean bias and variance, z of every seed, and whether none of them is beyond the limit."""
    tables = [table(scenario, groups, seed, penalty) for seed in seeds]
    shares = [found.pop("pruned rows")["share"] for found in tables]
    rows = {}
    for name in tables[0]:
        z = [found[name]["z"] for found in tables]
        rows[name] = {"bias": statistics.fmean(found[name]["bias"] for found in tables), "z": z,
                      "variance": statistics.fmean(found[name]["variance"] for found in tables),
                      "within_limit": max(map(abs, z)) <= LIMIT}
    return {"pruned_share": statistics.fmean(shares), "estimators": rows}


def show(scenario: str, found: dict) -> None:
    print(f"\n{scenario}: {found['pruned_share']:.1%} of the responses pruned")
    print(f"{'estimator':32}{'bias':>10}{'variance':>10}  z of every seed; within {LIMIT:g} standard errors?")
    for name, row in found["estimators"].items():
        print(f"{name:32}{row['bias']:>+10.2%}{row['variance']:>10.2f}  {' '.join(f'{z:+.1f}' for z in row['z'])}  "
              f"{'yes' if row['within_limit'] else 'NO'}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=20_000, help="per scenario and seed")
    parser.add_argument("--seeds", default="7,8,9")
    parser.add_argument("--penalty", type=float, default=0.0, help="overlong penalty of the longest response")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    options = parser.parse_args(argv)
    started, found = time.monotonic(), {}
    seeds = [int(seed) for seed in options.seeds.split(",")]
    print(f"SIMULATED, {options.groups} groups of {SIZE} per seed, seeds {options.seeds}, penalty {options.penalty}")
    for scenario in SCENARIOS:
        found[scenario] = over_seeds(scenario, options.groups, seeds, options.penalty)
        show(scenario, found[scenario])
    if options.json:
        result = {"simulated": True, "commit": commit(), "groups": options.groups, "seeds": seeds, "size": SIZE,
                  "penalty": options.penalty, "seconds": round(time.monotonic() - started), "scenarios": found}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
