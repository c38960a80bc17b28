"""What bench.train tells verl, composed by Hydra against verl's own config and accepted by the overlay's start."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from bench import train
from bench.common import TESTBED

ROOT = Path(__file__).resolve().parents[3]
SEPARATE = ("--trainer", "separate_async")
CASES = {  # name -> (arm, arguments)
    "plain": ("plain staleness=4 workers=4 concurrent=16", ()),
    "long groups": ("overlay", ("--cap", "4096", "--group", "16", "--algorithm", "dapo")),
    "lent": ("plain gpus=2/2 dynamic=on", ("--gpus", "2/2")),
    "loss": ("overlay loss=sais+dmmpt steps=4", ()),
    "auto anchor": ("overlay loss=pois steps=4", ()),
    "own loss": ("overlay loss=cispo", ()),
    "left out": ("all without routing", ()),
    "warm": ("overlay history=warm", ("--history", "HISTORY")),
    "separate": ("overlay warmup=2 off_policy=4 steps=4", (*SEPARATE, "--algorithm", "dapo")),
    "separate lent": ("plain gpus=2/2 switch=on", (*SEPARATE, "--gpus", "2/2")),
}
SCRIPT = """
import contextlib, io, json, os, sys
import verl.experimental.fully_async_policy as package
import verl.experimental.fully_async_policy.fully_async_main
import verl.trainer.main_ppo as main
from hydra import compose, initialize_config_dir
from esgrpo.errors import EsgrpoError
from esgrpo.hooks.verl.run.driver_start import prepare

answers = {}
for trainer, home, name in (("fully_async", package, "fully_async_ppo_trainer"),
                            ("separate_async", main, "ppo_trainer")):
    with initialize_config_dir(os.path.join(os.path.dirname(home.__file__), "config"), version_base=None):
        for case, (wanted, lines) in json.loads(sys.argv[1]).items():
            if wanted != trainer:
                continue
            for variable in ("ESGRPO_SEGMENT", "ESGRPO_FEATURES", "ESGRPO_FACTS", "ESGRPO_RUN_DIR"):
                os.environ.pop(variable, None)
            config, error = compose(name, overrides=lines), ""
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    prepare(config)
            except EsgrpoError as refusal:
                error = str(refusal)
            rollout = config.actor_rollout_ref.rollout
            answers[case] = {
                "error": error, "features": os.environ.get("ESGRPO_FEATURES", "").split(","),
                "segment": json.loads(os.environ.get("ESGRPO_SEGMENT", "{}")),
                "trainer": config.trainer.n_gpus_per_node, "n": rollout.n, "length": rollout.response_length,
                "rollout": config.rollout.n_gpus_per_node if trainer == "fully_async" else rollout.n_gpus_per_node,
                "async": dict(config.async_training) if trainer == "fully_async" else {},
                "switch": config.trainer.v1.separate_async.hybrid_rollout.enable_switch,
                "filters": bool(config.algorithm.filter_groups and config.algorithm.filter_groups.enable),
                "steps": json.loads(os.environ.get("ESGRPO_FACTS", "{}")).get("optimizer_steps_per_version"),
                "loss": config.actor_rollout_ref.actor.policy_loss.loss_mode}
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(forked_python, tmp_path_factory) -> dict:
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    out = tmp_path_factory.mktemp("train")
    (out / "history.json").write_text("{}")
    told = {}
    for name, (arm, arguments) in CASES.items():
        arguments = [str(out / "history.json") if word == "HISTORY" else word for word in arguments]
        options = train.parse(["--model", "smollm2", "--arms", arm, "--seeds", "1", "--out", str(out), *arguments])
        options.model = TESTBED / "model"  # the start wants one that is there
        told[name] = options.trainer, train.overrides(options, 1, out / "tasks", out / name.replace(" ", "-"), arm)
    done = forked_python("-c", SCRIPT, json.dumps(told), path=(ROOT / "overlay",), ESGRPO_ENABLE="1",
                         VERL_PLATFORM="cpu", HF_HUB_OFFLINE="1")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS"))[len("ANSWERS"):])


def test_every_command_is_accepted(answers):
    assert {name: found["error"] for name, found in answers.items()} == dict.fromkeys(CASES, "")


def test_values_of_an_arm_arrive_in_verls_config(answers):
    assert answers["plain"]["async"]["staleness_threshold"] == 4.0
    assert answers["plain"]["async"]["concurrent_samples_per_replica"] == 16
    assert answers["long groups"]["n"] == 16 and answers["long groups"]["length"] == 4096
    assert answers["lent"]["async"]["use_dynamic_resource_scheduling"]
    assert answers["separate lent"]["switch"]
    for name in ("lent", "separate lent"):
        assert (answers[name]["trainer"], answers[name]["rollout"]) == (2, 2)
    assert answers["separate"]["filters"] and not answers["long groups"]["filters"]
    for name in ("loss", "auto anchor", "separate"):
        assert answers[name]["steps"] == 4, name
    assert [answers[name]["loss"] for name in ("loss", "own loss", "plain")] == ["sais", "cispo", "vanilla"]


def test_the_overlay_switches_on_what_the_arm_names(answers):
    assert {"sais", "dmmpt"} <= set(answers["loss"]["features"])
    assert answers["auto anchor"]["segment"]["pois"]["anchor"] == "version"  # four steps a version
    assert "history" in answers["left out"]["features"] and "routing" not in answers["left out"]["features"]
    assert answers["warm"]["segment"]["history"]["path"].endswith(train.WARM_HISTORY)
