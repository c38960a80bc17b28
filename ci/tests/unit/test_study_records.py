"""Studies without a run write records: command, commit, seeds, device; the report knows every one of them."""

from __future__ import annotations

import json
import shlex

import pytest

from bench import loops, resolved, verdict
from bench.common import gains, provenance, records, targets
from bench.sim import null_groups, overlap, refill_ahead
from esgrpo.tools.report import load

SMALL = {
    "verdicts": (verdict, ["--task", "learning"]),
    "verdict cost": (verdict, ["--task", "search", "--cost"]),
    "thresholds": (resolved, []),
    "loops": (loops, ["--placements", "300"]),
    "simulated overlap": (overlap, ["--case", "age scale 2", "--groups", "96"]),
    "simulated null groups": (null_groups, ["--groups", "32", "--seeds", "1"]),
    "simulated refill": (refill_ahead, ["--steps", "20", "--seeds", "1"]),
}
CHANGES = ("command", "look_microseconds", "worker_cost", "seconds")  # from one call to the next


@pytest.mark.parametrize("kind", SMALL)
def test_a_record_stands_beside_what_is_printed(kind, tmp_path, capsys):
    module, arguments = SMALL[kind]
    path = tmp_path / "new" / "record.json"
    printed = []
    for more in ([], ["--results", str(path)]):
        assert module.main(["--json", *arguments, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        printed.append({name: value for name, value in found.items() if name not in CHANGES})
    assert printed[0] == printed[1]
    record, = load.records(path.parent)
    assert record.kind == kind and load.NOT_RECORDED not in record.provenance().values()
    assert record.command == shlex.join(
        ["python", "-m", module.__name__, "--json", *arguments, "--results", "record.json"])
    assert record.simulated == kind.startswith("simulated")
    pytest.importorskip("matplotlib")
    from esgrpo.tools.report import sections

    content = sections.build([record])
    block, = (block for section in content.sections for block in section.blocks)
    assert block.record == record and not content.unknown


def test_several_seeds_and_orders_are_played_for_a_record_alone(tmp_path, capsys):
    path = tmp_path / "record.json"
    assert verdict.main(["--task", "search", "--seeds", "1,2", "--results", str(path)]) == 0
    played = json.loads(path.read_text())["tasks"]["search"]
    assert list(played) == ["seed 1", "seed 2"] and played["seed 1"] != played["seed 2"]
    verdict.main(["--task", "search", "--orders", "2", "--results", str(path)])
    other = json.loads(path.read_text())["tasks"]["search"]
    assert list(other) == ["seed 0, order 0", "seed 0, order 1"]
    assert other["seed 0, order 0"]["learned"] != other["seed 0, order 1"]["learned"]
    assert overlap.main(["--case", "age scale 2", "--groups", "96", "--seeds", "1,4", "--results", str(path)]) == 0
    assert [case["seed"] for case in json.loads(path.read_text())["cases"]] == [1, 4]
    for wrong in (["--seeds", "1,2"], ["--orders", "2"]):
        with pytest.raises(SystemExit):
            verdict.main(wrong)
        assert "--results" in capsys.readouterr().err


def test_numbers_are_rounded_and_rows_of_them_take_one_line(tmp_path):
    path = tmp_path / "record.json"
    provenance.write_record(path, "bench.x", ["--out", "/a/b/c"], (3,), {
        "rows": [0.123456, -1.0], "texts": ["1,  2"], "deep": {"value": 1 / 3, "count": 7, "none": None}})
    text = path.read_text()
    found = json.loads(text)
    assert '"rows": [0.1235, -1.0],' in text and found["deep"] == {"value": 0.3333, "count": 7, "none": None}
    assert found["texts"] == ["1,  2"] and found["command"] == "python -m bench.x --out c" and found["seeds"] == [3]


def test_the_front_page_says_what_the_records_say(tmp_path, monkeypatch):
    speed = "decoded tokens/s"
    written = {
        gains.OVERLAP_SIMULATED: {"cases": [{"against_best_fixed": ratio} for ratio in (1.1, 0.914)]},
        gains.LOOPS_CORPUS: {"false_prunes": 3, "placements": 1000},
        "runs.json": {"measures": {"plain": {"1": {speed: 10.0}, "2": {speed: 20.0}},
                                   "keep": {"2": {speed: 25.0}, "3": {speed: 99.0}}}}}
    for name, record in written.items():
        (tmp_path / name).write_text(json.dumps(record))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert gains.studies() == {"simulated_control": "0.91 … 1.10", "loops_false": "3", "loops_placements": "1,000"}
    pair, = records.training_pairs(("runs.json",), overlay="keep")  # seeds that both arms have
    assert pair.ratio(speed) == 1.25


def _written(tmp_path, monkeypatch, **arms) -> None:
    """A record of runs, each a list of (seconds, responses, reward), and a targets.toml of one setting."""
    curves = {arm: {str(seed): {"evaluations": [[at, reward] for at, _, reward in run],
                                "by_samples": [[count, reward] for _, count, reward in run]}
                    for seed, run in enumerate(runs)} for arm, runs in arms.items()}
    (tmp_path / "runs.json").write_text(json.dumps({"curves": curves}))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    texts = targets.compat.toml(targets.Path(targets.__file__).with_suffix(".toml"))
    texts["setting"] = [{"plain": ["runs.json", "plain"], "overlay": ["runs.json", "all"], "en": "a task"}]
    monkeypatch.setattr(targets.compat, "toml", lambda path: texts)


def test_a_target_is_held_for_two_evaluations_and_was_not_there_at_the_start(tmp_path, monkeypatch):
    rising = [(0, 0, 0.12), (100, 1000, 0.21), (200, 2000, 0.22), (300, 3000, 0.31)]
    once = [(0, 0, 0.11), (150, 1000, 0.26), (250, 2000, 0.13), (400, 3000, 0.16)]
    _written(tmp_path, monkeypatch, plain=[once, once], all=[rising])
    head, *rows = targets.table("en")
    assert [row[1:] for row in rows[:2]] == [
        ["0.15", "-", "100 s; 1.0 (1/1)", "overlay"], ["0.20", "-", "100 s; 1.0 (1/1)", "overlay"]]
    assert [row[0] for row in rows] == ["a task", "", "", ""] and len(head) == len(rows[0])
    # at 300 s the plain run is a third of the way from 0.13 to 0.16
    assert rows[2][1:] == ["reward after 300 s", "0.14", "0.31", "+0.17"]
    assert rows[3][1:] == ["after 3,000 responses", "0.16", "0.31", "+0.15"]


def test_where_the_overlay_is_behind_stands_out(tmp_path, monkeypatch):
    slow = [(0, 0, 0.05), (100, 1000, 0.1), (200, 2000, 0.11), (300, 3000, 0.11)]
    fast = [(0, 0, 0.05), (50, 900, 0.12), (150, 2000, 0.13), (300, 3000, 0.16)]
    _written(tmp_path, monkeypatch, plain=[fast, slow], all=[slow, slow])
    _, *rows = targets.table("en")
    assert rows[0][1:] == ["0.10", "75 [50, 100] s; 0.9 [0.9, 1.0] (2/2)", "100 s; 1.0 (2/2)", "**plain**"]
    assert rows[1][4].startswith("**-0.0")
    _written(tmp_path, monkeypatch, plain=[slow, slow], all=[slow, [(0, 0, 0.05), (300, 3000, 0.06)]])
    assert targets.table("en")[1][4] == "**plain**"  # half of the runs against all of them
