"""Real fully-async starts in which one kind of process lacks a hook: refused in one line before the first weight sync.

The driver's own sources are whole, so that only the handshake can see it; and the two ways on without a hook.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.common import arm
from ci.tests.e2e.test_fully_async import ROOT, SEGMENT, overrides

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

# read after the overlay's own, in every process; the driver is the one that names verl's main
SITECUSTOMIZE = """
import os, sys
if os.environ.get("ESGRPO_ENABLE") == "1":
    lost, everywhere = os.environ.get("TEST_LOST_HOOK"), os.environ.get("TEST_LOST_EVERYWHERE")
    if lost and (everywhere or not any("fully_async_main" in word for word in sys.orig_argv)):
        from esgrpo import engine, recorded
        hooks = recorded.of_upstream(engine.load_hooks()[lost].hook.upstream).hooks
        hooks[lost] = recorded.Recorded({version: "0" * 16 for version in hooks[lost].fingerprints})
"""
IN_ONE_KIND = {"rollouter": "rollouter-failure-is-loud", "trainer": "trained-rows",
               "actor-worker": "policy-loss-context", "agent-loop-worker": "group-members",
               "vllm-server": "server-weight-version", "engine-core": "segment-scheduler"}
FIRST_SYNC = "Param sync before fit"


def start(tmp_path: Path, slug: str, *, prompts: int = 16, **variables: str) -> tuple[str, str]:
    """(how it ended, its log)."""
    site, run_dir = tmp_path / "site", tmp_path / "run"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join(map(str, (ROOT / "overlay", site, ROOT)))
    settings = [f"{SEGMENT}.{value}" for value in ("enable=True", "segment_length=64", "prune.repetition.enable=True")]
    settings.append("actor_rollout_ref.actor.policy_loss.loss_mode=pois")  # an actor worker has a hook with it
    try:
        arm.run("lost", overrides(tmp_path, run_dir, *settings, prompts=prompts), run_dir, ROOT / "overlay",
                environment={"PYTHONPATH": path, "TEST_LOST_HOOK": slug, **variables})
        end = "exit code 0"
    except RuntimeError as error:
        end = str(error)
    return end, (run_dir / "log.txt").read_text(errors="replace")


def last_line(log: str) -> str:
    return [line for line in log.splitlines() if line.strip()][-1]


@pytest.mark.parametrize("kind", IN_ONE_KIND)
def test_a_hook_that_one_kind_of_process_lacks_is_refused_before_the_first_sync(tmp_path, kind):
    end, log = start(tmp_path, IN_ONE_KIND[kind])
    assert "exit code 1" in end
    assert last_line(log).startswith(f"esgrpo: {IN_ONE_KIND[kind]}: DRIFTED in {kind} "), last_line(log)
    assert FIRST_SYNC not in log


def test_a_driver_that_lost_its_start_is_refused_before_ray(tmp_path):
    end, log = start(tmp_path, "driver-start", TEST_LOST_EVERYWHERE="1")
    assert "exit code 1" in end and last_line(log).startswith("esgrpo: driver-start: DRIFTED")
    assert "Started a local Ray instance" not in log and "[ASYNC MAIN]" not in log


@pytest.mark.parametrize("way", [{"ESGRPO_DISABLE": "segment-scheduler"},
                                 {"ESGRPO_STRICT": "0", "TEST_LOST_EVERYWHERE": "1"}])
def test_both_ways_on_without_the_scheduler_hook_train(tmp_path, way):
    end, log = start(tmp_path, "segment-scheduler" if "ESGRPO_STRICT" in way else "", **way)
    assert end == "exit code 0", last_line(log)
    assert "segment-scheduler is not in place in this engine" in log and FIRST_SYNC in log
