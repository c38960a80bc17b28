"""Treatments of cut responses with the true gradients of recorded samples: the second part of bench.estimator_bias.

The testbed's model answers prompts of its tasks, some groups a seed; of every response the gradient of the log-prob
of each piece of `LOOK` tokens is taken, over all parameters, and kept as a random projection (signs and permutation
fixed), which keeps inner products up to about one over the root of its size. Then a group is played again and again:
all members start together, one token a step, and are looked at after every `LOOK` tokens by one of two rules:

    loops     the product's rule for proven loops
    verdict   a logistic regression on what is known at a look, fitted to complete groups of the other seeds, cuts at a
              probability of success below `THRESHOLD`. A stand-in for whatever predicts: treatments are compared here,
              not predictors

The real GroupPruner tosses the coins, and the real estimator gives the advantages; every arm sees the same responses.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from dataclasses import dataclass, field

import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from bench.testbed.sampler import sample
from bench.testbed.statistics import MODEL
from bench.testbed.task import MAX_RESPONSE_TOKENS, generate, score
from bench.testbed.train_model import encode_prompt
from esgrpo import config
from esgrpo.algo.audit import Audit
from esgrpo.algo.group_pruning import Decided, Finished, GroupPruner
from esgrpo.algo.loops import surprisal
from esgrpo.algo.terms import Outcome, Rule, Treatment
from esgrpo.algo.treatment import CutWeights
from esgrpo.losses import Tossed, grpo_segment_advantage

SIZE, LOOK, PROJECTED = 8, 64, 4096
THRESHOLD, MOST = 0.10, 0.5  # predicted success below which a response is a candidate; share of a group that is cut
DRAWS = 8  # of all coins, for every arm
RECENT, GRAM = 64, 4  # tokens of the recent surprisal; of a pattern
RIDGE, NEWTON_STEPS = 1.0, 25
LOOPS, VERDICT = "loops", "verdict"
PREDICTED = "predicted"  # to the pruner: a rule of the audit's, not the learned verdicts, which audit themselves
LIMIT = 3.0  # standard errors
FACTS = {"size": SIZE, "look": LOOK, "projected": PROJECTED, "threshold": THRESHOLD, "most": MOST, "draws": DRAWS,
         "model": "bench/testbed/model"}


@dataclass(frozen=True)
class Arm:
    """`trained`: of a cut response, or it is a control that counts it and leaves it out. `weights`: by the coin.
    `alike`: a loss that divides every row by its own tokens, of complete groups, too; `cut_weights`: of the product."""

    name: str
    treatment: str
    pi: float = 0.1
    norm: bool = False
    trained: bool = True
    weights: bool = True
    alike: bool = False
    cut_weights: bool = False


ARMS = (
    Arm("failed", Treatment.FAILED), Arm("failed, divided by std", Treatment.FAILED, norm=True),
    Arm("failed, responses alike", Treatment.FAILED, alike=True, cut_weights=True),
    Arm("value", Treatment.VALUE),
    *(Arm(f"{treatment}, pi {pi:g}", treatment, pi) for treatment in (Treatment.DOUBLY_ROBUST, Treatment.MASKED)
      for pi in (0.1, 0.25)),
    Arm("control: counted, not trained", Treatment.FAILED, trained=False),
    Arm("control: masked, no weights", Treatment.MASKED, weights=False),
    Arm("control: responses alike, no factor", Treatment.FAILED, alike=True),
)


@dataclass
class Answer:
    tokens: list[int]
    log_probs: list[float]
    reward: float
    summed: list[float] = field(default_factory=list)  # log-probs, up to each token
    gradients: torch.Tensor | None = None  # [pieces + 1, PROJECTED]: of everything up to the end of each piece


class Projection:
    """Signs and a permutation of all parameters, summed in PROJECTED places."""

    def __init__(self, parameters: int):
        generator = torch.Generator().manual_seed(0)
        width = math.ceil(parameters / PROJECTED) * PROJECTED
        self._order = torch.randperm(width, generator=generator)
        self._signs = torch.randint(0, 2, (width,), generator=generator).mul_(2).sub_(1).float()
        self._room = torch.zeros(width)

    def __call__(self, gradients) -> torch.Tensor:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._room[:len(flat)] = flat
        return (self._room[self._order] * self._signs).view(-1, PROJECTED).sum(0)


def record(task: str, seed: int, prompts: int) -> list[list[Answer]]:
    """`prompts` groups of SIZE answers with rewards and gradients; the same for the same arguments."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = Qwen2ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    problems = [problem for problem in generate(task, seed, prompts, "test") for _ in range(SIZE)]
    questions = [encode_prompt(tokenizer, problem.prompt) for problem in problems]
    log_probs: list[list[float]] = []
    responses = sample(model, questions, MAX_RESPONSE_TOKENS, torch.Generator().manual_seed(seed),
                       tokenizer.pad_token_id, log_probs=log_probs)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    projection = Projection(sum(parameter.numel() for parameter in model.parameters()))
    answers = []
    for question, tokens, values, text, problem in zip(questions, responses, log_probs, texts, problems, strict=True):
        answer = Answer(tokens, values, score(text, problem), [0.0])
        for value in values:
            answer.summed.append(answer.summed[-1] + value)
        answer.gradients = gradients_of(model, question, tokens, projection)
        answers.append(answer)
    return [answers[start:start + SIZE] for start in range(0, len(answers), SIZE)]


