"""Procedurally generated reasoning tasks with a verifiable reward; standard library only.

Both tasks count how long a walk over the numbers modulo 100 (`LARGE`: 10,000) takes to reach 0. A prompt gives a
counter, a value and the rule; each line of a trace is the next counter and value, and the answer is the counter at 0:

* ``search``: ``v -> v + 7``, that is, find x with ``7*x = -v``, by trial. The number of tries a problem needs follows a
  Lomax (power) law, so the hazard of finishing falls with the length. May be tuned on.
* ``chain``: ``v -> 21*v + 7``. Most problems are short (exponential), the rest form a hump of long ones, so late in a
  trace the hazard of finishing rises. Held out of all tuning.

The rules are fixed: a tiny model can learn their tables by heart, and its errors stem from its behaviour.
`render_trace` writes the demonstrations for supervised training. They mix good and bad behaviour on purpose
(guessing, giving up, re-tries, repetition loops, answers off by one), so that a policy trained on them leaves
reinforcement learning something to gain.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass

TASKS = ("search", "chain")
SPLITS = ("train", "val", "test")
MAX_PROMPT_TOKENS = 64
RULES = {"search": (1, 7), "chain": (21, 7)}  # (a, b) of v -> a*v + b; one cycle of full length, so 00 is reached
SIGNS = {"search": ":", "chain": ">"}  # between counter and value; tells the rule within each line
WORDS = (*(f"{n:02d}" for n in range(100)), "wait", "anew")  # what is one token besides single characters
ANEW = 0.05  # share of re-tries that go back to the first line
TOKEN = re.compile(r"\d\d|wait|anew|[\s\S]")
ANSWER = re.compile(r"x=((?:\d\d)+)")


@dataclass(frozen=True)
class Scale:
    """How long walks are. `most_steps` lines and the answer fit into the response cap, with room for re-tries.

    steps: of the Lomax law. short, hump: mean, mean and deviation of the two kinds of chains; all in lines.
    digits: of a number, two a token. Rates of behaviour are per line of SMALL; `pace` lines make up for one of those.
    """

    modulus: int
    digits: int
    most_steps: int
    max_response_tokens: int
    steps: float
    short: float
    hump: tuple[float, float]
    pace: float


SMALL = Scale(100, 2, 99, 512, 13.0, 11.0, (75.0, 10.0), 1.0)  # the committed model's
LARGE = Scale(10_000, 4, 1300, 8192, 170.0, 140.0, (1000.0, 130.0), 13.0)  # for a GPU
SCALES = {"small": SMALL, "large": LARGE}
MAX_RESPONSE_TOKENS = SMALL.max_response_tokens


@dataclass(frozen=True)
class Problem:
    """A problem. Line k of a faultless trace holds counters[k] and values[k], 0..99; the last value is 0, the hit."""

    task: str
    prompt: str
    counters: tuple[int, ...]
    values: tuple[int, ...]
    scale: Scale = SMALL

    @property
    def steps(self) -> int:
        return len(self.values) - 1

    @property
    def ground_truth(self) -> str:
        return self.number(self.counters[-1])

    def number(self, value: int) -> str:
        return f"{value:0{self.scale.digits}d}"


@dataclass(frozen=True)
class Trace:
    """A demonstration: the response as token strings; `finished` is False when the response cap cut it off."""

    tokens: tuple[str, ...]
    finished: bool

    @property
    def text(self) -> str:
        return "".join(self.tokens)


@dataclass(frozen=True)
class Behaviour:
    """Probabilities of what a demonstration does besides searching.

    guess: per trace, answer at once. give_up, stall: per line. wait: per-line rate of re-tries of a calm trace.
    nervous: share of traces with a rate `nervous_factor` times as high, which makes the re-try count heavy-tailed.
    endless: share of stalls that never end. check: go back once more on the hit before answering, more often after a
    long search.
    right, right_checked: the answer is the hit itself (else off by one) without and with such a check.
    """

    guess: float
    give_up: float
    stall: float
    endless: float
    wait: float
    nervous: float
    nervous_factor: float
    check: float
    right: float
    right_checked: float


BEHAVIOUR = {
    "search": Behaviour(0.06, 0.0008, 0.0048, 0.50, 0.015, 0.20, 5.0, 0.08, 0.28, 0.97),
    "chain": Behaviour(0.05, 0.0015, 0.0038, 0.50, 0.015, 0.15, 5.0, 0.10, 0.33, 0.93),
}


def split_tokens(text: str) -> tuple[str, ...]:
    """The token strings of a prompt or response in the testbed's tokenizer, chat tokens excepted."""
    return tuple(TOKEN.findall(text))


def split_of(prompt: str) -> str:
    """The split a prompt belongs to. A hash of the text decides, so splits never share a problem, whatever the seed."""
    bucket = hashlib.sha256(prompt.encode()).digest()[0]
    return "train" if bucket < 205 else "val" if bucket < 230 else "test"


