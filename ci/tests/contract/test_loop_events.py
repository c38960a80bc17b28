"""What both sides of the fully async loop spend their time on, on verl's own classes; plain verl does not say."""

from __future__ import annotations

import asyncio
import inspect
import time
from types import SimpleNamespace

import pytest

from esgrpo import engine, records
from esgrpo.algo.rows import LoopEvent
from esgrpo.call import wrapped
from esgrpo.hooks.verl import owned
from esgrpo.hooks.verl.metrics import loop_events, rollouter_windows
from esgrpo.hooks.verl.run import stop_after_step, stop_request
from esgrpo.hooks.verl.server import calls_with_deadline
from esgrpo.hooks.verl.v1.rows import trained_rows as v1_trained_rows

TRAINED = [{"tokens": 6, "pruned": False, "spans": [[1, 2], [2, 4]]}, {"tokens": 2, "pruned": False, "spans": [[0, 2]]},
           {"tokens": 50, "pruned": True, "spans": [[0, 50]]}]  # under a rule that masks it


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv(records.ENV_RUN_DIR, str(tmp_path))
    monkeypatch.setattr(engine, "active_features", lambda: {"observe"})
    monkeypatch.setattr(stop_request, "asked", lambda: False)
    return str(tmp_path)


def trainer(code):
    """verl's trainer at the end of a step."""
    module = pytest.importorskip("verl.experimental.fully_async_policy.fully_async_trainer")
    real = module.FullyAsyncTrainer.__ray_metadata__.modified_class
    original = inspect.getattr_static(real, "_fit_postprocess_step")
    made = object.__new__(type("Trainer", (real,), {
        "_fit_postprocess_step": wrapped(code, original) if code else original}))
    made.current_param_version, made.local_trigger_step, made.global_steps, made.required_samples = 3, 1, 7, 4
    made.message_queue_client = SimpleNamespace(get_queue_size_sync=lambda: 0)
    made.metrics_aggregator = SimpleNamespace(add_step_metrics=lambda **_: None)
    made.progress_bar = SimpleNamespace(update=lambda _: None)
    made.timing_raw = {"step": 10.0, "gen": 4.5, "old_log_prob": 1.0, "update_actor": 3.0, "timing_s/param_sync": 1.5}
    made.metrics = {"fully_async/total_wait_time": 4.0, "actor/pg_loss": 0.25, "actor/grad_norm": float("nan"),
                    "actor/entropy": 1.5}
    return made


@pytest.mark.hook("stop-after-step")
def test_a_step_of_the_trainer_is_accounted_for(run_dir):
    made = trainer(stop_after_step)
    now = time.time()
    loop_events.note([{**row, "ended": now - 8.0 - 2 * index} for index, row in enumerate(TRAINED)])
    made._fit_postprocess_step()
    owned.of(made, owned.Steps).ended -= 30.0  # of the next one, of which 10 s are in verl's timer
    made._fit_postprocess_step()
    first, then = records.read(run_dir, "events")
    assert first["spent"] == pytest.approx({"wait": 4.0, "sync": 1.5, "train": 4.0, "checkpoint": 0.0,
                                            "validation": 0.0, "other": 0.5})
    assert then["spent"]["validation"] == pytest.approx(20.0, abs=1.0)
    assert (first["side"], first["version"], first["groups"], first["tokens"]) == ("train", 3, 4, 8)
    assert first["age"] == pytest.approx((1 * 2 + 0 * 4 + 2 * 2) / 8)  # trained under version 2
    assert (first["loss"], first["grad_norm"], first["entropy"], first["kl"]) == (0.25, None, 1.5, None)
    assert first["queued_s"] == pytest.approx(3.0, abs=0.5)  # collected 4 s after the step began, 10 s ago
    assert then["start"] == pytest.approx(first["start"] + first["seconds"] - 30.0)
    assert then["tokens"] == 0 and then["age"] is None and then["queued_s"] is None
    told = loop_events.take_metrics()  # with the next step, as verl has logged this one
    assert told["esgrpo/overlap/trainer/wait"] == pytest.approx(then["spent"]["wait"] / then["seconds"])
    assert sum(value for name, value in told.items() if "/trainer/" in name) == pytest.approx(1.0)
    assert loop_events.take_metrics() == {}
    for event in (first, then):
        assert sum(event["spent"].values()) == pytest.approx(event["seconds"])


