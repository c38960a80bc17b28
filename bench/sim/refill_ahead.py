"""python -m bench.sim.refill_ahead [--json] [--steps N] [--seeds N ...] [--results FILE]

SIMULATED: prompts that a step of verl's v1 separate_async begins, where its group filter leaves a share of all groups
out: verl's own rule (a batch a step, so many batches ahead; what is left out is begun again as the trainer asks for its
batch, and looked at every two seconds) beside that of algo/null_groups.py with one batch ahead. Groups trained a
second, their age in steps, and the share of steps that waited. A group lasts as long whatever else runs: rollout is
never the slower side for want of replicas.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from dataclasses import dataclass, field
from itertools import product
from math import log

from bench.common import console
from bench.common.provenance import add_results, write_record
from esgrpo.algo.null_groups import LeftOutShare, to_begin

BATCH = 32
SAMPLE_S, TRAIN_S, POLL_S = 0.6, 6.3, 2.0  # of train_h200_smollm2_sums_v1_warmup.json; verl's poll_interval
SHARES = (0.0, 0.4, 0.65)  # there: 0.67 to 0.70 of plain verl's groups, 0.41 and 0.45 of those of the sampler
MEDIANS = (3.0, 6.0)  # seconds of a group, as its longest response
SPREAD = 0.4  # of its logarithm
DRIFT = 0.2, 20  # the share moves by so much of it up and down, over steps: those of a real run do
VERL, OURS = (1, 2, 3, 4), "ahead of the filter, 1"  # batches ahead
STEPS, SEEDS = 400, (1, 2, 3)


@dataclass
class Group:
    ends: float
    begun: int  # step
    left_out: bool


@dataclass
class Loop:
    """One run: verl's loop, and `ours` for what a step begins, or verl's batch."""

    share: float
    median_s: float
    warmup: int  # batches
    ours: bool
    seed: int
    now: float = 0.0
    step: int = 0
    groups: list[Group] = field(default_factory=list)  # in process
    ages: list[int] = field(default_factory=list)
    waited: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.seen, self.left_out = LeftOutShare(), 0

    def begin(self, number: int) -> None:
        by, period = DRIFT
        wave = abs(self.step % (2 * period) - period) / period * 2 - 1  # 1, down to -1, and up again
        share = self.share * (1 + by * wave)
        for _ in range(number):
            lasts = self.chance.lognormvariate(log(self.median_s), SPREAD)
            self.groups.append(Group(self.now + lasts, self.step, self.chance.random() < share))

    def ahead(self) -> int:
        ended = [group for group in self.groups if group.ends <= self.now]
        left_out = sum(group.left_out for group in ended)
        if self.step > 1:
            self.seen.note(BATCH, self.left_out)
        self.left_out = 0
        return to_begin(BATCH, self.warmup * BATCH, len(ended) - left_out, len(self.groups) - len(ended), left_out,
                        self.seen.foreseen(BATCH, left_out))

    def sample(self) -> None:
        """verl's `wait_for_sampleable` and `sample`: the oldest go first."""
        self.now += SAMPLE_S
        asked = self.now
        while True:
            ended = [group for group in self.groups if group.ends <= self.now]
            kept = [group for group in ended if not group.left_out]
            evicted = len(ended) - len(kept)
            self.groups = [group for group in self.groups if group.ends > self.now or not group.left_out]
            self.left_out += evicted
            self.begin(evicted)
            if len(kept) >= BATCH:
                break
            self.now += POLL_S
        self.waited += self.now > asked
        taken = sorted(kept, key=lambda group: group.begun)[:BATCH]
        self.ages += [self.step - group.begun for group in taken]
        gone = set(map(id, taken))
        self.groups = [group for group in self.groups if id(group) not in gone]

    def run(self, steps: int) -> dict[str, float]:
        self.begin(self.warmup * BATCH)
        for self.step in range(1, steps + 1):
            self.begin(self.ahead() if self.ours else BATCH)
            self.sample()
            self.now += TRAIN_S
        return {"groups/s": len(self.ages) / self.now, "age": statistics.mean(self.ages), "waited": self.waited / steps}


def play(share: float, median_s: float, steps: int, seeds) -> dict[str, dict[str, float]]:
    arms = {f"verl, {warmup}": (warmup, False) for warmup in VERL} | {OURS: (1, True)}
    runs = {name: [Loop(share, median_s, *arm, seed).run(steps) for seed in seeds] for name, arm in arms.items()}
    return {name: {key: round(statistics.median(run[key] for run in found), 2) for key in found[0]}
            for name, found in runs.items()}


def main(argv: list[str] | None = None) -> int:
    reader = console.command_line("bench.sim.refill_ahead", __doc__)
    reader.add_argument("--json", action="store_true", help="the whole result instead of a table")
    reader.add_argument("--steps", type=console.count, default=STEPS, help=f"of a run, default {STEPS}")
    reader.add_argument("--seeds", type=console.whole, nargs="+", default=SEEDS, help="of lengths and of what passes")
    add_results(reader)
    options = reader.parse_args(argv)
    cases = [{"left_out": share, "median_s": median_s, **play(share, median_s, options.steps, options.seeds)}
             for share, median_s in product(SHARES, MEDIANS)]
    found = {"simulated": True, "steps": options.steps, "cases": cases}
    if options.results:
        write_record(options.results, "bench.sim.refill_ahead", argv, options.seeds, found)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    names = list(cases[0])[2:]
    print("SIMULATED  groups/s, age in steps, share of steps that waited")
    print("left out  group, s" + "".join(f"{name:>24}" for name in names))
    for case in cases:
        told = (" ".join(f"{case[name][key]:.2f}" for key in ("groups/s", "age", "waited")) for name in names)
        print(f"{case['left_out']:8g} {case['median_s']:9g}" + "".join(f"{cell:>24}" for cell in told))
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
