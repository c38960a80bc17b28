"""What the driver does with the composed config of verl's main_ppo, whose default is a v1 trainer."""

from __future__ import annotations

import json

import pytest

from ci.tests.contract.test_driver_start import BASE, ENVIRONMENT, ON, SEGMENT

pytest.importorskip("verl")
pytest.importorskip("vllm")
MODE = "trainer.v1.trainer_mode"
SEPARATE = [f"{MODE}=separate_async", "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=2", "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.n_gpus_per_node=3"]

CASES = {
    "off": [],
    "sync": ON,
    "static-sync": [f"{SEGMENT}.profile=static", f"{SEGMENT}.segment_length=64"],
    "static-colocate": [f"{SEGMENT}.profile=static", f"{SEGMENT}.segment_length=64", f"{MODE}=colocate_async",
                        "trainer.v1.sampler.max_off_policy_strategy=wait"],
    "separate": [*ON, *SEPARATE],
    "elastic": [f"{SEGMENT}.profile=elastic", f"{SEGMENT}.segment_length=64", *SEPARATE],
    "legacy": [*ON, "trainer.use_v1=False"],
    "legacy-off": ["trainer.use_v1=False"],
}

SCRIPT = """
import contextlib, io, json, os, sys
import verl.trainer.main_ppo as main
from hydra import compose, initialize_config_dir
from esgrpo import engine
from esgrpo.errors import EsgrpoError
from esgrpo.hooks.verl.run.driver_start import prepare

answers = {}
with initialize_config_dir(os.path.join(os.path.dirname(main.__file__), "config"), version_base=None):
    for name, overrides in json.load(sys.stdin).items():
        for variable in ("ESGRPO_SEGMENT", "ESGRPO_FEATURES", "ESGRPO_FACTS", "ESGRPO_RUN_DIR"):
            os.environ.pop(variable, None)
        config = compose("ppo_trainer", overrides=overrides)
        said, error = io.StringIO(), ""
        try:
            with contextlib.redirect_stderr(said):
                prepare(config)
        except EsgrpoError as refusal:
            error = str(refusal)
        answers[name] = {"error": error, "said": said.getvalue(), "mode": config.trainer.v1.trainer_mode,
                         "features": os.environ.get("ESGRPO_FEATURES", ""),
                         "facts": json.loads(os.environ.get("ESGRPO_FACTS", "{}")),
                         "states": {row["slug"]: row["state"] for row in engine.states("driver")}}
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(forked_python) -> dict:
    cases = {name: [*BASE, *overrides] for name, overrides in CASES.items()}
    done = forked_python("-c", SCRIPT, given=json.dumps(cases), **ENVIRONMENT)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS"))[len("ANSWERS"):])


def test_segments_start_under_every_v1_trainer(answers):
    for name in ("sync", "static-sync", "static-colocate", "separate"):
        assert not answers[name]["error"] and "v1" in answers[name]["features"].split(","), name
        assert answers[name]["states"]["v1-handshake"] == "APPLIED"


def test_the_profiles_group_filter_is_off_where_verl_has_one(answers):
    assert not answers["elastic"]["error"] and "null_groups" not in answers["elastic"]["features"].split(",")
    assert "null_groups: spare -> train, because verl's own filter does it" in answers["elastic"]["said"]


def test_the_legacy_trainer_is_still_refused_with_segments_only(answers):
    assert "neither verl's fully-async one nor that of its v1 trainers" in answers["legacy"]["error"]
    assert answers["legacy"]["error"].count("\n") == 0 and not answers["legacy-off"]["error"]


def test_without_a_feature_nothing_of_v1_is_on(answers):
    assert answers["off"]["features"] == "" and answers["off"]["states"]["v1-carry-over"] == "NOT_NEEDED"
    assert answers["off"]["mode"] == "sync"


def test_static_carry_over_needs_a_trainer_that_carries(answers):
    assert answers["static-sync"]["mode"] == answers["static-colocate"]["mode"] == "colocate_async"
    assert "sync -> colocate_async" in answers["static-sync"]["said"] and answers["sync"]["mode"] == "sync"
    assert "sync -> colocate_async" not in answers["static-colocate"]["said"]


def test_the_bound_that_waiting_really_gives_is_said(answers):
    assert "at most 8 + 1 weight versions" in answers["static-colocate"]["said"]
    assert "weight versions" not in answers["static-sync"]["said"]  # verl's default drops


def test_devices_and_optimiser_steps_of_a_version(answers):
    facts = {"devices": 5, "replicas": 1, "optimizer_steps_per_version": 4, "prompts_per_version": 16,
             "trainer": "separate_async", "batches_per_version": 1}
    assert facts.items() <= answers["separate"]["facts"].items()