@pytest.mark.hook("stop-after-step")
def test_a_trainer_whose_gpus_are_lent_waits(run_dir):
    made = trainer(stop_after_step)
    assert f'marked_timer("{loop_events.LENT_WAIT}"' in inspect.getsource(type(made).fit_step)
    made.timing_raw |= {loop_events.LENT_WAIT: 2.5, "step": 12.5}
    made._fit_postprocess_step()
    event, = records.read(run_dir, "events")
    assert event["spent"] == pytest.approx({"wait": 6.5, "sync": 1.5, "train": 4.0, "checkpoint": 0.0,
                                            "validation": 0.0, "other": 0.5})


def rollouter(code):
    """verl's rollouter at a weight version: 10 s of which it had nothing in flight for 2."""
    module = pytest.importorskip("verl.experimental.fully_async_policy.fully_async_rollouter")
    real = module.FullyAsyncRollouter.__ray_metadata__.modified_class
    original = inspect.getattr_static(real, "reset_staleness")
    made = object.__new__(type("Rollouter", (real,), {
        "reset_staleness": wrapped(code, original) if code else original}))
    start = time.time() - 10.0
    made._active_count_history = [(start, 0, 8), (start + 1, 4, 8), (start + 5, 0, 8), (start + 6, 8, 8)]
    made.active_tasks, made.max_concurrent_samples, made.max_queue_size = {1, 2, 3}, 8, 24

    async def queue_size():
        return 5

    made.message_queue_client = SimpleNamespace(get_queue_size=queue_size)
    made.llm_server_manager = SimpleNamespace(get_replicas=list)
    made.step_start_time = made.idle_start_time = start
    made._step_generated_samples, made._completed_steps, made._step_samples_history = 6, 4, []
    made._STEP_HISTORY_SIZE, made.paused = 10, True
    return made


def reset(made) -> dict:
    async def run():
        made.lock, made._resume_event = asyncio.Lock(), asyncio.Event()
        return await made.reset_staleness()

    return asyncio.run(run())


@pytest.mark.hook("rollouter-windows")
def test_a_version_of_the_rollouter_is_accounted_for(run_dir):
    timing = reset(rollouter(rollouter_windows))
    event, = records.read(run_dir, "events")
    assert timing["esgrpo/overlap/rollouter/idle"] == pytest.approx(event["spent"]["idle"] / event["seconds"])
    assert timing["esgrpo/overlap/queue_fill"] == 5 / 24
    assert timing["fully_async/rollouter/step_generated_samples"] == event["groups"] == 6
    assert event["side"] == "rollout" and event["seconds"] == pytest.approx(10.0, abs=0.5)
    assert event["spent"]["idle"] == pytest.approx(2.0)
    assert sum(event["spent"].values()) == pytest.approx(event["seconds"])
    assert event["in_flight"] * event["seconds"] == pytest.approx(4 * 4 + 8 * (event["seconds"] - 6))
    assert (event["limit"], event["queue"], event["queue_limit"]) == (8, 5, 24)


@pytest.mark.parametrize("batches, queued_s", [(1, 3.0), (2, None)])  # of a weight version
def test_a_step_of_a_v1_trainer_is_accounted_for(run_dir, batches, queued_s):
    made, now = SimpleNamespace(global_steps=3, parameter_sync_step=batches), time.time()
    timing = {"step": 10.0, "gen": 3.0, "switch_wait": 1.0, "update_weights": 1.0, "adv": 0.5, "update_actor": 3.0,
              "testing": 2.0}
    rows = [{**row, "group": "g", "ended": now - 11.0} for row in TRAINED]  # the wait ends 4 s after the step began
    told = loop_events.of_v1(made, rows, timing, {"actor/loss": 0.25})
    owned.of(made, owned.Steps).ended -= 30.0  # of the next one, which begins where this one ended
    loop_events.of_v1(made, [], timing, {})
    first, then = records.read(run_dir, "events")
    assert first["spent"] == pytest.approx({"wait": 4.0, "sync": 1.0, "train": 3.5, "checkpoint": 0.0,
                                            "validation": 2.0, "other": 1.5})
    assert (first["seconds"], first["queued_s"]) == (
        pytest.approx(12.0, abs=0.5), queued_s and pytest.approx(queued_s, abs=0.5))
    assert (first["side"], first["version"], first["groups"], first["tokens"]) == ("train", 3, 1, 8)
    assert first["loss"] == 0.25
    assert first["age"] == pytest.approx((1 * 2 + 0 * 4 + 2 * 2) / 8)  # trained under version 2
    assert told["esgrpo/overlap/trainer/wait"] == pytest.approx(4.0 / first["seconds"])
    assert then["start"] == pytest.approx(first["start"] + first["seconds"] - 30.0)
    for event in (first, then):
        assert sum(event["spent"].values()) == pytest.approx(event["seconds"])


