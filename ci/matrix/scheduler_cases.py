"""What every scheduler class must do with the mixin in front: one function a case, the same for all vLLM releases.

`new(segment, **options)` makes a Player; segment None is upstream's own class, the negative control: there nothing is
pruned and nothing yields. Options: `blocks`, `budget` in tokens a step (prompts longer than that are chunked), and
`caching` for the prefix cache.
"""

from __future__ import annotations

import inspect

from ci.matrix.scheduler_player import LOOP, TOLERANCE, expect

YIELD = {"enable": True, "segment_length": 16, "boundary": "yield"}
# the scripted model gives its tokens a surprisal of up to 0.7
SHORT_LOOPS = {"enable": True, "min_span": 32, "max_pattern_size": 4, "max_surprisal": 1.0, "check_interval": 32}
PRUNE = {"enable": True, "prune": {"repetition": SHORT_LOOPS}}
DOUBT = {"enable": True, "prune": {"repetition": {**SHORT_LOOPS, "max_surprisal": 0.01}}}
VERDICTS = {"enable": True, "prune": {"verdict": {"enable": True, "check_interval": 16}, "audit": {"enable": True}}}
QUIET = {"enable": True, "segment_length": 8}
SCARCE = 14  # blocks of 16 tokens: four requests of 16 + 50 tokens need 20
PRUNED_AT = 32  # looked at every 32 tokens
LENGTH = 60
DRAFTS = 8  # tokens a step, beside the model's own
CHUNK = 32  # tokens of a prompt that one step prefills: two blocks


class Unsupported(Exception):
    """The release has no such thing."""


def _finished(player) -> None:
    player.assert_empty()
    player.assert_accounted()


def a_loop_is_pruned_and_the_others_run_on(new):
    for segment in (None, PRUNE):
        player = new(segment)
        for i in range(4):
            player.add(f"r{i}", loop=i == 1, member=i, max_tokens=LENGTH)
        player.run()
        looped = LENGTH if segment is None else PRUNED_AT
        expect(player.counts(), {"r0": LENGTH, "r1": looped, "r2": LENGTH, "r3": LENGTH}, f"tokens, segment={segment}")
    expect(player.ends["r1"][:2], ("length", "pruned"), "end of the loop")
    expect((player.ends["r1"][2]["outcome"], player.ends["r1"][2]["rule"]), ("prune", "repetition"), "payload")
    expect({player.ends[key][1] for key in ("r0", "r2", "r3")}, {None}, "stop reason of the others")
    _finished(player)


def a_loop_that_the_model_doubts_runs_on(new):
    player = new(DOUBT)
    player.add("r0", loop=True, max_tokens=LENGTH)
    player.run()
    expect((player.counts(), player.ends["r0"][1]), ({"r0": LENGTH}, None), "tokens and stop reason")
    _finished(player)


def an_audited_loop_is_handed_back_with_its_surprisal_and_let_off(new):
    audited = {"enable": True, "prune": {"repetition": SHORT_LOOPS, "audit": {"enable": True}}}
    player = new(audited)
    player.add("r0", loop=True, max_tokens=LENGTH)
    player.add("r1", loop=True, member=1, max_tokens=LENGTH, exempt=True)
    player.run()
    expect(player.counts(), {"r0": PRUNED_AT, "r1": LENGTH}, "tokens")
    payload = player.ends["r0"][2]
    expect((player.ends["r0"][1], payload["outcome"], payload["rule"]), ("segment", "yield", "repetition"), "end")
    surprisal = -sum(player.logprobs["r0"]) / PRUNED_AT
    expect(abs(payload["surprisal"] - surprisal) < TOLERANCE, True, f"surprisal {payload['surprisal']}, {surprisal}")
    expect(player.ends["r1"][1], None, "stop reason of the exempted")
    _finished(player)


