"""The fork that most tests of this directory run their scripts in, against a new interpreter."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
SCRIPT = """
import json, os, sys
from esgrpo import engine
import torch.distributed.distributed_c10d as c10d
print(json.dumps([sys.argv, sys.orig_argv[1:], sys.path, __name__, os.getcwd(), sorted(os.environ), sys.stdin.read(),
                  [row for row in engine.states("actor-worker") if row["slug"] == "cpu-process-group"],
                  type(c10d.init_process_group).__name__, c10d.init_process_group.__module__]))
print("said", file=sys.stderr)
"""


@pytest.mark.parametrize("way, enable", [("source", "1"), ("file", "0"), ("module", "1")])
def test_a_script_finds_what_a_new_interpreter_has(run_python, forked_python, overlay, tmp_path, way, enable):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    arguments = {"source": ("-c", SCRIPT), "file": (file,), "module": ("-m", "script")}[way]
    arguments = (*arguments, "one", "two")
    shared = {"path": (overlay,), "cwd": tmp_path, "ESGRPO_ENABLE": enable, "ESGRPO_FEATURES": "cpu",
              "VERL_PLATFORM": "cpu"}
    new, fork = run_python(*arguments, **shared), forked_python(*arguments, **shared)
    assert json.loads(fork.stdout) == json.loads(new.stdout)
    assert fork.stderr.splitlines()[-1] == new.stderr.splitlines()[-1] == "said"


@pytest.mark.parametrize("source", ["import sys; sys.exit('no')", "raise ValueError('no')", "import sys; sys.exit(3)"])
def test_it_ends_as_a_new_interpreter_ends(run_python, forked_python, source):
    new, fork = run_python("-c", source, code=None), forked_python("-c", source, code=None)
    assert (fork.returncode, fork.stdout) == (new.returncode, new.stdout)
    assert fork.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_one_fork_leaves_nothing_to_the_next(forked_python, tmp_path):
    (tmp_path / "verl.py").write_text("import os; os.environ['LEFT'] = '1'; VALUE = 1")
    assert forked_python("-c", "import verl; print(verl.VALUE)", path=(tmp_path,)).stdout == "1\n"
    left = "import os, sys; print('verl' in sys.modules, 'LEFT' in os.environ)"
    assert forked_python("-c", left).stdout == "False False\n"


def test_a_script_that_does_not_end_is_ended(forked_python):
    assert forked_python("-c", "import time; time.sleep(60)", timeout=1, code=None).returncode < 0
    assert forked_python("-c", "print(1)").stdout == "1\n"
