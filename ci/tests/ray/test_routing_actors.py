"""Under real Ray: the router arrives in its actor through verl's own loader, and a replaced __init__ does too."""

import json
import os
from importlib import metadata

import pytest

pytest.importorskip("ray")
pytest.importorskip("verl")
pytestmark = [pytest.mark.real, pytest.mark.slow]

ACTOR = """
import ray

class Base:
    def __init__(self, first):
        self.first = first

@ray.remote(num_cpus=0)
class Actor(Base):
    def __init__(self, first, second=1):
        super().__init__(first)
        self.queue, self.second = "original", second

    def seen(self):
        return [self.queue, self.first, self.second]
"""
DRIVER = """
import functools, json, os, types
import ray
from esgrpo import config, engine
from esgrpo.hooks.verl.server import tail_router
from verl.workers.rollout.router import get_router_handle

def build(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.queue = "swapped"
    return __init__

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
from actor import Actor
plain = ray.get(Actor.remote(5, second=7).seen.remote())
import importlib, actor
Actor = importlib.reload(actor).Actor
hook = engine.Hook("swaps-queue", "actor:Actor.__init__", ("driver",), "wrap", "why", "when", unguarded="a test")
engine._records["swaps-queue"] = engine.Record(hook, types.SimpleNamespace(build=build))
engine.refresh()
answers = {"plain": plain, "hooked": ray.get(Actor.remote(5, second=7).seen.remote())}

path = tail_router.config_path(os.getcwd())
os.makedirs(os.path.dirname(path))
with open(path, "w") as file:
    file.write(tail_router.config_text(config.parse({})))
router = get_router_handle({"r0": "h0", "r1": "h1"}, router_config_path=path)
fields = {"sampling_params": {"extra_args": {"segment": {"length_class": "tail"}}}}
answers["fields"] = ray.get(router.require_acquire_fields.remote())
answers["acquired"] = ray.get(router.acquire_server.remote(request_id="q", **fields))
answers["status"] = ray.get(router.get_status.remote())["total_inflight"]
router.release_server.remote(server_id=answers["acquired"][0], request_id="q")
answers["left"] = ray.get(router.get_total_inflight.remote())
answers["taken"] = ray.get(router.esgrpo_take_metrics.remote())
default = get_router_handle({"r0": "h0", "r1": "h1"})
answers["handles"] = [hasattr(handle, "esgrpo_take_metrics") for handle in (router, default)]
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(overlay, clean_environment, tmp_path_factory, ray_driver):
    place = tmp_path_factory.mktemp("routing")
    (place / "actor.py").write_text(ACTOR)
    if "vllm" not in {found.metadata["Name"] for found in metadata.distributions()}:
        (place / "vllm.dist-info").mkdir()
        (place / "vllm.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.28.0\n")
    environment = {**clean_environment, "PYTHONPATH": os.pathsep.join([overlay, str(place)]), "ESGRPO_ENABLE": "1",
                   "ESGRPO_FEATURES": "observe,segment,history,routing"}
    done = ray_driver(DRIVER, cwd=place, env=environment)
    line = next((x for x in done.stdout.splitlines() if x.startswith("ANSWERS")), None)
    assert line, done.stderr[-3000:]
    return json.loads(line.removeprefix("ANSWERS"))


def test_a_replaced_init_arrives_with_the_actor_class(answers):
    assert answers["hooked"] == ["swapped", 5, 7] and answers["plain"] == ["original", 5, 7]


def test_the_router_is_an_actor_that_counts_like_verls(answers):
    assert answers["fields"] == ["sampling_params"] and answers["acquired"][1] == "h" + answers["acquired"][0][1:]
    assert answers["status"] == 1 and answers["left"] == 0
    assert answers["taken"]["in_flight/tail"] > 0 and answers["taken"]["tail_replicas"] == 0


def test_only_our_router_is_asked_for_metrics(answers):
    assert answers["handles"] == [True, False]
