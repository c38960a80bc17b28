"""Studies without a run write records: command, commit, seeds, device; the report knows every one of them."""

from __future__ import annotations

import json
import shlex

import pytest

from bench import loops, resolved, verdict
from bench.common import gains, provenance, records
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
