"""Control calls of a server whose slots are all taken by responses: a real Ray actor, made as verl makes its servers.

`launch` takes `max_concurrency` from verl's own RolloutReplica, as its launch_servers does. The server generates until
it is told to stop by a call of its own, like a weight sync that aborts what runs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("verl")
pytestmark = [pytest.mark.real, pytest.mark.slow]

OVERLAY = Path(__file__).resolve().parents[3] / "overlay"
SCRIPT = """
import asyncio, json, sys
from types import SimpleNamespace
import ray
from verl.workers.rollout import replica

hooked = sys.argv[1] == "hooked"
if hooked:
    from esgrpo.hooks.verl.server import control_slots
    control_slots.apply(replica)
    assert control_slots.installed(replica)

class Server:
    def __init__(self):
        self.stop, self.running = asyncio.Event(), 0
    async def generate(self):
        self.running += 1
        await self.stop.wait()
        return 1
    async def abort_all(self):
        self.stop.set()
        return self.running

class Replica(replica.RolloutReplica):
    async def launch_servers(self): pass

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
place = object.__new__(Replica)
place.config = SimpleNamespace(max_num_seqs=64)
slots = place.max_concurrency
server = ray.remote(Server).options(num_cpus=0, max_concurrency=slots).remote()
responses = [server.generate.remote() for _ in range(1000 + 16 + 8)]
control = server.abort_all.remote()
done, _ = ray.wait([control], timeout=20 if hooked else 8)  # plain verl's never comes
print("ANSWER" + json.dumps({"slots": slots, "came_through": bool(done),
                             "whole": len(ray.get(responses, timeout=60)) if done else 0}))
"""


@pytest.fixture(scope="module", params=["plain", "hooked"])
def answer(request, tmp_path_factory, ray_driver) -> tuple[bool, dict]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ESGRPO_")}
    done = ray_driver(SCRIPT, request.param, cwd=tmp_path_factory.mktemp("slots"),
                      env={**clean, "PYTHONPATH": str(OVERLAY), "ESGRPO_ENABLE": "0", "VERL_PLATFORM": "cpu",
                           "HF_HUB_OFFLINE": "1"})
    line = next((x for x in done.stdout.splitlines() if x.startswith("ANSWER")), None)
    assert line, done.stderr[-3000:]
    return request.param == "hooked", json.loads(line.removeprefix("ANSWER"))


@pytest.mark.hook("server-slots")
def test_a_control_call_comes_through_although_every_response_waits(answer):
    """Negative control: verl's own limit, with which nothing ever gives a slot back."""
    hooked, found = answer
    assert found["came_through"] is hooked and found["whole"] == (1024 if hooked else 0)
    assert found["slots"] == (1 << 20 if hooked else 1000)
