"""The training benchmark composes what verl is told; nothing is run here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import train
from bench.common import modules


def told(arguments, arm, tmp_path) -> dict[str, str]:
    options = train.parse([*arguments, "--out", str(tmp_path)])
    lines = train.overrides(options, 1, tmp_path / "data", tmp_path / "run", arm)
    return dict(line.lstrip("+").split("=", 1) for line in lines)  # as hydra: the last one of a key


def test_arms_differ_in_nothing_but_the_overlay(tmp_path):
    plain, overlay = (told((), arm, tmp_path) for arm in ("plain", "overlay"))
    segment = modules.SEGMENT.lstrip("+")
    differing = {key for key in plain.keys() | overlay.keys() if plain.get(key) != overlay.get(key)}
    assert differing and all(key.startswith(segment) for key in differing)
    assert plain[f"{segment}.observe"] == "True" and overlay[f"{segment}.profile"] == "elastic"


def test_large_scale_reaches_verl(tmp_path):
    large, small = told((), "overlay", tmp_path), told(("--scale", "small"), "overlay", tmp_path)
    rollout = "actor_rollout_ref.rollout"
    assert large["data.max_response_length"] == "8192" and small["data.max_response_length"] == "512"
    assert int(large[f"{rollout}.max_model_len"]) == 8192 + int(large["data.max_prompt_length"])
    assert large[f"{rollout}.max_num_batched_tokens"] == "8192" and large[f"{rollout}.max_num_seqs"] == "256"
    assert large[f"{rollout}.segment.segment_length"] == "1024" and small[f"{rollout}.segment.segment_length"] == "64"
    assert large["actor_rollout_ref.model.path"] == str(tmp_path / "model-large")
    assert small["actor_rollout_ref.model.path"].endswith("bench/testbed/model")


@pytest.mark.parametrize("arm", ["plain", "overlay"])
def test_an_arm_with_its_own_staleness_differs_in_nothing_else(tmp_path, arm):
    usual, own = told((), arm, tmp_path), told((), f"{arm} staleness=1.5", tmp_path)
    key = "async_training.staleness_threshold"
    assert usual.pop(key) == "2.0" and own.pop(key) == "1.5" and usual == own


@pytest.mark.parametrize(("arm", "said"), [
    ("magic", "unknown arm 'magic'"), ("magic staleness=1", "unknown arm 'magic staleness=1'"),
    ("plain staleness=", "staleness is a number"), ("plain staleness=-1", "staleness is a number"),
    ("plain staleness=1e", "staleness is a number")])
def test_unknown_arm(capsys, arm, said):
    with pytest.raises(SystemExit):
        train.parse(["--arms", f"plain,{arm}"])
    assert said in capsys.readouterr().err


def test_data_is_whole_or_not_there(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    options = train.parse(["--scale", "large", "--prompts", "3", "--out", str(tmp_path)])
    options.model.mkdir(parents=True)
    (options.model / "config.json").write_text("{}")  # is there: not trained again
    monkeypatch.setitem(train.SETTINGS, "large", replace(train.SETTINGS["large"], validation=2))
    data = train.prepare(options, [1, 2])
    assert sorted(path.name for path in data[2].iterdir()) == ["train.parquet", "val.parquet"]
    assert data[1] != data[2] and not list(tmp_path.glob("*.partial"))