def a_loop_is_proven_across_attempts(new):
    """16 tokens in each of two attempts; without the marks of the first the second proves nothing."""
    for carries in (True, False):
        player = new({**YIELD, "prune": {"repetition": {**SHORT_LOOPS, "check_interval": 8}}})
        player.add("r0", loop=True, max_tokens=LENGTH)
        player.run()
        expect((player.counts(), player.ends["r0"][1]), ({"r0": 16}, "segment"), "first attempt")
        player.add("r1", loop=True, done_before=16, max_tokens=LENGTH, prompt=[1] * 16 + player.tokens["r0"],
                   **({"marks": player.ends["r0"][2]["marks"]} if carries else {}))
        player.run()
        expect((len(player.tokens["r1"]), player.ends["r1"][1]), (16, "pruned" if carries else "segment"), "second")
        _finished(player)


def yield_is_exact(new):
    for segment in (None, YIELD):
        player = new(segment)
        for i, done in enumerate((0, 5, 16, 31, 0, 3)):  # the last two wait for a slot
            player.add(f"r{i}", done_before=done, member=i, max_tokens=LENGTH)
        player.run()
        if segment is None:
            expect(set(player.counts().values()), {LENGTH}, "upstream's lengths")
    expect(player.counts(), {"r0": 16, "r1": 11, "r2": 16, "r3": 1, "r4": 16, "r5": 13}, "lengths")
    expect({end[:2] for end in player.ends.values()}, {("length", "segment")}, "ends")
    _finished(player)


def _finish_in_one_step(new, members):
    player = new(QUIET)
    for i in range(8):
        player.add(f"r{i}", group="ab"[i % 2], member=i, max_tokens=50)
    player.run(6)
    before = player.counts()
    expect(player.scheduler.segment_finish("a", members, "group"), 4, "members found")
    expect(player.scheduler.segment_finish("nobody", None, "group"), 0, "members of a group that is not here")
    player.run(1)
    ended, others = ("r0", "r2"), ("r1", "r3", "r5", "r7")
    expect({key: end[:2] for key, end in player.ends.items()}, dict.fromkeys(ended, ("length", "pruned")), "ends")
    expect({key: len(player.tokens[key]) for key in ended}, {key: before[key] + 1 for key in ended}, "their tokens")
    player.run()
    waited = ("r4", "r6")  # without a place: no response is empty, they end with their first token
    expect({key: (len(player.tokens[key]), *player.ends[key][:2]) for key in waited},
           dict.fromkeys(waited, (1, "length", "pruned")), "those that waited")
    expect({key: len(player.tokens[key]) for key in others}, dict.fromkeys(others, 50), "tokens of the others")
    _finished(player)


def finish_takes_a_whole_group_in_one_step(new):
    _finish_in_one_step(new, None)


def finish_takes_named_members_in_one_step(new):
    _finish_in_one_step(new, [0, 2, 4, 6])


def a_window_counts_delivered_tokens_only(new):
    """Under async scheduling a response that ends by itself has one more row in flight, which upstream drops."""
    player = new(QUIET)
    for i in range(6):
        player.add(f"r{i}", eos_at=3 + 4 * i, member=i, max_tokens=50)
    player.run()
    expect(player.counts(), {f"r{i}": 4 + 4 * i for i in range(6)}, "tokens")
    expect(sum(player.made.values()), sum(player.counts().values()) + 6 * player.lag, "tokens sampled")
    _finished(player)


def an_accepted_draft_may_go_on_after_the_end(new):
    """Upstream trims what follows it, and so do sums and window; drafts of the others run on, some are rejected."""
    for segment in (None, QUIET):
        player = new(segment)
        if player.lag and not hasattr(player.scheduler, "_spec_token_placeholders"):
            raise Unsupported("this async scheduler takes no drafts by hand")
        player.speculate(DRAFTS)
        for i in range(8):
            player.add(f"r{i}", eos_at=2 + 5 * i if i < 6 else None, member=i, max_tokens=41)
        player.run()
        expect(player.counts(), {f"r{i}": min(3 + 5 * i, 41) if i < 6 else 41 for i in range(8)},
               f"tokens, segment={segment}")
        expect(player.trimmed > 0, True, "tokens were trimmed")
    _finished(player)


