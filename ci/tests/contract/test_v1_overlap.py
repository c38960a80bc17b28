"""The overlap control on verl's own v1 trainer separate_async and its replay buffer: what is begun in a step."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

from ci.tests.contract.queue_stub import Queue  # noqa: E402
from ci.tests.contract.v1_scenes import separate_async  # noqa: E402
from esgrpo import config, engine, records  # noqa: E402
from esgrpo.hooks.verl import owned  # noqa: E402
from esgrpo.hooks.verl.metrics import decision_counts  # noqa: E402
from esgrpo.hooks.verl.v1.overlap import batches_ahead  # noqa: E402
from esgrpo.hooks.verl.v1.prompts import carried_groups  # noqa: E402

MINI_BATCH, TRIGGERS, SIZE = 4, 2, 2
SPEED = 100.0  # tokens/s of a group in flight
BATCH = MINI_BATCH * TRIGGERS
THRESHOLD = 4
FIXED = ["concurrency", "trigger"]


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv(records.ENV_RUN_DIR, str(tmp_path))
    monkeypatch.setenv(config.ENV_SEGMENT, '{"observe": true, "overlap": {"enable": true, "age_scale": 40}}')
    monkeypatch.setenv(config.ENV_FACTS, json.dumps({"overlap_fixed": FIXED}))
    monkeypatch.setattr(engine, "active_features", lambda: {"observe", "overlap"})
    monkeypatch.setattr(decision_counts, "counts", type(decision_counts.counts)())
    return str(tmp_path)


def trainer(monkeypatch, controlled: bool, ahead: int = BATCH, mode: str = "separate_async", warmup: float = 0.0):
    """Before its first step."""
    made = separate_async(Queue(monkeypatch), [batches_ahead] * controlled, mode=mode, mini_batch=MINI_BATCH,
                          triggers=TRIGGERS, size=SIZE, ahead=ahead, threshold=THRESHOLD, warmup=warmup)
    made.wait = lambda: end_oldest(made)
    return made


def in_process(made) -> list[str]:
    """Oldest first."""
    prompts = {key: tag["global_steps"] for key, tag in made.queue.tags.items() if tag.get("is_prompt")}
    return sorted(prompts, key=prompts.get)


def end_oldest(made) -> None:
    """What happens while verl waits."""
    name = next(name for name in in_process(made) if made.queue.tags[name]["status"] != "finished")
    made.queue.tags[name]["status"] = "finished"
    made.queue.tags[f"{name}_0_0"] = {"status": "success"}


def step(made, train: float) -> int:
    """verl's step as far as prompts go, then what would have been measured of it, with `train` seconds of training;
    rollout is the faster the more is in flight. Returns the evicted groups."""
    made.prepare_step()
    flying, evicted = len(in_process(made)) - BATCH / 2, 0
    for _ in range(TRIGGERS):
        batch, metrics = made.replay_buffer.sample(made.global_steps, "train", MINI_BATCH)
        evicted += metrics.get("training/off_policy/evicted_samples", 0)
        made.queue.kv_clear(batch.keys, "train")
    tokens, sync = 1000 * BATCH, 0.2
    rollout = tokens / (SPEED * flying)
    seconds = max(rollout, train + sync)
    owned.of(made, owned.Steps).of_version = [Event(
        seconds=seconds, groups=BATCH, tokens=tokens, age=1.0, entropy=None,
        loss=0.1, kl=None, grad_norm=1.0,
        spent={"wait": seconds - train - sync, "train": train, "sync": sync, "other": 0.0})]
    owned.of(made, owned.RolloutSignals).windows = [{
        "version": made.global_steps, "tokens": tokens, "sync": 6.4, "used": flying * rollout * SIZE, "capacity": 64,
        "surprisal": 1.0, "surprisal_tokens": 1}]
    made.global_steps += 1
    return evicted


class Event(dict):
    __getattr__ = dict.__getitem__


SLOW_ROLLOUT, SLOW_TRAINING = 1.5, 20.0  # seconds of training; a batch takes rollout 6.7 s at first


@pytest.mark.hook("v1-batches-ahead")
def test_while_rollout_is_the_slower_side_more_is_begun(run_dir, monkeypatch):
    made = trainer(monkeypatch, controlled=True)
    assert sum(step(made, SLOW_ROLLOUT) for _ in range(8)) == 0  # nothing is begun in order to be dropped
    moves = records.read(run_dir, "moves")
    assert moves and all(move["cause"] == "rates" for move in moves)
    for move in moves:
        same = [name for name in FIXED if move["before"][name] == move["after"][name]]
        assert same == FIXED and move["after"]["staleness"] > move["before"]["staleness"]
    assert len(in_process(made)) == round(moves[-1]["after"]["staleness"] * BATCH) > BATCH
    assert made.replay_buffer.max_off_policy_threshold > THRESHOLD
    raised = [move["also"]["max_off_policy_threshold"] for move in moves if move["also"]]
    assert raised[0][0] == THRESHOLD and raised[-1][1] == made.replay_buffer.max_off_policy_threshold
    assert carried_groups.pool_of(made).threshold == made.replay_buffer.max_off_policy_threshold
    assert decision_counts.counts["overlap/moves"] == len(moves)
    assert decision_counts.counts["overlap/versions"] == 6  # the first is warm-up, the last not looked at yet


def test_plain_verl_has_the_same_number_in_process_whatever_the_rates_are(run_dir, monkeypatch):
    """Negative control."""
    for rates in (SLOW_ROLLOUT, SLOW_TRAINING):
        made = trainer(monkeypatch, controlled=False)
        for _ in range(8):
            step(made, rates)
            assert len(in_process(made)) == BATCH
        assert made.replay_buffer.max_off_policy_threshold == THRESHOLD
    assert records.read(run_dir, "moves") == []


def test_while_training_is_the_slower_side_less_is_begun_and_every_batch_is_filled(run_dir, monkeypatch):
    made = trainer(monkeypatch, controlled=True, ahead=3 * BATCH)
    for _ in range(10):
        step(made, SLOW_TRAINING)
    assert len(in_process(made)) < 3 * BATCH
    assert len(in_process(made)) == round(records.read(run_dir, "moves")[-1]["after"]["staleness"] * BATCH)
    assert made.replay_buffer.max_off_policy_threshold == THRESHOLD  # what was begun before may be that old


def test_what_was_raised_beyond_the_threshold_plain_verl_would_drop(run_dir, monkeypatch):
    """Negative control of the threshold that moves: the same prompts in process under verl's own."""
    made = trainer(monkeypatch, controlled=False, ahead=THRESHOLD * BATCH)
    assert sum(step(made, SLOW_ROLLOUT) for _ in range(THRESHOLD + 2)) > 0


