"""Who counts as left over after a start that was watched to its end."""

import os
import subprocess
import threading
import uuid

import pytest

from bench.common import arm
from ci import faults


@pytest.mark.parametrize("seconds, left", [("0.3", 0), ("60", 1)])
def test_a_process_that_ends_by_itself_is_not_left_over(seconds, left, monkeypatch):
    monkeypatch.setattr(faults, "TEARDOWN_LIMIT_S", 20.0 if not left else 0.0)
    marker = uuid.uuid4().hex
    process = subprocess.Popen(["sleep", seconds], env={**os.environ, arm.MARKER: marker})
    threading.Thread(target=process.wait, daemon=True).start()  # else it would stay as a zombie
    assert faults.left_over(marker)[0] == left
    arm.end_processes(marker)
    assert not arm.processes_of(marker)