def versions_between_steps(new):
    player = new(QUIET)
    for i in range(3):
        player.add(f"r{i}", member=i, max_tokens=30)
    windows = [player.scheduler.segment_set_version(5)]
    for version in (6, 7):
        player.run(10)
        windows.append(player.scheduler.segment_set_version(version))
    player.run()
    windows.append(player.scheduler.segment_set_version(8))
    spans = [end[2]["spans"] for end in player.ends.values()]
    expect([[version for version, _ in s] for s in spans], [[5, 6, 7]] * 3, "versions")
    expect([window["tokens"] for window in windows[1:]], [sum(s[i][1] for s in spans) for i in range(3)], "windows")
    expect(sum(window["tokens"] for window in windows), 90, "tokens in all windows")


def _abort_all(player) -> None:
    player.scheduler.finish_requests(list(player.scheduler.requests), _aborted())
    player.drain()
    delivered = sum(player.counts().values())
    expect(player.scheduler.segment_set_version(1)["tokens"], delivered, "tokens of the window")
    player.add("next", max_tokens=5)
    player.run()
    expect(player.counts()["next"], 5, "tokens of the next request")
    player.assert_empty()


def abort_while_steps_are_in_flight(new):
    player = new(QUIET)
    for i in range(6):
        player.add(f"r{i}", member=i, max_tokens=50)
    player.run(5)
    _abort_all(player)


def abort_while_a_prefill_is_in_flight(new):
    """After every step of chunked prompts once: what is in flight is a chunk, the last chunk, or a decode."""
    for steps in range(1, 7):
        player = new(QUIET, budget=20)
        for i in range(2):
            player.add(f"r{i}", member=i, max_tokens=50, prompt_tokens=30)
        player.run(steps)
        _abort_all(player)


def steps_that_only_decode_are_timed_and_aborted_requests_are_away_until_they_come_back(new):
    player = new(QUIET)
    now = [0.0]
    player.scheduler.segment_occupancy._clock = lambda: now[0]

    def window_of(steps, version):
        for _ in range(steps):
            now[0] += 0.5
            player.step()
        return player.scheduler.segment_set_version(version)

    for i in range(3):
        player.add(f"r{i}", member=i, max_tokens=40)
    pace = window_of(11, 1)["pace"]
    expect((pace["steps"], pace["batch"], pace["seconds"]),
           (10 - player.lag, 3 * (10 - player.lag), (10 - player.lag) * 0.5), "steps without the one that prefills")
    player.scheduler.finish_requests(list(player.scheduler.requests), _aborted())
    player.drain()
    expect(window_of(0, 2)["away"], 0.0, "request-seconds away before anybody comes back")
    now[0] += 2.0
    for i in range(2):
        player.add(f"again{i}", member=i, max_tokens=5, done_before=9)
    now[0] += 3.0
    player.add("another", member=7, max_tokens=5)
    expect(window_of(0, 3)["away"], 4.0, "request-seconds of the two that came back")
    player.run()
    player.assert_empty()


def _aborted():
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def preempted_requests_stay_in_the_book(new):
    """Too few blocks: the scheduler preempts what runs and recomputes it; nothing is lost or counted twice."""
    preempted = []
    for segment in (None, QUIET):
        player = new(segment, blocks=SCARCE)
        for i in range(4):
            player.add(f"r{i}", member=i, max_tokens=50)
        while player.scheduler.has_requests() or player.queue:
            player.step()
            preempted += [key for key, r in player.scheduler.requests.items() if r.status.name == "PREEMPTED"]
        expect(player.counts(), {f"r{i}": 50 for i in range(4)}, f"tokens, segment={segment}")
    expect(bool(preempted), True, "somebody was preempted")
    _finished(player)


