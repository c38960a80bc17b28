"""What the driver does with verl's own composed config: refuse in one line, or prepare every process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SEGMENT = "+actor_rollout_ref.rollout.segment"
ON = [f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=64"]
ORDER = [*ON, f"{SEGMENT}.history.enable=True", f"{SEGMENT}.routing.enable=True"]
ROUTING = [*ORDER, f"{SEGMENT}.routing.tail_share=0.5"]
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
BASE = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=some/model",
        "data.max_response_length=512", "actor_rollout_ref.rollout.calculate_log_probs=True", "trainer.device=cpu",
        "algorithm.adv_estimator=grpo"]

# overrides -> what the one line has to name
REFUSED = {
    "length-0": ([f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=0"], ["segment_length", "0", "[2, inf]"]),
    "length-1": ([f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=1"], ["segment_length", "1"]),
    "length-word": ([f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=long"], ["segment_length", "'long'"]),
    "length-beyond": ([f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=1024"], ["512", "max_response_length"]),
    "key": ([f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_lenght=64"], ["segment_lenght", "segment_length?"]),
    "estimator": ([*ON, f"{SEGMENT}.prune.repetition.enable=True", f"{SEGMENT}.prune.treatment=masked",
                   "algorithm.adv_estimator=gae"], ["gae", "grpo"]),
    "group": ([*ON, f"{SEGMENT}.prune.finish_group_after=99", f"{SEGMENT}.prune.audit.enable=True",
               f"{SEGMENT}.prune.treatment=masked"],
              ["finish_group_after", "99", "rollout.n"]),
    "sais": ([*ON, f"{LOSS}=sais", "actor_rollout_ref.rollout.calculate_log_probs=False"], ["calculate_log_probs"]),
    "epochs": ([*ON, f"{LOSS}=pois", "actor_rollout_ref.actor.ppo_epochs=2"], ["ppo_epochs", "2"]),
    "dmmpt": ([*ON, f"{SEGMENT}.dmmpt.enable=True"], ["dmmpt", "loss_mode"]),
    "rollout": ([*ON, "actor_rollout_ref.rollout.name=sglang"], ["sglang", "vllm"]),
    "model": ([*ON, "actor_rollout_ref.model.path=/nowhere/at/all"], ["/nowhere/at/all", "directory"]),
    "resume": ([*ON, "trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_20"],
               ["trainer.resume_from_path", "/nowhere/global_step_20", "not there", "the run does not start"]),
    "resume relative": ([*ON, "trainer.resume_mode=resume_path", "trainer.resume_from_path=nowhere/global_step_20"],
                        ["nowhere/global_step_20", "not there"]),
    "resume no step": ([*ON, "trainer.resume_mode=resume_path", "trainer.resume_from_path=/"], ["global_step_N"]),
    "resume nothing": ([*ON, "trainer.resume_mode=resume_path"], ["trainer.resume_from_path", "None"]),
    "scalar": ([f"{SEGMENT}=True"], ["segment", "mapping"]),
    "router": ([*ROUTING, "actor_rollout_ref.rollout.router_config_path=/my/router.yaml"],
               ["router_config_path", "/my/router.yaml", "tail_share=0"]),
    "deterministic": ([*ROUTING, "actor_rollout_ref.rollout.full_determinism=True"], ["full_determinism"]),
    "interpolation": ([*ON, f"{SEGMENT}.history.path=${{oc.env:SET_BY_NOBODY}}"],
                      ["segment.history.path", "SET_BY_NOBODY"]),
    "no effect": ([f"{SEGMENT}.boundary=yield"], ["segment.boundary", "segment.enable", "no effect"]),
    "path": ([*ON, "+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH=/elsewhere"], ["/elsewhere", "PYTHONPATH"]),
}
ACCEPTED = {
    "off": [],
    "observe": [f"{SEGMENT}.observe=True"],
    "all": [*ON, f"{SEGMENT}.prune.repetition.enable=True", f"{SEGMENT}.prune.treatment=masked", f"{LOSS}=pois",
            f"{SEGMENT}.dmmpt.enable=True", "async_training.trigger_parameter_sync_step=1"],
    "version": [*ON, f"{LOSS}=pois", f"{SEGMENT}.pois.anchor=version", "async_training.trigger_parameter_sync_step=3"],
    "one step": [*ON, f"{LOSS}=pois", "async_training.trigger_parameter_sync_step=1"],
    "three steps": [*ON, f"{LOSS}=pois", "async_training.trigger_parameter_sync_step=3"],
    "keep": [*ON, f"{SEGMENT}.sync.requests=keep"],
    "keep-nowhere": [*ON, f"{SEGMENT}.sync.requests=keep", "rollout.nnodes=0"],
    "keep-hybrid": [*ON, f"{SEGMENT}.sync.requests=keep", "async_training.use_dynamic_resource_scheduling=True"],
    "three steps token": [*ON, f"{LOSS}=pois", f"{SEGMENT}.pois.anchor=token",
                          "async_training.trigger_parameter_sync_step=3"],
    "idle": [*ON, f"{SEGMENT}.prune.audit.window=600"],
    "resume remote": [*ON, "trainer.resume_mode=resume_path", "trainer.resume_from_path=hdfs://store/global_step_20"],
    "resume elsewhere": [*ON, "trainer.resume_mode=resume_path", "trainer.resume_from_path=nowhere/global_step_20",
                         "+ray_kwargs.ray_init.runtime_env.working_dir=/elsewhere"],
    "resume unused": [*ON, "trainer.resume_from_path=/nowhere/global_step_20"],
    "unwritable": [*ON, f"{SEGMENT}.history.enable=True", f"{SEGMENT}.history.path=/dev/null/history.json"],
    "routing": [*ROUTING, "trainer.default_local_dir=routing-run"],
    "order alone": [*ORDER, "trainer.default_local_dir=order-run", "actor_rollout_ref.rollout.full_determinism=True",
                    "actor_rollout_ref.rollout.router_config_path=/my/router.yaml"],
}

SCRIPT = """
import json, os, sys
import verl.experimental.fully_async_policy as package
import verl.experimental.fully_async_policy.fully_async_main  # carries the handshake hook
import verl.trainer.main_ppo  # the main imports it first
from hydra import compose, initialize_config_dir
from esgrpo import engine
from esgrpo.errors import EsgrpoError
from esgrpo.hooks.verl.run import driver_start
from esgrpo.hooks.verl.run.driver_start import prepare

