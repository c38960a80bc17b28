"""What a step of verl's own v1 separate_async begins, where its group filter will leave finished groups out."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import torch  # noqa: E402

from ci.tests.contract.queue_stub import Queue  # noqa: E402
from ci.tests.contract.v1_scenes import separate_async  # noqa: E402
from esgrpo import config, engine  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl import owned  # noqa: E402
from esgrpo.hooks.verl.metrics import decision_counts  # noqa: E402
from esgrpo.hooks.verl.overlap import at_version  # noqa: E402
from esgrpo.hooks.verl.v1.overlap import batches_ahead  # noqa: E402
from esgrpo.hooks.verl.v1.prompts import failed_groups, refill_ahead  # noqa: E402

BATCH, SIZE, WARMUP, STEPS = 8, 2, 1, 40
LIMITS = SimpleNamespace(mini_batch=BATCH)
WINDOW = {"version": 1, "tokens": 1000, "sync": 0.0, "used": 8.0, "capacity": 64, "surprisal": 1.0,
          "surprisal_tokens": 1}
ALIKE = 0.5  # share of groups whose rewards are


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    monkeypatch.setattr(decision_counts, "counts", type(decision_counts.counts)())
    monkeypatch.setenv(config.ENV_SEGMENT, '{"enable": true, "null_groups": "spare"}')
    monkeypatch.setattr(engine, "active_features", lambda: {"null_groups"})
    return decision_counts.counts


def trainer(monkeypatch, ahead: bool, mode: str = "separate_async", alike: float = ALIKE, overlap: bool = False,
            threshold: int = 8, restored: int = 0):
    """With verl's filter, its warm-up begun, or more groups `restored`."""
    made = separate_async(Queue(monkeypatch), [refill_ahead] * ahead + [batches_ahead] * overlap, mode=mode,
                          mini_batch=BATCH, size=SIZE, ahead=restored or WARMUP * BATCH, threshold=threshold,
                          warmup=WARMUP, metric="reward")
    kind = type(made.replay_buffer)
    monkeypatch.setattr(kind, "_evict_terminal_groups", wrapped(failed_groups, kind._evict_terminal_groups))
    made.draws, made.waits, made.alike = np.random.default_rng(1), 0, alike
    made.wait = lambda: wait(made)
    return made


def wait(made) -> None:
    made.waits += 1
    end_all(made)


def running(made) -> list[str]:
    return [key for key, tag in made.queue.tags.items() if tag.get("is_prompt") and tag["status"] != "finished"]


def in_process(made) -> int:
    return sum(bool(tag.get("is_prompt")) for tag in made.queue.tags.values())


def end_all(made) -> None:
    for name in running(made):
        made.queue.tags[name]["status"] = "finished"
        alike = made.draws.random() < made.alike
        for session in range(SIZE):
            key = f"{name}_{session}_0"
            made.queue.tags[key] = {"status": "success", "response_len": 3}
            made.queue.rows[key] = {"rm_scores": torch.tensor([0.0, 0.0, 0.0 if alike else float(session)])}


def step(made) -> tuple[int, int]:
    """verl's step as far as prompts go; while it trains all that is in process ends. (times that it waited for its
    batch, groups that the filter left out)"""
    before = made.waits
    made.prepare_step()
    batch, metrics = made.replay_buffer.sample(made.global_steps, "train", BATCH)
    assert len(batch.keys) == BATCH * SIZE
    made.queue.kv_clear(batch.keys, "train")
    end_all(made)
    made.global_steps += 1
    return made.waits - before, metrics.get("training/filter_groups/evicted_samples", 0)


@pytest.mark.hook("v1-refill-ahead")
def test_what_the_filter_will_leave_out_is_begun_before_the_batch_is_asked_for(monkeypatch, counts):
    made = trainer(monkeypatch, ahead=True)
    waited, left_out = zip(*(step(made) for _ in range(STEPS)), strict=True)
    assert sum(count > 0 for count in waited[1:]) < 0.1 * STEPS  # where the coin left out more than two deviations
    assert counts["replaced/groups"] == counts["replaced/null"] > 0.7 * sum(left_out)
    assert owned.of(made, owned.Ahead).in_process == WARMUP * BATCH


def test_plain_verl_waits_in_nearly_every_step(monkeypatch):
    """Negative control."""
    made = trainer(monkeypatch, ahead=False)
    waited, left_out = zip(*(step(made) for _ in range(STEPS)), strict=True)
    assert sum(count > 0 for count in waited) > 0.9 * STEPS and sum(left_out) > 0
    assert in_process(made) == WARMUP * BATCH


def test_without_such_groups_the_steps_are_verls(monkeypatch, counts):
    begun = []
    for ahead in (True, False):
        made = trainer(monkeypatch, ahead=ahead, alike=0.0)
        begun.append([(step(made), in_process(made)) for _ in range(STEPS)])
    assert begun[0] == begun[1] and not counts["replaced/groups"]


def test_what_is_in_process_comes_back_down(monkeypatch):
    made = trainer(monkeypatch, ahead=True)
    for _ in range(STEPS):
        step(made)
    assert in_process(made) > WARMUP * BATCH
    made.alike = 0.0
    for _ in range(STEPS):
        step(made)
    assert in_process(made) == WARMUP * BATCH