def _preemptions(new, headroom: float):
    """(times somebody was preempted, requests that waited for headroom) of twelve requests in too few blocks."""
    player, before, times = new({**QUIET, "kv_headroom": headroom}, blocks=SCARCE), set(), 0
    for i in range(12):
        player.add(f"r{i}", member=i, max_tokens=LENGTH)
    while player.scheduler.has_requests() or player.queue:
        player.step()
        now = {key for key, r in player.scheduler.requests.items() if r.status.name == "PREEMPTED"}
        times, before = times + len(now - before), now
    expect(player.counts(), {f"r{i}": LENGTH for i in range(12)}, f"tokens, kv_headroom={headroom}")
    held = player.scheduler.segment_set_version(1)["held"]
    player.assert_empty()
    return times, held


def fewer_are_preempted_with_headroom(new):
    (without, never), (times, held) = _preemptions(new, 0.0), _preemptions(new, 0.4)
    expect((without > 0, never), (True, 0), "somebody is preempted without it, and nobody waits for it")
    expect((times < without, held > 0), (True, True), f"{times} instead of {without} preemptions, {held} waited")


def _reset_the_cache(new, drain: bool):
    lengths = []
    for segment in (None, YIELD):
        player = new(segment)
        known = inspect.signature(player.scheduler.reset_prefix_cache).parameters
        if segment is None and "reset_running_requests" not in known:
            raise Unsupported("reset_prefix_cache has no reset_running_requests")
        for i in range(4):
            player.add(f"r{i}", member=i, max_tokens=50)
        player.run(6)
        if drain:
            player.drain()
        player.scheduler.reset_prefix_cache(reset_running_requests=True)
        player.run()
        lengths.append(player.counts())
    expect(lengths, [{f"r{i}": 50 for i in range(4)}, {f"r{i}": 16 for i in range(4)}], "tokens, plain and yielding")
    _finished(player)
    return player


def a_cache_reset_between_steps_loses_nothing(new):
    """pause(keep, clear_cache=True) recomputes the KV cache of what runs, after what is in flight has come in."""
    player = _reset_the_cache(new, drain=True)
    for key, tokens in player.tokens.items():
        expect(tokens, [LOOP + i for i in range(16)], f"tokens of {key}")


def a_cache_reset_while_a_step_is_in_flight(new):
    """Under async scheduling upstream drops the output of that step; the worker samples it again."""
    _reset_the_cache(new, drain=False)


def _pause(player, paused: bool) -> None:
    """PAUSED_ALL, as pause_generation(mode="keep") sets it; the engine then steps until nothing is in flight."""
    try:
        from vllm.v1.core.sched.interface import PauseState
    except ImportError:
        raise Unsupported("the scheduler cannot be paused") from None
    player.scheduler.set_pause_state(PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED)
    if paused:
        while player.queue:
            player.step()


def _sync_with_kept_requests(new, rebuild: bool):
    """Four run, two wait; weights come while nothing is in flight, and again."""
    lengths = []
    for segment in (None, QUIET):
        player = new(segment)
        for i in range(6):
            player.add(f"r{i}", member=i, max_tokens=50)
        spans, windows = [], []
        for version in (5, 6, 7):
            _pause(player, True)
            if rebuild and version > 5:
                player.scheduler.reset_prefix_cache(reset_running_requests=True)
            if segment is not None:
                spans.append(player.counts())
                windows.append(player.scheduler.segment_set_version(version))
            frozen = player.counts()
            player.run(3)
            expect(player.counts(), frozen, "tokens while paused")
            _pause(player, False)
            player.run(12)
        player.run()
        lengths.append({key: list(tokens) for key, tokens in player.tokens.items()})
    if not rebuild:  # vLLM < 0.23 alone loses a token of each request at every reset of the cache
        expect(lengths[0], lengths[1], "tokens without the mixin and with it")
    expect(lengths[1], {f"r{i}": [LOOP + j for j in range(50)] for i in range(6)}, "every token once")
    for key, (_, _, payload) in player.ends.items():
        counts = [before.get(key, 0) for before in spans[1:]] + [50]
        wanted = [[version, after - before] for version, before, after in
                  zip((5, 6, 7), [0, *counts], counts, strict=False) if after > before]
        expect(payload["spans"], wanted, f"spans of {key}")
    expect(len(player.ends["r0"][2]["spans"]), 3, "versions that the first saw")
    expect([window["in_flight"] for window in windows], [0, 0, 0], "tokens in flight at a sync")
    expect([window["kept"] for window in windows], [6, 6, 6], "kept requests")
    last = player.scheduler.segment_set_version(8)
    expect(sum(window["tokens"] for window in [*windows, last]), 300, "tokens of all windows")
    expect(last["kept"], 0, "kept when all have ended")
    off = max(abs(end[2]["logprob_sum"] - sum(player.logprobs[key])) for key, end in player.ends.items())
    expect(off < TOLERANCE, True, f"log-prob sums, off by {off}")
    player.assert_empty()
    return windows


