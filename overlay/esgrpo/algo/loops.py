"""What proves a loop: tokens that repeat one pattern, and of which the model was certain. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from esgrpo.algo.looks import next_multiple
from esgrpo.config import Repetition

# What is known of a response at a look: its tokens, the sum of their log-probs, and how many of them have a log-prob.
# The last two count from the start of the present attempt, so those of earlier attempts are negative.
Mark = tuple[int, float, int]


def repeats(tokens: Sequence[int], span: int, longest: int) -> bool:
    """True when the last `span` tokens are one pattern of at most `longest` tokens, over and over; span >= 2 * longest.

    Only distances at which the last token stood before can be periods. The smallest period of the last 2 * longest
    tokens is the only one to try on the whole span: a period q of the span is one of theirs, too, so by Fine and Wilf
    (1965) the smallest, p, divides q, and what has period q with p-periodic patterns has period p.
    """
    length = len(tokens)
    if length < span:
        return False
    tail = tokens[length - 2 * longest:]
    before = list(tail[longest - 1:-1])
    before.reverse()  # before[i] stands i + 1 tokens before the last one
    period = 0
    for _ in range(before.count(tail[-1])):
        period = before.index(tail[-1], period) + 1
        if tail[period:] == tail[:-period]:
            return tokens[length - span + period:] == tokens[length - span:length - period]
    return False


def first_proof(rule: Repetition) -> int:
    """Tokens at which a loop can be proven for the first time: the first look that is min_span tokens in."""
    return next_multiple(rule.min_span - 1, rule.check_interval)


def surprisal(rule: Repetition, tokens: Sequence[int], mark: Mark, now: Mark) -> float | None:
    """Mean surprisal (nats per token) of the tokens since `mark` if they prove a loop, else None.

    `tokens` end with the newest one and reach back to `mark` at least. Where a token has no log-prob (log-probs off,
    or rows that an engine leaves out under speculative decoding) nothing is proven.
    """
    span = now[0] - mark[0]
    if span < rule.min_span or now[2] - mark[2] != span:
        return None
    mean = (mark[1] - now[1]) / span
    # in this order, because it is the log-probs that nearly all looks end at; NaN is no proof
    proven = mean <= rule.max_surprisal and repeats(tokens, span, rule.max_pattern_size)
    return max(mean, 0.0) if proven else None  # sums of zeros may be rounded