driver_start.sysconfig.get_path = lambda name: "/nowhere"  # as if nothing were installed: PYTHONPATH is all there is
answers = {}
with initialize_config_dir(os.path.join(os.path.dirname(package.__file__), "config"), version_base=None):
    for name, overrides in json.load(sys.stdin).items():
        for variable in ("ESGRPO_SEGMENT", "ESGRPO_FEATURES", "ESGRPO_FACTS", "ESGRPO_RUN_DIR"):
            os.environ.pop(variable, None)
        config = compose("fully_async_ppo_trainer", overrides=overrides)
        try:
            prepare(config)
        except EsgrpoError as error:
            answers[name] = {"error": str(error)}
            continue
        answers[name] = {
            "features": os.environ["ESGRPO_FEATURES"], "facts": json.loads(os.environ["ESGRPO_FACTS"]),
            "estimator": str(config.algorithm.adv_estimator),
            "entropy": bool(config.actor_rollout_ref.actor.calculate_entropy),
            "frees": bool(config.actor_rollout_ref.rollout.free_cache_engine),
            "router": config.actor_rollout_ref.rollout.router_config_path,
            "files": os.path.exists(os.path.join(str(config.trainer.default_local_dir), "esgrpo", "router.yaml")),
            "anchor": json.loads(os.environ["ESGRPO_SEGMENT"])["pois"]["anchor"],
            "bypass": bool(config.algorithm.rollout_correction.bypass_mode),
            "passed_on": sorted(config.ray_kwargs.ray_init.runtime_env.env_vars),
            "states": {row["slug"]: row["state"] for row in engine.states("driver")}}
