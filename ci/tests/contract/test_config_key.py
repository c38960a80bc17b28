"""`+actor_rollout_ref.rollout.segment.*` composes and converts on every verl release that the hook names.

Releases that are not installed come as wheels from the package index, unpacked below ESGRPO_CACHE (default
~/.cache/esgrpo) and put in front of the installed one. `verl.utils.config` and `verl.workers.config` of 0.7.1 to 0.9.1
import with the dependencies of 0.9.1; 0.7.0 needs one name that transformers has given up.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from esgrpo import recorded
from esgrpo.hooks.verl.run import segment_config

pytest.importorskip("verl")
pytestmark = pytest.mark.slow
GO_ON = {"ESGRPO_DISABLE": "driver-start,partial-driver-start"}
WITHOUT_A_DRIVER = ("0.7.1", "0.8.0")  # releases whose driver no hook reads: the guard ends a process that has the key
RELEASES = tuple(recorded.of_hook(segment_config.HOOK).fingerprints)
OVERRIDES = ["actor_rollout_ref.rollout.name=vllm",  # mandatory since 0.8.0
             "+actor_rollout_ref.rollout.segment.enable=True", "+actor_rollout_ref.rollout.segment.segment_length=1024",
             "+actor_rollout_ref.rollout.segment.prune.repetition.enable=True"]
SCRIPT = """
import copy, json, os, pickle, sys
import transformers
if not hasattr(transformers, "AutoModelForVision2Seq"):
    transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
import verl
from verl.utils.config import omega_conf_to_dataclass

directory = os.path.join(os.path.dirname(verl.__file__), "trainer", "config")
with initialize_config_dir(directory, version_base=None):
    raw = compose("ppo_trainer", overrides=sys.argv[1:]).actor_rollout_ref.rollout
plain = copy.deepcopy(raw)
with open_dict(plain):
    plain.pop("segment", None)
answer = {"verl": verl.__file__, "composed": raw.get("segment") is not None}
answer["plain"] = getattr(omega_conf_to_dataclass(plain), "segment", "no such field")
try:
    rollout = omega_conf_to_dataclass(raw)
    again = pickle.loads(pickle.dumps(rollout))
    answer.update(segment=rollout.segment, get=rollout.get("segment"), pickled=again.segment,
                  name=type(rollout).__module__ + ":" + type(rollout).__qualname__, same=type(again) is type(rollout))
except Exception as error:
    answer["error"] = f"{type(error).__name__}: {error}"
engine = sys.modules.get("esgrpo.engine")
if engine:
    answer["row"] = [row for row in engine.states("driver") if row["slug"] == "segment-config-key"][0]
print(json.dumps(answer))
"""


def installed() -> str:
    from importlib.metadata import version

    return version("verl")


def unpacked(version: str) -> list[str]:
    """Path entries with which `import verl` is this release."""
    if version == installed():
        return []
    cache = Path(os.environ.get("ESGRPO_CACHE") or Path.home() / ".cache" / "esgrpo")
    target = cache / f"verl-{version}"
    if not target.exists():
        wheels = cache / "wheels"
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
                        "--dest", str(wheels), f"verl=={version}"], check=True, timeout=300)
        unfinished = cache / f"verl-{version}.{os.getpid()}"  # renamed when whole: a broken download is not reused
        with zipfile.ZipFile(next(wheels.glob(f"verl-{version}-*.whl"))) as wheel:
            wheel.extractall(unfinished)
        unfinished.rename(target)
    return [str(target)]


@pytest.fixture(scope="module")
def release(request):
    return request.param, unpacked(request.param)


@pytest.fixture
def convert(forked_python, overlay):
    def run(release, code=0, **variables):
        path = release[1]
        done = forked_python("-c", SCRIPT, *OVERRIDES, path=(overlay, *path), code=code, VERL_PLATFORM="cpu",
                             **variables)
        if code:
            return done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])
        expected = path[0] if path else os.path.join(sys.prefix, "lib")
        assert answer.pop("verl").startswith(expected), "another verl was imported"
        return answer

    return run


@pytest.mark.hook("segment-config-key")
@pytest.mark.parametrize("release", RELEASES, indirect=True)
def test_the_key_composes_and_converts(convert, release):
    answer = convert(release, ESGRPO_ENABLE="1", ESGRPO_SEGMENT="{}", **GO_ON)
    segment = {"enable": True, "segment_length": 1024, "prune": {"repetition": {"enable": True}}}
    assert answer.get("error") is None and answer["composed"]
    assert answer["segment"] == answer["get"] == answer["pickled"] == segment
    assert answer["name"] == "verl.workers.config.rollout:RolloutConfig" and answer["same"]
    assert answer["plain"] is None  # a config without the key converts as before
    assert answer["row"]["state"] == "APPLIED" and answer["row"]["version"] == release[0]


@pytest.mark.parametrize("release", RELEASES, indirect=True)
def test_a_key_that_no_driver_has_read_is_refused(convert, release):
    """Else plain verl would train: this process has the overlay, but the run's settings never came here."""
    if release[0] in WITHOUT_A_DRIVER:
        assert "plain verl would train" in convert(release, code=1, ESGRPO_ENABLE="1").strip().splitlines()[-1]
    else:
        assert "goes on with plain verl" in convert(release, ESGRPO_ENABLE="1")["error"]
    if release[0] == installed():  # the ways out are ours, not the release's
        for way_out in ({"ESGRPO_STRICT": "0"}, GO_ON):
            assert convert(release, ESGRPO_ENABLE="1", **way_out).get("error") is None


@pytest.mark.parametrize("release", RELEASES, indirect=True)
def test_without_the_overlay_the_conversion_raises(convert, release):
    answer = convert(release)
    assert answer["composed"] and "unexpected keyword argument 'segment'" in answer["error"]
    assert answer["plain"] == "no such field"
