"""The robustness study composes what verl is told, and keeps what crashed; verl is not run here."""

from __future__ import annotations

import json

import pytest

from bench import robustness
from bench.common import modules, stack, training
from esgrpo.tools.report import load, tables, training_figures

SEGMENT = modules.SEGMENT.lstrip("+")
LOSS, BYPASS = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.rollout_correction.bypass_mode"


@pytest.fixture
def medium(tmp_path):
    model = tmp_path / "medium"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def parsed(tmp_path, study, *more):
    model = ("--model-medium", str(tmp_path / "medium")) if study == "grid" else ()
    return robustness.parse(["--study", study, "--out", str(tmp_path), "--cores", "1", *model, *more])


def told(options, cell_name, arm, seed=1) -> dict[str, str]:
    """As hydra: the last one of a key."""
    cell = next(cell for cell in robustness.cells(options.study) if cell.name == cell_name)
    lines = robustness.overrides(cell, arm, seed, options.out / "run", options)
    return dict(line.lstrip("+").split("=", 1) for line in lines)


@pytest.mark.parametrize("study, count", [("grid", 8), ("modes", 3), ("losses", 2)])
def test_arms_differ_in_nothing_but_their_switches(study, count, tmp_path, medium):
    options = parsed(tmp_path, study)
    assert len(options.settings) == count
    for cell in options.settings:
        every = [told(options, cell.name, arm) for arm in options.arms]
        differing = {key for one in every for key in one if len({other.get(key) for other in every}) > 1}
        of_a_loss = {LOSS, BYPASS, f"{SEGMENT}.pois.anchor", f"{SEGMENT}.dmmpt.enable"}
        allowed = of_a_loss if study == "losses" else {key for key in differing if key.startswith(SEGMENT)}
        assert differing and differing <= allowed
        assert every[0]["data.seed"] == "1" and "RUN_DIR" not in " ".join(every[0].values())


def test_grid_varies_task_algorithm_and_size(tmp_path, medium):
    options = parsed(tmp_path, "grid")
    grpo, dapo = (told(options, f"search {name} small", "overlay") for name in ("grpo", "dapo"))
    assert dapo["actor_rollout_ref.actor.clip_ratio_high"] == "0.28"
    assert dapo["actor_rollout_ref.actor.loss_agg_mode"] == "token-mean"
    assert dapo["algorithm.filter_groups.enable"] == "True" and dapo["reward.reward_manager.name"] == "dapo"
    assert int(dapo["reward.reward_kwargs.max_resp_len"]) == int(dapo["data.max_response_length"])
    assert not {key for key in grpo if "filter_groups" in key or "overlong" in key or "clip_ratio" in key}
    chain = told(options, "chain grpo medium", "plain")
    assert chain["actor_rollout_ref.model.path"] == str(medium) != grpo["actor_rollout_ref.model.path"]
    assert "data-chain-" in chain["data.train_files"] and "data-search-" in grpo["data.train_files"]
    assert {one["trainer.v1.trainer_mode"] for one in (grpo, dapo, chain)} == {"separate_async"}
    assert grpo["trainer.total_training_steps"] == str(options.steps)


def test_losses_train_on_data_of_older_weights(tmp_path):
    options = parsed(tmp_path, "losses", "--steps", "8", "--test-every", "8")
    by_arm = {arm: told(options, "fully async", arm) for arm in options.arms}
    assert {arm: one[LOSS] for arm, one in by_arm.items()} == {
        "vanilla": "vanilla", "recomputed": "vanilla", "sais": "sais", "pois": "pois",
        "pois version": "pois", "pois dmmpt": "pois", "sais dmmpt": "sais"}
    assert by_arm["pois dmmpt"] == by_arm["pois"] | {f"{SEGMENT}.dmmpt.enable": "True"}
    assert by_arm["recomputed"][BYPASS] == "False"
    one = by_arm["pois"]
    assert one[f"{SEGMENT}.profile"] == "static" and one["async_training.trigger_parameter_sync_step"] == "4"
    assert one["rollout.total_rollout_steps"] == "64"  # prompts of eight steps
    assert one["trainer.test_freq"] == "2"  # weight versions
    once = told(options, "one step", "pois")
    assert {key: value for key, value in once.items() if one[key] != value} == {
        "async_training.trigger_parameter_sync_step": "1", "trainer.test_freq": "8"}