print("ANSWERS" + json.dumps(answers))
"""


ENVIRONMENT = {"path": (ROOT / "overlay",), "ESGRPO_ENABLE": "1", "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def answers(forked_python, tmp_path_factory) -> dict:
    cases = {name: [*BASE, *overrides] for name, (overrides, _) in REFUSED.items()}
    cases |= {name: [*BASE, *overrides] for name, overrides in ACCEPTED.items()}
    result = forked_python("-c", SCRIPT, given=json.dumps(cases), cwd=tmp_path_factory.mktemp("driver"), **ENVIRONMENT)
    line = next((x for x in result.stdout.splitlines() if x.startswith("ANSWERS")), None)
    assert line, result.stderr[-3000:]
    return {**json.loads(line.removeprefix("ANSWERS")), "said": result.stderr}


@pytest.mark.hook("driver-start")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_with_five_parts(answers, name):
    line = answers[name]["error"]
    assert line.startswith("esgrpo: ") and line.count(" | ") >= 3 and "\n" not in line
    for part in REFUSED[name][1]:
        assert part in line, (part, line)


def test_off_leaves_no_feature_and_no_hook_of_a_feature(answers):
    off = answers["off"]
    assert off["features"] == "" and off["estimator"] == "grpo"
    assert off["states"]["group-members"] == off["states"]["segment-scheduler"] == "NOT_NEEDED"


def test_the_anchor_follows_the_steps_of_a_weight_version(answers):
    """Resolved once, by the driver: the losses read token or version."""
    anchors = {name: answers[name]["anchor"] for name in ("version", "one step", "three steps", "three steps token")}
    assert anchors == {"version": "version", "one step": "token", "three steps": "version",
                       "three steps token": "token"}
    assert answers["one step"]["bypass"] and not answers["three steps"]["bypass"]
    said = answers["said"]
    assert said.count("pois.anchor: auto -> version, because a weight version has 3 optimiser steps") == 1
    assert "pois.anchor: auto -> token, because a weight version has 1 optimiser step\n" in said


def test_unclipped_steps_are_warned_of_where_there_are_several(answers):
    """Negative controls: one step, and the anchor that clips."""
    assert answers["said"].count("nothing clips how far the 3 optimiser steps") == 1
    assert "nothing clips how far the 1 " not in answers["said"]


def test_without_replicas_for_the_tail_the_users_router_stays(answers):
    got = answers["order alone"]
    assert got["router"] == "/my/router.yaml" and not got["files"] and "tails" not in got["features"]


def test_kept_requests_need_a_cache_that_stays(answers):
    """Negative control: verl's default frees it, which must stay for hybrid replicas."""
    assert answers["all"]["frees"] and not answers["keep"]["frees"]
    assert answers["keep-nowhere"]["frees"] and answers["keep-hybrid"]["frees"]
    for part in ("free_cache_engine: True -> False", "there are no standalone replicas"):
        assert answers["said"].count(part) == 1  # not of "keep-hybrid": the standalone servers settle it themselves
    assert answers["keep"]["features"] == "keep,observe,segment"


def test_what_has_no_effect_is_said_once(answers):
    assert answers["said"].count("prune.audit.window=600: no effect without") == 1
    assert answers["said"].count("history.path=/dev/null/history.json: /dev/null is a file") == 1


def test_observing_changes_nothing_of_verls_settings(answers):
    assert answers["observe"]["features"] == "observe" and answers["observe"]["estimator"] == "grpo"


@pytest.mark.hook("driver-start")
def test_features_adjust_verl_and_are_passed_on(answers):
    got = answers["all"]
    assert set(got["features"].split(",")) == {"dmmpt", "observe", "pois", "prune", "segment", "weighted"}
    assert got["estimator"] == "grpo_segment" and got["entropy"] and got["bypass"]
    assert {"ESGRPO_ENABLE", "ESGRPO_FEATURES", "ESGRPO_SEGMENT", "ESGRPO_FACTS"} <= set(got["passed_on"])
    assert got["states"]["worker-handshake"] == "APPLIED" and got["facts"]["devices"] >= 2


def test_the_version_anchor_recomputes_log_probs(answers):
    assert not answers["version"]["bypass"]


def test_routing_names_its_router_in_verls_own_key(answers):
    import yaml

    got = answers["routing"]
    assert set(got["features"].split(",")) == {"history", "observe", "routing", "segment", "tails"}
    assert got["router"].endswith("routing-run/esgrpo/router.yaml")
    assert yaml.safe_load(Path(got["router"]).read_text()) == {
        "router_class": "esgrpo.hooks.verl.server.tail_router.TailRouter", "seed": 0, "tail_share": 0.5}
    assert got["states"]["tail-router"] in ("APPLIED", "NOT_NEEDED")
    assert all(answers[name]["router"] is None for name in ACCEPTED if name not in ("routing", "order alone"))


def test_a_users_mistake_never_ends_in_a_traceback(run_python):
    """Through verl's own main, hydra and all."""
    result = run_python(
        "-m", "esgrpo", "run", "--", sys.executable, "-m", "verl.experimental.fully_async_policy.fully_async_main",
        *BASE, f"{SEGMENT}.segment_lenght=64", code=1, timeout=300, **ENVIRONMENT)
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("esgrpo: actor_rollout_ref.rollout.segment.segment_lenght")
