"""The overlap control on verl's own trainer, rollouter and queue: what is moved, in which order, and what plain verl
does at the same moment."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import time
from types import SimpleNamespace

import pytest

from esgrpo import config, engine, records
from esgrpo.algo.overlap_law import Setting
from esgrpo.call import wrapped
from esgrpo.hooks.verl import owned
from esgrpo.hooks.verl.buffer import nothing_dropped
from esgrpo.hooks.verl.metrics import decision_counts, loop_events
from esgrpo.hooks.verl.overlap import overlap_control, rollouter_settings
from esgrpo.hooks.verl.run import stop_after_step, stop_request
from esgrpo.hooks.verl.server import calls_with_deadline

ray = pytest.importorskip("ray")
omegaconf = pytest.importorskip("omegaconf")
POLICY = "verl.experimental.fully_async_policy"
MINI_BATCH, TRIGGERS, START = 4, 1, Setting(4, 0.5, 4)
CAPACITY = 64  # requests of the replica


def real(module: str, name: str):
    return getattr(pytest.importorskip(f"{POLICY}.{module}"), name).__ray_metadata__.modified_class


class Actor:
    """An actor handle whose calls run at once, as between two awaits of the actor; the answer may be an error."""

    def __init__(self, instance, error=None):
        self.instance, self.error, self.asked = instance, error, []
        self.__dict__["__ray_call__"] = SimpleNamespace(remote=self._call)

    def _call(self, function, *arguments):
        self.asked.append(function.__name__)
        return self.error or function(self.instance, *arguments)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    def get(reference, timeout=None):
        assert timeout, "a wait without a deadline"
        if isinstance(reference, Exception):
            raise reference
        return reference

    monkeypatch.setenv(records.ENV_RUN_DIR, str(tmp_path))
    monkeypatch.setenv(config.ENV_SEGMENT, '{"observe": true, "overlap": {"enable": true, "override": true}}')
    monkeypatch.setattr(engine, "active_features", lambda: {"observe", "overlap"})
    monkeypatch.setattr(stop_request, "asked", lambda: False)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(decision_counts, "counts", type(decision_counts.counts)())
    monkeypatch.setattr(calls_with_deadline, "said", set())
    return str(tmp_path)


def rollouter():
    made = object.__new__(real("fully_async_rollouter", "FullyAsyncRollouter"))
    made.max_concurrent_samples, made.staleness_threshold, made.required_samples = START.concurrency, 0.5, 4
    made.max_required_samples = made.max_queue_size = 6
    made.concurrent_samples_per_replica, made.active_tasks, made._active_count_history = 4, {1, 2}, []
    made.llm_server_manager = SimpleNamespace(get_replicas=lambda: [None], get_active_server_count=lambda: 1)
    made.feed_task, made.pending_queue = SimpleNamespace(done=lambda: False), asyncio.Queue()
    made.total_rollout_steps, made.global_steps, made.staleness_samples = 1000, 50, 3
    made.paused, made._resume_event = True, asyncio.Event()
    return made


def queue(held=()):
    made = real("message_queue", "MessageQueue")(None, 6)
    made.queue.extend(held)
    return made


def trainer(controlled: bool, error=None):
    """verl's trainer, its actors beside it."""
    cls = real("fully_async_trainer", "FullyAsyncTrainer")
    method = wrapped(stop_after_step, inspect.getattr_static(cls, "_fit_postprocess_step"))
    method = wrapped(overlap_control, method) if controlled else method
    made = object.__new__(type("Trainer", (cls,), {"_fit_postprocess_step": method}))
    made.config = omegaconf.OmegaConf.create({"actor_rollout_ref": {
        "actor": {"ppo_mini_batch_size": MINI_BATCH}, "rollout": {"n": 4, "max_num_seqs": CAPACITY}}})
    made.current_param_version, made.local_trigger_step, made.global_steps = 0, 1, 0
    made.required_samples, made.staleness_threshold, made.trigger_parameter_sync_step = 4, 0.5, TRIGGERS
    made.rollouter, made.message_queue = Actor(rollouter(), error), queue()
    made.message_queue_client = SimpleNamespace(get_queue_size_sync=lambda: 0, queue_actor=Actor(made.message_queue))
    made.metrics_aggregator = SimpleNamespace(add_step_metrics=lambda **_: None)
    made.progress_bar = SimpleNamespace(update=lambda _: None)
    return made


