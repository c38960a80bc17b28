"""ray 2.51.1: create_collective_group(backend="hccl"), on torch.distributed; here with gloo instead of HCCL.

Two processes use the group class of the patched wheel. With ESGRPO_RAY_2_51_1_PYTHON, a Python that has this ray and
torch, real actors use it through ray's own calls.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ci.tests.contract import patched
from esgrpo import fingerprint

pytest.importorskip("torch")

SLUG = "add-hccl-collective-group"
COLLECTIVE = "ray/util/collective"
GROUP_FILE = f"{COLLECTIVE}/collective_group/hccl_collective_group.py"
FILES = tuple(f"{COLLECTIVE}/{name}.py" for name in ("types", "collective", "collective_group/base_collective_group"))
RAY_PYTHON = "ESGRPO_RAY_2_51_1_PYTHON"
BACKEND = {"RAY_HCCL_PROCESS_GROUP_BACKEND": "gloo"}
TIMEOUT_SECONDS = 120

MEMBER = '''
import json, pathlib, sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from ci.tests.contract import patched

root, kv, rank, world = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

def put(key, value, overwrite=False):
    (kv / "new").write_text(value)
    (kv / "new").rename(kv / key)

def get(key):
    return (kv / key).read_bytes() if (kv / key).exists() else None

internal_kv = SimpleNamespace(_internal_kv_put=put, _internal_kv_get=get, _internal_kv_del=lambda k: (kv / k).unlink())
types = patched.load(root / "ray/util/collective/types.py", "types", {})
base = patched.load(root / "ray/util/collective/collective_group/base_collective_group.py", "base",
                    {"ray.util.collective.types": types})
module = patched.load(root / "ray/util/collective/collective_group/hccl_collective_group.py", "hccl", {
    "ray": SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
                           experimental=SimpleNamespace(internal_kv=internal_kv)),
    "ray.util.collective.types": types, "ray.util.collective.collective_group.base_collective_group": base})
Group = module.HCCLGroup
if rank == 1:  # a trainer's own world
    dist.init_process_group("gloo", init_method=f"file://{kv}/own", rank=0, world_size=1)
seen = {"available": Group.check_backend_availability(), "backend": Group.backend(), "abstract":
        sorted(Group.__abstractmethods__)}
for name in ("a", "a", "b"):
    group = Group(world, rank, name)
    assert not list(kv.glob("collective_group_*")) or rank, "the address stays behind"
    value = torch.full((2,), rank + 1.0)
    group.allreduce([value], types.AllReduceOptions())
    seen["allreduce"] = value.tolist()
    value = torch.full((2,), rank + 1.0)
    options = types.ReduceScatterOptions()
    out = torch.zeros(2)
    try:
        group.reducescatter([out], [[value * (i + 1) for i in range(world)]], options)
        seen["reducescatter"] = out.tolist()
    except RuntimeError as error:
        seen["reducescatter"] = str(error)[:80]
    options = types.BroadcastOptions()
    options.root_rank = 1
    group.broadcast([value], options)
    seen["broadcast"] = value.tolist()
    group.barrier()
    group.destroy_group()
    seen["rank"] = [group.rank, group.world_size, group.group_name]
if rank == 1:
    assert dist.is_initialized() and dist.get_world_size() == 1, "the trainer's world has to outlive the groups"
    dist.destroy_process_group()
print(json.dumps(seen))
'''


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return {is_patched: patched.tree("ray", "2.51.1", [SLUG] if is_patched else [], tmp_path_factory.mktemp("ray"),
                                     also=FILES) for is_patched in (True, False)}


def members(root, kv, clean_environment, world=2, **variables):
    """Runs one process per rank; returns what each printed."""
    paths = [str(Path(__file__).resolve().parents[3]), str(Path(__file__).resolve().parents[3] / "overlay")]
    environment = {**clean_environment, "PYTHONPATH": os.pathsep.join(paths), **variables}
    started = [subprocess.Popen([sys.executable, "-c", MEMBER, root, kv, str(rank), str(world)], env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(world)]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output) for output, _ in outputs]


def test_two_processes(roots, tmp_path, clean_environment):
    first, second = members(roots[True], tmp_path, clean_environment, **BACKEND)
    assert first == {**second, "rank": [0, 2, "b"], "reducescatter": first["reducescatter"]}
    assert second["rank"] == [1, 2, "b"]
    assert first["available"] is True and first["backend"] == "hccl" and first["abstract"] == []
    assert first["allreduce"] == [3.0, 3.0] and first["broadcast"] == [2.0, 2.0]
    if not isinstance(first["reducescatter"], str):  # gloo of older torch has none, HCCL has
        assert (first["reducescatter"], second["reducescatter"]) == ([3.0, 3.0], [6.0, 6.0])


def test_without_npus_and_without_the_variable(roots, tmp_path, clean_environment):
    """The default is HCCL itself, which says what is missing."""
    if fingerprint.source_file("torch_npu"):
        pytest.skip("torch_npu is installed")
    with pytest.raises(AssertionError, match="has no backend 'hccl' for the collective group 'a'. Please install"):
        members(roots[True], tmp_path, clean_environment, world=1)


def dispatch(root, available):
    """ray's collective.py and types.py around a group class that records its construction."""
    made = []

    class HCCLGroup:
        def __init__(self, *arguments):
            made.append(arguments)

        @staticmethod
        def check_backend_availability():
            return available

    types = patched.load(root / COLLECTIVE / "types.py", "types", {})
    group = "ray.util.collective.collective_group"
    module = patched.load(root / COLLECTIVE / "collective.py", "collective", {
        "ray": patched.Upstream(experimental=patched.Upstream(internal_kv=patched.Upstream())), "": patched.Upstream(),
        ".": patched.Upstream(types=types), "ray.experimental.collective.util": patched.Upstream(),
        f"{group}.torch_gloo_collective_group": patched.Upstream(),
        f"{group}.hccl_collective_group": patched.Upstream(HCCLGroup=HCCLGroup),
        f"{group}.nccl_collective_group": patched.Upstream(), f"{group}.nixl_backend": patched.Upstream()})
    return module, types, made


