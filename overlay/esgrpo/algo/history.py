"""What is remembered of a prompt, by its content: how long its responses were and how often they were correct.

RhymeRL (arXiv 2508.18588) orders by the historical mean length of a prompt, TailSieve (2608.22788, app. B) finds 65 %
of the variance of log-lengths explained by the prompt; VADE (2511.18902) keeps a decayed Beta posterior of correctness.
Here lengths are a normal-inverse-gamma posterior over log-lengths around the running mean of all prompts, so that a
prompt seen once gets a wide interval and a prompt never seen gets that of all. The prior of correctness is that of the
prompts seen so far (correctness_prior.py), moved by the prompt's text once that is known to say something
(prompt_prior.py). Pure; standard library only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from esgrpo.algo.correctness_prior import CorrectnessPrior
from esgrpo.algo.lengths import (
    LengthStatistics,
    Moments,
    censored,
    expected_beyond,
    expected_tokens,
    student,
)
from esgrpo.algo.prompt_prior import PromptPrior
from esgrpo.algo.routing import BODY, length_class
from esgrpo.algo.terms import Outcome, Rule
from esgrpo.config import History, Routing

STATE_VERSION = 1
KEY_DIGITS = 16  # 200,000 prompts collide with probability 1e-9
PRIOR_DEGREES = 8.0  # how firmly the variance within a prompt is believed to be that of all prompts
KNOWN_WEIGHT = 0.5  # responses (after decay and censoring) from which a prompt counts as known
CENSORED_ROUNDS = 3  # Fisher scoring steps per visit; the estimate moves by less than 1 % after that
IMPUTED_LIMIT = math.log(4)  # a response that was cut off counts as at most four times as long as seen
INTERVAL = 1.2815515655446004  # standard normal quantile of 0.9: the interval holds 80 %
LOWER, UPPER = 0.1, 0.9
FULL = 0.8  # share of the budget from which a forecast is tail, however many responses fill the budget
BLANK_TOKENS = 1024  # forecast before any response was seen and without a budget
DECIMALS = 4  # of the saved state
# beyond these a saved state is damaged
MOST_RESPONSES = 1e9  # of one prompt
MOST_VERSIONS = 10**12
CUT_FOR_ITSELF = (Rule.REPETITION, Rule.VERDICT)


def prompt_key(raw_prompt) -> str:
    """Hash of a prompt's content (messages of verl's `raw_prompt`), the same in every process and run."""
    text = json.dumps(raw_prompt, sort_keys=True, ensure_ascii=False, default=_content)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:KEY_DIGITS]


def _content(value):
    """JSON for what messages may hold beside text: arrays, images, bytes."""
    if isinstance(value, (bytes, bytearray)):
        return hashlib.sha256(value).hexdigest()
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "tobytes"):
        return [type(value).__name__, str(getattr(value, "size", "")), hashlib.sha256(value.tobytes()).hexdigest()]
    return type(value).__qualname__  # an unknown object: its repr could hold an address


def came_to_its_end(outcome: str | None, full: bool) -> bool:
    """A response is the one that would have been: neither pruned nor interrupted before it was `full` (at its budget).

    None: nobody knows, there was no hook; it then counts as whole.
    """
    return outcome != Outcome.PRUNE and (full or outcome != Outcome.ABORT)


def chance_of_correct(summary: Mapping | None, correct: bool | None, full: bool) -> float | None:
    """What a response says of its prompt: `correct` where it came to its end, and for one that was cut for what it had
    shown itself the prediction of the rule that cut it, or a prompt whose wrong responses are cut would look solved.

    None: nothing, as one that was cut for what its siblings had shown. `summary`: of its row.
    """
    row = summary or {}
    if came_to_its_end(row.get("outcome"), full):
        return correct
    predicted = row.get("predicted")
    if predicted is None and row.get("rule") == Rule.REPETITION:
        return 0.0  # the engine cut it, without a coin and a prediction: a loop comes out wrong
    return predicted if row.get("rule") in CUT_FOR_ITSELF else None


@dataclass
class Entry:
    """One prompt. Weights are responses, decayed."""

    lengths: Moments = field(default_factory=Moments)
    correct: float = 0.0
    wrong: float = 0.0
    seen: int = 0  # weight version of the last visit, on the history's own clock

    def decayed(self, factor: float) -> Entry:
        return Entry(self.lengths.scaled(factor), self.correct * factor, self.wrong * factor, self.seen)


class PromptHistory:
    """Posterior of length and correctness per prompt.

    Invariants: at most `max_prompts` entries, the least recently observed go first; alpha, beta > 0 and both tend to
    those of a prompt never seen without visits; low <= tokens <= high in every forecast and none is above the budget;
    a forecast changes nothing; the clock never runs backwards, whatever versions are told; `from_state(to_state())`
    forecasts alike.
    """

    def __init__(self, settings: History, routing: Routing | None = None, budget: int = 0):
        """`budget`: longest possible response in tokens, 0 when unknown."""
        self.settings, self.routing, self.budget = settings, routing or Routing(), budget
        self.lengths, self.correctness, self.texts = LengthStatistics(), CorrectnessPrior(), PromptPrior()
        self._prompts: OrderedDict[str, Entry] = OrderedDict()
        self._clock = 0
        self._offset: int | None = 0  # None: decided by the first version that is told
        self._globals: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self._prompts)

    def _now(self, version: int | None) -> int:
        """`version` on the history's clock, which a run that starts again at version 0 carries on."""
        if version is None or version < 0:
            return self._clock
        offset = max(0, self._clock - version) if self._offset is None else self._offset
        return max(self._clock, version + offset)

    def _advance(self, version: int | None) -> int:
        if version is not None and version >= 0 and self._offset is None:
            self._offset = max(0, self._clock - version)
        self._clock = self._now(version)
        return self._clock

    def _entry(self, key: str, now: int) -> Entry:
        entry = self._prompts.get(key)
        if entry is None:
            return Entry()
        return entry.decayed(0.5 ** (max(0, now - entry.seen) / self.settings.half_life))

    def observe(self, key: str, lengths: Sequence[int], correct: Sequence[float | None], capped: Sequence[bool],
                version: int | None = None, features: Sequence[int] = ()) -> None:
        """One visit: tokens of each response, whether it was correct (a probability where that is only predicted, None:
        nobody knows), and whether its length is only a lower bound. Raises ValueError when the three differ in length.
        `features` are of prompt_prior."""
        if not len(lengths) == len(correct) == len(capped):
            raise ValueError(f"{len(lengths)} lengths, {len(correct)} verdicts, {len(capped)} caps")
        now = self._advance(version)
        if not lengths:
            return
        entry = self._entry(key, now).decayed(self.settings.decay)
        whole = [math.log(max(1, n)) for n, cut in zip(lengths, capped, strict=True) if not cut]
        bounds = [math.log(max(1, n)) for n, cut in zip(lengths, capped, strict=True) if cut]
        group, imputed = self._visit(entry.lengths, whole, bounds)
        self.lengths.add(group, whole + imputed)
        self._globals = None
        chances = [float(chance) for chance in correct if chance is not None]
        right, judged = sum(chances), len(chances)
        if key not in self._prompts:
            doubt = sum(chance * (1.0 - chance) for chance in chances)
            self.texts.learn(features, right, judged, self.correctness, doubt)
            self.correctness.add(right, judged, doubt)
        self._prompts[key] = Entry(entry.lengths.joined(group), entry.correct + right, entry.wrong + judged - right,
                                   now)
        self._prompts.move_to_end(key)
        while len(self._prompts) > self.settings.max_prompts:
            self._prompts.popitem(last=False)

    def _visit(self, before: Moments, whole: list[float], bounds: list[float]) -> tuple[Moments, list[float]]:
        """Moments of one visit and the imputed log-lengths of the responses that were cut off (`bounds`)."""
        group, imputed = _moments([(value, 1.0, None) for value in whole]), []
        for _ in range(CENSORED_ROUNDS if bounds else 0):
            mean, variance, _, _ = self._posterior(before.joined(group))
            deviation = math.sqrt(variance)
            rows = [(value, 1.0, None) for value in whole]
            for bound in bounds:
                value, weight, square = censored(bound, mean, deviation)
                rows.append((min(value, bound + IMPUTED_LIMIT), weight, square))
            group = _moments(rows)
            imputed = [min(expected_beyond(bound, mean, deviation), bound + IMPUTED_LIMIT) for bound in bounds]
        return group, imputed

    def _posterior(self, lengths: Moments) -> tuple[float, float, float, float]:
        """(mean, variance within the prompt, weight of the mean, degrees of freedom): normal-inverse-gamma."""
        prior_mean, prior_weight, within = self.lengths.prior()
        if self.lengths.empty:
            prior_mean = lengths.mean
        weight, degrees = prior_weight + lengths.weight, PRIOR_DEGREES + lengths.weight
        mean = (prior_weight * prior_mean + lengths.weight * lengths.mean) / weight
        shift = prior_weight * lengths.weight / weight * (lengths.mean - prior_mean) ** 2
        return mean, (PRIOR_DEGREES * within + lengths.squares + shift) / degrees, weight, degrees

    def posterior(self, key: str, version: int | None = None, features: Sequence[int] = ()) -> tuple[float, float]:
        """Beta(alpha, beta) of P(correct) now; `features` of the prompt's text count once they are known to help."""
        return self._correctness(self._entry(key, self._now(version)), features)

    def _correctness(self, entry: Entry, features: Sequence[int] = ()) -> tuple[float, float]:
        trusted = bool(features) and self.texts.open
        alpha, beta = (self.texts.parameters(features, self.correctness) if trusted else
                       self.correctness.parameters())
        return alpha + entry.correct, beta + entry.wrong

    def forecast(self, key: str, version: int | None = None) -> dict:
        """Expected tokens of a response, its 80 % interval, class and posterior of correctness; always answers."""
        entry = self._entry(key, self._now(version))
        alpha, beta = self._correctness(entry)
        short, tail, low, high, tokens = self._all_prompts()
        known = entry.lengths.weight >= KNOWN_WEIGHT
        if known:
            mean, within, weight, degrees = self._posterior(entry.lengths)
            spread = within * (weight + 1) / weight
            reach = math.sqrt(spread) * student(INTERVAL, degrees)
            tokens = expected_tokens(mean, spread, self.budget)
            low, high = math.exp(mean - reach), math.exp(mean + reach)
        if self.budget:
            low, high = min(low, self.budget), min(high, self.budget)
        return {"tokens": min(max(tokens, low), high), "low": low, "high": high, "known": known,
                "length_class": length_class(tokens, (short, tail)) if known else BODY, "alpha": alpha, "beta": beta}

    def _all_prompts(self) -> tuple[float, ...]:
        """Quantiles of all lengths (short, tail, low, high) and their mean, in tokens; kept until the next visit."""
        if self._globals is None:
            at = self.lengths.quantile
            if self.lengths.empty:
                top = float(self.budget or 2 * BLANK_TOKENS)
                self._globals = (0.0, top, 1.0, top, max(1.0, top / 2))
            else:
                tail = min(at(self.routing.tail_quantile), FULL * self.budget or math.inf)
                self._globals = (min(at(self.routing.short_quantile), tail), tail, at(LOWER), at(UPPER),
                                 self.lengths.mean_tokens(self.budget))
        return self._globals

    def to_state(self) -> dict:
        """Plain JSON; prompts from the least to the most recently observed.

        May run in another thread than `observe`, which replaces entries and never changes one.
        """
        prompts = {key: [*(round(x, DECIMALS) for x in (e.lengths.weight, e.lengths.mean, e.lengths.squares, e.correct,
                                                         e.wrong)), e.seen] for key, e in list(self._prompts.items())}
        return {"state_version": STATE_VERSION, "clock": self._clock, "lengths": self.lengths.to_state(),
                "correctness": self.correctness.to_state(), "texts": self.texts.to_state(), "prompts": prompts}

    @classmethod
    def from_state(cls, settings: History, state: dict, routing: Routing | None = None,
                   budget: int = 0) -> PromptHistory:
        """Raises ValueError when `state` is damaged or of another version."""
        history = cls(settings, routing, budget)
        try:
            if state["state_version"] != STATE_VERSION:
                raise ValueError(f"state_version {state['state_version']!r}")
            history._clock, history._offset = int(state["clock"]), None
            if not 0 <= history._clock <= MOST_VERSIONS:
                raise ValueError(f"clock {history._clock}")
            history.lengths = LengthStatistics.from_state(state["lengths"])
            history.correctness = CorrectnessPrior.from_state(state.get("correctness", ()))  # older states have none
            history.texts = PromptPrior.from_state(state["texts"]) if "texts" in state else PromptPrior()
            for key, row in state["prompts"].items():
                weight, mean, squares, correct, wrong = map(float, row[:-1])
                entry = Entry(Moments(weight, mean, squares), correct, wrong, int(row[-1]))
                counts_fit = all(0 <= count <= MOST_RESPONSES for count in (weight, correct, wrong))  # nan does not
                if not (entry.lengths.plausible and 0 <= entry.seen <= history._clock and counts_fit):
                    raise ValueError(f"prompt {key}: {row}")
                history._prompts[str(key)] = entry
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        while len(history._prompts) > settings.max_prompts:
            history._prompts.popitem(last=False)
        return history


def _moments(rows: Sequence[tuple[float, float, float | None]]) -> Moments:
    """Moments of (value, weight, expected square deviation or None: from the mean of the rows)."""
    weight = sum(row[1] for row in rows)
    if weight <= 0:
        return Moments()
    mean = sum(row[0] * row[1] for row in rows) / weight
    return Moments(weight, mean, sum(w * ((value - mean) ** 2 if square is None else square)
                                     for value, w, square in rows))
