"""What the quickstart says of its two arms, and what a reader can do in its environment afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import quickstart
from esgrpo.tools.lint.release import releases

ROOT = Path(__file__).resolve().parents[3]


def arm(effective_per_s, time_to_target, steps=40):
    return SimpleNamespace(effective_per_s=effective_per_s, time_to_target=time_to_target, steps=steps)


@pytest.mark.parametrize("overlay, gained, said", [
    ((110.0, 50.0), False, ("1.10 times its effective tokens/s", "1.00 times its time to target", "nothing")),
    ((90.0, None), False, ("0.90 times its effective tokens/s; nothing",)),
    ((140.0, 45.0), True, ("1.40", "0.90", "more than two runs of one arm differ by")),
    ((140.0, 80.0), False, ("1.40", "1.60 times its time to target", "more than")),  # more tokens, and slower
    ((60.0, 50.0), False, ("0.60", "more than")),
    ((54.0, None, 3), False, ("0.54", "40 and 3 optimiser steps are too few")),
    ((140.0, 45.0, 3), False, ("1.40", "too few")),
])
def test_a_gain_is_claimed_only_beyond_what_two_runs_of_one_arm_differ_by(overlay, gained, said):
    row, better = quickstart.against_plain(arm(100.0, 50.0), arm(*overlay))
    assert row[:2] == ["against plain", ""] and better == gained
    assert all(part in row[2] for part in said)


@pytest.mark.parametrize("model", ["testbed", "smollm2"])
def test_the_overlay_arm_is_the_default_profile_which_its_driver_accepts(model, tmp_path, monkeypatch):
    told = {}
    monkeypatch.setattr(quickstart.make_data, "write", lambda *_: None)
    monkeypatch.setattr(quickstart.scales, "make_pretrained", lambda *_: tmp_path)
    monkeypatch.setattr(quickstart.arm, "run", lambda name, overrides, *_, **__: told.update({name: overrides}))
    monkeypatch.setattr(quickstart.compare, "load", lambda *_: None)
    monkeypatch.setattr(quickstart, "report", lambda *_: 0)
    assert quickstart.main(["--model", model, "--out", str(tmp_path)]) == 0
    prefix = "+actor_rollout_ref.rollout.segment."
    segment = dict(line.removeprefix(prefix).split("=") for line in told["overlay"] if line.startswith(prefix))
    length = int(segment.pop("segment_length"))
    assert segment == {"profile": "elastic"}
    for lines in told.values():
        limit = next(line for line in lines if line.startswith("data.max_response_length=")).partition("=")[2]
        assert length < int(limit) and not any("RUN_DIR" in line for line in lines)
    reward = next(line for line in told["plain"] if line.startswith("reward.custom_reward_function.path="))
    assert reward.endswith("testbed/reward.py" if model == "testbed" else "pretrained/reward.py")


def test_where_nothing_is_gained_the_reader_is_sent_to_a_heading_that_is_there():
    page, _, heading = quickstart.NOTHING_HERE.rpartition(": ")[2].partition(", ")
    assert f"\n## {heading}\n" in (ROOT / page).read_text()


def test_it_ends_with_commands_of_its_own_environment(monkeypatch):
    monkeypatch.setattr(sys, "executable", str(quickstart.ROOT / ".venv" / "bin" / "python"))
    status, benchmarks = quickstart.afterwards(quickstart.ROOT / "runs" / "quickstart")
    assert status.startswith(".venv/bin/esgrpo status runs/quickstart: ")
    assert ".venv/bin/python -m bench.…" in benchmarks


@pytest.mark.parametrize("free, arguments, wanted", [(7, (), 8), (11, ("--model", "smollm2"), 12),
                                                     (7, ("--model=testbed",), 8)])
def test_it_asks_for_the_memory_of_its_model(tmp_path, free, arguments, wanted):
    awk = tmp_path / "awk"  # reads /proc/meminfo
    awk.write_text(f"#!/bin/sh\necho {free}\n")
    awk.chmod(0o755)
    done = subprocess.run(["bash", str(ROOT / "bench" / "quickstart.sh"), *arguments], capture_output=True, text=True,
                          env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "ESGRPO_PYTHON": sys.executable,
                               "ESGRPO_VENV": str(tmp_path / "venv")}, timeout=60)
    assert done.returncode == 2 and f"{free} GiB of memory are free | wanted {wanted} |" in done.stderr


RECIPES = ROOT / "bench" / "recipes"


@pytest.mark.parametrize("recipe", ["fully_async.sh", "one_step_off.sh"])
def test_a_recipe_refuses_a_release_that_it_was_not_written_for(tmp_path, recipe):
    for name in ("python3", "esgrpo"):
        stub = tmp_path / name
        stub.write_text("#!/bin/sh\necho started\n")
        stub.chmod(0o755)

    def started(**variables):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), **variables}
        return subprocess.run(["bash", str(RECIPES / recipe)], capture_output=True, text=True, env=environment,
                              timeout=60)

    for release in (None, *releases()):
        assert started(**({"VERL": release} if release else {})).stdout == "started\n", release
    done = started(VERL="0.7.5")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "VERL: 0.7.5 | wanted one of " + " ".join(releases()) in done.stderr and done.stderr.count(" | ") == 3


@pytest.mark.parametrize("checkout, installed", [("here", True), ("elsewhere", False)])
def test_the_package_is_installed_once_for_this_checkout(tmp_path, checkout, installed):
    """`pip install -e` runs only where the environment does not have this very checkout."""
    venv, here = tmp_path / "venv", tmp_path / "here"
    (venv / "bin").mkdir(parents=True)
    (here / "ci").mkdir(parents=True)
    (here / "ci" / "env.sh").write_text((ROOT / "ci" / "env.sh").read_text())
    package = tmp_path / checkout / "overlay" / "esgrpo"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (venv / "bin" / "esgrpo").touch(mode=0o755)
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/bash\n[ "$1" = -m ] && {{ echo "$@" >> {tmp_path}/pip; exit; }}\n'
                      f'PYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    subprocess.run(["bash", "-c", f"source {here}/ci/env.sh; install_package"], check=True, capture_output=True,
                   env={"PATH": os.environ["PATH"], "ESGRPO_VENV": str(venv)})
    assert (tmp_path / "pip").exists() != installed
    if not installed:
        assert (tmp_path / "pip").read_text().split()[-2:] == ["-e", str(here)]
