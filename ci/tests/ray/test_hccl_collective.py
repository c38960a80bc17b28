"""ray >= 2.60 with the hook: real actors in a group "hccl", through ray's own calls; here with gloo instead of HCCL."""

import json
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")
pytestmark = [pytest.mark.real, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "hccl_actors.py"
ON = {"ESGRPO_ENABLE": "1", "VERL_PLATFORM": "huawei", "RAY_HCCL_PROCESS_GROUP_BACKEND": "gloo",
      "RAY_USAGE_STATS_ENABLED": "0"}
PAUSE_SECONDS, AT_ONCE_SECONDS = 0.8, 0.5  # the script's pause is 1 s


def check_answers(output: str) -> None:
    """What two ranks must have seen, twice: the second group has the name of the first."""
    line, = (line for line in output.splitlines() if line.startswith("[["))  # raylets log to stdout, too
    rounds = json.loads(line)
    assert len(rounds) == 2
    for answers in rounds:
        for rank, seen in enumerate(answers):
            assert seen["allreduce"] == [3.0] * 3 and seen["max"] == [2.0] * 3
            assert all(seen[f"broadcast-{dtype}"] == [8] * 4 for dtype in ("uint8", "bfloat16", "int64"))
            assert seen["allgather"] == [[1.0] * 3, [2.0] * 3] and seen["send-recv"] == [0.0, 1.0, 2.0, 3.0]
            assert seen["reduce"] == [3.0 if rank == 1 else 1.0] * 3  # a tensor that is not the root's stays
            assert "only accepts torch.Tensor" in seen["numpy"] and seen["rank"] == [rank, 2]
        waited, late = (seen["barrier"] for seen in answers)
        assert waited > PAUSE_SECONDS and late < AT_ONCE_SECONDS


@pytest.mark.hook("add-hccl-collective-group")
def test_actors_with_the_hook(run_python, overlay, tmp_path):
    done = run_python(SCRIPT, "weights", tmp_path / "own", path=(overlay,), **ON)
    check_answers(done.stdout)
    assert "add-hccl-collective-group" not in done.stderr  # nothing odd in the driver


def test_without_it_ray_refuses(run_python, overlay, tmp_path):
    off = {"ESGRPO_DISABLE": "add-hccl-collective-group"}
    done = run_python(SCRIPT, "weights", tmp_path / "own", path=(overlay,), code=1, **{**ON, **off})
    assert "Backend HCCL is not registered" in done.stderr


REGISTRY = """
import json
from esgrpo import engine
{before}
import ray.util.collective
record = engine.load_hooks()["add-hccl-collective-group"]
from ray.util.collective.backend_registry import BackendRegistry
try:
    owner = BackendRegistry().get("HCCL").__module__
except ValueError as error:
    owner = str(error)
print(json.dumps([record.state.value, record.detail, owner]))
"""
FOREIGN = """
import wrapt
def foreign(module):
    class Theirs(module.BaseGroup): pass
    Theirs.__module__ = "somebody.else"
    module.register_collective_backend("hccl", Theirs)
import ray.util.collective.backend_registry as registry
foreign(registry)
engine.refresh()
"""


def test_it_is_registered_once(run_python, overlay):
    state, _, owner = json.loads(run_python("-c", REGISTRY.format(before=""), path=(overlay,), **ON).stdout)
    assert (state, owner) == ("APPLIED", "esgrpo.platforms.torch_collective")


def test_on_another_platform_it_is_not_needed(run_python, overlay):
    done = run_python("-c", REGISTRY.format(before=""), path=(overlay,), **{**ON, "VERL_PLATFORM": ""})
    state, _, refused = json.loads(done.stdout)
    assert state == "NOT_NEEDED" and "not registered" in refused


def test_a_foreign_backend_of_that_name_is_left_alone(run_python, overlay):
    """A ray, or a program, that has its own HCCL: said, not replaced."""
    before = ("import sys, os\n"
              "os.environ['VERL_PLATFORM'] = ''\n" + FOREIGN.replace("engine.refresh()", "")
              + "os.environ['VERL_PLATFORM'] = 'huawei'\nengine.refresh()")
    done = run_python("-c", REGISTRY.format(before=before), path=(overlay,), **ON)
    state, detail, owner = json.loads(done.stdout)
    assert (state, owner) == ("FAILED", "somebody.else") and "somebody.else for HCCL" in detail