def test_ray_makes_the_group(roots):
    module, types, made = dispatch(roots[True], available=True)
    for name in ("hccl", "HCCL"):
        module._check_backend_availability(types.Backend(name))
        module.GroupManager().create_collective_group(types.Backend(name), 2, 1, "weights", 30000)
    assert made == [(2, 1, "weights")] * 2
    module, types, made = dispatch(roots[True], available=False)
    with pytest.raises(RuntimeError, match="HCCL is not available. Please install torch_npu."):
        module._check_backend_availability(types.Backend("hccl"))
    with pytest.raises(RuntimeError, match="HCCL is not available"):
        module.GroupManager().create_collective_group("hccl", 2, 1, "weights", 30000)
    assert made == []


def test_upstream_refuses_the_name(roots):
    """Negative control, and what the patch leaves as it is."""
    with pytest.raises(ValueError, match="Unrecognized backend: 'hccl'"):
        dispatch(roots[False], available=True)[1].Backend("hccl")
    for is_patched in (True, False):
        _, types, _ = dispatch(roots[is_patched], available=True)
        assert [types.Backend(name) for name in ("nccl", "gloo", "torch_gloo", "nixl")] == [
            "nccl", "gloo", "torch_gloo", "nixl"]
        with pytest.raises(ValueError, match="Unrecognized backend: 'hcll'"):
            types.Backend("hcll")


def test_the_overlay_has_the_same_group(roots, overlay):
    """Two copies of one class, as a patched ray cannot import the overlay: they may not drift apart."""
    def code(path):
        body = ast.parse(Path(path).read_text(encoding="utf-8")).body
        return [ast.dump(node) for node in body[1:]]  # without the docstring

    assert code(roots[True] / GROUP_FILE) == code(f"{overlay}/esgrpo/platforms/torch_collective.py")


def patched_ray(python, root, directory):
    """A directory in which `import ray` finds the interpreter's ray with its collective package patched."""
    script = "import ray; print(ray.__version__, ray.__path__[0])"
    version, _, home = subprocess.run([python, "-c", script], cwd=directory, check=True, capture_output=True,
                                      text=True).stdout.strip().partition(" ")
    assert version == "2.51.1"
    for original, skipped in ((Path(home), "util"), (Path(home) / "util", "collective")):
        place = directory / "ray" / original.relative_to(home)
        place.mkdir()
        for child in original.iterdir():
            if child.name != skipped:
                (place / child.name).symlink_to(child)
    changed = directory / COLLECTIVE
    subprocess.run(["cp", "-r", Path(home) / "util" / "collective", changed], check=True)
    for name in patched.touched(patched.patch_file("ray", "2.51.1", SLUG)):
        (directory / name).write_bytes((root / name).read_bytes())
    return directory


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(RAY_PYTHON not in os.environ, reason=f"{RAY_PYTHON} names no Python with ray 2.51.1: not run")
def test_real_actors(roots, tmp_path, run_python):
    from ci.tests.ray.test_hccl_collective import check_answers

    python, script = os.environ[RAY_PYTHON], Path(__file__).parents[1] / "ray" / "hccl_actors.py"
    variables = {**BACKEND, "RAY_USAGE_STATS_ENABLED": "0"}
    place = tmp_path / "patched"
    place.mkdir()
    place = patched_ray(python, roots[True], place)
    check_answers(run_python(script, "weights", tmp_path / "own", path=(place,), python=python, **variables).stdout)
    refused = run_python(script, "weights", tmp_path / "own2", python=python, code=1, **variables)
    assert re.search("Unrecognized backend: 'hccl'", refused.stderr)
