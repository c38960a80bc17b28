"""SegmentMixin on vLLM's real sync and async scheduler classes, in this process, with scripted model output.

The CPU platform always turns async scheduling off, so the async class is driven here: the next step is scheduled before
the output of this one is known, as EngineCore.step_with_batch_queue does.
"""

from __future__ import annotations

import importlib.util
import random
from collections import defaultdict

import numpy as np
import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from bench.scheduler_cost import make_config, make_request, make_scheduler, model_output, upstream_class  # noqa: E402
from esgrpo import config as settings  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.slow]
EOS = 7
YIELD = {"enable": True, "segment_length": 16, "boundary": "yield"}
PRUNE = {"enable": True, "prune": {"repetition": {"enable": True}}}
QUIET = {"enable": True, "segment_length": 8}


@pytest.fixture(scope="module", params=["sync", "async"])
def configuration(request):
    """(config, upstream class); four requests run at once."""
    return make_config(request.param == "async", max_num_seqs=4, max_model_len=512), upstream_class(
        request.param == "async")


class Player:
    """Steps a scheduler with a model whose i-th token of a request is known: a loop, or `i` itself."""

    def __init__(self, configuration, segment: dict | None):
        from esgrpo.hooks.vllm.segment_mixin import mixed_with

        config, base = configuration
        self.lag = int(base.__name__ == "AsyncScheduler")
        self.scheduler = make_scheduler(config, 256, base if segment is None else mixed_with(base))
        if segment is not None:
            self.scheduler._segment_start(settings.parse(segment))
        self.made = defaultdict(int)  # tokens that the model sampled for a request, delivered or not
        self.tokens, self.logprobs, self.ends = defaultdict(list), defaultdict(list), {}
        self.script = {}
        self.queue = []  # scheduled, output not yet handed in

    def add(self, key: str, eos_at: int | None = None, loop: bool = False, **fields) -> None:
        request = make_request(key, **fields)
        request.sampling_params.stop_token_ids = [EOS]
        self.script[key] = eos_at, loop
        self.scheduler.add_request(request)

    def _sample(self, scheduled: dict[str, int]):
        order = list(scheduled)
        tokens = []
        for key in order:
            eos_at, loop = self.script[key]
            i = self.made[key]
            tokens.append(EOS if i == eos_at else 100 if loop else 100 + i)
            self.made[key] += 1
        values = np.asarray([-0.01 * (self.made[key] + len(key)) for key in order], dtype=np.float32)
        return model_output(order, np.asarray(tokens, dtype=np.int64), values)

    def step(self) -> None:
        """One turn of EngineCore's loop: fill the queue of batches first, then take the oldest output."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.queue.append((output, self._sample(output.num_scheduled_tokens)))
            if len(self.queue) <= self.lag and (output.num_scheduled_tokens or self.scheduler.has_requests()):
                return
        if self.queue:
            self.hand_in()

    def hand_in(self) -> None:
        for client in self.scheduler.update_from_output(*self.queue.pop(0)).values():
            for output in client.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                if output.new_logprobs is not None:
                    self.logprobs[output.request_id] += output.new_logprobs.logprobs[:, 0].tolist()
                if output.finish_reason is not None:
                    assert output.request_id not in self.ends, "ended twice"
                    payload = (output.kv_transfer_params or {}).get("esgrpo")
                    self.ends[output.request_id] = str(output.finish_reason), output.stop_reason, payload

    def run(self, steps: int = 1 << 20) -> None:
        while steps and (self.scheduler.has_requests() or self.queue):
            self.step()
            steps -= 1

    def counts(self) -> dict[str, int]:
        return {key: len(tokens) for key, tokens in self.tokens.items()}

    def assert_empty(self) -> None:
        scheduler, book = self.scheduler, self.scheduler.segment_book
        assert scheduler.get_request_counts() == (0, 0) and not scheduler.requests
        assert scheduler.get_kv_cache_usage() == 0.0
        assert (book.tracked, book.pending, book._groups) == ({}, {}, {})
        assert scheduler.segment_logprobs._late == {}

    def assert_accounted(self) -> None:
        """Window, spans and log-prob sums agree with what the client got."""
        assert self.scheduler.segment_set_version(1)["tokens"] == sum(self.counts().values())
        for key, (_, _, payload) in self.ends.items():
            assert sum(count for _, count in payload["spans"]) == len(self.tokens[key])
            assert payload["logprob_sum"] == pytest.approx(sum(self.logprobs[key]), abs=1e-4)


def test_a_loop_is_pruned_and_the_others_run_on(configuration):
    player = Player(configuration, PRUNE)
    for i in range(4):
        player.add(f"r{i}", loop=i == 1, member=i, max_tokens=60)
    player.run()
    assert player.counts() == {"r0": 60, "r1": 32, "r2": 60, "r3": 60}
    assert player.ends["r1"][:2] == ("length", "pruned")
    assert (player.ends["r1"][2]["outcome"], player.ends["r1"][2]["rule"]) == ("prune", "repetition")
    assert {player.ends[key][1] for key in ("r0", "r2", "r3")} == {None}
    player.assert_empty()
    player.assert_accounted()


def test_yield_is_exact(configuration):
    player = Player(configuration, YIELD)
    for i, done in enumerate((0, 5, 16, 31, 0, 3)):  # the last two wait for a slot
        player.add(f"r{i}", done_before=done, member=i, max_tokens=60)
    player.run()
    assert player.counts() == {"r0": 16, "r1": 11, "r2": 16, "r3": 1, "r4": 16, "r5": 13}
    assert {end[:2] for end in player.ends.values()} == {("length", "segment")}
    player.assert_empty()
    player.assert_accounted()


@pytest.mark.parametrize("members", [None, [0, 2, 4, 6]])
def test_finish_takes_running_and_waiting_in_one_step(configuration, members):
    player = Player(configuration, QUIET)
    for i in range(8):
        player.add(f"r{i}", group="ab"[i % 2], member=i, max_tokens=50)
    player.run(6)
    before = player.counts()
    assert player.scheduler.segment_finish("a", members, "group") == 4
    assert player.scheduler.segment_finish("nobody", None, "group") == 0
    player.run(1)
    assert {key: end[:2] for key, end in player.ends.items()} == dict.fromkeys(
        ("r0", "r2", "r4", "r6"), ("length", "pruned"))
    assert {key: len(player.tokens[key]) for key in player.ends} == {
        "r0": before["r0"] + 1, "r2": before["r2"] + 1, "r4": 0, "r6": 0}
    player.run()
    assert {key: len(player.tokens[key]) for key in ("r1", "r3", "r5", "r7")} == dict.fromkeys(
        ("r1", "r3", "r5", "r7"), 50)
    player.assert_empty()
    player.assert_accounted()


def test_a_window_counts_delivered_tokens_only(configuration):
    """Under async scheduling a response that ends by itself has one more row in flight, which upstream drops."""
    player = Player(configuration, QUIET)
    for i in range(6):
        player.add(f"r{i}", eos_at=3 + 4 * i, member=i, max_tokens=50)
    player.run()
    assert player.counts() == {f"r{i}": 4 + 4 * i for i in range(6)}
    assert sum(player.made.values()) == sum(player.counts().values()) + 6 * player.lag
    player.assert_empty()
    player.assert_accounted()


def test_versions_between_steps(configuration):
    player = Player(configuration, QUIET)
    for i in range(3):
        player.add(f"r{i}", member=i, max_tokens=30)
    windows = [player.scheduler.segment_set_version(5)]
    for version in (6, 7):
        player.run(10)
        windows.append(player.scheduler.segment_set_version(version))
    player.run()
    windows.append(player.scheduler.segment_set_version(8))
    spans = [end[2]["spans"] for end in player.ends.values()]
    assert [[version for version, _ in s] for s in spans] == [[5, 6, 7]] * 3
    assert [window["tokens"] for window in windows[1:]] == [sum(s[i][1] for s in spans) for i in range(3)]
    assert sum(window["tokens"] for window in windows) == 90


def test_abort_while_steps_are_in_flight(configuration):
    from vllm.v1.request import RequestStatus

    player = Player(configuration, QUIET)
    for i in range(6):
        player.add(f"r{i}", member=i, max_tokens=50)
    player.run(5)
    player.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    while player.queue:
        player.hand_in()
    delivered = sum(player.counts().values())
    assert player.scheduler.segment_set_version(1)["tokens"] == delivered
    player.add("next", max_tokens=5)
    player.run()
    assert player.counts()["next"] == 5
    player.assert_empty()


def test_preempted_requests_stay_in_the_book(configuration):
    """pause(keep, clear_cache=True) recomputes the KV cache of what runs; nothing is lost or counted twice."""
    player = Player(configuration, YIELD)
    for i in range(4):
        player.add(f"r{i}", member=i, max_tokens=50)
    player.run(6)
    while player.queue:  # EngineCore waits for what is in flight before it clears
        player.hand_in()
    player.scheduler.reset_prefix_cache(reset_running_requests=True)
    player.run()
    assert player.counts() == {f"r{i}": 16 for i in range(4)}
    player.assert_empty()
    player.assert_accounted()


def test_without_a_decision_the_outputs_are_upstreams(configuration):
    seen = []
    for segment in (None, QUIET):
        player = Player(configuration, segment)
        for i in range(9):
            player.add(f"r{i}", eos_at=5 * i + 2 if i % 2 else None, member=i, max_tokens=20 + i)
        player.run()
        seen.append((dict(player.tokens), dict(player.logprobs), {k: e[:2] for k, e in player.ends.items()}))
    assert seen[0] == seen[1]


def test_the_repetition_rule_is_vllms():
    """`repeats` against upstream's own function, on random and on periodic tails."""
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.core.sched.utils import check_sequence_repetition

    from esgrpo.algo.segments import repeats

    rng, found = random.Random(0), 0
    for _ in range(4000):
        low = rng.randint(1, 4)
        rule = {"min_pattern_size": low, "max_pattern_size": rng.randint(low, 9), "min_count": rng.randint(2, 5)}
        pattern = [rng.randrange(3) for _ in range(rng.randint(1, 10))]
        tokens = [rng.randrange(3) for _ in range(rng.randint(0, 20))] + pattern * rng.randint(1, 6)
        if rng.random() < 0.3:
            tokens[rng.randrange(len(tokens))] = 9
        expected = check_sequence_repetition(tokens, RepetitionDetectionParams(**rule))
        assert repeats(tokens, settings.Repetition(enable=True, **rule)) == expected, (tokens, rule)
        found += expected
    assert 400 < found < 3600
