"""When a response is looked at: the wheel against an oracle that looks at every response at every step."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from esgrpo.algo.looks import next_multiple
from esgrpo.algo.loops import repeats
from esgrpo.algo.segments import PRUNE, UNKNOWN_VERSION, YIELD, BoundaryWheel, SegmentBook
from esgrpo.config import Prune, Repetition, Segment


@given(done=st.integers(0, 10**9), length=st.integers(1, 10**6))
def test_next_multiple_is_the_first_above(done, length):
    boundary = next_multiple(done, length)
    assert boundary % length == 0
    assert boundary - length <= done < boundary


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-3, 40)), max_size=30), st.integers(1, 5))
def test_wheel_returns_every_look_once_in_order_and_at_its_step(requests, tokens_per_step):
    wheel = BoundaryWheel(tokens_per_step)
    expected = {}
    for key, (step, tokens_left) in enumerate(requests):
        wheel.schedule(key, step, tokens_left)
        expected[key] = step + math.ceil(max(1, tokens_left) / tokens_per_step)
    assert len(wheel) == len(requests)
    seen = []
    for step in range(80):
        keys = wheel.due(step)
        assert keys == sorted(keys)  # all were scheduled before: equal steps come first come, first served
        seen += [(key, step) for key in keys]
    assert sorted(seen) == sorted(expected.items())
    assert len(wheel) == 0


# A response is a plan: when it starts, what it had before, and how many tokens it gets at each of its steps. Zeros are
# steps in which it waits, is preempted, or prefills.
def plans(tokens_per_step):
    growth = st.integers(0, tokens_per_step) | st.just(tokens_per_step)
    return st.tuples(st.integers(0, 8), st.integers(0, 60), st.lists(growth, min_size=1, max_size=60))


@st.composite
def workloads(draw, boundary=("soft",)):
    tokens_per_step = draw(st.integers(1, 4))
    repetition = Repetition(enable=draw(st.booleans()), check_interval=draw(st.integers(1, 11)), max_pattern_size=3,
                            min_span=draw(st.integers(6, 12)))
    settings_ = Segment(enable=True, segment_length=draw(st.integers(2, 13)), boundary=draw(st.sampled_from(boundary)),
                        prune=Prune(repetition=repetition))
    return settings_, tokens_per_step, draw(st.lists(plans(tokens_per_step), min_size=1, max_size=6))


class Watched(SegmentBook):
    """Every boundary may end a response, so that all are looked at; these go on."""

    def _may_end_at_boundary(self, item):
        return True


def crossed(before: int, now: int, length: int) -> bool:
    """The oracle: a multiple of `length` lies in (before, now]."""
    return any(total % length == 0 for total in range(before + 1, now + 1))


class Replay:
    """One engine that runs the plans; `events` are what the book found, `oracle` what was really there, per step."""

    def __init__(self, settings_, tokens_per_step, plan_list, make_token=lambda key, index: index, book=Watched):
        self.settings, self.plans, self.make_token = settings_, plan_list, make_token
        self.book = book(settings_, tokens_per_step)
        self.tokens, self.closed = {}, {}
        self.looks, self.idle_slots, self.event_looks = Counter(), Counter(), Counter()
        self.events, self.oracle = [], []
        self.endings = {}
        self.tokens_per_step = tokens_per_step
        for step in range(max(start + len(growth) for start, _, growth in plan_list) + 1):
            self._step(step)

    def _step(self, step):
        length, interval = self.settings.segment_length, self.settings.prune.repetition.check_interval
        repetition = self.settings.prune.repetition
        truth = set()
        for key, (start, done_before, growth) in enumerate(self.plans):
            if start == step:
                self.book.add(key, f"group-{key % 2}", key, done_before)
                self.tokens[key] = []
            if key not in self.book.tracked:
                continue
            if not start <= step < start + len(growth):
                self.closed[key] = self.book.close(key, len(self.tokens[key]))
                continue
            tokens, grown = self.tokens[key], growth[step - start]
            before = done_before + len(tokens)
            tokens += [self.make_token(key, len(tokens) + i) for i in range(grown)]
            self.idle_slots[key] += self.tokens_per_step - grown
            if crossed(before, before + grown, length):
                truth.add((key, "boundary"))
            if repetition.enable and crossed(before, before + grown, interval):
                truth.add((key, "repetition"))
        found = set()
        for key in self.book.advance():
            if key not in self.book.tracked:
                continue
            item = self.book.tracked[key]
            boundaries, repetition_due = item.boundaries, item.next_repetition
            decision = self.book.look(key, self.tokens[key], (0.0, len(self.tokens[key])))  # a model that is certain
            events = {(key, "boundary")} if item.boundaries > boundaries else set()
            events |= {(key, "repetition")} if item.next_repetition != repetition_due else set()
            self.looks[key] += 1
            self.event_looks[key] += bool(events)
            found |= events
            if decision.outcome in (PRUNE, YIELD):
                self.endings[key] = decision.outcome, len(self.tokens[key])
                self.book.close(key, len(self.tokens[key]))
        self.events.append(found)
        self.oracle.append(truth)


@settings(max_examples=2 * settings.default.max_examples)
@given(workloads())
def test_no_boundary_is_missed_early_or_late(workload):
    replay = Replay(*workload)
    assert replay.events == replay.oracle


@settings(max_examples=2 * settings.default.max_examples)
@given(workloads())
def test_boundaries_that_can_end_nothing_are_counted_without_a_look(workload):
    settings_, _, plan_list = workload
    replay = Replay(*workload, book=SegmentBook)
    for found, oracle in zip(replay.events, replay.oracle, strict=True):
        assert {event for event in found if event[1] == "repetition"} == {e for e in oracle if e[1] == "repetition"}
    if not settings_.prune.repetition.enable:
        assert not replay.looks
    for key, item in replay.closed.items():
        done_before, total = plan_list[key][1], plan_list[key][1] + len(replay.tokens[key])
        assert item.boundaries == total // settings_.segment_length - done_before // settings_.segment_length


def test_boundaries_are_counted_by_the_length_that_was_told():
    """Negative control: who only measures has none."""
    for enable, expected in ((True, 2 + 4 + 1), (False, 0)):
        book = SegmentBook(Segment(enable=enable, observe=not enable, segment_length=64))
        book.add("a", "g", 0, 0)
        book.set_segment_length("g", 16, False, {"a": 130})  # 64 and 128 are behind
        book.set_segment_length("g", 64, False, {"a": 192})  # 144, 160, 176, 192; the next one stays at 208
        assert book.close("a", 255).boundaries == expected


def test_the_last_token_of_a_response_that_ends_by_itself_ends_no_segment():
    """Negative control: handed back or aborted there, it has one more."""
    for by_itself, expected in ((True, 5), (False, 6)):
        book = SegmentBook(Segment(enable=True, segment_length=16))
        book.add("a", "g", 0, 0)
        assert book.close("a", 96, by_itself).boundaries == expected


@given(workloads())
def test_a_look_without_an_event_is_paid_by_a_slot_that_made_no_token(workload):
    """Looks <= events + token slots that were left empty; nothing depends on how many responses run."""
    replay = Replay(*workload)
    for key in replay.tokens:
        assert replay.event_looks[key] <= replay.looks[key] <= replay.event_looks[key] + replay.idle_slots[key]


@given(st.integers(2, 200), st.integers(0, 300), st.integers(1, 6), st.data())
def test_at_a_steady_pace_looks_per_boundary_are_logarithmic(length, done_before, tokens_per_step, data):
    """At pace g of k tokens per step, a look leaves at most (1 - g/k) of the way to the boundary."""
    pace = data.draw(st.integers(1, tokens_per_step))
    replay = Replay(Segment(enable=True, segment_length=length), tokens_per_step,
                    [(0, done_before, [pace] * (3 * length // pace + 2))])
    events = replay.event_looks[0]
    allowed = 1 if pace == tokens_per_step else 2 + math.ceil(math.log(length) / -math.log(1 - pace / tokens_per_step))
    assert events >= 2
    assert replay.looks[0] <= (events + 1) * allowed


@given(workloads())
def test_spans_of_an_undisturbed_response_are_its_tokens(workload):
    replay = Replay(*workload)
    for key, item in list(replay.book.tracked.items()):
        count = len(replay.tokens[key])
        closed = replay.book.close(key, count)
        assert closed is item
        assert closed.spans == ([[UNKNOWN_VERSION, count]] if count else [])


@settings(max_examples=2 * settings.default.max_examples)
@given(workloads(boundary=("yield",)))
def test_yield_ends_at_the_first_boundary_unless_the_tail_repeats_before(workload):
    """Tokens repeat with period 2: the first look with enough of them prunes, else the boundary yields."""
    settings_, tokens_per_step, plan_list = workload
    replay = Replay(settings_, tokens_per_step, plan_list, make_token=lambda key, index: index % 2)
    rule, length = settings_.prune.repetition, settings_.segment_length
    for key, (_, done_before, growth) in enumerate(plan_list):
        expected, count = None, 0
        for grown in growth:
            before, count = done_before + count, count + grown
            looked = rule.enable and crossed(before, done_before + count, rule.check_interval)
            if looked and count >= rule.min_span:
                expected = PRUNE, count
            elif crossed(before, done_before + count, length):
                expected = YIELD, count
            if expected:
                break
        assert replay.endings.get(key) == expected


def brute_force_repeats(tokens, span, longest) -> bool:
    """The tail is one pattern over and over, the oldest one maybe cut, written down literally."""
    for size in range(1, longest + 1):
        pattern = tokens[-size:]
        if len(tokens) >= span and (pattern * span)[-span:] == tokens[-span:]:
            return True
    return False


def spans():
    """(span, longest pattern)."""
    return st.integers(1, 6).flatmap(lambda longest: st.tuples(st.integers(2 * longest, 18), st.just(longest)))


def sequences():
    """Short alphabets, with and without a repeated tail that may be cut or disturbed."""
    token = st.integers(0, 2)
    noise = st.lists(token, max_size=24)
    tails = st.builds(lambda head, pattern, count, cut: head + (pattern * count)[cut:],
                      noise, st.lists(token, min_size=1, max_size=7), st.integers(1, 7), st.integers(0, 3))
    return noise | tails


@settings(max_examples=6 * settings.default.max_examples)
@given(sequences(), spans())
def test_repeats_equals_brute_force(tokens, rule):
    assert repeats(tokens, *rule) == brute_force_repeats(tokens, *rule)
    assert repeats(tuple(tokens), *rule) == repeats(tokens, *rule)


def looks(book, key, tokens, steps, per_step=1) -> list[int]:
    """At how many tokens of the attempt a response is looked at while it makes `per_step` tokens at each step."""
    seen = []
    for _ in range(steps):
        tokens += [len(tokens) + i for i in range(per_step)]
        for due in book.advance():
            assert due == key
            decision = book.look(key, tokens, (0.0, len(tokens)))
            seen.append((len(tokens), decision.outcome, decision.rule))
            if decision.outcome != "continue":
                book.close(key, len(tokens))
                return seen
    return seen


def test_a_shorter_length_brings_the_boundary_nearer_and_is_looked_at_once():
    book, tokens = Watched(Segment(enable=True, segment_length=64)), []
    book.add("a", "g", 0, 0)
    assert looks(book, "a", tokens, 20) == []
    book.set_segment_length("g", 16, False, {"a": 20})
    assert [at for at, *_ in looks(book, "a", tokens, 60)] == [32, 48, 64, 80]  # the outdated look at 64 adds none
    book.set_segment_length("g", 64, False, {"a": 80})
    assert [at for at, *_ in looks(book, "a", tokens, 120)] == [96, 128, 192]  # from the next boundary on


def test_the_wheel_keeps_no_second_chain_of_looks():
    """Every nearer appointment leaves an outdated entry, which must not make appointments of its own."""
    book, tokens = Watched(Segment(enable=True, segment_length=64)), []
    book.add("a", "g", 0, 0)
    for length in (32, 16, 8, 4):
        book.set_segment_length("g", length, False, {"a": 0})
    assert len(book._wheel) == 5
    assert [at for at, *_ in looks(book, "a", tokens, 200)] == list(range(4, 201, 4))
    assert len(book._wheel) == 1


def test_the_short_class_is_never_segmented():
    """Negative control: the body class under the same settings yields."""
    for length_class, expected in (("body", [(16, YIELD, "boundary")]), ("short", [])):
        book = SegmentBook(Segment(enable=True, segment_length=16, boundary="yield"))
        book.add("a", "g", 0, 0, length_class)
        assert looks(book, "a", [], 100) == expected
        assert len(book._wheel) == 0


def test_repetition_is_looked_at_in_the_short_class_too():
    rule = Repetition(enable=True, check_interval=8, max_pattern_size=2, min_span=8)
    book = SegmentBook(Segment(enable=True, segment_length=16, boundary="yield", prune=Prune(repetition=rule)))
    book.add("a", "g", 0, 0, "short")
    decisions = []
    for step in range(1, 25):
        decisions += [(step, book.look(key, [7] * step, (0.0, step)).outcome) for key in book.advance()]
    assert decisions[0] == (8, PRUNE)


def test_a_soft_boundary_hands_a_response_back_once_to_be_moved():
    for move, expected in ((False, []), (True, [(32, YIELD, "move")])):
        book, tokens = SegmentBook(Segment(enable=True, segment_length=64)), []
        book.add("a", "g", 0, 0, "short", move)
        assert looks(book, "a", tokens, 20) == []
        book.set_segment_length("g", 16, True, {"a": 20})
        assert [look for look in looks(book, "a", tokens, 200) if look[1] != "continue"] == expected
    book.add("b", "g", 0, len(tokens), "tail", False)  # its next attempt, where the router sent it
    assert looks(book, "b", [], 200) == [] == list(book.advance())


def test_an_attempt_on_its_way_hears_what_its_group_was_told():
    book = SegmentBook(Segment(enable=True, segment_length=64))
    assert book.set_segment_length("g", 16, True, {}) == 0
    book.add("a", "g", 0, 20, "body", True)
    assert looks(book, "a", [], 100) == [(12, YIELD, "move")]


def test_the_age_of_kv_follows_prefills_and_preemptions():
    book = SegmentBook(Segment(enable=True))
    for key in "abc":
        book.add(key, "g", "abc".index(key), 0)
    assert book.kv_ages(3, {key: (True, 0) for key in "abc"}) == [0, 0, 0]  # made by weights nobody named
    book.set_version(3, dict.fromkeys("abc", 0))
    book.close("a", 0)
    book.add("a", "g", 0, 0)
    assert book.kv_ages(4, {"a": (True, 0), "b": (False, 0), "c": (True, 1)}) == [1, 0, 1]  # c was preempted under 3
    book.set_version(4, dict.fromkeys("abc", 0))
    assert book.kv_ages(6, {"a": (True, 0), "b": (True, 0), "c": (True, 1)}) == [3, 2, 3]
    assert book.kv_ages(7, {"a": (False, 1), "b": (True, 0), "c": (True, 1)}) == [0, 3, 4]
