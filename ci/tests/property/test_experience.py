"""The experience buffer over a chain of restarts: whatever dies when, each sample of the epoch ends once, and one way.

`Restarts` is a data loader, a rollouter, the queue, a trainer and checkpoints, with a plain record of what is where.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esgrpo.algo.experience import ENDS, FINISHED, Backlog, Drawn, ExperienceBuffer, Overflow, SentSample, age_key
from esgrpo.algo.resuming import reissued_words
from esgrpo.algo.terms import Status

PROMPTS = 12


class Restarts(RuleBasedStateMachine):
    """A crash falls back to the last checkpoint, which may hold finished samples whole."""

    @initialize()
    def begin(self):
        self.start = 0
        self.go_on({"position": 0, "drawn": 0, "entries": [], "ends": {}, "ended": [], "whole": {}})

    def go_on(self, checkpoint):
        self.checkpoint, self.position = checkpoint, checkpoint["position"]
        self.ended = list(checkpoint["ended"])  # (prompt, status) of every end that the weights hold
        self.buffer = ExperienceBuffer(checkpoint["drawn"], checkpoint["entries"], checkpoint["ends"])
        self.running, self.finished, self.carried, self.strays, self.number = {}, {}, {}, 0, 0
        for entry in self.buffer.back(checkpoint["whole"]):
            assert entry.prompt == checkpoint["whole"][entry.was] and entry.responses == 4  # as it was saved
            self.carried[entry.was] = entry.prompt
        assert self.carried == checkpoint["whole"]
        self.start += 1

    @rule()
    def feed(self):
        """The next prompt is issued: one to give back, else one of the data loader."""
        name, waiting = f"s{self.start}-{self.number}", bool(self.buffer.waiting)
        self.number += 1
        if waiting:
            self.running[name] = self.buffer.again(name).prompt
        elif self.position < PROMPTS:
            self.running[name] = self.position
            self.buffer.took(name, 0, self.position)
            self.position += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def generate(self, data):
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.finished[name] = self.running.pop(name)
        for _ in range(2):  # told twice, it is finished once
            self.buffer.generated(name, 4, 40)
        assert (self.buffer.open[name].responses, self.buffer.open[name].tokens) == (4, 40)

    @rule()
    def sync(self):
        self.carried.update(self.finished)
        self.finished = {}
        self.buffer.synced()

    @precondition(lambda self: self.finished or self.carried)
    @rule(data=st.data())
    def train(self, data):
        """In any order; what is told twice ends once, and is counted."""
        name = data.draw(st.sampled_from(sorted({**self.finished, **self.carried})))
        place = self.finished if name in self.finished else self.carried
        self.ended.append((place.pop(name), Status.TRAINED))
        self.buffer.ended([name, name])
        self.buffer.ended([name, "nobody"], Status.DROPPED)
        self.strays += 2

    @precondition(lambda self: self.running)
    @rule(data=st.data(), status=st.sampled_from([Status.PRUNED, Status.DROPPED]))
    def give_up(self, data, status):
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.ended.append((self.running.pop(name), status))
        self.buffer.ended([name], status)
        self.buffer.generated(name, 4, 40)  # comes after it in the rollouter, and changes nothing

    @rule(whole=st.booleans())
    def save(self, whole):
        entries = [Drawn(**{**vars(entry), "status": Status.RUNNING}) for entry in self.buffer.to_give_back()]
        assert [entry.draw for entry in entries] == sorted(entry.draw for entry in entries)
        self.checkpoint = {
            "position": self.position, "drawn": self.buffer.drawn, "entries": entries, "ended": list(self.ended),
            "ends": {str(status): number for status, number in self.buffer.ends.items()},
            "whole": {**self.finished, **self.carried} if whole else {}}

    @rule()
    def crash(self):
        self.go_on(self.checkpoint)

    @invariant()
    def every_sample_is_in_one_status(self):
        counts, ends = self.buffer.counts(), Counter(status for _, status in self.ended)
        assert counts == {Status.WAITING: len(self.buffer.waiting), Status.RUNNING: len(self.running),
                          Status.FINISHED: len(self.finished), Status.CARRIED: len(self.carried),
                          **{status: ends[status] for status in ENDS}}
        assert sum(counts.values()) == self.buffer.drawn == self.position and self.buffer.unknown == 0
        assert self.buffer.strays == self.strays
        for place, status in ((self.running, {Status.RUNNING}), ({**self.finished, **self.carried}, set(FINISHED))):
            assert all(self.buffer.open[name].prompt == prompt and self.buffer.open[name].status in status
                       for name, prompt in place.items())

    @invariant()
    def every_draw_is_in_one_place(self):
        entries = [*self.buffer.waiting, *self.buffer.open.values()]
        held = [entry.prompt for entry in entries]
        assert Counter([*held, *(prompt for prompt, _ in self.ended)]) == Counter(range(self.position))
        assert all(entry.draw == entry.prompt + 1 for entry in entries)  # a prompt keeps its draw

    def teardown(self):
        """After the last start goes to its end, each prompt has ended once."""
        while self.buffer.waiting or self.position < PROMPTS:
            self.feed()
        left = {**self.running, **self.finished, **self.carried}
        assert sorted([*left.values(), *(prompt for prompt, _ in self.ended)]) == list(range(PROMPTS))


TestRestarts = Restarts.TestCase


def test_what_is_given_back_remembers_its_name():
    buffer = ExperienceBuffer()
    buffer.took("a", 0, "prompt a")
    buffer.took("b", 0, "prompt b")
    buffer.ended(["a"])
    entry, = buffer.to_give_back()
    assert (entry.draw, entry.prompt, entry.was) == (2, "prompt b", "b")
    later = ExperienceBuffer(buffer.drawn, [entry])
    assert later.restored == 2 and later.again("c").was == "b" and later.again("d") is None
    assert later.unknown == 1  # a checkpoint of an older release: nobody knows how the other one ended


def test_wording():
    assert reissued_words(3, 4, 50, 8) == (
        "restart: 3 prompt groups were unfinished and start anew: 4 responses that had ended (50 tokens) are generated "
        "a second time, 8 that had not lose what they had")


VERSIONS = st.none() | st.integers(0, 5)


@given(st.lists(st.tuples(VERSIONS, st.booleans()), max_size=40))
def test_the_backlog_hands_out_the_oldest_and_loses_none(steps):
    """Against sorting; puts and gets in any order, with the end of the data behind everything."""
    backlog, waiting, got = Backlog(), [], []
    backlog.append(None)
    for number, (version, gets) in enumerate(steps):
        sample = SentSample.of(b"", str(number), version)
        backlog.append(sample)
        waiting.append(sample)
        if gets:
            got.append(backlog.popleft())
            waiting.sort(key=age_key)  # stable: in order of arrival among equals
            assert got[-1] is waiting.pop(0)
    got += backlog
    assert got.pop() is None and sorted(int(sample.name) for sample in got) == list(range(len(steps)))


@given(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=20))
def test_overflow_counts_what_a_bounded_queue_would_drop(limit, sizes):
    overflow = Overflow(limit)
    firsts = [overflow.put(waiting) for waiting in sizes]
    beyond = [waiting + 1 - limit for waiting in sizes if waiting >= limit]
    assert (overflow.kept, overflow.most) == (len(beyond), max(beyond, default=0))
    assert sum(firsts) == bool(beyond)