def version(made, seconds=10.0, tokens=4000, wait=8.0, train=1.5) -> None:
    """One weight version in which rollout is slow: the trainer waited for `wait` of its seconds."""
    made.current_param_version += 1
    made.timing_raw = {"step": seconds, "update_actor": train, "timing_s/param_sync": 0.2}
    made.metrics = {"fully_async/total_wait_time": wait, "actor/pg_loss": 0.1, "actor/grad_norm": 1.0}
    inner = made.rollouter.instance
    signals = owned.of(inner, owned.RolloutSignals)
    signals.event = SimpleNamespace(seconds=seconds, in_flight=float(inner.max_concurrent_samples))
    signals.windows = [{"version": 1, "tokens": tokens * inner.max_concurrent_samples // START.concurrency, "sync": 6.4,
                        "capacity": CAPACITY, "surprisal": 100.0, "surprisal_tokens": 100}]
    steps = owned.of(made, owned.Steps)
    steps.ended = time.time() - seconds
    loop_events.note([{"tokens": tokens, "pruned": False, "spans": [[made.current_param_version - 1, tokens]],
                       "ended": time.time()}])
    made._fit_postprocess_step()


def versions(made, count: int) -> None:
    for _ in range(count):
        version(made)


def in_force(made) -> tuple:
    inner = made.rollouter.instance
    return (inner.max_concurrent_samples, inner.staleness_threshold, inner.required_samples, made.required_samples)


@pytest.mark.hook("overlap-control")
def test_slow_rollout_moves_the_settings_of_both_sides_alike(run_dir):
    made = trainer(True)
    versions(made, 6)  # of which the first is warm-up
    inner, moves = made.rollouter.instance, records.read(run_dir, "moves")
    assert moves and in_force(made) != (4, 0.5, 4, 4)
    after = moves[-1]["after"]
    assert inner.max_concurrent_samples == after["concurrency"] and inner.required_samples == after["trigger"]
    assert made.required_samples == after["trigger"] and made.required_samples % MINI_BATCH == 0
    assert made.staleness_threshold == inner.staleness_threshold == after["staleness"]
    begun = round(after["trigger"] * (1 + after["staleness"]))
    assert inner.max_required_samples == begun
    assert made.message_queue.max_queue_size == made.message_queue.queue.maxlen >= begun
    assert inner.max_queue_size == made.message_queue.max_queue_size
    # with more room it goes on at once, and verl's own books hold the change
    assert not inner.paused and inner._resume_event.is_set()
    assert inner._active_count_history[-1][1:] == (2, inner.max_concurrent_samples)
    inner._update_max_concurrent_samples()  # as when replicas come and go
    assert inner.max_concurrent_samples == after["concurrency"]
    assert all(move["cause"] == "rates" and move["before"] != move["after"] for move in moves)
    assert [move["before"] for move in moves[1:]] == [move["after"] for move in moves[:-1]]
    # what else had to follow, and what TensorBoard gets
    grown = [move["also"]["max_queue_size"] for move in moves if move["also"]]
    assert grown and grown[0][0] == 6 and grown[-1][1] == inner.max_queue_size
    told = loop_events.take_metrics()
    assert {name: told[f"esgrpo/overlap/{name}"] for name in after} == after and told["esgrpo/overlap/trust"] == 1.0
    counts = records.read(run_dir, "decisions")[-1]["counts"]
    assert counts["overlap/moves"] == len(moves) and counts["overlap/versions"] == 5  # the first is warm-up


def test_plain_verl_waits_with_the_settings_it_has(run_dir):
    """Negative control: the same versions."""
    made = trainer(False)
    versions(made, 6)
    assert in_force(made) == (4, 0.5, 4, 4) and made.rollouter.asked == []
    assert records.read(run_dir, "moves") == []


def test_a_full_queue_of_verl_throws_away_what_the_grown_one_keeps():
    held = list(range(6))
    plain, grown = queue(held), queue(held)
    assert rollouter_settings.grow_queue(grown, 9) == (6, 9)
    assert rollouter_settings.grow_queue(grown, 4) == (9, 9)  # it may still hold what a larger bound let in
    for made in (plain, grown):
        asyncio.run(made.put_sample("new"))
    assert list(grown.queue) == [*held, "new"] and grown.dropped_samples == 0
    assert list(plain.queue) == [*held[1:], "new"] and plain.dropped_samples == 1


