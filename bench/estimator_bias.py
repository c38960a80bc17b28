"""What each treatment of cut responses does to the gradient: bias, variance, and information per decoded token.

    python -m bench.estimator_bias --json bench/results/estimator_bias.json

Two parts, both against full rollouts of the same responses, so that only the treatment is left in the difference.

Simulated: a policy over four kinds of responses (short or long, right or wrong), one softmax parameter, groups of n.
The real GroupPruner decides at every ending, with the coin; what it prunes is never scored. What the tokens up to a
decision say of the kind is exact: that the response is longer than so. Unbiased: mean difference within three standard
errors of 0. The controls must be off by more.

Recorded (bench.common.estimator_gradients): responses of the testbed's model to its tasks, with the gradient of each.

Information per token is 1 / (variance x tokens), that of full rollouts being 1. It says nothing of bias.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.common import console, estimator_gradients
from bench.common.provenance import commit, cpu_model
from bench.testbed.task import TASKS
from esgrpo import config
from esgrpo.algo.audit import Audit
from esgrpo.algo.group_pruning import Finished, GroupPruner
from esgrpo.algo.terms import Treatment
from esgrpo.losses import Tossed, grpo_segment_advantage

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
    head: float = 0.0  # of the tokens up to its decision
    pi: float = 1.0
    kept: bool = True
    pivot: float | None = None
    reward: float | None = None  # what was predicted
    decided_at: int | None = None
    cut_score: float = 0.0  # what a reward function gives to a response that was cut

    @property
    def head_of_all(self) -> float:
        """Up to the decision; all of a response about which nobody decided."""
        return self.gradient if self.decided_at is None else self.head


def probabilities(shift: float) -> dict[str, float]:
    weights = {kind: math.exp(LOGITS[kind] + shift * kind.endswith("right")) for kind in KINDS}
    return {kind: weight / sum(weights.values()) for kind, weight in weights.items()}


def survivors(shift: float, tokens: int) -> dict[str, float]:
    """P(kind, and at least so many tokens)."""
    def reaches(kind: str) -> float:
        low, high = LENGTHS[kind]
        return max(0.0, (high - max(tokens, low) + 1) / (high - low + 1))

    return {kind: chance * reaches(kind) for kind, chance in probabilities(shift).items()}


def head_gradient(shift: float, tokens: int) -> float:
    """d log P(at least so many tokens) / d parameter: all that a response says until then."""
    running = survivors(shift, tokens)
    return running[PARAMETER] / sum(running.values()) - probabilities(shift)[PARAMETER]


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


def prune(pruner: GroupPruner, name: str, rows: list[Row], known: dict, shift: float, penalty: float) -> None:
    """Let the group run: the shortest ends first, everybody still running has as many tokens."""
    pruner.watch(name, SIZE, known)
    running = sorted(range(SIZE), key=lambda member: rows[member].tokens)
    while running:
        member = running.pop(0)
        row = rows[member]
        pruner.ended(name, member, Finished(row.tokens, row.correct, row.score))
        for other, item in pruner.checkpoint(name, dict.fromkeys(running, row.tokens)).items():
            found = rows[other]
            found.pi, found.pivot, found.reward = item.keep_probability, item.pivot, item.reward
            found.decided_at, found.head = item.tokens, head_gradient(shift, item.tokens)
            if item.verdict.prune:
                found.kept = False
                found.cut_score = -penalty * item.tokens / max(LENGTHS[PARAMETER])
                running.remove(other)
    pruner.close(name)


def simulate(name: str, groups: int, seed: int, penalty: float = 0.0, treatment: str = Treatment.MASKED,
             pi: float | None = None) -> list[list[Row]]:
    """The same responses for every treatment and keep probability."""
    rng, scenario = random.Random(seed), SCENARIOS[name]
    audit = scenario.prune["audit"]
    settings = config.parse({"enable": True, "prune": {**scenario.prune, "treatment": str(treatment), "audit": {
        **audit, "exempt_prob": pi or audit["exempt_prob"]}}})
    pruner = GroupPruner(settings, Audit(settings.prune.audit, random.Random(seed + 1)), BUDGET)
    made = []
    for number in range(WARM_UP_GROUPS + groups):
        shift = rng.choice(scenario.shifts)
        rows = sample_group(rng, penalty, shift)
        prune(pruner, f"group-{number}", rows, forecast(rng, shift), shift, penalty)
        made.append(rows)
    return made[WARM_UP_GROUPS:]


def advantages(groups: list[list[Row]], complete: bool, norm: bool, pivoted: bool = True,
               treatment: str = Treatment.MASKED) -> list[list[tuple[float, float]]]:
    """Of the code under test, for the complete groups or for what pruning left: (up to the decision, after it).

    A row stands as two tokens, of which a cut one has the first, or none when it is masked.
    """
    flat = [row for rows in groups for row in rows]
    index = [number for number, rows in enumerate(groups) for _ in rows]
    trained = treatment != Treatment.MASKED
    mask = torch.tensor([[complete or row.kept or trained, complete or row.kept] for row in flat]).long()
    tossed = None
    if not complete and treatment != Treatment.FAILED:
        pivot = [row.pivot if pivoted or row.pivot is None else 0.0 for row in flat]
        tossed = Tossed([row.pi for row in flat], pivot, [row.reward for row in flat], [not row.kept for row in flat],
                        [None if row.decided_at is None else 1 for row in flat])
    rewards = torch.tensor([[row.score if complete or row.kept else row.cut_score, 0.0] for row in flat],
                           dtype=torch.float64)
    values = grpo_segment_advantage(rewards, mask, index, norm_by_std=norm, tossed=tossed).tolist()
    return [values[start:start + SIZE] for start in range(0, len(values), SIZE)]


def divided_by_std(groups: list[list[Row]], values: list) -> list[list[tuple[float, float]]]:
    """Negative control: weighted advantages over the weighted estimate of a group's standard deviation."""
    result = []
    for rows, found in zip(groups, values, strict=True):
        weights = [row.kept / row.pi for row in rows]
        mean = sum(w * row.score for w, row in zip(weights, rows, strict=True)) / SIZE
        square = sum(w * (row.score - mean) ** 2 for w, row in zip(weights, rows, strict=True)) / (SIZE - 1)
        result.append([tuple(value / (square**0.5 + 1e-6) for value in pair) for pair in found])
    return result


