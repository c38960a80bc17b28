"""Fixtures that several tests share: the overlay's place and a clean interpreter beside this one."""

import gc
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a developer's shell or an earlier test may have set, and what would change a child's behaviour.
LEAKS = ("ESGRPO_", "PYTHONPATH", "VERL_", "VLLM_", "RAY_ADDRESS")


@pytest.fixture(autouse=True)
def _handlers_stay():
    """A command's `main` called here takes SIGTERM as Ctrl-C: what a later test forks would have it, and lose it where
    Python ignores exceptions."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def overlay() -> str:
    return str(ROOT / "overlay")


@pytest.fixture(scope="session")
def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LEAKS)}


@pytest.fixture(scope="session")
def installed() -> bool:
    """The environment has the package itself, as after the quickstart: then it loads without a PYTHONPATH."""
    return Path(sysconfig.get_path("purelib"), "esgrpo.pth").exists()


@pytest.fixture
def run_python(clean_environment, tmp_path):
    """Runs `python ARGUMENTS` in an empty directory with `path` as PYTHONPATH and nothing else inherited from us."""

    def run(*arguments, path=(), python=sys.executable, cwd=tmp_path, timeout=120, code=0, **variables):
        environment = {**clean_environment, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
        done = subprocess.run([str(python), *map(str, arguments)], cwd=cwd, env=environment, timeout=timeout,
                              capture_output=True, text=True)
        assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def _forking(clean_environment, tmp_path_factory):
    """(what answers requests of forked_python.py, its directory)."""
    directory = tmp_path_factory.mktemp("forked")
    with subprocess.Popen([sys.executable, str(ROOT / "ci/tests/forked_python.py")], text=True, cwd=directory,
                          env={**clean_environment, "HF_HUB_OFFLINE": "1"}, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout.readline() == "[]\n", "an upstream was imported before the overlay"
        yield server, directory
        server.stdin.close()


@pytest.fixture(scope="session")
def forked_python(_forking, clean_environment):
    """`run_python` in the fork of an interpreter that has torch and transformers already: for scripts that import verl.
    `given` is its standard input."""
    server, directory = _forking

    def run(*arguments, path=(), cwd=directory, timeout=300, code=0, given="", **variables):
        files = {name: str(directory / name) for name in ("stdin", "stdout", "stderr")}
        Path(files["stdin"]).write_text(given)
        environment = {**clean_environment, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
        request = {**files, "arguments": [*map(str, arguments)], "cwd": str(cwd), "timeout": timeout,
                   "environment": environment}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        done = subprocess.CompletedProcess(arguments, int(server.stdout.readline()),
                                           *(Path(files[name]).read_text() for name in ("stdout", "stderr")))
        assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def pytest_collection_finish(session):
    """Thousands of tests and the libraries of their modules live to the end: the collector need not walk them again."""
    gc.collect()
    gc.freeze()


def pytest_itemcollected(item):
    """A test goes by the names of the hooks that it is about, too: `pytest -k prompts-in-flight`."""
    for marker in item.iter_markers("hook"):
        item.extra_keyword_matches.update(marker.args)
