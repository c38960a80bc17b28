"""Sources of upstream releases, where they come from git."""

from __future__ import annotations

import subprocess
import tarfile

import pytest

from esgrpo.tools import upstreams


@pytest.mark.parametrize("filters", [True, False])
def test_sources_from_git_need_no_tar_filters(filters, monkeypatch, tmp_path):
    """Debian 12's Python 3.11.2 has none."""
    repository = tmp_path / "verl"
    repository.mkdir()
    (repository / "setup.py").write_text("# a release\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", "a"), ("tag", "v0.7.0")):
        subprocess.run(["git", "-C", str(repository), *command], check=True)
    monkeypatch.setenv("ESGRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(upstreams.VERL_GIT, str(repository))
    if not filters:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        real = tarfile.TarFile.extractall
        monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path=".": real(self, path))
    assert (upstreams.sources("verl", "0.7.0") / "setup.py").read_text() == "# a release\n"


@pytest.mark.parametrize("told, reason", [
    ("ERROR: Invalid requirement: 'verl==bogus': Expected end\n    verl==bogus\n        ^\n",
     "ERROR: Invalid requirement: 'verl==bogus': Expected end"),
    ("ERROR: Could not find a version\nERROR: No matching distribution\n\n[notice] a new pip\n",
     "ERROR: No matching distribution"),
    ("error: no such command\n   ^^^\n", "error: no such command"), ("   ^\n", "no output"), ("", "no output")])
def test_the_reason_that_pip_gives(told, reason, monkeypatch, tmp_path):
    monkeypatch.setattr(upstreams.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", told))
    with pytest.raises(upstreams.Unavailable) as error:
        upstreams._download("verl", "bogus", tmp_path / "none")
    assert error.value.args[1] == reason
