"""Reward function of the tasks for verl (``reward.custom_reward_function.path``, name ``compute_score``).

Standard library only, because verl loads this file by its path. 1.0 where reasoning-gym's own scorer gives its full
score to what stands in the last <answer> of a response, else 0.0: its partial scores (a part of the answer, factors
that are not prime) would reward what is wrong.
"""

from __future__ import annotations

import re

_ANSWER = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)
_FACTOR = re.compile(r"[0-9]{1,32}")
FACTORIZATION = "prime_factorization"


def answer(text: str) -> str | None:
    """What the last <answer> of a response holds, or None."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def _factors(text: str) -> list[int] | None:
    """Sorted factors of "2 × 3", or None when something else stands there."""
    parts = [part.strip() for part in text.split("×") if part.strip()]
    return sorted(map(int, parts)) if all(map(_FACTOR.fullmatch, parts)) else None


def score(family: str, text: str, ground_truth: str) -> float:
    """1.0 or 0.0 for a response to a question of this family."""
    given = answer(text)
    if given is None:
        return 0.0
    if family == FACTORIZATION:
        return float(_factors(given) == _factors(ground_truth))
    return float(given == ground_truth)


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Score one response; data_source is "reasoning_gym/FAMILY". Returns ``{"score": 0.0 or 1.0, "acc": bool}``."""
    value = score(data_source.rsplit("/", 1)[-1], solution_str, ground_truth)
    return {"score": value, "acc": value == 1.0}