def test_running_groups_count_for_what_they_are_expected_to_be_worth(monkeypatch):
    """Of those that have not ended when a step begins the filter will leave out its share, too: they end as the batch
    is asked for, and the step does not wait for others."""
    waited = {}
    for ahead in (True, False):
        made = trainer(monkeypatch, ahead=ahead)
        for _ in range(STEPS // 2):
            step(made)
        made.waits = 0
        for _ in range(STEPS):
            made.prepare_step()
            end_all(made)  # what ran, and what this step has begun
            made.queue.kv_clear(made.replay_buffer.sample(made.global_steps, "train", BATCH)[0].keys, "train")
            made.global_steps += 1
        waited[ahead] = made.waits
    assert waited[True] < 0.1 * STEPS < waited[False]


def test_a_warm_up_that_is_left_out_still_is_the_measure(monkeypatch):
    """As of a checkpoint most of whose groups have no gradient: verl takes it for full."""
    made = trainer(monkeypatch, ahead=True, alike=1.0)
    end_all(made)
    # BATCH of BATCH that were seen and BATCH of others: half of what is begun will be left out, and two deviations
    assert refill_ahead.of_step(made) == int(2 * (2 * BATCH + 2 * 8**0.5)) - WARMUP * BATCH
    assert owned.of(made, owned.Ahead).in_process == WARMUP * BATCH


@pytest.mark.parametrize("features, measure", [({"null_groups"}, WARMUP * BATCH),
                                               ({"null_groups", "overlap"}, WARMUP * BATCH + 5)])
def test_what_a_checkpoint_brings_back_on_top_is_used_up(monkeypatch, features, measure):
    """Or each restart would leave more in process. The overlap controller begins its own on purpose."""
    monkeypatch.setattr(engine, "active_features", lambda: features)
    made = trainer(monkeypatch, ahead=True, alike=0.0, restored=WARMUP * BATCH + 5)
    step(made)
    assert owned.of(made, owned.Ahead).in_process == in_process(made) == measure


def test_what_is_too_old_is_no_reason_to_begin_more(monkeypatch):
    made = trainer(monkeypatch, ahead=True, threshold=1)
    end_all(made)
    made.global_steps = 3  # the warm-up is of version 1
    assert refill_ahead.of_step(made) == BATCH and not decision_counts.counts["replaced/groups"]
    buffer = made.replay_buffer
    evicted = buffer._evict_terminal_groups(3, "train", buffer._terminal_eviction_reasons(3, "train"))[0]
    assert len(evicted) == WARMUP * BATCH and owned.of(buffer, owned.Groups).filtered == 0


@pytest.mark.parametrize("mode", ["colocate_async", "sync"])
def test_other_trainers_begin_what_verl_begins(monkeypatch, mode):
    made = trainer(monkeypatch, ahead=True, mode=mode)
    end_all(made)
    assert len(made._next_train_batch()) == BATCH


def test_a_buffer_of_the_users_own_is_left_alone(monkeypatch):
    made = trainer(monkeypatch, ahead=True)
    made.replay_buffer = SimpleNamespace()
    assert len(made._next_train_batch()) == BATCH


def test_a_refill_is_as_large_as_verl_says(monkeypatch):
    made = trainer(monkeypatch, ahead=True)
    end_all(made)
    assert len(made._next_train_batch(3)) == 3


def test_the_overlap_controller_moves_what_is_wanted_in_process(monkeypatch):
    """Both on: its move is begun once, and what will be left out beside it."""
    monkeypatch.setenv(config.ENV_FACTS, json.dumps({"overlap_fixed": []}))
    made = trainer(monkeypatch, ahead=True, overlap=True)
    monkeypatch.setattr(batches_ahead, "at_weight_version", lambda trainer: None)
    step(made)
    assert owned.of(made, owned.Ahead).in_process == WARMUP * BATCH
    owned.of(made, owned.Ahead).owed = BATCH
    for _ in range(STEPS):
        step(made)
    ahead = owned.of(made, owned.Ahead)
    assert ahead.owed == 0 and ahead.in_process == (WARMUP + 1) * BATCH


def test_the_controller_hears_of_the_tokens_that_nobody_will_train(monkeypatch):
    """Rollout is as much slower as it makes groups for nothing."""
    from esgrpo.algo import overlap_signals

    made, told = trainer(monkeypatch, ahead=True), []
    monkeypatch.setattr(batches_ahead, "controller_for", lambda trainer: SimpleNamespace(start=None, limits=LIMITS))
    monkeypatch.setattr(at_version, "follow", lambda control, window, left, move: told.append(window.tokens))
    control = owned.of(made, owned.Overlap)
    control.applied = SimpleNamespace(concurrency=8)
    monkeypatch.setattr(overlap_signals, "window", lambda version, rollout, *rest: rollout)
    for _ in range(3):
        owned.of(made, owned.Steps).of_version = [SimpleNamespace(seconds=1.0)]
        owned.of(made, owned.RolloutSignals).windows = [WINDOW]
        monkeypatch.setattr(overlap_signals, "validation", lambda events: 0.0)
        batches_ahead.at_weight_version(made)
        control.applied = SimpleNamespace(concurrency=8)
        left_out = step(made)[1]
    assert left_out and len(told) == 2
    assert owned.of(made.replay_buffer, owned.Groups).evicted_tokens == left_out * SIZE * 3
    assert told[-1] < WINDOW["tokens"]