def self_inclusive(rows: list[Row], self_normalised: bool) -> list[float]:
    """Negative controls: the weighted mean over all kept rows, own row included."""
    weights = [row.kept / row.pi for row in rows]
    divisor = sum(weights) if self_normalised else len(rows)
    mean = sum(w * row.score for w, row in zip(weights, rows, strict=True)) / divisor
    return [(w * (row.score - mean),) * 2 for w, row in zip(weights, rows, strict=True)]


def unweighted(rows: list[Row]) -> list[float]:
    """Negative control: what is left is taken for the whole group."""
    mean = statistics.fmean(row.score for row in rows if row.kept)
    return [(row.score - mean if row.kept else 0.0,) * 2 for row in rows]


def gradients(groups: list[list[Row]], values: list) -> list[float]:
    """One number per group: sum of advantage times score function, over n."""
    return [sum(head * row.head_of_all + tail * (row.gradient - row.head_of_all)
                for (head, tail), row in zip(pairs, rows, strict=True)) / SIZE
            for pairs, rows in zip(values, groups, strict=True)]


def decoded(groups: list[list[Row]]) -> float:
    """Mean tokens of a group."""
    return statistics.fmean(sum(row.tokens if row.kept else row.decided_at for row in rows) for rows in groups)


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
            "z": statistics.fmean(differences) / error if error else 0.0,
            "variance": statistics.variance(estimate) / statistics.variance(whole)}