def test_a_queue_that_drops_nothing_gets_the_new_bound():
    made = queue(range(6))
    nothing_dropped.unbounded(made)
    assert rollouter_settings.grow_queue(made, 4) == (6, 6) and made.max_queue_size == math.inf
    assert rollouter_settings.grow_queue(made, 9) == (6, 9)
    assert nothing_dropped.unbounded(made).limit == 9 and made.max_queue_size == math.inf
    assert len(made.queue) == 6 and rollouter_settings.grow_queue(made, 8) == (9, 9)


@pytest.mark.parametrize("error", [ray.exceptions.GetTimeoutError("late"), ray.exceptions.ActorDiedError()])
def test_a_rollouter_that_does_not_answer_costs_the_moves_not_the_run(run_dir, error, capsys):
    made = trainer(True)
    versions(made, 3)
    before = in_force(made)
    made.rollouter.error = error
    versions(made, 2)
    assert in_force(made) == before
    assert capsys.readouterr().err.count("overlap-control's report") == 1
    made.rollouter.error = None
    versions(made, 4)
    assert in_force(made) != before and in_force(made)[2] == in_force(made)[3]


def test_a_move_that_was_not_confirmed_is_made_at_the_next_version(run_dir, monkeypatch):
    made = trainer(True)
    versions(made, 2)
    call = made.rollouter._call
    lost = ray.exceptions.GetTimeoutError("late")
    made.rollouter.__dict__["__ray_call__"].remote = (
        lambda function, *arguments: lost if function.__name__ == "move" else call(function, *arguments))
    versions(made, 4)
    assert made.required_samples == 4 and records.read(run_dir, "moves") == []
    made.rollouter.__dict__["__ray_call__"].remote = call
    version(made)
    assert len(records.read(run_dir, "moves")) == 1 and in_force(made)[:3] != (4, 0.5, 4)


@pytest.mark.parametrize("asked, most", [(0, 2 * CAPACITY // 4), (10, 10)])
def test_prompts_in_flight_go_up_to_the_room_of_all_replicas_or_to_what_was_set(run_dir, monkeypatch, asked, most):
    monkeypatch.setenv(config.ENV_FACTS, '{"replicas": 2}')
    overlap = {"enable": True, "max_concurrency": asked}
    monkeypatch.setenv(config.ENV_SEGMENT, json.dumps({"observe": True, "overlap": overlap}))
    made = trainer(True)
    version(made)
    assert owned.of(made, owned.Overlap).controller.limits.concurrency == (2, most)  # a prompt has four responses


def test_a_raised_trigger_comes_down_to_what_is_left_of_the_data(run_dir):
    made = trainer(True)
    version(made)
    control, raised = owned.of(made, owned.Overlap), Setting(4, 0.5, 3 * MINI_BATCH)
    control.controller.setting = control.applied = raised
    inner = made.rollouter.instance
    inner.feed_task, inner.staleness_samples = SimpleNamespace(done=lambda: True), 2 * MINI_BATCH + 1
    version(made)
    assert made.required_samples == inner.required_samples == 2 * MINI_BATCH
    assert [row["cause"] for row in records.read(run_dir, "moves")] == ["end of data"]


def test_the_warm_up_of_the_first_version_says_nothing_of_rates(run_dir):
    """Eight times slower than all later ones, at more groups in flight than there are later."""
    made = trainer(True)
    version(made, seconds=80.0, wait=78.0)
    made.rollouter.instance.max_concurrent_samples = 3
    versions(made, 6)
    assert records.read(run_dir, "moves")[0]["after"]["concurrency"] > START.concurrency


def test_within_a_weight_version_nothing_is_asked(run_dir):
    made = trainer(True)
    made.local_trigger_step = 2
    version(made)
    assert made.rollouter.asked == []


@pytest.mark.parametrize("fed, waiting, begun, left", [(False, 2, 3, 950 + 5), (True, 3, 4, 6), (True, 0, 0, 0)])
def test_what_is_left_of_the_data(fed, waiting, begun, left):
    inner = rollouter()
    inner.feed_task, inner.staleness_samples = SimpleNamespace(done=lambda: fed), begun
    for _ in range(waiting):
        inner.pending_queue.put_nowait(object())
    assert rollouter_settings.report(inner).left == left
