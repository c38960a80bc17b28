"""Solutions written out step by step: what the supervised stage learns from; standard library only.

The tokenizer of SmolLM2 has a token for each digit. Each line holds what the next one needs, so that a long solution
is many easy steps: a model that errs rarely per line fails often on the long ones, and has something to gain.
"""

from __future__ import annotations

import re

from bench.pretrained.reward import FACTORIZATION

_NUMBER = re.compile(r"\d+")
_TERM = re.compile(r"([+-]) (\d+)")


def numbers(question: str) -> list[int]:
    """The numbers after the last colon of a question."""
    return [int(n) for n in _NUMBER.findall(question.rsplit(":", 1)[-1])]


def _division(a: int, b: int) -> str:
    return f"{a} = {a // b} * {b} + {a % b}"


def _gcd(question: str) -> tuple[list[str], str]:
    """Euclid's algorithm, number by number."""
    divisor, *rest = numbers(question)
    lines = []
    for number in rest:
        a, b = max(divisor, number), min(divisor, number)
        while True:
            lines.append(_division(a, b))
            if a % b == 0:
                break
            a, b = b, a % b
        divisor = b
    return lines, str(divisor)


def _lcm(question: str) -> tuple[list[str], str]:
    """Multiples of both numbers, the lower one raised until they are equal: (a + b) / gcd - 1 lines."""
    a, b = numbers(question)
    x, y = a, b
    lines = [f"{x} {y}"]
    while x != y:
        x, y = (x + a, y) if x < y else (x, y + b)
        lines.append(f"{x} {y}")
    return lines, str(x)


def _chain_sum(question: str) -> tuple[list[str], str]:
    """One term a line, with the running sum."""
    expression = question.rsplit(":", 1)[-1]
    total = int(_NUMBER.search(expression)[0])
    lines = []
    for sign, term in _TERM.findall(expression):
        after = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {after}")
        total = after
    return lines, str(total)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _prime_factorization(question: str) -> tuple[list[str], str]:
    """Division by one prime after the other, up to the square root of what is left."""
    left, prime, factors, lines = int(_NUMBER.search(question)[0]), 2, [], []
    while prime * prime <= left:
        lines.append(_division(left, prime))
        if left % prime == 0:
            factors.append(prime)
            left //= prime
        else:
            prime = next(n for n in range(prime + 1, 2 * prime + 1) if _is_prime(n))
    lines.append(f"{left} < {prime} * {prime}")
    return lines, " × ".join(map(str, [*factors, *([left] if left > 1 else [])]))


_SOLVERS = {"gcd": _gcd, "lcm": _lcm, "chain_sum": _chain_sum, FACTORIZATION: _prime_factorization}


def solve(family: str, question: str) -> str:
    """The response that is shown for a question: its steps, a line each, and the answer."""
    lines, result = _SOLVERS[family](question)
    return "\n".join([*lines, f"<answer>{result}</answer>"])
