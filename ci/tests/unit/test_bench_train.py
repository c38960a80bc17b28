"""The training benchmark composes what verl is told; nothing is run here."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

from bench import train
from bench.common import ROOT, algorithms, arm_values, compare, modules, scales, stack, training
from ci.tests.unit.test_ablation import settings_of
from ci.tests.unit.test_bench_robustness import write_run

SMOLLM2 = ("--model", "smollm2", "--task", "lcm")
SEPARATE = (*SMOLLM2, "--trainer", "separate_async")
ROLLOUT = "actor_rollout_ref.rollout"


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


def test_data_is_whole_or_not_there(tmp_path):
    pytest.importorskip("pandas")
    options = train.parse(["--scale", "large", "--prompts", "3", "--validation", "2", "--out", str(tmp_path)])
    options.model.mkdir(parents=True)
    (options.model / "config.json").write_text("{}")  # is there: not trained again
    data = train.prepare(options, [1, 2])
    assert sorted(path.name for path in data[2].iterdir()) == ["train.parquet", "val.parquet"]
    assert data[1] != data[2] and not list(tmp_path.glob("*.partial"))


def test_the_pretrained_model_reaches_verl(tmp_path):
    lines = told((*SMOLLM2, "--cap", "4096", "--group", "16", "--prompts", "64", "--validation", "32",
                  "--pretrained", str(tmp_path / "made")), "overlay", tmp_path)
    assert lines["actor_rollout_ref.model.path"] == str(tmp_path / "made" / "model")
    assert lines["reward.custom_reward_function.path"].endswith("bench/pretrained/reward.py")
    assert lines["data.max_response_length"] == "4096" and lines[f"{ROLLOUT}.max_model_len"] == str(4096 + 128)
    assert lines[f"{ROLLOUT}.n"] == lines["rollout.n"] == "16"
    assert lines[f"{ROLLOUT}.segment.segment_length"] == str(4096 // scales.SEGMENTS)
    assert lines["data.train_max_samples"] == "64" and lines["data.val_max_samples"] == "32"
    dtype = lines[f"{ROLLOUT}.dtype"]
    assert dtype == scales.cpu_dtype()
    assert lines[f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes"] == str(scales.CPU_KV_BYTES)


@pytest.mark.parametrize("flags, dtype", [("sse2 avx2", "float32"), ("avx512f avx512_bf16", "bfloat16"),
                                          ("avx512f amx_bf16", "bfloat16"), ("asimd bf16", "bfloat16"),
                                          ("", "float32")])
def test_vllm_calculates_in_what_the_processor_can(flags, dtype):
    assert scales.cpu_dtype(flags.split()) == dtype


@pytest.mark.parametrize("arguments, arm, own", [
    (SMOLLM2, "plain workers=4", {f"{ROLLOUT}.agent.num_workers": "4", "reward.num_workers": "4"}),
    (SMOLLM2, "plain concurrent=8", {"async_training.concurrent_samples_per_replica": "8"}),
    (SMOLLM2, "plain gpus=1/3", {"rollout.n_gpus_per_node": "3"}),
    (SMOLLM2, "plain steps=4", {"async_training.trigger_parameter_sync_step": "4"}),
    (SMOLLM2, "plain lr=5e-5", {"actor_rollout_ref.actor.optim.lr": "5e-05"}),
    (SMOLLM2, "plain loss_agg_mode=seq-mean-token-mean", {f"{algorithms.ACTOR}.loss_agg_mode": "seq-mean-token-mean"}),
    (SMOLLM2, "plain loss=gspo", {algorithms.LOSS: "gspo"}),
    (SMOLLM2, "plain dynamic=on", {"async_training.use_dynamic_resource_scheduling": "True"}),
    (SMOLLM2, "plain dynamic=off", {}),
    (SEPARATE, "plain warmup=2", {"trainer.v1.separate_async.num_warmup_batches": "2.0"}),
    (SEPARATE, "plain off_policy=2", {"trainer.v1.sampler.max_off_policy_threshold": "2"}),
    (SEPARATE, "plain gpus=1/3", {f"{ROLLOUT}.n_gpus_per_node": "3"}),
    (SEPARATE, "plain gpus=2/1", {"trainer.n_gpus_per_node": "2"}),
    (SEPARATE, "plain steps=4", {"trainer.v1.separate_async.parameter_sync_step": "4", "data.train_batch_size": "32"}),
    (SEPARATE, "plain switch=on", {"trainer.v1.separate_async.hybrid_rollout.enable_switch": "True",
                                   "actor_rollout_ref.hybrid_engine": "True"}),
    (SEPARATE, "plain filter_groups=on", {"algorithm.filter_groups.enable": "True",
                                          "algorithm.filter_groups.metric": "acc"}),
    ((*SEPARATE, "--algorithm", "dapo"), "plain filter_groups=off", {"algorithm.filter_groups.enable": "False"}),
])
def test_an_arms_own_value_changes_what_it_names_and_nothing_else(tmp_path, arguments, arm, own):
    usual, lines = told(arguments, "plain", tmp_path), told(arguments, arm, tmp_path)
    logical = "ray_kwargs.ray_init.num_gpus"  # on a CPU
    assert {key: value for key, value in lines.items() if usual.get(key) != value and key != logical} == own


@pytest.mark.parametrize("arguments, arm", [(SMOLLM2, "plain dynamic=on"), (SEPARATE, "plain switch=on")])
def test_replicas_on_lent_gpus_sleep_while_the_trainer_works(tmp_path, monkeypatch, arguments, arm):
    """vLLM on a CPU has no sleep mode."""
    monkeypatch.setattr(arm_values.stack, "DEVICE", "cuda")
    lines = arm_values.parse(arm, {"off"}, train.parse([*arguments, "--arms", "plain"]).trainer).overrides()
    assert {f"{ROLLOUT}.free_cache_engine=True", f"{ROLLOUT}.enable_sleep_mode=True"} <= set(lines)


def test_an_arm_with_overlap_control_has_a_price_of_age_of_its_own(tmp_path):
    arm = "all overlap staleness=8 age_scale=16"
    usual, lines = told(SMOLLM2, "all overlap staleness=8", tmp_path), told(SMOLLM2, arm, tmp_path)
    assert {key: value for key, value in lines.items() if usual.get(key) != value} == {
        f"{ROLLOUT}.segment.overlap.age_scale": "16"}


def test_losses_of_the_overlay_and_a_warm_history(tmp_path):
    (tmp_path / "1.json").write_text("{}")
    arguments = (*SMOLLM2, "--seeds", "1", "--history", str(tmp_path / "{seed}.json"))
    lines = told((*arguments, "--arms", "overlay history=warm"), "overlay history=warm loss=pois+dmmpt", tmp_path)
    assert lines[algorithms.LOSS] == "pois" and lines[f"{ROLLOUT}.segment.dmmpt.enable"] == "True"
    assert lines[f"{ROLLOUT}.segment.history.path"] == str(tmp_path / "run" / train.WARM_HISTORY)
    assert f"{ROLLOUT}.segment.history.path" not in told(arguments, "overlay", tmp_path)


def test_dapo_samples_dynamically_where_the_trainer_has_it_and_says_so(tmp_path):
    fully, separate = (told((*base, "--algorithm", "dapo"), "plain", tmp_path) for base in (SMOLLM2, SEPARATE))
    for lines in (fully, separate):
        assert lines["actor_rollout_ref.actor.clip_ratio_high"] == "0.28"
        assert lines["reward.reward_kwargs.overlong_buffer_cfg.enable"] == "True"
        assert lines["reward.reward_kwargs.max_resp_len"] == lines["data.max_response_length"]
    assert "algorithm.filter_groups.enable" not in fully and separate["algorithm.filter_groups.enable"] == "True"
    assert "no dynamic sampling" in algorithms.said("dapo", 256, False)
    assert "dynamic sampling on acc" in algorithms.said("dapo", 256, True)


@pytest.mark.parametrize("arguments, said", [
    (("--task", "sorting"), "wanted one of gcd"), (("--cap", "0"), "--cap: 0 | wanted a whole number above 0"),
    (("--gpus", "2/2", "--arms", "plain gpus=1/2"), "3 GPUs, the others have 4"),
    (("--group", "1"), "no advantage"), (("--gpus", "2"), "TRAINER/ROLLOUT"), (("--segment", "9999"), "to the cap"),
    (("--seeds", "one"), "whole numbers"), (("--budget", "-1"), "--budget: -1 | wanted a number above 0"),
    (("--stop", "/"), "exists already"), (("--togeth",), "unrecognized arguments: --togeth"),
    (("--arms", "plain colour=red"), "unknown value 'colour'"), (("--arms", "plain steps=0"), "steps is optimiser"),
    (("--arms", "plain loss=magic"), "loss is one of vanilla"), (("--arms", "plain steps=1 steps=4"), "said twice"),
    (("--arms", "overlay age_scale=16"), "of an arm with overlap"),
    (("--arms", "plain switch=on"), "switch is a value of --trainer separate_async"),
    (("--trainer", "separate_async", "--arms", "plain staleness=2"), "staleness is a value of --trainer fully_async"),
    (("--arms", "overlay history=warm"), "wants --history FILE"), (("--arms", "plain history=warm"), "with a history"),
    (("--arms", "overlay history=warm", "--history", "/nowhere/{seed}.json"), "no file /nowhere/1.json"),
])
def test_bad_input_is_one_line(capsys, arguments, said):
    with pytest.raises(SystemExit):
        train.parse(["--model", "smollm2", *arguments])
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_with_fewer_questions_than_are_asked_for_is_one_line(tmp_path, capsys):
    pandas = pytest.importorskip("pandas")
    folder = tmp_path / "made"
    for name in ("model", "tasks/lcm"):
        (folder / name).mkdir(parents=True)
    (folder / "model" / "config.json").touch()
    for split, rows in (("train", 7), ("val", 9)):
        pandas.DataFrame({"prompt": [""] * rows}).to_parquet(folder / "tasks" / "lcm" / f"{split}.parquet")
    assert scales.make_pretrained(folder, "lcm", None, {"train": 7, "val": 9}) == folder / "tasks" / "lcm"
    assert train.main(["--model", "smollm2", "--task", "lcm", "--pretrained", str(folder), "--prompts", "8",
                       "--validation", "9", "--out", str(tmp_path / "out")]) == 1
    assert "train.parquet has 7 questions, wanted 8" in capsys.readouterr().out


def test_every_family_of_the_pretrained_model_is_known():
    families = pytest.importorskip("bench.pretrained.families")
    assert set(scales.FAMILIES) == set(families.FAMILIES)
    assert scales.PRETRAINED_PROMPT_TOKENS == families.MAX_PROMPT_TOKENS


@pytest.mark.parametrize("arm", modules.LEFT_OUT)
def test_all_without_a_module_lacks_it_and_nothing_else(arm):
    whole, rest = (settings_of(lines) for lines in (modules.ARMS["all"], modules.with_left_out(64)[arm]))
    ours, theirs = ({f"{section}.{key}": value for section, keys in vars(settings).items()
                     for key, value in (vars(keys) if hasattr(keys, "__dict__") else {"": keys}).items()}
                    for settings in (whole, rest))
    changed = {key for key in ours if ours[key] != theirs[key]}
    assert len(changed) == 1


def test_arms_may_stand_apart():
    options = train.parse(["--arms", "plain, overlay staleness=4 ,all"])
    assert options.arms.split(",") == ["plain", "overlay staleness=4", "all"]


def test_all_arms_race_to_the_same_rewards_and_are_compared_at_equal_samples(tmp_path):
    options = train.parse([*SMOLLM2, "--out", str(tmp_path)])
    assert options.targets == compare.PRETRAINED_TARGETS == train.parse(
        ["--model", "smollm2", "--task", "gcd", "--arms", "all without loops"]).targets
    write_run(tmp_path / "run", [], [0.2, 0.35, 0.45, 0.5, 0.55])
    result = compare.load(tmp_path / "run", 0.5)
    found = compare.races(result, (0.3, 0.5, 0.9))
    assert found["time to 0.30, s"] == result.evaluations[1][0] and found["time to 0.90, s"] is None
    assert found["samples to 0.30"] == result.sampled_by[1] and found["samples to 0.90"] is None
    assert found["time to 0.50, s"] == result.time_to_target and found["samples to 0.50"] == result.samples_to_target


def test_equal_samples_are_those_of_the_slowest_arm():
    curves = {"plain": {1: {"by_samples": [[0, 0.2], [100, 0.4]]}, 2: {"by_samples": [[0, 0.2], [50, 0.3]]}},
              "overlay": {1: {"by_samples": [[0, 0.2], [80, 0.6], [240, 0.8]]}}}
    found = {name: {seed: {} for seed in seeds} for name, seeds in curves.items()}
    found = training.with_equal_samples(found, curves)
    at = "held-out reward, equal samples"
    assert found["plain"][1][at] == 0.4 and found["overlay"][1][at] == pytest.approx(0.6 + 0.2 * 20 / 160)
    assert found["plain"][2][at] == 0.3


def test_rewards_on_the_same_prompts_are_measures_and_stay_out_of_a_record(tmp_path, monkeypatch):
    found = {"C loops": {1: {"steps": 3}, 2: {}}, "plain": {1: {}}}
    rewards = {"plain": {1: {"a": 0.0, "b": 0.5, "c": 0.0, "d": 0.5}},
               "C loops": {1: {"a": 0.0, "b": 0.5, "d": 1.0, "c": 0.25}, 2: {"a": 0.0}}}
    at = "reward on later prompts, less that of plain on the same"
    told = training.with_same_prompts(found, rewards)
    assert told == {"C loops": {1: {"steps": 3, at: 0.375, f"{at}, standard error": pytest.approx(0.125)}, 2: {}},
                    "plain": {1: {}}}
    published = {}
    monkeypatch.setattr(training, "publish", lambda _rows, _notes, _options, data: published.update(data) or 0)
    monkeypatch.setattr(training, "device", lambda _options: "a device")
    curves = {name: {seed: {"by_samples": [], training.REWARDS: of} for seed, of in seeds.items()}
              for name, seeds in rewards.items()}
    options = argparse.Namespace(task="lcm", seeds=[1, 2], budget=1.0, prompts=4, replicas=1, jobs=1, target=0.5)
    training.report(found, curves, [], options)
    assert published["measures"]["C loops"][1][at] == 0.375
    assert published["curves"]["C loops"][1] == {"by_samples": []}


def test_a_run_begins_with_the_files_that_it_is_brought(tmp_path, monkeypatch):
    (tmp_path / "history.json").write_text("warm")
    seen = []
    monkeypatch.setattr(training.arm, "run", lambda _label, _lines, run_dir, *_, **more: seen.append(
        ((run_dir / "own.json").read_text(), more["main"])))
    monkeypatch.setattr(training.compare, "load", lambda *_: None)
    monkeypatch.setattr(training, "measures", lambda *_: {})
    monkeypatch.setattr(compare, "load", lambda *_: type("Result", (), {"curves": {}, "first_rewards": {}})())
    training.run_one("x", ["a"], tmp_path / "run", 1.0, 0.5, main=stack.MAIN_PPO,
                     brought={"own.json": tmp_path / "history.json"})
    assert seen == [("warm", stack.MAIN_PPO)]


def in_environment(device, code):
    """Standard output of `code` in an interpreter whose ESGRPO_BENCH_DEVICE is `device`."""
    environment = {**os.environ, "ESGRPO_BENCH_DEVICE": device, "CUDA_VISIBLE_DEVICES": "3,4"}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_all_of_a_run_may_share_one_gpu():
    code = ("import json; from bench.common import stack; print(json.dumps([stack.DEVICE, stack.environment('overlay'),"
            "stack.fully_async('m', 't', 'v', 'r', 'd', replicas=2)]))")
    device, environment, lines = json.loads(in_environment("cuda-shared", code).stdout)
    assert device == "cuda" and set(environment["CUDA_VISIBLE_DEVICES"].split(",")) == {"3"}
    assert str(ROOT) in environment["PYTHONPATH"].split(os.pathsep)  # Ray's workers import the module below
    told = dict(line.lstrip("+").split("=", 1) for line in lines)
    assert told["ray_kwargs.ray_init.num_gpus"] == "3"
    assert told[f"{ROLLOUT}.checkpoint_engine.backend"] == "cpu_zmq"
    assert told[f"{ROLLOUT}.checkpoint_engine.custom_backend_module"] == "bench.common.shared_gpu"
    _, environment, lines = json.loads(in_environment("cuda", code).stdout)
    assert environment["CUDA_VISIBLE_DEVICES"] == "3,4"
    assert f"{ROLLOUT}.checkpoint_engine.backend=nccl" in lines and not any("custom_backend" in line for line in lines)


def test_runs_beside_others_on_a_gpu_have_few_workers():
    code = "from bench.common import scales; print(scales.setting_of(scales.SMOLLM2).workers)"
    assert {device: int(in_environment(device, code).stdout) for device in ("cuda", "cuda-shared")} == {
        "cuda": 8, "cuda-shared": 2}


def test_unknown_device_is_one_line():
    done = in_environment("tpu", "import bench.common.stack")
    assert done.returncode == 1 and "ESGRPO_BENCH_DEVICE is 'tpu'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("seconds, said", [
    ([], "1500 s per run"), ([1500.0, 1499.8], "1500 s per run"),
    ([740.4, 742.0], "740 to 742 s per run of a budget of 1500 s"),
    ([600.0, 1500.0], "600 to 1500 s per run of a budget of 1500 s; of unequal length: compare their rates")])
def test_a_record_says_how_long_was_measured(seconds, said):
    found = {"plain": {seed: {training.MEASURED: value} for seed, value in enumerate(seconds)}, "all": {1: {}}}
    assert training.time_of(found, 1500.0) == said