def test_a_threshold_that_was_set_by_hand_bounds_what_is_begun(run_dir, monkeypatch):
    monkeypatch.setenv(config.ENV_FACTS, json.dumps({"overlap_fixed": [*FIXED, "max_off_policy_threshold"]}))
    made = trainer(monkeypatch, controlled=True)
    assert sum(step(made, SLOW_ROLLOUT) for _ in range(8)) == 0
    assert len(in_process(made)) == (THRESHOLD - 2) * BATCH
    assert made.replay_buffer.max_off_policy_threshold == THRESHOLD


@pytest.mark.parametrize("mode, fixed", [("colocate_async", FIXED), ("separate_async", [*FIXED, "staleness"])])
def test_elsewhere_and_what_was_set_by_hand_stays(run_dir, monkeypatch, mode, fixed):
    monkeypatch.setenv(config.ENV_FACTS, json.dumps({"overlap_fixed": fixed}))
    made = trainer(monkeypatch, controlled=True, mode=mode)
    for _ in range(8):
        step(made, SLOW_ROLLOUT)
    assert len(in_process(made)) == BATCH and records.read(run_dir, "moves") == []


@pytest.mark.parametrize("ahead", [THRESHOLD, 2 * THRESHOLD])
def test_what_a_checkpoint_brings_back_is_not_dropped_as_too_old(run_dir, monkeypatch, ahead):
    """The threshold that left room for it was moved by the start that ended."""
    dropped = []
    for controlled in (True, False):  # plain verl is the negative control
        made = trainer(monkeypatch, controlled, ahead=ahead * BATCH, warmup=1.0)
        dropped.append(sum(step(made, SLOW_TRAINING) for _ in range(2 * ahead)))
    assert dropped[0] == 0 < dropped[1]


@pytest.mark.parametrize("rates", [SLOW_ROLLOUT, SLOW_TRAINING])
def test_what_is_restored_is_where_it_starts_from(run_dir, monkeypatch, rates):
    """After a restart verl's own warm-up is left out where more has come back."""
    made = trainer(monkeypatch, controlled=True, ahead=2 * BATCH)
    for _ in range(2):
        step(made, rates)
    step(made, rates)
    assert owned.of(made, owned.Overlap).controller.start.staleness == 2.0