def table(name: str, groups: int, seed: int, penalty: float = 0.0) -> dict[str, dict[str, float]]:
    """Of `masked`: name of the estimator -> bias, z, variance; plus the share of rows pruned."""
    made = simulate(name, groups, seed, penalty)
    whole, whole_std = (advantages(made, True, norm) for norm in (False, True))
    target, left = gradients(made, whole), advantages(made, False, False)
    result = {
        "masked": compare(gradients(made, left), target),
        "masked, pivot 0": compare(gradients(made, advantages(made, False, False, pivoted=False)), target),
        "control: divided by std": compare(gradients(made, divided_by_std(made, left)), gradients(made, whole_std)),
        "control: self-normalised mean": compare(gradients(made, [self_inclusive(r, True) for r in made]), target),
        "control: mean including self": compare(gradients(made, [self_inclusive(r, False) for r in made]), target),
        "control: token-mean": compare(token_mean(made, left, False), token_mean(made, whole, True)),
        "control: no weights": compare(gradients(made, [unweighted(rows) for rows in made]), target),
    }
    rows = [row for group in made for row in group]
    result["pruned rows"] = {"share": sum(not row.kept for row in rows) / len(rows)}
    return result


PROBABILITIES = (0.1, 0.25)  # that a coin spares a candidate
NEEDS_WEIGHTS = ("enough",)  # scenarios that predict nothing


def treatments(name: str) -> list[tuple[str, str, float, bool]]:
    """(row of the table, treatment, keep probability, divided by the standard deviation) of a scenario."""
    rows = [(f"{treatment}, pi {pi:g}", treatment, pi, False)
            for treatment in (Treatment.DOUBLY_ROBUST, Treatment.MASKED) for pi in PROBABILITIES]
    if name in NEEDS_WEIGHTS:
        return rows
    audited = [("failed", Treatment.FAILED, False), ("value", Treatment.VALUE, False),
               ("failed, divided by std", Treatment.FAILED, True)]
    return [(label, treatment, PROBABILITIES[0], norm) for label, treatment, norm in audited] + rows


def treated(name: str, groups: int, seed: int, penalty: float = 0.0) -> dict[str, dict[str, float]]:
    """Row of `treatments` -> bias, z, variance, tokens and information per token against complete groups."""
    result = {}
    for label, treatment, pi, norm in treatments(name):
        made = simulate(name, groups, seed, penalty, treatment, pi)
        found = compare(gradients(made, advantages(made, False, norm, treatment=treatment)),
                        gradients(made, advantages(made, True, norm)))
        tokens = decoded(made) / statistics.fmean(sum(row.tokens for row in rows) for rows in made)
        result[label] = {**found, "tokens": tokens, "information": 1 / (found["variance"] * tokens)}
    return result


def over_seeds(tables: list[dict[str, dict]]) -> dict[str, dict]:
    """Mean of every number over seeds, z of every seed, and whether none of them is beyond the limit."""
    rows = {}
    for name in tables[0]:
        z = [found[name]["z"] for found in tables]
        means = {key: statistics.fmean(found[name][key] for found in tables) for key in tables[0][name] if key != "z"}
        spread = [found[name]["information"] for found in tables if "information" in found[name]]
        rows[name] = {**means, "z": z, "within_limit": max(map(abs, z)) <= LIMIT,
                      **({"information_spread": [min(spread), max(spread)]} if spread else {})}
    return rows


def simulated(scenario: str, groups: int, seeds: list[int], penalty: float) -> dict:
    tables = [table(scenario, groups, seed, penalty) for seed in seeds]
    share = statistics.fmean(found.pop("pruned rows")["share"] for found in tables)
    return {"pruned_share": share, "estimators": over_seeds(tables),
            "treatments": over_seeds([treated(scenario, groups, seed, penalty) for seed in seeds])}