def gradients_of(model, question: list[int], tokens: list[int], projection: Projection) -> torch.Tensor:
    """[pieces + 1, PROJECTED]: of the summed log-prob of nothing, of the first piece, the first two …"""
    ids = torch.tensor([question + tokens])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(question) - 1:-1]
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    parameters, found = list(model.parameters()), [torch.zeros(PROJECTED)]
    for start in range(0, len(tokens), LOOK):
        piece = chosen[start:start + LOOK].sum()
        found.append(found[-1] + projection(torch.autograd.grad(piece, parameters,
                                                                retain_graph=start + LOOK < len(tokens))))
    return torch.stack(found)


# The stand-in for a predictor


def own_features(answer: Answer, at: int) -> list[float]:
    summed, tokens = answer.summed, answer.tokens
    recent = max(0, at - RECENT)
    grams = [tuple(tokens[i:i + GRAM]) for i in range(at - GRAM + 1)]
    return [math.log(at), -summed[at] / at, -(summed[at] - summed[recent]) / (at - recent),
            len(set(grams)) / len(grams)]


def group_features(group: list[Answer], member: int, at: int, finished: list[int]) -> list[float]:
    """Of siblings: those that still run at `at`, and those that `finished` with a known reward."""
    running = [-answer.summed[at] / at for answer in group if len(answer.tokens) > at]
    right = sum(group[number].reward for number in finished)
    lengths = sorted(len(group[number].tokens) for number in finished)
    doublings = max(0.0, math.log2(at / lengths[len(lengths) // 2])) if lengths else 0.0
    return [-group[member].summed[at] / at - statistics.fmean(running), len(finished) / SIZE,
            math.log((right + 0.5) / (len(finished) - right + 0.5)), doublings]


class Predictor:
    """Probability of success at a look: logistic regression with a ridge, by Newton's method."""

    def __init__(self, groups: list[list[Answer]]):
        rows, outcomes = [], []
        for group in groups:
            for member, answer in enumerate(group):
                for at in range(LOOK, len(answer.tokens), LOOK):
                    finished = [number for number, other in enumerate(group) if len(other.tokens) <= at]
                    rows.append(own_features(answer, at) + group_features(group, member, at, finished))
                    outcomes.append(answer.reward)
        table, wanted = torch.tensor(rows, dtype=torch.float64), torch.tensor(outcomes, dtype=torch.float64)
        self._mean, self._scale = table.mean(0), table.std(0).clamp(min=1e-9)
        inputs = self._inputs(table)
        self._weights = torch.zeros(inputs.shape[1], dtype=torch.float64)
        ridge = RIDGE * torch.eye(len(self._weights), dtype=torch.float64)
        for _ in range(NEWTON_STEPS):
            chance = torch.sigmoid(inputs @ self._weights)
            slope = inputs.T @ (wanted - chance) - ridge @ self._weights
            curve = (inputs * (chance * (1 - chance))[:, None]).T @ inputs + ridge
            self._weights += torch.linalg.solve(curve, slope)
        self._plain = (self._mean.tolist(), self._scale.tolist(), self._weights.tolist())

    def _inputs(self, table: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.ones(len(table), 1, dtype=torch.float64), (table - self._mean) / self._scale], 1)

    def __call__(self, features: list[float]) -> float:
        mean, scale, weights = self._plain
        logit = weights[0] + sum(w * (x - m) / s for w, x, m, s in zip(weights[1:], features, mean, scale, strict=True))
        return 1 / (1 + math.exp(-logit))


# Playing groups again


def new_pruner(arm: Arm, seed: int) -> GroupPruner:
    audit = {"enable": True, "exempt_prob": arm.pi, "max_fraction": MOST, "min_candidates": 1, "max_false_rate": 1.0}
    settings = config.parse({"enable": True, "segment_length": LOOK, "prune": {
        "treatment": str(arm.treatment), "audit": audit, "repetition": {"enable": True}}})
    return GroupPruner(settings, Audit(settings.prune.audit, random.Random(seed)), MAX_RESPONSE_TOKENS)


def is_loop(answer: Answer, at: int, rule: config.Repetition) -> bool:
    since = at - rule.min_span
    return at % rule.check_interval == 0 and since >= 0 and surprisal(
        rule, answer.tokens[:at], (since, answer.summed[since], since), (at, answer.summed[at], at)) is not None


def play(group: list[Answer], rule: str, pruner: GroupPruner, name: str, own: list[dict[int, list[float]]],
         predictor: Predictor) -> dict[int, Decided]:
    """One group under one rule, with the coins of `pruner`: who was decided, and how."""
    pruner.watch(name, SIZE, None)
    watched, cut, waiting = pruner.groups[name], set(), sorted(range(SIZE), key=lambda n: len(group[n].tokens))
    for at in range(LOOK, MAX_RESPONSE_TOKENS + LOOK, LOOK):
        while waiting and len(group[waiting[0]].tokens) <= at:
            member = waiting.pop(0)
            answer = group[member]
            pruner.ended(name, member, Finished(len(answer.tokens), answer.reward > 0, answer.reward))
        for member in sorted(waiting):
            if member in watched.decided:
                continue
            if rule == LOOPS:
                success = 0.0 if is_loop(group[member], at, pruner.prune.repetition) else 1.0
            else:
                success = predictor(own[member][at] + group_features(group, member, at, list(watched.finished)))
            if success >= THRESHOLD:
                continue
            decided = pruner.decide(name, watched, member, Rule.REPETITION if rule == LOOPS else PREDICTED, 0.0, at,
                                    success)
            if decided is not None and decided.verdict.prune:
                cut.add(member)
                waiting.remove(member)
    decided = dict(watched.decided)
    pruner.close(name)
    return decided


def weights_of(arm: Arm, groups: list[list[Answer]], decisions: list[dict[int, Decided]]) -> list[list[list[float]]]:
    """Advantages (up to the decision, after it) of every row: from the estimator, with a row as two tokens."""
    flat = [(found.get(member), answer) for group, found in zip(groups, decisions, strict=True)
            for member, answer in enumerate(group)]
    cut = [found is not None and found.verdict.prune for found, _ in flat]
    index = [number for number, group in enumerate(groups) for _ in group]
    masked = arm.treatment == Treatment.MASKED
    mask = torch.tensor([[not (gone and masked), not gone] for gone in cut]).long()
    rewards = torch.tensor([[0.0 if gone else answer.reward, 0.0] for gone, (_, answer) in zip(cut, flat, strict=True)])
    tossed = None
    if arm.treatment != Treatment.FAILED and arm.weights:
        tossed = Tossed([1.0 if found is None else found.keep_probability for found, _ in flat],
                        [None if found is None else found.pivot for found, _ in flat],
                        [None if found is None else found.reward for found, _ in flat], cut,
                        [None if found is None else 1 for found, _ in flat])
    values = grpo_segment_advantage(rewards.double(), mask, index, norm_by_std=arm.norm, tossed=tossed)
    if not arm.trained:
        values = torch.where(torch.tensor(cut)[:, None], 0.0, values)
    return [values[start:start + SIZE].tolist() for start in range(0, len(flat), SIZE)]


def estimates(arm: Arm, groups: list[list[Answer]], decisions: list[dict[int, Decided]],
              values: list[list[list[float]]]) -> torch.Tensor:
    """[groups, PROJECTED]: sum of advantage times gradient, over the members; a cut tail has the advantage 0."""
    divisors = divisors_of(arm, groups, decisions)
    found = torch.zeros(len(groups), PROJECTED)
    for number, (group, decided, pairs) in enumerate(zip(groups, decisions, values, strict=True)):
        for member, (answer, (head, tail)) in enumerate(zip(group, pairs, strict=True)):
            whole = answer.gradients[-1]
            split = answer.gradients[decided[member].tokens // LOOK] if member in decided else whole
            found[number] += (head * split + tail * (whole - split)) / (SIZE * divisors[number][member])
    return found


def divisors_of(arm: Arm, groups: list[list[Answer]], decisions: list[dict[int, Decided]]) -> list[list[float]]:
    """What a row's tokens are divided by: 1, or where rows count alike, the tokens that it has, over its cut weight."""
    if not arm.alike:
        return [[1.0] * SIZE for _ in groups]
    rows = []
    for group, decided in zip(groups, decisions, strict=True):
        for member, answer in enumerate(group):
            item = decided.get(member)
            gone = item is not None and item.verdict.prune
            rule, reason = (item.verdict.rule, item.verdict.reason) if item else ("", "")
            rows.append({"outcome": Outcome.PRUNE if gone else Outcome.FINISH, "rule": rule if gone else "",
                         "tokens": item.tokens if gone else len(answer.tokens), "candidate_rule": rule,
                         "exempted": item is not None and not gone, "decided_by": reason})
    weights = CutWeights(MAX_RESPONSE_TOKENS)
    for row in rows:
        weights.learn(row)
    flat = [row["tokens"] / (weights.of(row) if arm.cut_weights else 1.0) for row in rows]
    return [flat[start:start + SIZE] for start in range(0, len(flat), SIZE)]


def squared_mean(rows: torch.Tensor) -> float:
    """|E row|^2 without the bias of squaring a mean: the mean inner product of different rows."""
    count = len(rows)
    return float((rows.sum(0).square().sum() - rows.square().sum()) / (count * (count - 1)))


def variance(draws: list[torch.Tensor]) -> float:
    """Of one group's estimate, summed over parameters, over groups and coins."""
    squares = statistics.fmean(float(rows.square().sum(1).mean()) for rows in draws)
    return squares - squared_mean(sum(draws) / len(draws))


@dataclass
class Found:
    """Of one arm in one seed."""

    draws: list[torch.Tensor]  # estimates of every group, for every draw of the coins
    whole: torch.Tensor  # of complete groups
    tokens: float  # decoded, share of those of complete groups
    cut: float  # share of responses
    right: float  # share of cut responses that would have been right

    @property
    def variance(self) -> float:
        return variance(self.draws) / variance([self.whole])

    @property
    def information(self) -> float:
        return 1 / (self.variance * self.tokens)


def along(difference: torch.Tensor, whole: torch.Tensor) -> tuple[float, float]:
    """Bias along the mean gradient of complete groups, over its length, and its z value."""
    others = (whole.sum(0) - whole) / (len(whole) - 1)  # without the group's own noise
    parts = (difference * others).sum(1) / squared_mean(whole)
    error = float(parts.std()) / len(parts) ** 0.5
    return float(parts.mean()), float(parts.mean()) / error if error else 0.0


def row_of(found: list[Found]) -> dict:
    """One row of the table, over seeds."""
    whole = torch.cat([one.whole for one in found])
    difference = torch.cat([sum(one.draws) / len(one.draws) - one.whole for one in found])
    length = max(squared_mean(whole), 0.0) ** 0.5
    z = [along(sum(one.draws) / len(one.draws) - one.whole, one.whole)[1] for one in found]
    bias, of_all = along(difference, whole)
    noise = (float(difference.square().sum(1).mean()) / len(difference)) ** 0.5
    information = [one.information for one in found]
    return {"bias": bias, "z": z, "z_of_all": of_all, "bias_length": max(squared_mean(difference), 0.0) ** 0.5 / length,
            "noise_length": noise / length, "variance": statistics.fmean(one.variance for one in found),
            "tokens": statistics.fmean(one.tokens for one in found), "information": statistics.fmean(information),
            "information_spread": [min(information), max(information)],
            "cut_share": statistics.fmean(one.cut for one in found),
            "cut_right_share": statistics.fmean(one.right for one in found),
            "within_limit": abs(of_all) <= LIMIT}


def run_arm(arm: Arm, rule: str, groups: list[list[Answer]], predictor: Predictor,
            own: list[list[dict[int, list[float]]]], seed: int) -> Found:
    none: list[dict[int, Decided]] = [{} for _ in groups]
    full = dataclasses.replace(arm, treatment=Treatment.FAILED, trained=True)
    whole = estimates(full, groups, none, weights_of(full, groups, none))
    draws, tokens, cuts, right = [], 0, 0, 0.0
    for draw in range(DRAWS):
        pruner = new_pruner(arm, 1000 * seed + draw)
        decisions = [play(group, rule, pruner, f"g{number}", own[number], predictor)
                     for number, group in enumerate(groups)]
        draws.append(estimates(arm, groups, decisions, weights_of(arm, groups, decisions)))
        for group, found in zip(groups, decisions, strict=True):
            for member, answer in enumerate(group):
                gone = member in found and found[member].verdict.prune
                tokens += found[member].tokens if gone else len(answer.tokens)
                cuts, right = cuts + gone, right + gone * answer.reward
    complete = sum(len(answer.tokens) for group in groups for answer in group)
    return Found(draws, whole, tokens / (DRAWS * complete), cuts / (DRAWS * SIZE * len(groups)), right / max(1, cuts))


def measure(tasks: list[str], seeds: list[int], prompts: int) -> dict[str, dict[str, dict[str, dict]]]:
    """task -> rule -> arm -> numbers; all arms take turns on the same responses."""
    result = {}
    for task in tasks:
        began = time.monotonic()
        recorded = {seed: record(task, seed, prompts) for seed in seeds}
        print(f"{task}: {len(seeds)} x {prompts} groups recorded in {time.monotonic() - began:.0f} s", flush=True)
        found: dict[str, dict[str, list[Found]]] = {rule: {arm.name: [] for arm in ARMS} for rule in (LOOPS, VERDICT)}
        for seed, groups in recorded.items():
            predictor = Predictor([group for other in seeds if other != seed for group in recorded[other]])
            own = [[{at: own_features(answer, at) for at in range(LOOK, len(answer.tokens), LOOK)} for answer in group]
                   for group in groups]
            for rule, arms in found.items():
                for arm in ARMS:
                    arms[arm.name].append(run_arm(arm, rule, groups, predictor, own, seed))
        result[task] = {rule: {name: row_of(rows) for name, rows in arms.items()} for rule, arms in found.items()}
        print(f"{task}: {time.monotonic() - began:.0f} s", flush=True)
    return result


def show(title: str, rows: dict[str, dict]) -> None:
    print(f"\n{title}\n{'':32}{'bias':>9}{'z':>6}{'|bias|':>8}{'noise':>7}{'var':>7}{'tokens':>8}{'info':>6}"
          f"{'[low, high]':>15}{'cut':>6}{'right':>7}")
    for name, row in rows.items():
        low, high = row["information_spread"]
        print(f"{name:32}{row['bias']:>+9.1%}{row['z_of_all']:>+6.1f}{row['bias_length']:>8.2f}{row['noise_length']:>7.2f}"
              f"{row['variance']:>7.2f}{row['tokens']:>8.2f}{row['information']:>6.2f}{f'[{low:.2f}, {high:.2f}]':>15}"
              f"{row['cut_share']:>6.0%}{row['cut_right_share']:>7.1%}")
