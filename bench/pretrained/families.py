"""The tasks: questions and golds of four families of reasoning-gym, balanced, and split without overlap.

`lcm` has the long tail. `prime_factorization` is held out: no training run was made on it before the method was as it
is. Samples of the untrained start on it are a quarter of groups_pretrained.json.gz, though, which the gate of learned
verdicts was chosen with. The demonstrations of the supervised stage have questions of their own, the split `start`.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bench.pretrained import worked
from bench.pretrained.reward import FACTORIZATION, score
from esgrpo.errors import EsgrpoError

COUNTS = {"train": 2048, "val": 256, "test": 256, "start": 2048}  # questions of a split
SPLITS = tuple(COUNTS)
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 128, 2048
_LARGEST_BUCKET = {"train": 102, "val": 128, "test": 154, "start": 256}  # of 256; about 40, 10, 10 and 40 %
ONE_ANSWER = 0.04  # largest share of a split with the same answer
_DRAWS_PER_SEED, _MOST_DRAWS = 10_000_000, 1_000_000


@dataclass(frozen=True)
class Family:
    """Questions of one task. `ranges`: settings of reasoning-gym, taken in turn.

    bands: (longest written-out solution in bytes, share of the questions), ascending; empty: as they come. A byte is a
    token at most, so the last bound is below the response cap.
    """

    name: str
    ranges: tuple[dict, ...]
    bands: tuple[tuple[int, float], ...] = ()
    held_out: bool = False

    def band(self, solution: str) -> int | None:
        """Index of the band of a solution; None when it is too long."""
        size = len(solution.encode())
        bounds = [most for most, _ in self.bands] or [MAX_RESPONSE_TOKENS - 1]
        return next((i for i, most in enumerate(bounds) if size <= most), None)


FAMILIES = {family.name: family for family in (
    Family("gcd", ({"max_value": 200, "max_numbers": 3}, {"max_value": 1000, "max_numbers": 3})),
    Family("chain_sum", ({"min_terms": 2, "max_terms": 6, "min_digits": 2, "max_digits": 3},
                         {"min_terms": 5, "max_terms": 12, "min_digits": 1, "max_digits": 2})),
    Family("lcm", ({"min_value": 4, "max_value": 100}, {"min_value": 4, "max_value": 250}),
           ((150, 0.20), (250, 0.30), (450, 0.25), (800, 0.12), (1400, 0.08), (MAX_RESPONSE_TOKENS - 1, 0.05))),
    Family(FACTORIZATION, ({"max_value": 30_000},), held_out=True),
)}


@dataclass(frozen=True)
class Problem:
    family: str
    question: str
    gold: str
    solution: str = field(repr=False)


def split_of(family: str, question: str) -> str:
    """The split of a question. A hash decides, so splits never share one, whatever the seed.

    Of numbers whose order does not matter, all orders are in the same split.
    """
    key = ",".join(map(str, sorted(worked.numbers(question)))) if family in ("gcd", "lcm") else question
    bucket = hashlib.sha256(f"{family}/{key}".encode()).digest()[0]
    return next(split for split, most in _LARGEST_BUCKET.items() if bucket < most)


def entries(family: Family, seed: int, create: Callable) -> Iterable[dict]:
    """Questions of reasoning-gym without end, the ranges in turn; `create` is its create_dataset."""
    first = seed * _DRAWS_PER_SEED  # of reasoning-gym the entry i of seed s is the entry 0 of seed s + i
    sets = [create(family.name, seed=first, size=_DRAWS_PER_SEED, **settings) for settings in family.ranges]
    for index in range(_DRAWS_PER_SEED):
        yield sets[index % len(sets)][index]


def allot(family: Family, counts: dict[str, int], drawn: Iterable[dict], seed: int) -> dict[str, list[Problem]]:
    """`counts` distinct problems of each split, with each band's share and no answer above ONE_ANSWER of a split.

    Raises EsgrpoError when the questions drawn do not fill them.
    """
    shares = [share for _, share in family.bands] or [1.0]
    quota = {split: [math.ceil(share * count) for share in shares] for split, count in counts.items()}
    most = {split: max(1, int(ONE_ANSWER * count)) for split, count in counts.items()}
    chosen: dict[str, list[Problem]] = {split: [] for split in counts}
    answers = {split: Counter() for split in counts}
    seen: set[str] = set()
    for draws, entry in enumerate(drawn):
        if all(len(chosen[split]) >= counts[split] for split in counts):
            break
        if draws == _MOST_DRAWS:
            raise EsgrpoError("pretrained", f"{family.name}: {draws} questions drawn, {_filled(chosen)}",
                              f"{counts}", "no tasks were made", "ask for fewer questions")
        question, gold = entry["question"], entry["answer"]
        split = split_of(family.name, question)
        if split not in counts or question in seen or answers[split][gold] >= most[split]:
            continue
        solution = worked.solve(family.name, question)
        band = family.band(solution)
        if band is None or quota[split][band] == 0 or len(chosen[split]) >= counts[split]:
            continue
        if score(family.name, solution, gold) != 1.0:
            raise EsgrpoError("pretrained", f"{family.name}: {question!r} has the answer {gold!r}",
                              f"that of the solution written out, {solution[-40:]!r}",
                              "no tasks were made: this is another reasoning-gym", "use the release of wheels.txt")
        seen.add(question)
        answers[split][gold] += 1
        quota[split][band] -= 1
        chosen[split].append(Problem(family.name, question, gold, solution))
    for split, problems in chosen.items():  # the rare bands fill last
        random.Random(f"{family.name}/{split}/{seed}").shuffle(problems)
    return chosen


def _filled(chosen: dict[str, list[Problem]]) -> str:
    return ", ".join(f"{len(problems)} of {split}" for split, problems in chosen.items())