@pytest.mark.parametrize("arguments, said", [
    (["--study", "grid"], "--model-medium"), (["--study", "modes", "--arms", "magic"], "unknown 'magic'"),
    (["--study", "losses", "--steps", "7"], "not a multiple of 4"),
    (["--study", "modes", "--jobs", "5000"], "there are")])
def test_what_cannot_be_run_is_said_at_once(arguments, said, capsys):
    with pytest.raises(SystemExit):
        robustness.parse(arguments)
    assert said in capsys.readouterr().err


def test_some_settings_only_need_no_second_model(tmp_path):
    options = robustness.parse(["--study", "grid", "--cells", "chain dapo small", "--cores", "1"])
    assert [cell.name for cell in options.settings] == ["chain dapo small"]


def write_run(run_dir, overrides, rewards, code=0):
    """What an arm leaves of a run that took len(rewards) - 1 steps; the last gradient of a crash is no number."""
    (run_dir / "esgrpo").mkdir(parents=True)
    (run_dir / "esgrpo" / "hooks.json").write_text("[]")
    rows = [{"val-core/testbed/acc/mean@1": rewards[0]}] + [
        {"val-core/testbed/acc/mean@1": reward, "training/global_step": step, "critic/score/mean": reward,
         "actor/grad_norm": float("nan") if code and step == len(rewards) - 1 else float(step)}
        for step, reward in enumerate(rewards[1:], 1)]
    (run_dir / "metrics-timed.jsonl").write_text("".join(
        json.dumps({"time": 110.0 + at, "step": at, "data": row}) + "\n" for at, row in enumerate(rows)))
    (run_dir / "log.txt").write_text("RuntimeError: lost it (in /some/folder/file.py)\n" if code else "")
    (run_dir / "arm.json").write_text(json.dumps({
        "name": "x", "started": 0.0, "ready": 100.0, "ended": 200.0, "budget_s": 1800.0, "return_code": code,
        "stopped_at_budget": False, "overrides": overrides}))


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """Runs `plain` and `overlay` of the mode sync: the latter crashed at its second step under seed 2."""
    monkeypatch.setattr(training, "prepare_data", lambda *_: None)
    monkeypatch.setattr(training, "run_side_by_side", lambda *_: pytest.fail("a finished run is run again"))
    options = parsed(tmp_path, "modes", "--steps", "4")
    for seed in (1, 2):
        for arm, rewards in (("plain", [0.4, 0.5, 0.6, 0.7, 0.8]), ("overlay", [0.4, 0.6, 0.7, 0.8, 0.9])):
            crash = arm == "overlay" and seed == 2
            run_dir = robustness.run_dir_of(options.settings[0], arm, seed, options)
            lines = robustness.overrides(options.settings[0], arm, seed, run_dir, options)
            write_run(run_dir, lines, rewards[:3] if crash else rewards, code=int(crash))
    return ["--study", "modes", "--cells", "sync", "--seeds", "1,2", "--steps", "4", "--out", str(tmp_path), "--cores",
            "1", "--results", str(tmp_path / "results" / "robustness.json")]


def test_a_crash_is_a_result(finished, tmp_path, capsys):
    assert robustness.main(finished) == 1
    text = (tmp_path / "results" / "robustness.json").read_text()
    written = json.loads(text)
    overlay = written["measures"]["sync, overlay"]
    assert overlay["2"]["crashed"] == 1.0 and overlay["1"]["crashed"] == 0.0
    assert overlay["2"]["non-finite numbers"] == 1 and overlay["2"]["optimiser steps"] == 2
    assert written["failed"] == ["sync, overlay seed 2, 2 optimiser steps: RuntimeError: lost it (in file.py)"]
    assert "NaN" not in text and str(tmp_path) not in text
    plain = written["measures"]["sync, plain"]["1"]
    assert plain["held-out reward, end"] == pytest.approx(0.75) and plain["gradient norm, max"] == 4.0
    assert plain["step time, s"] == 25.0  # four steps in the 100 s that it ran, whatever the limit
    head, _, row = written["table"]
    assert dict(zip(head, row, strict=True))["held-out reward, end, less plain"] == "0 [-0.1, 0.1]"


