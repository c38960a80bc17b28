"""The recipe's main of v0.7.0: the config is validated and handed on before Ray starts, or refused in one line."""

import json
from pathlib import Path

import pytest

from ci.tests.contract import release_0_7_0

pytest.importorskip("verl")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SEGMENT = "+actor_rollout_ref.rollout.segment"
BASE = ["actor_rollout_ref.model.path=some/model", "actor_rollout_ref.rollout.name=vllm",
        "data.max_response_length=512", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.calculate_log_probs=True"]
ON = [f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_length=64"]
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
FSDP2 = "actor_rollout_ref.actor.strategy=fsdp2"
# verl asks for a cluster in the middle of run_ppo: what it would start with is the answer
SCRIPT = """
import json, os, sys
import release_0_7_0
release_0_7_0.importable()
import ray
from omegaconf import OmegaConf

def init(**arguments):
    print(json.dumps({"env": dict(arguments["runtime_env"]["env_vars"]), **seen}))
    raise SystemExit(0)

seen = {}
ray.init, ray.is_initialized = init, lambda: False
import recipe.fully_async_policy.fully_async_main as main
import verl.trainer.main_ppo as main_ppo
from hydra import compose, initialize_config_dir

os.chdir(sys.argv[1])  # the recipe's config searches verl/trainer/config below the working directory
with initialize_config_dir(os.path.join(sys.argv[1], "recipe/fully_async_policy/config"), version_base=None):
    config = compose("fully_async_ppo_trainer", overrides=sys.argv[2:])
from esgrpo import config as settings
seen["segment"] = OmegaConf.to_container(config.actor_rollout_ref.rollout).get("segment")
task_runner = main.FullyAsyncTaskRunner.__ray_metadata__.modified_class
hooks = sys.modules.get("esgrpo.engine")
seen["handshake"] = hooks.carries(task_runner._create_trainer, "partial-handshake") if hooks else False
main_ppo.run_ppo(config, task_runner_class=main.FullyAsyncTaskRunner)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return release_0_7_0.whole_tree(tmp_path_factory.mktemp("patched"), release_0_7_0.SLUGS)


@pytest.fixture
def start(forked_python, overlay, tree):
    def run(*overrides, code=0, enable="1"):
        return forked_python("-c", SCRIPT, tree, *BASE, *overrides, path=(tree, overlay, HERE), code=code,
                             ESGRPO_ENABLE=enable)

    return run


@pytest.mark.hook("partial-driver-start", "partial-handshake")
def test_the_settings_reach_every_worker(start):
    answer = json.loads(start(*ON, f"{SEGMENT}.prune.repetition.enable=True", f"{LOSS}=pois").stdout.splitlines()[-1])
    assert answer["env"]["ESGRPO_FEATURES"] == "observe,pois,prune,segment" and answer["handshake"]
    assert json.loads(answer["env"]["ESGRPO_SEGMENT"])["segment_length"] == 64
    assert json.loads(answer["env"]["ESGRPO_FACTS"])["optimizer_steps_per_version"] == 4


def test_without_the_overlay_nothing_does(start):
    """Negative control."""
    answer = json.loads(start(*ON, enable="0").stdout.splitlines()[-1])
    assert not [name for name in answer["env"] if name.startswith("ESGRPO")] and not answer["handshake"]


@pytest.mark.parametrize("overrides, named", [
    ([f"{SEGMENT}.enable=True", f"{SEGMENT}.segment_lenght=64"], ["segment_lenght", "segment_length?"]),
    ([*ON, f"{LOSS}=pois", f"{SEGMENT}.pois.anchor=version", FSDP2, "async_training.use_rollout_log_probs=False"],
     ["use_rollout_log_probs"]),
    ([*ON, f"{LOSS}=pois", f"{SEGMENT}.pois.anchor=version"], ["actor.strategy=fsdp", "wanted token here"]),
])
def test_a_mistake_is_one_line(start, overrides, named):
    done = start(*overrides, code=1)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("esgrpo: ")]
    assert all(word in line for word in named) and "Traceback" not in done.stderr


def test_the_version_anchor_asks_for_proximal_log_probs(start):
    done = start(*ON, f"{LOSS}=pois", f"{SEGMENT}.pois.anchor=version", FSDP2)
    assert "async_training.compute_prox_log_prob: False -> True" in done.stderr


def test_sais_needs_no_bypass_mode(start):
    """0.7.0 has no such path: the loss is handed the stored log-probs."""
    assert "sais" in json.loads(start(*ON, f"{LOSS}=sais").stdout.splitlines()[-1])["env"]["ESGRPO_FEATURES"]
