"""The start-up benchmark counts and orders what it says; no timing is asserted."""

import json
import random

import pytest

from bench import startup


def test_the_two_environments_differ_by_the_overlay_only(monkeypatch, overlay):
    monkeypatch.setenv("ESGRPO_ENABLE", "1")
    monkeypatch.setenv("PYTHONPATH", "/else")
    bare, overlaid = startup.environments()
    assert "ESGRPO_ENABLE" not in overlaid and "PYTHONPATH" not in bare
    assert overlaid == {**bare, "PYTHONPATH": overlay}


def test_pairs_are_abba_and_signs_are_overlay_minus_bare():
    seen = []

    def measure(environment):
        seen.append("B" if "PYTHONPATH" in environment else "A")
        return 3.0 if seen[-1] == "B" else 1.0

    found = startup.run(4, measure, progress=None)
    assert "".join(seen) == "ABAABAAA" * 2  # A B, control, B A, control
    assert found["starts"] == len(seen) and found["pairs"] == 4 and found["baseline_ms"] == 1.0
    assert found["overhead_ms"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert found["control_ms"]["median"] == 0.0


def test_a_drift_of_the_machine_cancels():
    """Every start takes longer than the one before it: in AB order alone B would look slower."""
    clock = iter(range(10**6))
    found = startup.run(100, lambda environment: float(next(clock)), progress=None)
    assert found["overhead_ms"]["median"] == 0.0 and found["overhead_ms"]["low"] < 0 < found["overhead_ms"]["high"]


def test_the_interval_holds_the_median():
    found = startup.interval([random.Random(1).gauss(1, 1) for _ in range(50)] + [0.0, 2.0], random.Random(0))
    assert found["low"] <= found["median"] <= found["high"]


def test_a_small_run_writes_what_it_did(tmp_path, capsys):
    path = tmp_path / "results" / "startup.json"
    assert startup.main(["--pairs", "2", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["pairs"] == 2 and result["starts"] == 8 and "--pairs 2" in result["command"]
    assert result["baseline_ms"] > 0 and result["machine"]["cores"] and result["python"]
    assert "A/A control" in capsys.readouterr().out


@pytest.mark.parametrize("pairs", ["0", "-1", "x"])
def test_impossible_pairs(pairs):
    with pytest.raises(SystemExit) as caught:
        startup.main(["--pairs", pairs])
    assert caught.value.code == 2
