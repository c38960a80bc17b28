"""Segments of one engine: when to look at a response, and what to do with it at a boundary.

Pure: tokens in, decisions out; no clock, no torch, no upstream. A step is one executed engine step. A response grows
by at most `tokens_per_step` tokens a step, so a look that is k tokens away cannot be due earlier than
ceil(k / tokens_per_step) steps from now: the wheel is asked once a step and touches only what may be due. A boundary
that can end nothing is not looked at: it is counted when the response is looked at next, told a length, or closed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from esgrpo.algo.looks import Looks, distance, next_multiple
from esgrpo.algo.loops import Mark, surprisal
from esgrpo.algo.terms import LengthClass, Outcome, Rule
from esgrpo.config import Segment

CONTINUE, PRUNE, YIELD = "continue", Outcome.PRUNE, Outcome.YIELD
SHORT, BODY, TAIL = map(str, LengthClass)
ASKED_GROUPS_KEPT = 4096  # a finish may overtake the attempt that it is for; groups are short-lived
GROUP_LENGTHS_KEPT = 4096  # a group may be between two attempts when it is told its segment length
UNKNOWN_VERSION = -1  # tokens made before the first weight sync told the engine its version


class BoundaryWheel:
    """Timing wheel of looks: one list for each step at which some can be due. It must be asked at every step."""

    def __init__(self, tokens_per_step: int = 1):
        if tokens_per_step < 1:
            raise ValueError(f"tokens_per_step must be at least 1, got {tokens_per_step}")
        self._tokens_per_step = tokens_per_step
        self._looks: dict[int, list[Hashable]] = {}  # step -> keys, first come, first served

    def schedule(self, key: Hashable, step: int, tokens_left: int) -> int:
        """Look at `key` no earlier than when `tokens_left` (>= 1) more tokens can exist, counted from `step`.

        Returns the step of the look.
        """
        due = step - (-tokens_left // self._tokens_per_step) if tokens_left > 0 else step + 1
        keys = self._looks.get(due)
        if keys is None:
            self._looks[due] = [key]
        else:
            keys.append(key)
        return due

    def due(self, step: int) -> list[Hashable]:
        return self._looks.pop(step, [])

    def entries(self) -> list[tuple[int, Hashable]]:
        """(step, key) of every appointment, outdated ones included."""
        return [(due, key) for due, keys in self._looks.items() for key in keys]

    def __len__(self) -> int:
        return sum(map(len, self._looks.values()))


@dataclass(frozen=True)
class Decision:
    outcome: str  # continue | prune | yield
    rule: str = ""  # which rule asked for it


# Made once: a look takes a few microseconds, and making a frozen dataclass is one of them.
GO_ON, LOOP, HELD_LOOP = Decision(CONTINUE), Decision(PRUNE, Rule.REPETITION), Decision(YIELD, Rule.REPETITION)
BOUNDARY, MOVE, SURPLUS = (Decision(YIELD, rule) for rule in (Rule.BOUNDARY, Rule.MOVE, Rule.SURPLUS))


def at_boundary(length_class: str, move: bool, yields: bool) -> Decision:
    """What a boundary does with a response that no rule stops. `move`: it may be handed back to change its replica."""
    if length_class == TAIL and move:
        return MOVE
    return BOUNDARY if yields else GO_ON


@dataclass(slots=True)
class Tracked:
    """One response in this engine. `done_before` counts tokens of its earlier attempts, elsewhere or before a sync;
    `attempt` tells it from them, and from other requests that an agent loop makes for the same member at once."""

    group: str
    member: int
    done_before: int
    length_class: str
    move: bool  # may be handed back once, to be moved to a replica of the tail class
    next_boundary: int | None  # in tokens of the whole response, the first one not yet counted; None: never segmented
    length: int  # tokens from that boundary to the one after it
    next_repetition: int | None
    next_verdict: int | None = None  # in tokens of the whole response: the next look for the learned verdict
    due: int = 0  # step of the look that counts; entries of the wheel for other steps are outdated
    boundaries: int = 0  # counted so far
    spans: list[list[int]] = field(default_factory=list)  # [weight version, tokens], oldest first
    spanned: int = 0  # tokens of this attempt already in `spans`
    kv_version: int | None = None  # version of the oldest KV that its next token reads; None: of the present version
    preemptions: int = 0  # when kv_version was set
    marks: deque[Mark] = field(default_factory=deque)  # of looks for loops, oldest first: as far as a proof reaches
    earlier: list[int] = field(default_factory=list)  # last tokens of earlier attempts, as far as the marks reach
    surprisal: float | None = None  # of a proven loop
    stays: bool = False  # the front end may end it at any token, and is not asked before it is handed back
    attempt: int = 0


class SegmentBook:
    """All tracked responses of one engine.

    Invariants: a key is tracked from `add` to `close`; spans sum to the attempt's tokens; a pending finish is carried
    out once or dropped with the response; a boundary at which a response would be handed back never lies behind tokens
    that were already made; a response of the short class has none; one that may be moved is handed back for it at most
    once.
    """

    def __init__(self, settings: Segment, tokens_per_step: int = 1, budget: int = 0):
        self.settings = settings
        self.version = UNKNOWN_VERSION
        self.step = 0
        self.tracked: dict[Hashable, Tracked] = {}
        self.pending: dict[Hashable, Decision] = {}  # whom to end or to hand back at the next step
        self._groups: dict[str, set[Hashable]] = {}
        self._asked: OrderedDict[str, dict[int, str]] = OrderedDict()  # group -> member -> rule
        self._lengths: OrderedDict[str, tuple[int, bool]] = OrderedDict()  # group -> (segment length, tail class)
        self._wheel = BoundaryWheel(tokens_per_step)
        self._length, self._interval = settings.segment_length, settings.prune.repetition.check_interval
        self._min_span = settings.prune.repetition.min_span
        self._decides, self._yields = settings.enable, settings.boundary == "yield"
        self.looks = Looks()
        self._glance = self.looks.look
        verdict = settings.prune.verdict
        self._look_every = distance(verdict.check_interval, budget) if verdict.enable else 0
        self._loop = HELD_LOOP if settings.audited else LOOP  # the audit's coin is tossed where the response comes from

    def add(self, key: Hashable, group: str, member: int, done_before: int, length_class: str = BODY,
            move: bool = False, exempt: bool = False, marks: Sequence[Mark] = (), earlier: Sequence[int] = (),
            stays: bool = False, attempt: int = 0) -> None:
        """Track one attempt. `exempt`: the rule for loops has been let off. `stays`: vLLM's front end looks for stop
        strings in it, so that it may have ended with the token at which it would be handed back.

        `marks` are what `carried_marks` gave at the end of the attempt before, `earlier` are the tokens before this
        attempt, of which the newest are needed.
        """
        repetition = self.settings.prune.repetition
        if self._lengths.get(group, (0, False))[1]:  # told while this attempt was on its way
            length_class = TAIL
        item = Tracked(group, member, done_before, length_class, move, None, 0,
                       next_multiple(done_before, repetition.check_interval)
                       if repetition.enable and not exempt else None, stays=stays, attempt=attempt)
        self._set_boundary(item, done_before)
        if self._look_every:
            item.next_verdict = next_multiple(done_before, self._look_every)
        if item.next_repetition is not None:
            reach = done_before - marks[0][0] if marks else 0
            if 0 < reach <= len(earlier):
                item.marks.extend(tuple(mark) for mark in marks)
                item.earlier = list(earlier[len(earlier) - reach:])
            item.marks.append((done_before, 0.0, 0))
        self.tracked[key] = item
        self._groups.setdefault(group, set()).add(key)
        rule = self._asked.get(group, {}).get(member)
        if rule is not None:
            self.pending[key] = Decision(PRUNE, rule)
        self._plan(key, item, 0)

    def _length_of(self, group: str) -> int:
        told = self._lengths.get(group)
        return self._length if told is None else told[0]

    def _set_boundary(self, item: Tracked, total: int) -> None:
        """The next boundary is the first one after `total` tokens of the whole response."""
        if item.length_class != SHORT:
            item.length = self._length_of(item.group)
            item.next_boundary = next_multiple(total, item.length)

    def count_boundaries(self, item: Tracked, count: int) -> bool:
        """Count those that were reached by the `count` tokens of this attempt; returns whether there were any."""
        total = item.done_before + count
        if item.next_boundary is None or total < item.next_boundary or not self._decides:
            return False
        item.boundaries += 1 + total // item.length - item.next_boundary // item.length
        self._set_boundary(item, total)
        return True

    def _may_end_at_boundary(self, item: Tracked) -> bool:
        """Else nothing but a count comes of its boundaries, for which nobody needs to look."""
        return not item.stays and (self._yields or (item.move and item.length_class == TAIL))

    def _plan(self, key: Hashable, item: Tracked, count: int) -> None:
        """Appoint the next look of a response that has made `count` tokens in this attempt."""
        if not self._decides:
            return
        look, boundary, verdict = item.next_repetition, item.next_boundary, item.next_verdict
        if verdict is not None and (look is None or verdict < look):
            look = verdict
        if boundary is not None and (look is None or boundary < look) and self._may_end_at_boundary(item):
            look = boundary
        if look is not None:
            item.due = self._wheel.schedule(key, self.step, look - item.done_before - count)

    def advance(self) -> list[Hashable]:
        """One engine step was executed; returns the keys that may be due now."""
        self.step += 1
        due = []
        for key in self._wheel.due(self.step):
            item = self.tracked.get(key)
            if item is not None and item.due == self.step:
                item.due = 0  # whoever looks makes the next appointment
                due.append(key)
        return due

    def look(self, key: Hashable, tokens: Sequence[int], logprobs: tuple[float, int] = (0.0, 0)) -> Decision:
        """Evaluate a response whose attempt has made `tokens` so far, and schedule the next look.

        `logprobs`: sum of the log-probs of these tokens (nats), and how many of them have one.
        """
        item = self.tracked[key]
        count = len(tokens)
        total = item.done_before + count
        decision = GO_ON
        if item.next_repetition is not None and total >= item.next_repetition:
            item.next_repetition = next_multiple(total, self._interval)
            if self._proves_loop(item, tokens, (total, *logprobs)):
                decision = self._loop
        if item.next_boundary is not None and total >= item.next_boundary:
            if self.count_boundaries(item, count) and decision is GO_ON:
                decision = self._at_boundary(item)
        if item.next_verdict is not None and total >= item.next_verdict:
            every = self._look_every
            item.next_verdict = total - total % every + every  # next_multiple, without a call
            if decision is GO_ON:
                self._glance(key, item.group, item.member, total, tokens, logprobs)
        if decision is GO_ON:
            self._plan(key, item, count)
        return decision

    def _proves_loop(self, item: Tracked, tokens: Sequence[int], now: Mark) -> bool:
        """Looks at all tokens since the newest mark that lies at least `min_span` tokens back."""
        marks = item.marks
        newest = now[0] - self._min_span
        while len(marks) > 1 and marks[1][0] <= newest:
            marks.popleft()
        mark = marks[0]
        marks.append(now)
        if mark[0] > newest:
            return False
        missing = now[0] - mark[0] - len(tokens)
        if missing > 0:  # they lie in earlier attempts
            tokens = [*item.earlier[len(item.earlier) - missing:], *tokens]
        item.surprisal = surprisal(self.settings.prune.repetition, tokens, mark, now)
        return item.surprisal is not None

    def carried_marks(self, item: Tracked, count: int, logprobs: tuple[float, int]) -> list[list]:
        """What the next attempt of a response needs so that a loop is proven across attempts; plain lists.

        `count` tokens were made in this attempt, `logprobs` as in `look`.
        """
        total = item.done_before + count
        newest = total - self.settings.prune.repetition.min_span
        marks = [mark for mark in item.marks if mark[0] < total]
        while len(marks) > 1 and marks[1][0] <= newest:
            del marks[0]
        return [[at, summed - logprobs[0], rows - logprobs[1]] for at, summed, rows in marks]

    def _at_boundary(self, item: Tracked) -> Decision:
        decision = GO_ON if item.stays else at_boundary(item.length_class, item.move, self._yields)
        item.move = item.move and decision is not MOVE
        return decision

    def set_segment_length(self, group: str, length: int, tail: bool, token_counts: dict[Hashable, int]) -> int:
        """Segments of this group have `length` tokens from the next boundary on; returns how many responses are here.

        A shorter length may bring the next boundary nearer, a longer one leaves it where it is. `tail` puts all of them
        into the tail class. `token_counts` covers the group's tracked keys (tokens of the attempt). Later attempts of
        the group start with this length.
        """
        keys = self._groups.get(group, ())
        for key in keys:  # by the length that it had until now
            self.count_boundaries(self.tracked[key], token_counts[key])
        self._lengths[group] = length, tail
        self._lengths.move_to_end(group)
        while len(self._lengths) > GROUP_LENGTHS_KEPT:
            self._lengths.popitem(last=False)
        for key in keys:
            item, count = self.tracked[key], token_counts[key]
            if tail:
                item.length_class = TAIL
            before = item.next_boundary
            self._set_boundary(item, item.done_before + count)
            if before is not None:
                item.next_boundary = min(before, item.next_boundary)
            if (item.next_boundary != before or tail) and self._may_end_at_boundary(item):
                self._plan(key, item, count)
        return len(keys)

    def ask_finish(self, group: str, members: Sequence[int] | None, rule: str) -> int:
        """Finish these members of a group (None: all that are here) at the next step, or with their first token;
        returns how many are here.

        A member that is between two attempts, or whose attempt is still on its way to this engine, is finished when
        it arrives.
        """
        if members is not None:
            self._asked.setdefault(group, {}).update(dict.fromkeys(members, rule))
            while len(self._asked) > ASKED_GROUPS_KEPT:
                self._asked.popitem(last=False)
        found = 0
        for key in self._groups.get(group, ()):
            if members is None or self.tracked[key].member in members:
                self.pending[key] = Decision(PRUNE, rule)
                found += 1
        return found

    def hand_back(self, key: Hashable) -> bool:
        """Hand it back at the next step; returns whether that is possible here: it is tracked, and does not stay. One
        that is to be ended is ended."""
        item = self.tracked.get(key)
        if item is None or item.stays:
            return False
        self.pending.setdefault(key, SURPLUS)
        return True

    def keys_of(self, group: str) -> set[Hashable]:
        """All responses of a group that are here: an agent loop may run several requests of one member at once."""
        return self._groups.get(group, set())

    def members_of(self, group: str) -> dict[int, Hashable]:
        """Which responses of a group are here: member -> key."""
        return {self.tracked[key].member: key for key in self._groups.get(group, ())}

    def take_pending(self, made: Callable[[Hashable], int]) -> dict[Hashable, Decision]:
        """What to do now; `made`: tokens of an attempt so far. A response without any token waits for its first
        one: verl's agent loop makes no log-probs of an empty response, and cannot join it with others."""
        pending = self.pending
        self.pending = {key: asked for key, asked in pending.items() if self.tracked[key].done_before + made(key) == 0}
        return {key: asked for key, asked in pending.items() if key not in self.pending}

    def set_version(self, version: int, token_counts: dict[Hashable, int]) -> None:
        """New weights: tokens made so far belong to the old version. `token_counts` covers every tracked key."""
        for key, item in self.tracked.items():
            self._extend_spans(item, token_counts[key])
        self.version = version

    def kv_ages(self, version: int, kept: dict[Hashable, tuple[bool, int]]) -> list[int]:
        """Weight versions between the oldest KV of each response and `version`, which comes in now.

        Asked before set_version. `kept` maps every tracked key to (has KV in the cache, preemptions so far): KV that
        was given up is computed again by the weights that are there then.
        """
        ages = []
        for key, (has_kv, preemptions) in kept.items():
            item = self.tracked[key]
            if not has_kv:
                item.kv_version = None
            elif item.kv_version is None or item.preemptions != preemptions:
                item.kv_version = self.version
            item.preemptions = preemptions
            known = item.kv_version is not None and item.kv_version != UNKNOWN_VERSION
            ages.append(version - item.kv_version if known else 0)
        return ages

    def _extend_spans(self, item: Tracked, count: int) -> None:
        if count > item.spanned:
            item.spans.append([self.version, count - item.spanned])
            item.spanned = count

    def close(self, key: Hashable, count: int, by_itself: bool = False) -> Tracked | None:
        """The attempt ended after `count` tokens; returns what is known of it, or None when it was not tracked.

        `by_itself`: at its own end or at the budget; then its last token ends nothing but the response, no segment.
        """
        item = self.tracked.pop(key, None)
        if item is None:
            return None
        self.pending.pop(key, None)
        keys = self._groups[item.group]
        keys.discard(key)
        if not keys:
            del self._groups[item.group]
        if self._look_every:
            self.looks.ended(key, item.group, not keys)
        self.count_boundaries(item, count - by_itself)
        self._extend_spans(item, count)
        return item
