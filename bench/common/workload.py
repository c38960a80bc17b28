"""Workloads of rollout benchmarks: which prompts come, how long each response is, and whether it is correct.

Lengths are tokens. A log-length is a mean of all prompts + a part of the prompt + a part of the visit + a part of the
sample, all normal; the shares are TailSieve's (arXiv 2608.22788, app. B: prompt 64.8 %, sampling 26.1 %, checkpoint and
interaction 9.1 %). A share of the responses runs into the cap, concentrated in the prompts with the longest answers.
Long and hard go together: the log-odds of being correct fall with the prompt's and with the sample's part of the
length, and a response that the cap cuts off is wrong (UloRL, arXiv 2507.19766: reward 0).

A prompt comes back once an epoch, so that what was remembered of it means something. Deterministic for a seed; the
first `members` samples of a group do not depend on how many spare ones are made.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

SHARES = {"prompt": 0.648, "visit": 0.091, "sample": 0.261}  # of the variance of log-lengths
SPIKED_PROMPTS = 0.1  # share of the prompts that the responses at the cap belong to
PROMPT_SLOPE, SAMPLE_SLOPE = 1.2, 0.8  # fall of the log-odds of correct per standard deviation of length
DIFFICULTY = 2.5  # standard deviation of the log-odds between prompts of equal length: about 40 % groups of one mind
EPOCHS = 4  # how often a prompt comes back, unless told


@dataclass(frozen=True)
class Preset:
    """`median` tokens of a response, `spread` = standard deviation of log-lengths, `spike` = share forced to the cap,
    `odds` = log-odds of correct at median length."""

    median: float
    spread: float
    spike: float
    prompt_tokens: int
    odds: float
    source: str


PRESETS = {
    "math": Preset(1160, 0.988, 0.03, 256, 0.5, "TailSieve tab. A.3 at a cap of 16,384: P50 1,160, P90 4,115, P99 "
                   "about 11.5k; 3 % truncated on math"),
    "code": Preset(600, 0.85, 0.001, 512, 0.5, "RollPacker fig. 2: P75 755 to 1,100, longest 25 to 32 times the "
                   "median; TailSieve: 0.1 % truncated on code"),
    "agentic": Preset(2000, 0.988, 0.01, 2048, 0.0, "Laminar: P99 about ten times the median in tool RL (second-hand); "
                      "median, prompt and 1 % at the cap are assumptions"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response to be made: `tokens` is its whole length, the cap included."""

    key: int  # unique in the workload
    group: int
    member: int
    prompt_tokens: int
    tokens: int
    correct: bool


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All responses of one visit of a prompt; those from the group size on are spare ones."""

    index: int
    prompt: int
    samples: list[Sample]


def generate(preset: str, groups: int, members: int, cap: int, seed: int, *, prompts: int | None = None,
             spare: int = 0, scale: float = 1.0, tail: float = 1.0) -> list[Group]:
    """`groups` visits of `prompts` different prompts (default: each comes EPOCHS times), as `stream` makes them."""
    endless = stream(preset, prompts or max(1, groups // EPOCHS), members, cap, seed, spare=spare, scale=scale,
                     tail=tail)
    return list(itertools.islice(endless, groups))


def stream(preset: str, prompts: int, members: int, cap: int, seed: int, *, spare: int = 0, scale: float = 1.0,
           tail: float = 1.0, first: int = 0, choose: Callable[[], int] | None = None) -> Iterator[Group]:
    """Visits without end, numbered from `first` on: epoch after epoch over all prompts, each in another order, or of
    the prompts that `choose` names, which is asked when a visit is asked for.

    `scale` multiplies lengths (not the cap): a small one makes a test, 4 to 8 a thinking model. `tail` multiplies the
    spread. Raises KeyError for an unknown preset.
    """
    shape = PRESETS[preset]
    spread = {name: shape.spread * tail * math.sqrt(share) for name, share in SHARES.items()}
    base = math.log(shape.median * scale)
    spiked = NormalDist().inv_cdf(1 - SPIKED_PROMPTS)
    order = list(range(prompts))
    for index in itertools.count(first):
        if index % prompts == 0:
            random.Random(f"{seed} epoch {index // prompts}").shuffle(order)
        prompt = order[index % prompts] if choose is None else choose()
        own = random.Random(f"{seed} prompt {prompt}")
        rank, hard = own.gauss(0, 1), own.gauss(0, 1)
        rng = random.Random(f"{seed} visit {index}")
        visit = base + spread["prompt"] * rank + spread["visit"] * rng.gauss(0, 1)
        odds = shape.odds - PROMPT_SLOPE * rank + DIFFICULTY * hard
        spike = shape.spike / SPIKED_PROMPTS if rank > spiked else 0.0
        samples = []
        for member in range(members + spare):
            part = rng.gauss(0, 1)
            length = cap if rng.random() < spike else max(1, round(math.exp(visit + spread["sample"] * part)))
            chance = 1 / (1 + math.exp(SAMPLE_SLOPE * part - odds))
            correct = rng.random() < chance and length < cap
            samples.append(Sample(index * (members + spare) + member, index, member, shape.prompt_tokens,
                                  min(length, cap), correct))
        yield Group(index, prompt, samples)


def replay(path: str | Path, members: int, cap: int | None = None, prompt_tokens: int = 256) -> list[Group]:
    """A recorded trace: JSON lines with `prompt` (any value), `tokens`, `correct` and, if known, `prompt_tokens`.

    Responses of one prompt form groups of `members` in order of their lines; what does not fill a group is left out.
    A `cap` cuts longer responses, which makes them wrong.
    """
    waiting: dict[str, list[dict]] = {}
    numbers: dict[str, int] = {}
    result: list[Group] = []
    for row in _lines(path):
        name = json.dumps(row["prompt"], sort_keys=True)
        rows = waiting.setdefault(name, [])
        rows.append(row)
        if len(rows) == members:
            index = len(result)
            result.append(Group(index, numbers.setdefault(name, len(numbers)), [
                Sample(index * members + member, index, member, int(row.get("prompt_tokens", prompt_tokens)),
                       max(1, min(int(row["tokens"]), cap or int(row["tokens"]))),
                       bool(row["correct"]) and (cap is None or int(row["tokens"]) < cap))
                for member, row in enumerate(rows)]))
            waiting[name] = []
    return result


def _lines(path: str | Path) -> Iterator[dict]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def statistics(groups: list[Group]) -> dict[str, float]:
    """Quantiles of the lengths and the share at the longest; shares of correct samples and of groups of one mind."""
    from esgrpo.algo.accounting import quantile

    lengths = [sample.tokens for group in groups for sample in group.samples]
    correct = [[sample.correct for sample in group.samples] for group in groups]
    longest = max(lengths)
    return {"p50": quantile(lengths, 0.5), "p90": quantile(lengths, 0.9), "p99": quantile(lengths, 0.99),
            "max": longest, "mean": sum(lengths) / len(lengths),
            "at_longest": sum(length == longest for length in lengths) / len(lengths),
            "correct": sum(map(sum, correct)) / len(lengths),
            "one_mind": sum(len(set(group)) == 1 for group in correct) / len(correct)}
