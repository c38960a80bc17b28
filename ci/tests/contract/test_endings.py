"""How a run ends: last line and exit code of the driver, and what the trainers do when they are told to stop."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("ray")

from esgrpo.call import wrapped  # noqa: E402
from esgrpo.errors import Terminated  # noqa: E402
from esgrpo.hooks.verl.run import stop_after_step, stop_request  # noqa: E402
from esgrpo.hooks.verl.v1.run import stop_after_step as v1_stop_after_step  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
TERMINATED = 143


def ended(tmp_path, scene: str, save_freq: int = 2, checkpoint: bool = True, segment: str = "{}"):
    """(exit code, lines) of a driver."""
    if checkpoint:
        (tmp_path / "global_step_3").mkdir()
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    command = [sys.executable, "-m", "ci.tests.contract.ending_probe", scene, str(tmp_path), str(save_freq)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env={
        **os.environ, "PYTHONPATH": f"{ROOT / 'overlay'}:{ROOT}", "ESGRPO_SEGMENT": segment,
        "ESGRPO_RUN_DIR": str(tmp_path)})
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()


@pytest.mark.hook("driver-ending-in-one-line")
def test_the_last_line_names_what_died_and_where_to_go_on(tmp_path):
    code, lines = ended(tmp_path, "died")
    assert code == 1 and lines[-1].startswith("esgrpo: ended: the agent-loop worker (node 10.0.0.1, pid 77, "
                                              "agent_loop_worker_3) died")
    assert lines[-1].endswith(f"resume: the same command goes on from {tmp_path}/global_step_3")
    assert any("Traceback" in line for line in lines[:-1])  # what verl would have shown stays


def test_without_a_checkpoint_the_last_line_says_so(tmp_path):
    code, lines = ended(tmp_path, "died", save_freq=-1, checkpoint=False)
    assert code == 1 and f"nothing to resume from: {tmp_path} holds no checkpoint" in lines[-1]
    assert "trainer.save_freq=N" in lines[-1]


def test_a_run_that_we_ended_is_told_without_a_traceback(tmp_path):
    code, lines = ended(tmp_path, "ours")
    assert code == 1 and "the engine died" in lines[-1] and "global_step_3" in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_a_refusal_says_nothing_of_checkpoints(tmp_path):
    code, lines = ended(tmp_path, "refused")
    assert code == 1 and lines[-1] == "esgrpo: a-hook: lost | wanted APPLIED | strict mode stops here | do"


def test_a_sigterm_that_the_trainer_answered(tmp_path):
    code, lines = ended(tmp_path, "saved")
    assert code == TERMINATED and lines[-1].startswith("esgrpo: SIGTERM:")
    assert lines[-1].endswith(f"resume: the same command goes on from {tmp_path}/global_step_4")


def test_a_sigterm_waits_for_the_step_and_not_for_ever(tmp_path):
    code, lines = ended(tmp_path, "sigterm", segment='{"sigterm_deadline": 1}')
    assert code == TERMINATED and "asked" in lines
    assert any("a checkpoint is saved when the running step has ended, in 1 s at most" in line for line in lines)
    assert "took more than 1 s" in lines[-1] and lines[-1].endswith("global_step_3")


def test_a_second_sigterm_stops_at_once(tmp_path):
    code, lines = ended(tmp_path, "twice")
    assert code == TERMINATED and "a second SIGTERM" in lines[-1]


def test_a_sigterm_that_kills_the_workers_too_is_told_as_one(tmp_path):
    code, lines = ended(tmp_path, "everybody")
    assert code == TERMINATED and lines[-1].startswith("esgrpo: SIGTERM: before a checkpoint was saved: the agent-loop")
    assert lines[-1].endswith("global_step_3")


@pytest.mark.parametrize(("scene", "save_freq", "segment", "words"), [
    ("early", 2, "{}", "training had not begun"),
    ("sigterm", -1, "{}", "trainer.save_freq=-1 forbids a checkpoint"),
    ("sigterm", 2, '{"sigterm_deadline": 0}', "leaves no time")])
def test_where_nothing_can_be_saved_a_sigterm_ends_at_once(tmp_path, scene, save_freq, segment, words):
    code, lines = ended(tmp_path, scene, save_freq, checkpoint=False, segment=segment)
    assert code == TERMINATED and words in lines[-1] and "nothing to resume from" in lines[-1]
    assert "asked" not in lines


@pytest.fixture
def told(monkeypatch):
    """Whether the driver was told to stop, as the trainers see it."""
    answers = SimpleNamespace(stop=False)
    monkeypatch.setattr(stop_request, "asked", lambda: answers.stop)
    return answers


def fully_async(tmp_path, save_freq: int = 5):
    """verl's trainer with its own decision to save; a step and the checkpoint are fakes."""
    module = pytest.importorskip("verl.experimental.fully_async_policy.fully_async_trainer")
    real = module.FullyAsyncTrainer.__ray_metadata__.modified_class
    subclass = type("Trainer", (real,), {
        "_fit_postprocess_step": wrapped(stop_after_step, inspect.getattr_static(real, "_fit_postprocess_step")),
        "_save_checkpoint": lambda self: self.saves.append(self.current_param_version)})
    made = object.__new__(subclass)
    made.saves, made.current_param_version, made.last_ckpt_version, made.local_trigger_step = [], 3, 0, 1
    made.timing_raw, made.metrics, made.max_steps_duration, made.global_steps, made.required_samples = {}, {}, 0, 7, 4
    made.config = SimpleNamespace(trainer=SimpleNamespace(save_freq=save_freq, esi_redundant_time=0,
                                                          default_local_dir=str(tmp_path)))
    made.message_queue_client = SimpleNamespace(get_queue_size_sync=lambda: 0)
    made.metrics_aggregator = SimpleNamespace(add_step_metrics=lambda **_: None)
    made.progress_bar = SimpleNamespace(update=lambda _: None)
    return made