def test_batches_of_a_version_are_told_as_one_and_a_checkpoint_is_no_validation(run_dir):
    """verl logs the mean of what its batches bring: of 0.9 of one second and none of nine that would be 0.45."""
    made = trainer(stop_after_step)
    loop_events.take_metrics()
    made.local_trigger_step, made.timing_raw = 2, {"step": 1.0, "update_actor": 0.1}
    made.metrics = {"fully_async/total_wait_time": 0.9}
    made._fit_postprocess_step()
    assert loop_events.take_metrics() == {}
    made.local_trigger_step, made.timing_raw = 1, {"step": 9.0, "update_actor": 9.0, "save_checkpoint": 5.0}
    made.metrics = {"fully_async/total_wait_time": 0.0}
    owned.of(made, owned.Steps).ended -= 14.0
    made._fit_postprocess_step()
    last = records.read(run_dir, "events")[-1]["spent"]
    assert (last["checkpoint"], last["validation"]) == (pytest.approx(5.0), pytest.approx(0.0, abs=0.2))
    told = loop_events.take_metrics()
    assert told["esgrpo/overlap/trainer/wait"] == pytest.approx(0.9 / 15, rel=0.05)
    assert told["esgrpo/overlap/trainer/checkpoint"] == pytest.approx(5 / 15, rel=0.05)


def test_metrics_of_an_event_are_shares_of_its_time_and_of_its_bounds():
    assert loop_events.metrics_of(None) == {}
    event = LoopEvent(side="rollout", version=1, start=0.0, seconds=10.0, spent={"idle": 4.0, "busy": 6.0}, groups=2,
                      devices={"0": (0.5, 1.0), "1": (0.7, 1.0)}, queue=3, queue_limit=0)
    assert loop_events.metrics_of(event) == {
        "esgrpo/overlap/rollouter/idle": 0.4, "esgrpo/overlap/rollouter/busy": 0.6,
        "esgrpo/overlap/rollouter/devices": pytest.approx(0.6)}  # without a bound the queue has no fill


def test_a_setting_is_told_once():
    loop_events.take_metrics()
    loop_events.tell({"trust": 0.7})
    assert loop_events.take_metrics() == {"esgrpo/overlap/trust": 0.7} and loop_events.take_metrics() == {}


def test_plain_verl_writes_none_and_says_that_it_was_idle_all_the_time(run_dir):
    """Negative control; and why its own idle ratio is not used."""
    trainer(None)._fit_postprocess_step()
    made = rollouter(None)
    made.idle_start_time = made.step_start_time + 0.1  # one pause of a version counts, and all after it
    assert reset(made)["fully_async/rollouter/idle_ratio"] > 0.9
    assert records.read(run_dir, "events") == []


def test_a_release_without_the_history_of_groups_in_flight_gets_no_event():
    assert loop_events.of_rollouter(SimpleNamespace(), loop_events.history_of(SimpleNamespace()), 1) is None


@pytest.mark.parametrize("closed", [2, 0])
def test_a_step_of_a_v1_trainer_says_what_the_weight_sync_did_to_requests(run_dir, monkeypatch, closed):
    window = {"version": 3, "start": 0.0, "seconds": 10.0, "capacity": 4, "used": 30.0, "sync": 1.0, "idle": 4.0,
              "tail": 5.0, "tokens": 100, "surprisal": 0.0, "surprisal_tokens": 0, "outcomes": {"abort": 1},
              "kept": 5, "kv_ages": [[1, 4], [3, 1]]}
    told = [[{**window, "replica": str(number)}] for number in range(closed)]
    monkeypatch.setattr(v1_trained_rows, "servers_of", lambda trainer: [])
    monkeypatch.setattr(calls_with_deadline, "fetched_if_any", lambda *_: told)
    trainer = SimpleNamespace()
    metrics = v1_trained_rows.windows(trainer)
    syncs = {key.rpartition("/")[2]: value for key, value in metrics.items() if key.startswith("esgrpo/sync/")}
    assert syncs == ({"kept": 10, "aborted": 2, "kv_age": 3, "kv_age_mean": 1.4} if closed else {})
    assert len(records.read(run_dir, "windows")) == len(owned.take(trainer, owned.RolloutSignals).windows) == closed
