"""LogprobSums against one float per request, under everything that a scheduler does to a batch.

Batches change order and members, requests are preempted and come back, prefill chunks sample nothing, speculative
steps sample several tokens, and a request may end while later steps that contain it are still in flight.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from esgrpo.hooks.vllm.logprob_sums import LogprobSums

# plain: one row per request, no starts. filtered: rows of accepted tokens only, starts with the end appended.
# expanded: a row per scheduled logit, also for rejected drafts, with or without the end.
LAYOUTS = ["plain", "filtered", "expanded", "expanded-without-end"]
JUNK = [0.0, -3.5, float("-inf"), float("nan")]  # what may stand in a row that belongs to no sampled token


class Sums(RuleBasedStateMachine):
    @initialize(layout=st.sampled_from(LAYOUTS), depth=st.integers(0, 2), junk=st.sampled_from(JUNK))
    def start(self, layout, depth, junk):
        self.sums, self.layout, self.depth, self.junk = LogprobSums(), layout, depth, junk
        self.alive = {}  # the oracle: request -> sum
        self.counted = {}  # and the tokens in it
        self.flight = deque()  # scheduled steps whose output has not come yet: {request: scheduled tokens}
        self.arrived, self.order = 0, []

    @rule(count=st.integers(1, 3))
    def arrive(self, count):
        for _ in range(count):
            self.alive[f"r{self.arrived}"], self.counted[f"r{self.arrived}"] = 0.0, 0
            self.arrived += 1

    @precondition(lambda self: self.alive and len(self.flight) <= self.depth)
    @rule(data=st.data(), shuffle=st.booleans())
    def schedule(self, data, shuffle):
        """A step: some of the requests (the others wait or are preempted), in the old order or in a new one."""
        batch = data.draw(st.lists(st.sampled_from(sorted(self.alive)), min_size=1, unique=True), label="batch")
        if not shuffle:
            batch = [key for key in self.order if key in batch] + sorted(set(batch) - set(self.order))
        self.order = batch
        most = 1 if self.layout == "plain" else 3
        self.flight.append({key: data.draw(st.integers(1, most), label=key) for key in batch})

    @precondition(lambda self: self.flight)
    @rule(data=st.data(), with_logprobs=st.sampled_from([True, True, True, False]))
    def output(self, data, with_logprobs):
        scheduled = self.flight.popleft()
        sampled, rows, starts, expected, drawn = [], [], [], 0, {}
        for key, tokens in scheduled.items():
            values = data.draw(st.lists(st.floats(-9, 0, width=32), max_size=tokens), label=key)
            sampled.append([7] * len(values))
            starts.append(len(rows))
            padding = max(1, len(values)) if self.layout in ("plain", "filtered") else tokens
            rows += values + [self.junk] * (padding - len(values))
            if key in self.alive:
                drawn[key] = values
                expected += len(values)
                self.alive[key] += sum(values) if with_logprobs else 0.0
                self.counted[key] += len(values) if with_logprobs else 0
        ends = [] if self.layout == "expanded-without-end" else [len(rows)]
        table = np.array([[value, -1.0] for value in rows], dtype=np.float32)
        logprobs = SimpleNamespace(logprobs=table,
                                   cu_num_generated_tokens=None if self.layout == "plain" else starts + ends)
        output = SimpleNamespace(req_ids=list(scheduled), sampled_token_ids=sampled,
                                 req_id_to_index={key: index for index, key in enumerate(scheduled)},
                                 logprobs=logprobs if with_logprobs else None)
        assert self.sums.add(output, scheduled, self.alive, set(scheduled.values()) == {1}) == expected
        assert self.sums.several == {key: len(values) for key, values in drawn.items() if len(values) > 1}
        for key in data.draw(st.sets(st.sampled_from(sorted(drawn))) if drawn else st.just(set()), label="ends"):
            kept = data.draw(st.integers(min(1, len(drawn[key])), len(drawn[key])), label="kept")
            assert self.sums.trim(key, kept) == len(drawn[key]) - kept
            self.alive[key] -= sum(drawn[key][kept:]) if with_logprobs else 0.0
            self.counted[key] -= len(drawn[key]) - kept if with_logprobs else 0
            self.end_of(key)

    @rule()
    def nothing_sampled(self):
        """A step without sampling, as on an earlier pipeline stage."""
        output = SimpleNamespace(req_ids=[], sampled_token_ids=[], req_id_to_index={}, logprobs=None)
        assert self.sums.add(output, {}, self.alive) == 0

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), tracked=st.sampled_from([True, True, False]))
    def end(self, data, tracked):
        """The request is freed; its sum is asked for only when the segment book knows it."""
        self.end_of(data.draw(st.sampled_from(sorted(self.alive))), tracked)

    def end_of(self, key, tracked=True):
        self.sums.ended(key, sum(step.get(key, 0) for step in self.flight))
        expected = self.alive.pop(key)
        if tracked:
            assert self.sums.of(key) == (pytest.approx(expected, abs=1e-9), self.counted[key])
            assert self.sums.pop(key) == pytest.approx(expected, abs=1e-9)
            assert self.sums.pop(key) == 0.0

    @invariant()
    def no_leak(self):
        """What is kept belongs to the last batch, to a living request, or to a step in flight."""
        if hasattr(self, "sums"):
            assert len(self.sums._sums) == len(self.sums._order)
            assert not set(self.sums._order) & set(self.sums._parked)
            in_flight = {key for step in self.flight for key in step}
            assert set(self.sums._late) <= in_flight - set(self.alive)

    @invariant()
    def sums_of_the_living_are_exact(self):
        if hasattr(self, "sums"):
            for key, expected in self.alive.items():
                assert self.sums.of(key) == (pytest.approx(expected, abs=1e-9), self.counted[key])

    def teardown(self):
        """After one more batch that holds all living requests, nothing else is left."""
        if hasattr(self, "sums"):
            while self.flight:
                self.flight_is_drained()
            self.alive["last"], self.counted["last"] = 0.0, 0
            self.flight.append({key: 1 for key in self.alive})
            self.flight_is_drained()
            assert set(self.sums._order) == set(self.alive)
            assert not self.sums._parked and not self.sums._late

    def flight_is_drained(self):
        scheduled = self.flight.popleft()
        keys = list(scheduled)
        logprobs = SimpleNamespace(logprobs=np.full((len(keys), 1), -1.0), cu_num_generated_tokens=None)
        self.sums.add(SimpleNamespace(req_ids=keys, sampled_token_ids=[[7]] * len(keys), logprobs=logprobs,
                                      req_id_to_index={key: i for i, key in enumerate(keys)}), scheduled, self.alive)


TestSums = Sums.TestCase
