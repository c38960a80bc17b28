"""Scripts that start a Ray of their own."""

import subprocess
import sys

import pytest

STARTS = 3
# ray._private.node gives a raylet 30 s, fixed; beside two real runs on two cores that is now and then too short.
NO_START = "The current node timed out during startup"


@pytest.fixture(scope="session")
def ray_driver():
    """Runs `python -c SCRIPT ARGUMENTS`, once more where Ray itself did not come up: then nothing was asked yet."""

    def run(script, *arguments, **options):
        for _ in range(STARTS):
            done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True,
                                  timeout=400, **options)
            if NO_START not in done.stderr:
                break
        return done

    return run
