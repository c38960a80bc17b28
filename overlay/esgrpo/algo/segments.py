"""Segments of one engine: when to look at a response, and what to do with it at a boundary.

Pure: tokens in, decisions out; no clock, no torch, no upstream. A step is one executed engine step. A response grows
by at most `tokens_per_step` tokens a step, so a look that is k tokens away cannot be due earlier than
ceil(k / tokens_per_step) steps from now: the wheel is asked once a step and touches only what may be due.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from esgrpo.config import Repetition, Segment

CONTINUE, PRUNE, YIELD = "continue", "prune", "yield"
SHORT, BODY, TAIL = "short", "body", "tail"  # length classes
ASKED_GROUPS_KEPT = 4096  # a finish may overtake the attempt that it is for; groups are short-lived
GROUP_LENGTHS_KEPT = 4096  # a group may be between two attempts when it is told its segment length
UNKNOWN_VERSION = -1  # tokens made before the first weight sync told the engine its version


class BoundaryWheel:
    """Priority queue of looks, keyed by the earliest step at which they can be due."""

    def __init__(self, tokens_per_step: int = 1):
        if tokens_per_step < 1:
            raise ValueError(f"tokens_per_step must be at least 1, got {tokens_per_step}")
        self._tokens_per_step = tokens_per_step
        self._heap: list[tuple[int, int, Hashable]] = []
        self._order = 0  # makes ties first come, first served, whatever the keys are

    def schedule(self, key: Hashable, step: int, tokens_left: int) -> int:
        """Look at `key` no earlier than when `tokens_left` (>= 1) more tokens can exist, counted from `step`.

        Returns the step of the look.
        """
        due = step + -(-max(1, tokens_left) // self._tokens_per_step)
        heapq.heappush(self._heap, (due, self._order, key))
        self._order += 1
        return due

    def due(self, step: int) -> list[Hashable]:
        keys = []
        while self._heap and self._heap[0][0] <= step:
            keys.append(heapq.heappop(self._heap)[2])
        return keys

    def __len__(self) -> int:
        return len(self._heap)


def next_multiple(done: int, length: int) -> int:
    """The first multiple of `length` above `done`, in tokens of the whole response."""
    return (done // length + 1) * length


def repeats(tokens: Sequence[int], rule: Repetition) -> bool:
    """True when the tail of `tokens` is one pattern at least `min_count` times.

    The rule of vLLM's RepetitionDetectionParams (vllm.v1.core.sched.utils.check_sequence_repetition), which looks at
    every token; here it is asked every `check_interval` tokens. Only distances at which the last token stood before
    can be periods: they are found by list.index, and each is verified by one slice comparison.
    """
    length = len(tokens)
    longest = min(rule.max_pattern_size, length // rule.min_count)
    if longest < rule.min_pattern_size:
        return False
    last = tokens[-1]
    before = list(tokens[length - 1 - longest:length - 1])
    before.reverse()  # before[i] stands i + 1 tokens before the last one
    period = rule.min_pattern_size - 1
    for _ in range(before.count(last)):
        try:
            period = before.index(last, period) + 1
        except ValueError:  # the others are nearer than min_pattern_size
            return False
        span = period * rule.min_count
        if tokens[length - span + period:] == tokens[length - span:length - period]:
            return True
    return False


@dataclass(frozen=True)
class Decision:
    outcome: str  # continue | prune | yield
    rule: str = ""  # which rule asked for it


# Made once: a look takes a few microseconds, and making a frozen dataclass is one of them.
GO_ON, LOOP = Decision(CONTINUE), Decision(PRUNE, "repetition")
BOUNDARY, MOVE = Decision(YIELD, "boundary"), Decision(YIELD, "move")


@dataclass(slots=True)
class Tracked:
    """One response in this engine. `done_before` counts tokens of its earlier attempts, elsewhere or before a sync."""

    group: str
    member: int
    done_before: int
    length_class: str
    move: bool  # may be handed back once, to be moved to a replica of the tail class
    next_boundary: int | None  # in tokens of the whole response; None: never segmented
    next_repetition: int | None
    due: int = 0  # step of the look that counts; entries of the wheel for other steps are outdated
    boundaries: int = 0
    spans: list[list[int]] = field(default_factory=list)  # [weight version, tokens], oldest first
    spanned: int = 0  # tokens of this attempt already in `spans`
    kv_version: int | None = None  # version of the oldest KV that its next token reads; None: of the present version
    preemptions: int = 0  # when kv_version was set


class SegmentBook:
    """All tracked responses of one engine.

    Invariants: a key is tracked from `add` to `close`; spans sum to the attempt's tokens; a pending finish is carried
    out once or dropped with the response; a boundary never lies behind tokens that were already made; a response of the
    short class has none; one that may be moved is handed back for it at most once.
    """

    def __init__(self, settings: Segment, tokens_per_step: int = 1):
        self.settings = settings
        self.version = UNKNOWN_VERSION
        self.step = 0
        self.tracked: dict[Hashable, Tracked] = {}
        self.pending: dict[Hashable, str] = {}  # finish at the next step: key -> rule
        self._groups: dict[str, set[Hashable]] = {}
        self._asked: OrderedDict[str, dict[int, str]] = OrderedDict()  # group -> member -> rule
        self._lengths: OrderedDict[str, tuple[int, bool]] = OrderedDict()  # group -> (segment length, tail class)
        self._wheel = BoundaryWheel(tokens_per_step)
        self._length = settings.segment_length
        self._decides, self._yields = settings.enable, settings.boundary == "yield"

    def add(self, key: Hashable, group: str, member: int, done_before: int, length_class: str = BODY,
            move: bool = False) -> None:
        repetition = self.settings.prune.repetition
        if self._lengths.get(group, (0, False))[1]:  # told while this attempt was on its way
            length_class = TAIL
        item = Tracked(group, member, done_before, length_class, move,
                       self._boundary_after(done_before, group, length_class),
                       next_multiple(done_before, repetition.check_interval) if repetition.enable else None)
        self.tracked[key] = item
        self._groups.setdefault(group, set()).add(key)
        rule = self._asked.get(group, {}).get(member)
        if rule is not None:
            self.pending[key] = rule
        self._plan(key, item, 0)

    def _boundary_after(self, tokens: int, group: str, length_class: str) -> int | None:
        if length_class == SHORT:
            return None
        told = self._lengths.get(group)
        return next_multiple(tokens, self._length if told is None else told[0])

    def _plan(self, key: Hashable, item: Tracked, count: int) -> None:
        """Appoint the next look of a response that has made `count` tokens in this attempt."""
        look, repetition = item.next_boundary, item.next_repetition
        if look is None or (repetition is not None and repetition < look):
            look = repetition
        if look is not None and self._decides:
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

    def look(self, key: Hashable, tokens: Sequence[int]) -> Decision:
        """Evaluate a response whose attempt has made `tokens` so far, and schedule the next look."""
        item = self.tracked[key]
        count = len(tokens)
        total = item.done_before + count
        decision = GO_ON
        if item.next_repetition is not None and total >= item.next_repetition:
            item.next_repetition = next_multiple(total, self.settings.prune.repetition.check_interval)
            if repeats(tokens, self.settings.prune.repetition):
                decision = LOOP
        if item.next_boundary is not None and total >= item.next_boundary:
            item.boundaries += 1
            item.next_boundary = self._boundary_after(total, item.group, item.length_class)
            if decision is GO_ON:
                decision = self._at_boundary(item)
        if decision is GO_ON:
            self._plan(key, item, count)
        return decision

    def _at_boundary(self, item: Tracked) -> Decision:
        if item.length_class == TAIL and item.move:
            item.move = False
            return MOVE
        return BOUNDARY if self._yields else GO_ON

    def set_segment_length(self, group: str, length: int, tail: bool, token_counts: dict[Hashable, int]) -> int:
        """Segments of this group have `length` tokens from the next boundary on; returns how many responses are here.

        A shorter length may bring the next boundary nearer, a longer one leaves it where it is. `tail` puts all of them
        into the tail class. `token_counts` covers the group's tracked keys (tokens of the attempt). Later attempts of
        the group start with this length.
        """
        self._lengths[group] = length, tail
        self._lengths.move_to_end(group)
        while len(self._lengths) > GROUP_LENGTHS_KEPT:
            self._lengths.popitem(last=False)
        keys = self._groups.get(group, ())
        for key in keys:
            item, count = self.tracked[key], token_counts[key]
            if tail:
                item.length_class = TAIL
            boundary = self._boundary_after(item.done_before + count, group, item.length_class)
            if boundary is not None and (item.next_boundary is None or boundary < item.next_boundary):
                item.next_boundary = boundary
                self._plan(key, item, count)
        return len(keys)

    def ask_finish(self, group: str, members: Sequence[int] | None, rule: str) -> int:
        """Finish these members of a group (None: all that are here) at the next step; returns how many are here.

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
                self.pending[key] = rule
                found += 1
        return found

    def members_of(self, group: str) -> dict[int, Hashable]:
        """Which responses of a group are here: member -> key."""
        return {self.tracked[key].member: key for key in self._groups.get(group, ())}

    def take_pending(self) -> dict[Hashable, str]:
        pending, self.pending = self.pending, {}
        return pending

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

    def close(self, key: Hashable, count: int) -> Tracked | None:
        """The attempt ended after `count` tokens; returns what is known of it, or None when it was not tracked."""
        item = self.tracked.pop(key, None)
        if item is None:
            return None
        self.pending.pop(key, None)
        keys = self._groups[item.group]
        keys.discard(key)
        if not keys:
            del self._groups[item.group]
        self._extend_spans(item, count)
        return item