def requests_kept_over_a_weight_sync_keep_their_kv(new):
    windows = _sync_with_kept_requests(new, rebuild=False)
    expect([window["kv_ages"] for window in windows], [[[0, 6]], [[0, 2], [1, 4]], [[0, 2], [2, 4]]], "ages of KV")


def blocks_computed_over_a_weight_sync_are_never_found(new):
    """A sync between two prefill chunks: what follows is computed from the first one's old KV, and so is the response.

    Others may not find such blocks. They do find those of a request that arrived after the sync.
    """
    from vllm.v1.core.block_pool import BlockPool

    if not hasattr(BlockPool, "evict_blocks"):
        raise Unsupported("no request is kept over a sync: single blocks cannot leave the prefix cache")
    for segment in (None, {**QUIET, "sync": {"requests": "keep"}}):
        player = new(segment, budget=CHUNK, caching=True)
        manager = player.scheduler.kv_cache_manager

        def found(key, manager=manager) -> list[bool]:
            """Whether the prefix cache has a block, for all that the request holds."""
            held = set(manager.get_block_ids(key)[0])
            return [block.block_hash is not None for block in manager.block_pool.blocks if block.block_id in held]

        player.add("old", prompt_tokens=3 * CHUNK, max_tokens=2 * CHUNK)
        player.run(1)
        _pause(player, True)
        expect(any(found("old")), True, "the first chunk's blocks are in the prefix cache")
        player.scheduler.reset_prefix_cache()
        _pause(player, False)
        player.run(CHUNK)
        expect(len(player.tokens["old"]) > 0, True, "the prompt is through")
        expect(any(found("old")), segment is None, "blocks of old weights are in the prefix cache")
        player.add("new", prompt_tokens=3 * CHUNK, max_tokens=2 * CHUNK)
        player.run(CHUNK)
        expect(any(found("new")), True, "blocks of new weights are in the prefix cache")
        player.run()
    _finished(player)


def requests_kept_over_a_weight_sync_have_new_kv_after_a_rebuild(new):
    windows = _sync_with_kept_requests(new, rebuild=True)
    expect([window["kv_ages"] for window in windows], [[[0, 6]]] * 3, "ages of KV")


def a_group_is_told_its_segment_length(new):
    """Shorter and tail class: those that may be moved come back at the next boundary, once; the others run on."""
    for told in (False, True):
        player = new({"enable": True, "segment_length": 1024})
        for i in range(4):
            player.add(f"r{i}", group="ab"[i % 2], member=i, max_tokens=50, move=i < 2)
        player.run(6)
        before = player.counts()
        if told:
            expect(player.scheduler.segment_progress("a"), {0: before["r0"], 2: before["r2"]}, "progress")
            expect(player.scheduler.segment_set_length("a", 16, True), 2, "members that heard it")
            expect(player.scheduler.segment_set_length("nobody", 16, True), 0, "members of nobody")
        player.run()
        expect(player.counts(), {"r0": 16 if told else 50, "r1": 50, "r2": 50, "r3": 50}, f"tokens, told={told}")
    expect(player.ends["r0"][1], "segment", "end of the moved one")
    expect((player.ends["r0"][2]["outcome"], player.ends["r0"][2]["rule"]), ("yield", "move"), "payload")
    expect((player.ends["r1"][2]["boundaries"], player.ends["r2"][2]["boundaries"]), (0, 3), "boundaries")
    _finished(player)


