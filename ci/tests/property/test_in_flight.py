"""Prompts in flight over a chain of restarts: whatever dies when, each prompt of the epoch is trained once."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esgrpo.algo.resuming import Drawn, InFlight, reissued_words

PROMPTS = 12


class Restarts(RuleBasedStateMachine):
    """A data loader, a rollouter, a trainer and checkpoints; a crash falls back to the last checkpoint."""

    @initialize()
    def begin(self):
        self.start = 0
        self.go_on({"position": 0, "state": (0, []), "ended": []})

    def go_on(self, checkpoint):
        self.checkpoint, self.position, self.ended = checkpoint, checkpoint["position"], list(checkpoint["ended"])
        drawn, entries = checkpoint["state"]
        self.ledger, self.samples, self.number = InFlight(drawn, entries), {}, 0
        self.start += 1

    @rule()
    def feed(self):
        """The next prompt is issued: one to give back, else one of the data loader."""
        name, waiting = f"s{self.start}-{self.number}", bool(self.ledger.waiting)
        self.number += 1
        if waiting:
            self.samples[name] = self.ledger.again(name).prompt
        elif self.position < PROMPTS:
            self.samples[name] = self.position
            self.ledger.took(name, 0, self.position)
            self.position += 1

    @precondition(lambda self: self.samples)
    @rule(data=st.data())
    def generate(self, data):
        name = data.draw(st.sampled_from(sorted(self.samples)))
        self.ledger.generated(name, 4, 40)
        assert (self.ledger.open[name].responses, self.ledger.open[name].tokens) == (4, 40)

    @precondition(lambda self: self.samples)
    @rule(data=st.data())
    def end(self, data):
        """Trained or given up, in any order."""
        name = data.draw(st.sampled_from(sorted(self.samples)))
        self.ended.append(self.samples.pop(name))
        self.ledger.ended([name, name, "nobody"])

    @rule()
    def save(self):
        entries = [Drawn(**vars(entry)) for entry in self.ledger.to_give_back()]
        assert [entry.draw for entry in entries] == sorted(entry.draw for entry in entries)
        self.checkpoint = {"position": self.position, "state": (self.ledger.drawn, entries), "ended": list(self.ended)}

    @rule()
    def crash(self):
        self.go_on(self.checkpoint)

    @invariant()
    def every_draw_is_in_one_place(self):
        entries = [*self.ledger.waiting, *self.ledger.open.values()]
        held = [entry.prompt for entry in entries]
        assert Counter([*held, *self.ended]) == Counter(range(self.position))  # each once, none missing
        assert self.ledger.drawn == self.position
        assert all(entry.draw == entry.prompt + 1 for entry in entries)  # a prompt keeps its draw

    def teardown(self):
        """After the last start goes to its end, each prompt has been trained once."""
        while self.ledger.waiting or self.position < PROMPTS:
            self.feed()
        self.ended += self.samples.values()
        assert sorted(self.ended) == list(range(PROMPTS))


TestRestarts = Restarts.TestCase


def test_what_is_given_back_remembers_its_sample():
    ledger = InFlight()
    ledger.took("a", 0, "prompt a")
    ledger.took("b", 0, "prompt b")
    ledger.ended(["a"])
    entry, = ledger.to_give_back()
    assert (entry.draw, entry.prompt, entry.was) == (2, "prompt b", "b")
    later = InFlight(ledger.drawn, [entry])
    assert later.restored == 2 and later.again("c").was == "b" and later.again("d") is None


def test_wording():
    assert reissued_words(3, 4, 50, 8) == (
        "restart: 3 prompt groups were unfinished and start anew: 4 responses that had ended (50 tokens) are generated "
        "a second time, 8 that had not lose what they had")
