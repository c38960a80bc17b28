"""Interpreters that have torch and transformers already, in which the contract modules of many cells run as forks.

Most of the seconds of a cell with a vLLM release are those of the libraries below it. A lane is one process of
ci/tests/forked_python.py; the driver lends it to one cell at a time, by two pipes. A cell without one, as of
`--cell` by hand, has its module run in a new interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ci.matrix import vllm_environment

ROOT = Path(__file__).resolve().parents[2]
LANE = "ESGRPO_MATRIX_LANE"  # of a cell: the descriptors to ask and to listen at
WORTH = 3  # cells for which a lane has to import less than they would
LIMIT_S = 900


class Lane:
    def __init__(self):
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(vllm_environment.LEAKS) and name != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen([sys.executable, str(ROOT / "ci" / "tests" / "forked_python.py")],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        env=environment, start_new_session=True)

    def options(self) -> dict:
        """For the subprocess.Popen of the cell that gets it."""
        ends = self.process.stdin.fileno(), self.process.stdout.fileno()
        return {"pass_fds": ends, "env": {**os.environ, LANE: "{},{}".format(*ends)}}

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        with self.process:
            pass


def run(module: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """`python -m module` in a process that has this environment and nothing of another release."""
    if LANE not in os.environ:
        return subprocess.run([sys.executable, "-m", module], env=environment, capture_output=True, text=True, cwd=ROOT)
    ask, listen = map(int, os.environ[LANE].split(","))
    with tempfile.TemporaryDirectory(prefix="esgrpo-matrix-") as name:
        files = {stream: os.path.join(name, stream) for stream in ("stdout", "stderr")}
        request = {**files, "stdin": os.devnull, "arguments": ["-m", module], "cwd": str(ROOT), "timeout": LIMIT_S,
                   "environment": environment}
        with open(ask, "w", closefd=False) as pipe:
            pipe.write(json.dumps(request) + "\n")
        with open(listen, closefd=False) as pipe:
            line = pipe.readline()
            if line == "[]\n":  # what a new lane says first: no upstream has been imported
                line = pipe.readline()
        texts = [Path(file).read_text(errors="replace") for file in files.values()]
    return subprocess.CompletedProcess(module, int(line), *texts)
