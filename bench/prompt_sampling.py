"""Simulated: what choosing prompts is worth, in groups with gradient per group that was rolled out.

    python -m bench.prompt_sampling --json bench/results/prompt_sampling.json    # three minutes

No model is trained here. Each prompt has a probability of a correct response that drifts by itself, the same in every
arm: on average upwards, as under training, at a pace of its own, with noise. What a chosen prompt teaches is not
modelled, so the numbers say how well a rule finds prompts with gradient and nothing about rewards. Arms: `uniform` (a
new shuffle every epoch, as verl does), `greso` (arXiv 2506.02177: a shuffle, of which a prompt is skipped with
probability 1 - max(p^c, 0.01) after c visits without gradient in a row; p of easy and hard prompts adapts towards a
share of 0.25 without gradient, one third of them easy), `sampler` (algo/prompt_sampling.py on algo/history.py) and
`thompson` (the same with VADE's sampled p). Outcomes come back after `--lag` further groups have started.

What the texts of prompts are worth is tried in the first epoch, every prompt at most once, with prompts of which a text
explains this or that share of the difficulty (`Texts`): `sampler` reads them (algo/prompt_prior.py), `blind` does not.

How fast a taken prompt recovers is tried with other seeds than the ones that the comparison is made with. What it costs
to train a prompt again soon is not modelled, so that the fastest recovery always looks best here, and `most often` says
how the choice repeats itself: the setting in use is not the best one of this table.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import statistics
import sys
from collections import Counter, deque
from functools import partial

from bench.common import console
from bench.common.provenance import commit
from esgrpo import config
from esgrpo.algo.prompt_prior import features_of
from esgrpo.algo.prompt_sampling import RECOVERY_SHARE, PromptSampler, has_gradient

SEEDS, TUNING_SEEDS = "0,1,2", "100,101,102"
RECOVERY_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5)  # of the prompts, tried with the tuning seeds
MEASURES = {"gradient": "groups with gradient", "gain": "p(1-p)^2"}  # what arms are compared by
RESPONSES = 8
GROUPS_PER_VERSION = 16
EXPLAINED = (0.0, 0.3, 0.6)  # shares of the variance of the starting log-odds, by the prompt's text
TEXT_WORDS, WORDS_A_PROMPT, LARGEST_NUMBER = 200, 8, 4  # of the vocabulary; of a text; digits
FIRST_EPOCH = 0.5  # share of the prompts that are rolled out there: the sampler can leave out the others
LENGTH = 100  # tokens of every response: lengths play no part here
# Log-odds of a correct response: mean and spread over prompts at the start, mean drift per weight version.
POPULATIONS = {"mixed": (-0.5, 2.5, 0.004), "hard": (-3.0, 2.5, 0.004), "easy": (1.5, 2.5, 0.004),
               "alike": (-0.5, 1.2, 0.004), "solved or hopeless": (-0.5, 4.0, 0.004), "fast": (-0.5, 2.5, 0.016)}
MIXED = "mixed"
DRIFT_SPREAD, NOISE = 0.004, 0.02
# GRESO's constants, as read in its code.
LEAST_CHANCE, TARGET, EASY_PART, STEP, LOWEST, HIGHEST, INITIAL = 0.01, 0.25, 1 / 3, 0.01, 0.05, 0.95, 0.5


class Texts:
    """Texts of prompts, and what each says of its prompt's difficulty: mean 0 and variance 1 over prompts.

    Source, words and the size of a number say a third each. Words are letters, so that no number hides in them."""

    def __init__(self, prompts: int, rng: random.Random):
        sources = [rng.gauss(0, 1) for _ in range(6)]
        words = {"".join(rng.choices("abcdefghijklmnop", k=6)): rng.gauss(0, 1) for _ in range(TEXT_WORDS)}
        self.texts, self.said = [], []
        for _ in range(prompts):
            source, chosen = rng.randrange(len(sources)), rng.sample(sorted(words), WORDS_A_PROMPT)
            digits = rng.randint(1, LARGEST_NUMBER)
            size = (digits - (1 + LARGEST_NUMBER) / 2) / math.sqrt((LARGEST_NUMBER ** 2 - 1) / 12)
            said = sources[source] + sum(words[word] for word in chosen) / math.sqrt(WORDS_A_PROMPT) + size
            self.texts.append((f"{' '.join(chosen)} {'7' * digits}?", f"source {source}"))
            self.said.append(said)
        mean, deviation = statistics.fmean(self.said), statistics.pstdev(self.said)
        self.said = [(said - mean) / deviation for said in self.said]


class Population:
    """Prompts whose difficulty drifts with the weight version, alike for every rule with the same seed."""

    def __init__(self, prompts: int, seed: int, name: str = MIXED, explained: float = 0.0):
        start, spread, drift = POPULATIONS[name]
        self.rng = random.Random(f"population {seed}")
        self.odds = [self.rng.gauss(start, spread) for _ in range(prompts)]
        self.texts = Texts(prompts, random.Random(f"texts {seed}")) if explained else None
        if self.texts:
            own = math.sqrt(1.0 - explained)
            self.odds = [start + own * (odds - start) + math.sqrt(explained) * spread * said
                         for odds, said in zip(self.odds, self.texts.said, strict=True)]
        self.pace = [self.rng.gauss(drift, DRIFT_SPREAD) for _ in range(prompts)]

    def step(self) -> None:
        self.odds = [odds + pace + self.rng.gauss(0.0, NOISE)
                     for odds, pace in zip(self.odds, self.pace, strict=True)]

    def group(self, prompt: int, rng: random.Random) -> list[bool]:
        chance = 1.0 / (1.0 + math.exp(-self.odds[prompt]))
        return [rng.random() < chance for _ in range(RESPONSES)]


class Uniform:
    def __init__(self, prompts: int, rng: random.Random):
        self.prompts, self.rng, self.deck = prompts, rng, []

    def take(self, version: int) -> int:
        if not self.deck:
            self.deck = self.rng.sample(range(self.prompts), self.prompts)
        return self.deck.pop()

    def outcome(self, prompt: int, correct: list[bool], version: int) -> None:
        pass


class Greso(Uniform):
    """Probabilistic pre-rollout filter; skipping costs nothing."""

    def __init__(self, prompts: int, rng: random.Random):
        super().__init__(prompts, rng)
        self.run, self.kind = Counter(), {}
        self.chance = {"easy": INITIAL, "hard": INITIAL}
        self.seen = {"easy": 0, "hard": 0, "all": 0}

    def take(self, version: int) -> int:
        while True:
            prompt = super().take(version)
            chance = self.chance[self.kind[prompt]] ** self.run[prompt] if self.run[prompt] else 1.0
            if self.rng.random() < max(chance, LEAST_CHANCE):
                return prompt

    def outcome(self, prompt: int, correct: list[bool], version: int) -> None:
        self.seen["all"] += 1
        if has_gradient(correct):
            self.run[prompt] = 0
        else:
            self.kind[prompt] = "easy" if correct[0] else "hard"
            self.run[prompt] += 1
            self.seen[self.kind[prompt]] += 1
        if self.seen["all"] == GROUPS_PER_VERSION:
            for kind, target in (("easy", TARGET * EASY_PART), ("hard", TARGET * (1 - EASY_PART))):
                above = self.seen[kind] / GROUPS_PER_VERSION >= target
                moved = self.chance[kind] + (-STEP if above else STEP)
                self.chance[kind] = min(HIGHEST, max(LOWEST, moved))
            self.seen = dict.fromkeys(self.seen, 0)


class Sampler:
    def __init__(self, prompts: int, rng: random.Random, recovery_share: float = RECOVERY_SHARE,
                 texts: Texts | None = None, **settings):
        from esgrpo.algo.history import PromptHistory

        features = [features_of(*text) for text in texts.texts] if texts else [()] * prompts
        self.history = PromptHistory(config.History(enable=True))
        self.sampler = PromptSampler(config.Sampler(enable=True, **settings), self.history, rng, prompts, str,
                                     RESPONSES, features.__getitem__)
        self.sampler.recovery = max(1.0, prompts * recovery_share)
        self.take = self.sampler.take

    def outcome(self, prompt: int, correct: list[bool], version: int) -> None:
        features = self.sampler.outcome(str(prompt), correct)
        self.history.observe(str(prompt), [LENGTH] * RESPONSES, correct, [False] * RESPONSES, version, features)


ARMS = {"uniform": Uniform, "greso": Greso, "thompson": partial(Sampler, choice="thompson"), "sampler": Sampler}
FIRST_EPOCH_ARMS = {"uniform": Uniform, "blind": Sampler, "sampler": Sampler}


def run(arm: str, prompts: int, groups: int, lag: int, seed: int, name: str = MIXED, explained: float = 0.0,
        **options) -> dict[str, float]:
    """One arm, one seed, one population; shares of the rolled-out groups."""
    rng, population = random.Random(f"{arm} {seed}"), Population(prompts, seed, name, explained)
    if population.texts and arm == "sampler":
        options["texts"] = population.texts
    rule = {**ARMS, **FIRST_EPOCH_ARMS}[arm](prompts, rng, **options)
    waiting, taken, useful, squares = deque(), Counter(), 0, 0.0
    for number in range(groups):
        version = number // GROUPS_PER_VERSION
        if number and number % GROUPS_PER_VERSION == 0:
            population.step()
        prompt = rule.take(version)
        taken[prompt] += 1
        correct = population.group(prompt, rng)
        waiting.append((prompt, correct))
        useful += has_gradient(correct)
        share = sum(correct) / RESPONSES
        squares += share * (1 - share) ** 2
        if len(waiting) > lag:
            rule.outcome(*waiting.popleft(), version)
    found = {"gradient": useful / groups, "gain": squares / groups, "distinct": len(taken) / prompts,
             "most_often": float(max(taken.values()))}
    if isinstance(rule, Sampler):
        reported = rule.sampler.metrics()
        found |= {"expected": reported["expected_gradient"], "realised": reported["realised_gradient"]}
    return found


def summary(rows: list[dict[str, float]]) -> dict[str, dict]:
    """Mean and the values of all seeds, per measure."""
    return {name: {"mean": round(statistics.fmean(row[name] for row in rows), 4),
                   "seeds": [round(row[name], 4) for row in rows]} for name in rows[0]}


def verdict(arms: dict[str, dict], ours: str = "sampler", other: str = "greso") -> dict[str, str]:
    """Per measure: `yes` when ours is above the other in every seed, `no` when in none, else `not in every seed`."""
    said = {}
    for measure in MEASURES:
        above = [a > b for a, b in zip(arms[ours][measure]["seeds"], arms[other][measure]["seeds"], strict=True)]
        said[measure] = "yes" if all(above) else "not in every seed" if any(above) else "no"
    return said


def show(name: str, measures: dict[str, dict]) -> None:
    spread = " .. ".join(f"{choose(measures['gradient']['seeds']):.3f}" for choose in (min, max))
    print(f"{name:11} groups with gradient {measures['gradient']['mean']:.3f} ({spread}), p(1-p)^2 "
          f"{measures['gain']['mean']:.4f}, prompts seen {measures['distinct']['mean']:.2f}, most often "
          f"{measures['most_often']['mean']:.0f}")


def main(argv: list[str] | None = None) -> int:
    parser = console.command_line("bench.prompt_sampling", __doc__.splitlines()[0])
    parser.add_argument("--prompts", type=console.count, default=2000)
    parser.add_argument("--groups", type=console.count, default=8000, help="groups that are rolled out")
    parser.add_argument("--lag", type=console.whole, default=32, help="groups that start before an outcome is known")
    parser.add_argument("--seeds", type=console.seeds, default=SEEDS, help="of the comparison")
    parser.add_argument("--tuning-seeds", type=console.seeds, default=TUNING_SEEDS,
                        help="of the recovery shares; none of --seeds")
    parser.add_argument("--json", type=console.output_file, help="write the result here, too")
    options = parser.parse_args(argv)
    seeds, tuning = options.seeds, options.tuning_seeds
    fewest = min(options.groups, round(FIRST_EPOCH * options.prompts))
    if options.lag >= fewest:
        parser.error(f"--lag {options.lag}: wanted fewer than the {fewest} groups of the shortest run")
    if set(seeds) & set(tuning):
        parser.error("a seed of --tuning-seeds is among --seeds: the comparison would be of what was tuned for it")
    size = options.prompts, options.groups, options.lag
    print(f"SIMULATED, seeds {console.listed(seeds)}, {options.prompts} prompts, {options.groups} groups of "
          f"{RESPONSES}")
    found, beats = {}, {}
    for population in POPULATIONS:
        arms = found[population] = {arm: summary([run(arm, *size, seed, population) for seed in seeds]) for arm in ARMS}
        beats[population] = verdict(arms)
        print(f"prompts: {population}")
        for name, measures in arms.items():
            show(name, measures)
        print("sampler beats greso: " + ", ".join(f"{MEASURES[m]} {said}" for m, said in beats[population].items()))
    print(f"recovery of a taken prompt as a share of the prompts, seeds {console.listed(tuning)}; in use: "
          f"{RECOVERY_SHARE}")
    recoveries = {str(share): summary([run("sampler", *size, seed, recovery_share=share) for seed in tuning])
                  for share in RECOVERY_SHARES}
    for share, measures in recoveries.items():
        show(share, measures)
    first = {}
    for explained in EXPLAINED:
        arms = first[str(explained)] = {
            arm: summary([run(arm, options.prompts, round(FIRST_EPOCH * options.prompts), options.lag, seed,
                              explained=explained) for seed in seeds]) for arm in FIRST_EPOCH_ARMS}
        print(f"first epoch, texts explain {explained:.0%} of the difficulty")
        for name, measures in arms.items():
            show(name, measures)
    if options.json:
        command = shlex.join(["python", "-m", "bench.prompt_sampling", *(argv or sys.argv[1:])])
        result = {"simulated": True, "command": command, "commit": commit(), "seeds": seeds,
                  "responses": RESPONSES, "beats_greso": beats, "populations": found,
                  "first_epoch": {"share": FIRST_EPOCH, "explained": first},
                  "recovery_share": {"in_use": RECOVERY_SHARE, "seeds": tuning, "tried": recoveries}}
        console.write(options.json, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