def test_damaged_records_do_not_hide_the_other_runs(finished, tmp_path):
    (tmp_path / "modes-sync-overlay-2" / "esgrpo" / "hooks.json").write_text("[{")
    assert robustness.main(finished) == 1
    written = json.loads((tmp_path / "results" / "robustness.json").read_text())
    assert set(written["measures"]["sync, overlay"]) == {"1"}
    assert written["failed"] == [
        "sync, overlay seed 2, 0 optimiser steps: RuntimeError: lost it (in file.py), JSONDecodeError in its records"]


def test_the_report_sets_the_arms_side_by_side(finished, tmp_path):
    pytest.importorskip("matplotlib")
    robustness.main(finished)
    record, = load.records(tmp_path / "results")
    assert record.kind == "robustness" and record.seeds == ("1", "2")
    shown = tables.robustness(record)
    assert shown[0].rows == record.data["table"]
    assert "lost it" in str(next(table for table in shown if table.title == "Failed runs").rows)
    assert record.data["curves"]["sync, overlay"]["1"]["by_step"][-1] == [4, 0.9]
    figure, = training_figures.robustness(record)
    assert "optimiser steps" in figure.svg and "overlay" in figure.svg


def test_a_run_that_never_began_is_tried_twice_and_named(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(training, "prepare_data", lambda *_: None)
    monkeypatch.setattr(training, "run_side_by_side", lambda waiting, *_: tried.append(list(waiting)))
    results = tmp_path / "robustness.json"
    assert robustness.main(["--study", "losses", "--cells", "fully async", "--arms", "pois", "--seeds", "1",
                            "--cores", "1", "--out", str(tmp_path), "--results", str(results)]) == 1
    assert tried == [[("fully async,pois", 1)]] * robustness.ATTEMPTS
    assert json.loads(results.read_text())["failed"] == ["fully async, pois seed 1, 0 optimiser steps: not started"]


def test_what_is_there_can_be_collected_without_a_start(finished, tmp_path):
    assert robustness.main([*finished, "--seeds", "1,2,3", "--collect"]) == 1
    written = json.loads((tmp_path / "results" / "robustness.json").read_text())
    assert written["seeds"] == [1, 2, 3] and set(written["measures"]["sync, plain"]) == {"1", "2"}
    assert "sync, plain seed 3, 0 optimiser steps: not started" in written["failed"]


def test_a_child_makes_one_run(tmp_path, monkeypatch):
    commands, started = [], []
    monkeypatch.setattr(training, "prepare_data", lambda *_: None)
    monkeypatch.setattr(training, "run_side_by_side", lambda waiting, options, command: commands.extend(
        command(*key, options) for key in waiting))
    monkeypatch.setattr(robustness.arm, "run", lambda label, _lines, _run_dir, _overlay, **more: started.append(
        (label, more["main"])))
    monkeypatch.chdir(tmp_path)
    robustness.main(["--study", "modes", "--cells", "sync", "--seeds", "7", "--cores", "1", "--out", "here"])
    plain, overlay = commands[:2]
    assert overlay[0] == "bench.robustness" and overlay[overlay.index("--here") - 1] == "7"
    assert robustness.main(overlay[1:]) == 0 and robustness.main(plain[1:]) == 0
    assert started == [("sync, overlay seed 7", stack.MAIN_PPO), ("sync, plain seed 7", stack.MAIN_PPO)]
    assert robustness.parse(plain[1:]).out == tmp_path / "here"
