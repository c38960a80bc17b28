"""SegmentBook as a state machine: responses come, grow, are looked at, asked to finish and closed in any order."""

from __future__ import annotations

from itertools import groupby

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esgrpo.algo.segments import (
    BODY,
    CONTINUE,
    PRUNE,
    SHORT,
    SURPLUS,
    TAIL,
    UNKNOWN_VERSION,
    YIELD,
    Decision,
    SegmentBook,
)
from esgrpo.config import Prune, Repetition, Segment

GROUPS = ["a", "b", "c"]


def runs(versions) -> list[list[int]]:
    """Run lengths of a list with one weight version per token."""
    return [[version, len(list(tokens))] for version, tokens in groupby(versions)]


def merged(spans) -> list[list[int]]:
    """Neighbouring spans of one version as one: a sync may bring the version that is already there."""
    return runs([version for version, count in spans for _ in range(count)])


class Books(RuleBasedStateMachine):
    """`tokens[key]` holds the token ids and `versions[key]` the version that made each of them."""

    @initialize(enable=st.booleans(), boundary=st.sampled_from(["soft", "yield"]), length=st.integers(2, 9),
                repetition=st.booleans(), tokens_per_step=st.integers(1, 3))
    def start(self, enable, boundary, length, repetition, tokens_per_step):
        prune = Prune(Repetition(enable=repetition, check_interval=3, max_pattern_size=2, min_span=6))
        self.settings = Segment(enable=enable, boundary=boundary, segment_length=length, prune=prune)
        self.tokens_per_step = tokens_per_step
        self.book = SegmentBook(self.settings, tokens_per_step)
        self.version = UNKNOWN_VERSION
        self.tokens, self.versions, self.places = {}, {}, {}
        self.asked = {}  # what must be pending
        self.wishes = {}  # (group, member) -> rule: also for attempts that are still to come
        self.adds, self.closes, self.carried = 0, 0, 0
        self.lengths = {}  # group -> (segment length, tail) that it was told
        self.moves = {}  # key -> may be moved
        self.moved = set()
        self.longest = max(length, prune.repetition.check_interval)
        self.gone = set()  # keys that were closed; some come back, as they do when a resume keeps its request id

    @rule(group=st.sampled_from(GROUPS), member=st.integers(0, 3), done_before=st.integers(0, 20),
          again=st.booleans(), length_class=st.sampled_from([SHORT, BODY, TAIL]), move=st.booleans())
    def add(self, group, member, done_before, again, length_class, move):
        key = min(self.gone) if again and self.gone else f"key-{self.adds}"
        self.gone.discard(key)
        self.book.add(key, group, member, done_before, length_class, move)
        self.moves[key] = move
        self.moved.discard(key)
        self.tokens[key], self.versions[key], self.places[key] = [], [], (group, member)
        self.adds += 1
        if (group, member) in self.wishes:
            self.asked[key] = Decision(PRUNE, self.wishes[group, member])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def step(self, data):
        """Every response makes 0 .. tokens_per_step tokens, then the due ones are looked at and maybe ended."""
        for key in self.tokens:
            made = data.draw(st.lists(st.integers(0, 1), max_size=self.tokens_per_step), label=key)
            self.tokens[key] += made
            self.versions[key] += [self.version] * len(made)
        for key in self.book.advance():
            item = self.book.tracked[key]
            decision = self.book.look(key, self.tokens[key], (0.0, len(self.tokens[key])))
            if decision.outcome == YIELD:
                assert item.length_class != SHORT
                if decision.rule == "move":
                    assert item.length_class == TAIL and self.moves[key] and key not in self.moved
                    self.moved.add(key)
                else:
                    assert (decision.rule, self.settings.boundary) == ("boundary", "yield")
            if decision.outcome != CONTINUE:
                assert self.settings.enable
                self._close(key)
            else:
                total = item.done_before + len(self.tokens[key])
                assert item.length_class != TAIL or not item.move or item.next_boundary > total  # else it had moved

    @rule(group=st.sampled_from([*GROUPS, "nobody"]), length=st.integers(2, 30), tail=st.booleans())
    def set_segment_length(self, group, length, tail):
        here = [key for key, (g, _) in self.places.items() if g == group]
        counts = {key: len(self.tokens[key]) for key in here}
        before = {}
        for key in here:
            item = self.book.tracked[key]
            self.book.count_boundaries(item, counts[key])  # its next one is ahead
            before[key] = item.next_boundary
        assert self.book.set_segment_length(group, length, tail, counts) == len(here)
        self.lengths[group] = length, tail
        self.longest = max(self.longest, length)
        for key in here:
            item, total = self.book.tracked[key], self.book.tracked[key].done_before + counts[key]
            if item.length_class == SHORT:
                assert item.next_boundary is None
                continue
            nearest = (total // length + 1) * length
            assert item.next_boundary == (nearest if before[key] is None else min(before[key], nearest))
    @rule(group=st.sampled_from([*GROUPS, "nobody"]), members=st.none() | st.sets(st.integers(0, 4)),
          name=st.sampled_from(["group", "length"]))
    def ask_finish(self, group, members, name):
        wanted = [key for key, (g, m) in self.places.items() if g == group and (members is None or m in members)]
        assert self.book.ask_finish(group, None if members is None else sorted(members), name) == len(wanted)
        self.asked.update(dict.fromkeys(wanted, Decision(PRUNE, name)))
        self.wishes.update({(group, member): name for member in members or ()})

    @rule(number=st.integers(0, 9))
    def hand_back(self, number):
        """Whom a rule ends is not handed back."""
        key = f"key-{number}"
        assert self.book.hand_back(key) == (key in self.tokens)
        if key in self.tokens:
            self.asked.setdefault(key, SURPLUS)

    @rule()
    def carry_out(self):
        """Whoever has no token yet waits for the first one."""
        def made(key):
            return len(self.tokens[key])

        pending = self.book.take_pending(made)
        later = {key: name for key, name in self.asked.items() if self.book.tracked[key].done_before + made(key) == 0}
        assert pending == {key: name for key, name in self.asked.items() if key not in later}
        assert self.book.take_pending(made) == {}
        self.asked = later
        for key in pending:
            self.carried += 1
            self._close(key)

    @rule(newer=st.integers(0, 3))
    def set_version(self, newer):
        self.version = max(self.version, 0) + newer
        self.book.set_version(self.version, {key: len(tokens) for key, tokens in self.tokens.items()})

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data):
        self._close(data.draw(st.sampled_from(sorted(self.tokens))))

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def close_again(self, data):
        assert self.book.close(data.draw(st.sampled_from(sorted(self.gone))), 99) is None

    def _close(self, key):
        tokens, versions = self.tokens.pop(key), self.versions.pop(key)
        group, member = self.places.pop(key)
        item = self.book.close(key, len(tokens))
        assert (item.group, item.member) == (group, member)
        assert sum(count for _, count in item.spans) == len(tokens)
        assert all(count > 0 for _, count in item.spans)
        assert [version for version, _ in item.spans] == sorted(version for version, _ in item.spans)
        assert merged(item.spans) == runs(versions)
        self.asked.pop(key, None)  # dropped with the response
        self.gone.add(key)
        self.closes += 1
        assert self.book.close(key, len(tokens)) is None

    @invariant()
    def tracked_from_add_to_close(self):
        if hasattr(self, "book"):
            assert set(self.book.tracked) == set(self.tokens)
            assert len(self.tokens) == self.adds - self.closes

    @invariant()
    def pending_only_what_was_asked_and_lives(self):
        if hasattr(self, "book"):
            assert self.book.pending == self.asked

    @invariant()
    def group_index_does_not_leak(self):
        if hasattr(self, "book"):
            index = {}
            for key, (group, _) in self.places.items():
                index.setdefault(group, set()).add(key)
            assert self.book._groups == index

    @invariant()
    def every_response_has_a_look_ahead_and_the_wheel_forgets(self):
        """An entry per response; entries of closed ones go when their step comes, at most segment_length later."""
        if hasattr(self, "book"):
            entries = self.book._wheel.entries()
            looked_at = {key for key, item in self.book.tracked.items()
                         if item.next_repetition is not None
                         or item.next_boundary is not None and self.book._may_end_at_boundary(item)}
            appointed = set(entries)
            assert all((self.book.tracked[key].due, key) in appointed for key in looked_at) or not self.settings.enable
            assert all(due <= self.book.step + self.longest for due, _ in entries)
            assert self.settings.enable or not entries

    @invariant()
    def a_boundary_is_ahead_and_the_tail_is_for_good(self):
        if hasattr(self, "book"):
            for item in self.book.tracked.values():
                assert (item.next_boundary is None) == (item.length_class == SHORT)
                assert item.length_class == TAIL or not self.lengths.get(item.group, (0, False))[1]
    @invariant()
    def spans_never_run_ahead(self):
        if hasattr(self, "book"):
            for key, item in self.book.tracked.items():
                assert item.spanned == sum(count for _, count in item.spans) <= len(self.tokens[key])


TestBooks = Books.TestCase