def _steps(rng: random.Random, task: str, scale: Scale) -> int:
    while True:
        if task == "search":  # Lomax of shape 1, cut at the cap
            steps = int(scale.steps * (1.0 / (1.0 - rng.random()) - 1.0))
        elif rng.random() < 0.85:
            steps = 1 + int(rng.expovariate(1.0 / scale.short))
        else:
            steps = round(rng.gauss(*scale.hump))
        if (task == "search" or steps >= 1) and steps <= scale.most_steps:
            return steps


def _draw(rng: random.Random, task: str, scale: Scale) -> Problem:
    steps = _steps(rng, task, scale)
    (a, b), start, values = RULES[task], rng.randrange(scale.modulus), [0]
    back = pow(a, -1, scale.modulus)
    for _ in range(steps):  # backwards from the hit
        values.append(back * (values[-1] - b) % scale.modulus)
    counters = tuple((start + k) % scale.modulus for k in range(steps + 1))
    rule = f"+{b:02d}" if a == 1 else f"*{a:02d}+{b:02d}"
    first, digits = f"{start:0{scale.digits}d}{SIGNS[task]}", scale.digits
    return Problem(task, f"{first}{values[-1]:0{digits}d} {rule}", counters, tuple(reversed(values)), scale)


def generate(task: str, seed: int, count: int, split: str = "train", scale: Scale = SMALL) -> list[Problem]:
    """`count` problems of a task, the same for the same arguments.

    Drawn with replacement: the shortest problems are few and frequent, so a large set repeats some of them.
    """
    if task not in TASKS or split not in SPLITS:
        raise ValueError(f"unknown task or split: {task!r}, {split!r}")
    rng = random.Random(f"{task}/{split}/{seed}")
    problems: list[Problem] = []
    while len(problems) < count:
        problem = _draw(rng, task, scale)
        if split_of(problem.prompt) == split:
            problems.append(problem)
    return problems


def _line(problem: Problem, step: int) -> str:
    return f"{problem.number(problem.counters[step])}{SIGNS[problem.task]}{problem.number(problem.values[step])}\n"


def _answer(problem: Problem, step: int) -> str:
    return f"x={problem.number((problem.counters[0] + step) % problem.scale.modulus)}"


def _walk(rng: random.Random, problem: Problem, b: Behaviour) -> tuple[list[str], bool]:
    """Lines of a searching trace and whether it ended by itself.

    After "wait" the last line is written again, after "anew" the first: what a line repeats shows in the line before,
    which a tiny model learns without fault.
    """
    out: list[str] = []
    pace, most = problem.scale.pace, problem.scale.max_response_tokens
    wait = b.wait / pace * (b.nervous_factor if rng.random() < b.nervous else 1.0)
    step, checked = 0, False
    while 2 * len(out) < most:  # no line is shorter than 2 tokens
        out.append(_line(problem, step))
        if rng.random() < b.stall / pace:
            again = "wait\n" + out[-1]
            if rng.random() < b.endless:
                return [*out, (again if rng.random() < 0.7 else "wait\n") * most], False
            while rng.random() < 0.5:  # stalls that recover, so that repetition alone does not prove a loop
                out.append(again)
        hit = step == problem.steps
        if rng.random() < (min(0.9, b.check + step / (40 * pace)) if hit and not checked else wait):
            anew = rng.random() < ANEW
            out.append("anew\n" if anew else "wait\n")
            step, checked = 0 if anew else step, hit or checked
        elif hit:
            right = rng.random() < (b.right_checked if checked else b.right)
            return [*out, _answer(problem, step + (0 if right else rng.choice((-1, 1))))], True
        elif rng.random() < b.give_up / pace:
            return [*out, _answer(problem, step)], True
        else:
            step += 1
    return out, False


def render_trace(rng: random.Random, problem: Problem) -> Trace:
    """A demonstration response for a problem, at most the scale's response cap with the end token."""
    behaviour, most = BEHAVIOUR[problem.task], problem.scale.max_response_tokens
    if rng.random() < behaviour.guess:
        return Trace(split_tokens(_answer(problem, _steps(rng, problem.task, problem.scale))), True)
    lines, finished = _walk(rng, problem, behaviour)
    tokens = split_tokens("".join(lines))
    if len(tokens) >= most:
        return Trace(tokens[:most], False)
    return Trace(tokens, finished)


def score(text: str, ground_truth: str | Problem) -> float:
    """Exact reward: 1.0 if the last line of the response is ``x=NN`` with the right number, else 0.0."""
    if isinstance(ground_truth, Problem):
        ground_truth = ground_truth.ground_truth
    last = text.replace("<|im_end|>", "").replace("<|endoftext|>", "").rstrip("\n").rsplit("\n", 1)[-1]
    match = ANSWER.fullmatch(last)
    return 1.0 if match is not None and match.group(1) == ground_truth else 0.0