@pytest.mark.hook("stop-after-step")
def test_a_fully_async_trainer_saves_between_two_versions_and_ends(tmp_path, told):
    trainer = fully_async(tmp_path)
    trainer._fit_postprocess_step()
    told.stop, trainer.local_trigger_step = True, 2
    trainer._fit_postprocess_step()  # weights in the middle of a version
    assert trainer.saves == []
    trainer.local_trigger_step, trainer.current_param_version = 1, 4
    with pytest.raises(Terminated, match=f"goes on from {tmp_path}/global_step_4"):
        trainer._fit_postprocess_step()
    assert trainer.saves == [4] and trainer.global_steps == 10
    with pytest.raises(Terminated):
        trainer._fit_postprocess_step()
    assert trainer.saves == [4]  # once


def test_a_fully_async_trainer_that_may_not_save_says_so(tmp_path, told):
    trainer, told.stop = fully_async(tmp_path, save_freq=-1), True
    with pytest.raises(Terminated, match="trainer.save_freq=-1 forbids it"):
        trainer._fit_postprocess_step()
    assert trainer.saves == []


def v1_fit(steps: int, told, tmp_path, save_freq: int = 5) -> tuple[list[int], list[int]]:
    """verl's v1 `fit` reduced to what follows a step, word for word its condition; returns (steps, saves)."""
    from omegaconf import OmegaConf

    done, saves = [], []

    class Trainer:
        global_steps = 1
        config = OmegaConf.create({"trainer": {"save_freq": save_freq, "default_local_dir": str(tmp_path)}})

        def step(self, metrics, timing_raw):
            done.append(self.global_steps)
            told.stop = self.global_steps >= steps

    Trainer.step = wrapped(v1_stop_after_step, Trainer.step)
    trainer = Trainer()
    with pytest.raises(Terminated) as ending:
        while True:
            trainer.step({}, {})
            if trainer.config.trainer.save_freq > 0 and trainer.global_steps % trainer.config.trainer.save_freq == 0:
                saves.append(trainer.global_steps)
            trainer.global_steps += 1
    assert ("global_step_3" in str(ending.value)) == (save_freq > 0)
    return done, saves


@pytest.mark.hook("v1-stop-after-step")
@pytest.mark.parametrize(("save_freq", "saves"), [(5, [3]), (3, [3]), (-1, [])])
def test_a_v1_trainer_saves_after_the_running_step_and_ends(told, tmp_path, save_freq, saves):
    assert v1_fit(3, told, tmp_path, save_freq) == ([1, 2, 3], saves)


def test_the_condition_under_which_verls_v1_fit_saves_is_the_one_above():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    source = " ".join(inspect.getsource(PPOTrainer.fit).split())
    step, save = (source.index(words) for words in ("batch = self.step(", "self._save_checkpoint()"))
    assert step < source.index("self.global_steps % self.config.trainer.save_freq == 0", step) < save


def test_no_answer_of_rays_head_is_no():
    assert stop_request.asked() is False  # Ray is not there at all


def test_verl_saves_nothing_on_a_stop(tmp_path, told):
    """Negative control."""
    module = pytest.importorskip("verl.experimental.fully_async_policy.fully_async_trainer")
    trainer, told.stop = fully_async(tmp_path), True
    real = module.FullyAsyncTrainer.__ray_metadata__.modified_class
    assert inspect.getattr_static(real, "_fit_postprocess_step")(trainer) is None and trainer.saves == []
    assert asyncio.iscoroutinefunction(real.fit_step)