def looks_are_taken_at_their_distance_and_told_once(new):
    """Without learned verdicts nobody looks; a look says what the client got until then."""
    for segment in ({"enable": True}, VERDICTS):
        player = new(segment)
        for i in range(3):
            player.add(f"r{i}", group="ab"[i // 2], member=i, max_tokens=50)
        player.run(42)
        found = player.scheduler.segment_take_looks(["a", "nobody"])
        at = {i: len(player.tokens[f"r{i}"]) // 16 * 16 for i in range(2)}
        expect(min(at.values()) >= 32, True, "members were looked at more than once")
        expect({i: looks[-1][0] for i, looks in found.get("a", {}).items()}, at if segment is VERDICTS else {}, "looks")
        expect(player.scheduler.segment_take_looks(["a"]), {}, "the same looks again")
        for i, looks in found.get("a", {}).items():
            for number, (tokens, newest, mean, recent) in enumerate(looks, 1):
                delivered = player.tokens[f"r{i}"][tokens - 16:tokens]
                expect((tokens, newest), (16 * number, delivered), "a look")
                values = player.logprobs[f"r{i}"][:tokens]
                expect(abs(mean + sum(values) / tokens) < TOLERANCE, True, f"surprisal {mean}")
                expect(abs(recent + sum(values[-16:]) / 16) < TOLERANCE, True, f"recent surprisal {recent}")
        player.run()
        expect(player.scheduler.segment_take_looks(["a", "b"]), {}, "looks at what has ended")
        expect(set(player.counts().values()), {50}, "tokens: a look ends nothing")
        _finished(player)


def without_a_decision_the_outputs_are_upstreams(new):
    seen = []
    for segment in (None, QUIET):
        player = new(segment)
        for i in range(9):
            player.add(f"r{i}", eos_at=5 * i + 2 if i % 2 else None, member=i, max_tokens=20 + i)
        player.run()
        expect(hasattr(player.scheduler, "segment_book"), segment is not None, "the mixin is there")
        seen.append((dict(player.tokens), dict(player.logprobs), {k: e[:2] for k, e in player.ends.items()}))
    expect(seen[1], seen[0], "tokens, log-probs and ends")


CASES = (
    without_a_decision_the_outputs_are_upstreams,
    a_loop_is_pruned_and_the_others_run_on,
    a_loop_that_the_model_doubts_runs_on,
    an_audited_loop_is_handed_back_with_its_surprisal_and_let_off,
    a_loop_is_proven_across_attempts,
    yield_is_exact,
    finish_takes_a_whole_group_in_one_step,
    finish_takes_named_members_in_one_step,
    a_window_counts_delivered_tokens_only,
    an_accepted_draft_may_go_on_after_the_end,
    versions_between_steps,
    abort_while_steps_are_in_flight,
    abort_while_a_prefill_is_in_flight,
    steps_that_only_decode_are_timed_and_aborted_requests_are_away_until_they_come_back,
    preempted_requests_stay_in_the_book,
    fewer_are_preempted_with_headroom,
    a_cache_reset_between_steps_loses_nothing,
    a_cache_reset_while_a_step_is_in_flight,
    requests_kept_over_a_weight_sync_keep_their_kv,
    requests_kept_over_a_weight_sync_have_new_kv_after_a_rebuild,
    blocks_computed_over_a_weight_sync_are_never_found,
    a_group_is_told_its_segment_length,
    looks_are_taken_at_their_distance_and_told_once,
)
