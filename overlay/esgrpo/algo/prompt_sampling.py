"""Which prompt comes next: the one with the largest expected gradient among some that are drawn.

A group whose responses all score the same has no advantage. VADE (arXiv 2511.18902) keeps Beta(alpha, beta) of
P(correct) per prompt and takes the prompts with the largest gain p (1 - p)^2, which for binary rewards and un-
normalised advantages is E[A^2; correct] and has its maximum at p = 1/3; it samples p (`choice=thompson`). Its decay
equations and constants could not be read: the posterior comes decayed from the history, with constants of our own.

Here the gain is its mean under the posterior (`choice=expected`): a sampled p of a prompt with few visits is mostly
noise, and what a prior fitted to the data set and to prompts' texts says of it is not (bench.prompt_sampling).
Selection alone would take the best prompts over and over, so a prompt that was taken rests, and after that counts for
less until RECOVERY_SHARE of the data set's size have been taken after it; so do its copies in the data set. Pure: the
random generator is injected.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

REST_SHARE = 0.1  # of the prompts: however good a prompt is, so many others come before it comes again
RECOVERY_SHARE = 0.75  # of the prompts: a longer one repeats less and finds less gradient (bench.prompt_sampling)
MOST_IN_AN_EPOCH = 10  # what REST_SHARE implies: takes of one prompt are more than a tenth of the prompts apart
EXPECTED = "expected"  # of settings.choice
REPORT_WINDOW = 1000  # groups that the reported shares are computed from
STATE_VERSION = 3


def gain(p: float) -> float:
    """E[A^2; correct] of a prompt whose responses are correct with probability p; largest at p = 1/3."""
    return p * (1.0 - p) ** 2


def expected_gain(alpha: float, beta: float) -> float:
    """E[gain(p)] when p ~ Beta(alpha, beta)."""
    total = alpha + beta
    return alpha * beta * (beta + 1.0) / (total * (total + 1.0) * (total + 2.0))


def _log_rising(x: float, n: int) -> float:
    """log of x (x + 1) ... (x + n - 1)."""
    return math.lgamma(x + n) - math.lgamma(x)


def gradient_probability(alpha: float, beta: float, responses: int) -> float:
    """P(a group of this many responses has correct and wrong ones) when p ~ Beta(alpha, beta)."""
    total = _log_rising(alpha + beta, responses)
    all_correct = math.exp(_log_rising(alpha, responses) - total)
    all_wrong = math.exp(_log_rising(beta, responses) - total)
    return min(1.0, max(0.0, 1.0 - all_correct - all_wrong))


def has_gradient(correct: Iterable) -> bool:
    """True when responses of both kinds are among these, a predicted one as what is likelier; None (unknown) says
    nothing."""
    return len({chance > 0.5 for chance in correct if chance is not None}) > 1


class PromptSampler:
    """Draws prompts, numbered 0 to prompts - 1, one at a time and only when asked: no look-ahead of its own.

    `history` answers posterior(key, version, features) -> (alpha, beta), forecast(key, version) -> {"known": bool, ...}
    and texts.open; `key_of(number)` is the prompt's key in it, `features_of(number)` what prompt_prior makes of its
    text, empty for nothing. `settings` is config.Sampler. `responses` is the size of a group.

    Invariants: every prompt is either eligible or resting; among any `prompts` takes in a row, none stands more than
    MOST_IN_AN_EPOCH times; every eligible prompt is the next one with probability of at least
    settings.uniform / (eligible prompts); the same seed, history and questions give the same prompts; to_state and
    restore continue a sequence as if it had not been interrupted.
    """

    def __init__(self, settings, history, rng: random.Random, prompts: int, key_of: Callable[[int], str],
                 responses: int, features_of: Callable[[int], Sequence[int]] = lambda number: ()):
        if prompts < 1:
            raise ValueError(f"{prompts} prompts, wanted at least 1")
        self.settings, self.history, self.rng = settings, history, rng
        self.prompts, self.key_of, self.responses, self.features_of = prompts, key_of, responses, features_of
        self.rest, self.recovery = int(prompts * REST_SHARE), max(1.0, prompts * RECOVERY_SHARE)
        self.eligible = list(range(prompts))
        self.resting: deque[int] = deque()
        self.taken = 0
        self._last: dict[str, int] = {}  # key -> number of the last take of it or a copy
        self._recent: deque[int] = deque()  # the last `prompts` takes
        self._counts: Counter[int] = Counter()  # of what stands in _recent
        self._unseen: deque[bool] = deque(maxlen=REPORT_WINDOW)
        self._waiting: dict[str, tuple[float, Sequence[int]]] = {}  # key -> expected share, features; one a prompt
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=REPORT_WINDOW)
        self._tally: Counter[str] = Counter()  # since `take_counts`

    def take(self, version: int | None) -> int:
        """The next prompt, chosen with what the history knows now. `version` counts weight versions; None: the last one
        that the history was told."""
        if self.rng.random() < self.settings.uniform:
            place = self.rng.randrange(len(self.eligible))
        else:
            place = self._preferred(version)
        number = self.eligible[place]
        self.eligible[place] = self.eligible[-1]
        self.eligible.pop()
        self.resting.append(number)
        if len(self.resting) > self.rest:
            self.eligible.append(self.resting.popleft())
        self._note(number, version)
        return number

    def _candidates(self) -> list[int]:
        size = len(self.eligible)
        return self.rng.sample(range(size), min(self.settings.candidates, size))

    def _preferred(self, version: int | None) -> int:
        """Place of the candidate that promises most. Among candidates that are known alike it is an accident."""
        worths, known = {}, set()
        for place in self._candidates():
            number = self.eligible[place]
            key = self.key_of(number)
            alpha, beta = self.history.posterior(key, version, self.features_of(number))
            recovered = self._recovered(key)
            expected = self.settings.choice == EXPECTED
            worths[place] = recovered * (expected_gain(alpha, beta) if expected
                                         else gain(self.rng.betavariate(alpha, beta)))
            known.add((alpha, beta, recovered))
        self._tally["chosen"] += len(known) > 1
        return max(worths, key=worths.__getitem__)

    def _recovered(self, key: str) -> float:
        """What a prompt counts: 0 to 1. One that rests is not eligible, but a copy of it may be."""
        if key not in self._last:
            return 1.0
        since = self.taken - self._last[key]
        return 0.0 if since <= self.rest else min(1.0, since / self.recovery)

    def _note(self, number: int, version: int | None) -> None:
        key = self.key_of(number)
        self._last[key] = self.taken
        self.taken += 1
        self._recent.append(number)
        self._counts[number] += 1
        if len(self._recent) > self.prompts:
            old = self._recent.popleft()
            self._counts[old] -= 1
            if not self._counts[old]:
                del self._counts[old]
        unseen = not self.history.forecast(key, version)["known"]
        self._unseen.append(unseen)
        self._tally.update(takes=1, unseen=int(unseen), by_text=int(unseen and self.history.texts.open))
        features = self.features_of(number)
        posterior = self.history.posterior(key, version, features)
        self._waiting[key] = gradient_probability(*posterior, self.responses), features

    def outcome(self, key: str, correct: Iterable) -> Sequence[int]:
        """A group of this prompt ended; `correct` has one entry per response, None where it is unknown. Returns the
        features of the prompt, for the history; empty for a prompt that was not taken here."""
        expected, features = self._waiting.pop(key, (None, ()))
        if expected is not None:
            self._outcomes.append((expected, has_gradient(correct)))
        return features

    def take_counts(self) -> dict[str, int]:
        """Since the last call: takes, those of prompts without history, those of them whose text was known to say
        something, and those that were chosen: the candidates differed in what is known of them."""
        counts, self._tally = self._tally, Counter()
        return {name: counts[name] for name in ("takes", "unseen", "by_text", "chosen")}

    def metrics(self) -> dict[str, float]:
        """Shares in [0, 1]. Expected and realised are of the same groups: those whose outcome came back.

        unseen: takes of prompts without history; coverage: distinct prompts among the last one epoch's takes, over
        the takes; entropy: of the same takes, over its largest possible value (1 for an epoch without repetition).
        """
        shares = {}
        if self._unseen:
            takes = len(self._recent)
            entropy = math.log(takes) - sum(c * math.log(c) for c in self._counts.values()) / takes
            shares = {"unseen": sum(self._unseen) / len(self._unseen), "coverage": len(self._counts) / takes,
                      "entropy": entropy / math.log(takes) if takes > 1 else 1.0}
        if self._outcomes:
            number = len(self._outcomes)
            shares["expected_gradient"] = sum(expected for expected, _ in self._outcomes) / number
            shares["realised_gradient"] = sum(realised for _, realised in self._outcomes) / number
        return shares

    def to_state(self) -> dict:
        """JSON-able. What is reported is not kept: groups in flight are lost at a restart, and their outcomes too."""
        kind, words, gauss = self.rng.getstate()
        return {"state_version": STATE_VERSION, "prompts": self.prompts, "taken": self.taken,
                "eligible": list(self.eligible), "resting": list(self.resting), "last": dict(self._last),
                "rng": [kind, list(words), gauss]}

    def restore(self, state: dict) -> None:
        """Continue from to_state. Raises ValueError for another version or data set; nothing is changed then."""
        found = state.get("state_version"), state.get("prompts")
        if found != (STATE_VERSION, self.prompts):
            raise ValueError(f"state version {found[0]} of {found[1]} prompts, "
                             f"wanted version {STATE_VERSION} of {self.prompts} prompts")
        eligible, resting = list(state["eligible"]), deque(state["resting"])
        last = {str(key): int(take) for key, take in dict(state["last"]).items()}
        if sorted([*eligible, *resting]) != list(range(self.prompts)) or len(resting) > self.rest:
            raise ValueError(f"{len(eligible)} eligible and {len(resting)} resting prompts do not make up the data")
        if len(last) > self.prompts or not all(0 <= take < state["taken"] for take in last.values()):
            raise ValueError(f"last takes of {len(last)} prompts do not fit {state['taken']} takes")
        kind, words, gauss = state["rng"]
        self.rng.setstate((kind, tuple(words), gauss))
        self.eligible, self.resting, self.taken, self._last = eligible, resting, int(state["taken"]), last