def show(title: str, rows: dict[str, dict]) -> None:
    print(f"\n{title}\n{'':32}{'bias':>10}{'variance':>10}{'tokens':>8}{'info':>7}  z of every seed; within "
          f"{LIMIT:g} standard errors?")
    for name, row in rows.items():
        more = f"{row['tokens']:>8.2f}{row['information']:>7.2f}" if "tokens" in row else " " * 15
        print(f"{name:32}{row['bias']:>+10.2%}{row['variance']:>10.2f}{more}  "
              f"{' '.join(f'{z:+.1f}' for z in row['z'])}  {'yes' if row['within_limit'] else 'NO'}")


def main(argv: list[str] | None = None) -> None:
    parser = console.command_line("bench.estimator_bias", __doc__.partition("\n")[0])
    parser.add_argument("--groups", type=console.whole, default=10_000, help="simulated, per scenario and seed")
    parser.add_argument("--seeds", type=console.seeds, default="7,8,9")
    parser.add_argument("--penalty", type=console.not_negative, default=0.0,
                        help="overlong penalty of the longest response")
    parser.add_argument("--prompts", type=console.whole, default=128, help="recorded, per task and seed; 0: none")
    parser.add_argument("--tasks", type=console.names(TASKS), default=",".join(TASKS), help="recorded")
    parser.add_argument("--json", type=console.output_file, help="write the result here, too")
    options = parser.parse_args(argv)
    started, found = time.monotonic(), {}
    seeds = options.seeds
    if 0 < options.groups < 2 * BATCH:
        parser.error(f"--groups {options.groups}: wanted 0, or {2 * BATCH} and more: two updates")
    if options.prompts and (options.prompts < 2 or len(seeds) < 2):
        parser.error(f"--prompts {options.prompts} --seeds {console.listed(seeds)}: wanted two or more of both: a seed "
                     "is predicted from the others; or --prompts 0")
    print(f"SIMULATED, {options.groups} groups of {SIZE} per seed, seeds {console.listed(seeds)}, penalty "
          f"{options.penalty}")
    for scenario in SCENARIOS if options.groups else ():
        found[scenario] = simulated(scenario, options.groups, seeds, options.penalty)
        show(f"{scenario}: {found[scenario]['pruned_share']:.1%} of the responses pruned; masked and its controls",
             found[scenario]["estimators"])
        show(f"{scenario}: treatments", found[scenario]["treatments"])
    recorded = estimator_gradients.measure(options.tasks, seeds, options.prompts) if options.prompts else {}
    for task, rules in recorded.items():
        for rule, rows in rules.items():
            estimator_gradients.show(f"RECORDED, {task}, {rule}", rows)
    if options.json:
        command = shlex.join(["python", "-m", "bench.estimator_bias", *(sys.argv[1:] if argv is None else argv)])
        write(options.json, {"commands": [command], "commit": commit(), "seeds": seeds,
                             "device": f"{cpu_model()}, one thread", "versions": {"torch": torch.__version__},
                             "seconds": round(time.monotonic() - started),
                             "simulated": {"groups": options.groups, "size": SIZE, "penalty": options.penalty,
                                           "scenarios": found} if found else {},
                             "recorded": {"prompts": options.prompts, **estimator_gradients.FACTS,
                                          "tasks": recorded} if recorded else {}})


SAME = ("commit", "seeds", "device", "versions")  # of parts that stand in one file


def write(path: Path, result: dict) -> None:
    """Also beside the other parts of the same code and machine, which may be measured one after another."""
    before = json.loads(path.read_text()) if path.exists() else {}
    if before and all(before.get(key) == result[key] for key in SAME):
        result["commands"] = before["commands"] + result["commands"]
        result["seconds"] += before["seconds"]
        for part, name in (("simulated", "scenarios"), ("recorded", "tasks")):
            old, new = before[part], result[part]
            together = {**old.get(name, {}), **new.get(name, {})}
            result[part] = {**old, **new, name: together} if together else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(console.exit_code(main))
