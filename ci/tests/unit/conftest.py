"""Fixtures of the tests of the engine: a throw-away upstream and scripts on it in a fresh process."""

import json

import pytest

from ci.tests.unit.engine_scene import HELPERS, UPSTREAM


@pytest.fixture
def up(tmp_path):
    """Directory of a fake distribution `up` 1.0 with a module up.mod."""
    directory = tmp_path / "site"
    (directory / "up").mkdir(parents=True)
    (directory / "up" / "__init__.py").write_text("")
    (directory / "up" / "mod.py").write_text(UPSTREAM)
    (directory / "up" / "alias.py").write_text("from up.mod import f\n")
    info = directory / "up-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: up\nVersion: 1.0\n")
    return directory


@pytest.fixture
def script(run_python, up, overlay):
    """Runs HELPERS + source; returns (what the last line of stdout says, stderr)."""

    def run(source, **variables):
        done = run_python("-c", HELPERS + source, path=(overlay, up), **variables)
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return run
