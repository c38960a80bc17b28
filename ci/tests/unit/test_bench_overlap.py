"""The benchmark of the overlap control: its halves, its sums, and the engine that becomes slow."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from bench import overlap
from bench.common import ROOT


def event(side, start, seconds, tokens=100, age=1.0, **spent):
    return {"side": side, "start": start, "seconds": seconds, "version": int(start), "tokens": tokens, "age": age,
            "groups": overlap.MINI_BATCH, "spent": {"wait": 0.0, **spent}}


def test_a_half_counts_the_batches_that_ended_in_it():
    events = [event("train", 0, 10, wait=10.0), event("train", 10, 10, tokens=300, age=None, wait=2.0, train=8.0),
              event("train", 20, 10), event("rollout", 5, 10)]
    found = overlap.half(events, 5, 25)
    assert (found["versions"], found["tokens/s"], found["trainer waits"]) == (2, 20.0, 0.6)
    even, odd = (100 * math.exp(-1 / overlap.AGE_SCALE), 300)  # both lie as far off their mean, one in each direction
    assert found["standard error"] == pytest.approx((odd - even) / 2 * 2 / 20)
    assert found["fresh tokens/s"] == pytest.approx((100 * math.exp(-1 / overlap.AGE_SCALE) + 300) / 20)
    with pytest.raises(RuntimeError, match="no batch"):
        overlap.half(events, 40, 50)


def test_time_that_no_event_accounts_for_is_found():
    whole = [event(side, start, 10, busy=10.0) for side in ("train", "rollout") for start in (0, 10)]
    assert overlap.unaccounted(whole) == 0.0
    assert overlap.unaccounted([*whole, event("rollout", 30, 10, busy=10.0)]) == pytest.approx(0.25)
    assert overlap.unaccounted([each for each in whole if each["side"] == "train"]) == 0.0  # v1 has no rollouter


@pytest.mark.parametrize("name, trainer", [("controlled", "async_training.staleness_threshold=0.5"),
                                           ("v1 controlled", "trainer.v1.separate_async.num_warmup_batches=0.5")])
def test_an_arm_runs_its_trainer_at_the_learning_rate_that_was_asked_for(name, trainer, tmp_path):
    lines = overlap.overrides(overlap.EVERY_ARM[name], tmp_path, tmp_path, 1, 0.0)
    assert trainer in lines and "actor_rollout_ref.actor.optim.lr=0.0" in lines
    assert f"{overlap.SEGMENT}.overlap.enable=True" in lines


def test_an_interrupted_one_says_so_and_ends(monkeypatch, capsys):
    monkeypatch.setattr(overlap, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    monkeypatch.setattr(overlap.signal, "signal", lambda *_: None)
    assert overlap.main(["--arms", "controlled", "--seeds", "1"]) == 130
    assert "interrupted" in capsys.readouterr().out


@pytest.fixture
def helper(monkeypatch, tmp_path):
    """The module without its hooks."""
    for variable, value in (("SLOW_STEP_MS", "20"), ("SLOW_AFTER_S", "10"), ("SLOW_MARK", str(tmp_path / "mark")),
                            ("SLOW_TOKEN_MS", "2")):
        monkeypatch.setenv(variable, value)
    monkeypatch.setitem(sys.modules, "wrapt", SimpleNamespace(register_post_import_hook=lambda *_: None))
    spec = importlib.util.spec_from_file_location("slow", ROOT / "bench" / "slow_engine" / "sitecustomize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_long_update_lasts_longer_with_more_tokens(helper, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    trainer = type("RayPPOTrainer", (), {"_update_actor": lambda self, batch: "done"})
    helper._slow_update(SimpleNamespace(RayPPOTrainer=trainer))
    batch = SimpleNamespace(batch={"response_mask": np.ones((32, 50))})
    assert (trainer()._update_actor(batch), slept) == ("done", [pytest.approx(3.2)])


@pytest.mark.parametrize("name", ["step", "step_with_batch_queue"])
def test_steps_that_run_the_model_become_twice_as_long(name, helper, monkeypatch, tmp_path):
    clock, slept = [100.0], []
    for timer in ("time", "perf_counter"):
        monkeypatch.setattr(time, timer, lambda: clock[0])
    monkeypatch.setattr(time, "sleep", slept.append)

    def step(self, executed):
        clock[0] += 0.005
        return {}, executed

    core = type("EngineCore", (), {"step": step, "step_with_batch_queue": step})
    helper._slow(SimpleNamespace(EngineCore=core))
    for at, executed in ((100.0, False), (100.0, True), (109.0, True), (111.0, True), (112.0, True)):
        clock[0] = at
        assert getattr(core(), name)(executed) == ({}, executed)
    assert slept == pytest.approx([0.02, 0.02, 0.045, 0.045])  # 0.005 + 0.02, then twice as long
    assert float((tmp_path / "mark").read_text()) == pytest.approx(111.005)
