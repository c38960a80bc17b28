"""All arms of a comparison race to one target, which is known before; older records are read so, too."""

from __future__ import annotations

import json

import pytest

from bench import ablation, quickstart, robustness, train
from bench.common import compare, training
from ci.tests.unit.test_bench_robustness import write_run
from esgrpo.tools.report import load, sections, tables

SEEDS = ("1", "2")


def test_an_arm_that_begins_low_has_no_easier_target(tmp_path):
    """Rewards after the first evaluation are the same: so are the times."""
    for name, start in (("plain", 0.5), ("overlay", 0.4)):
        write_run(tmp_path / name, [], [start, 0.55, 0.58, 0.61, 0.65])
    plain, overlay = (compare.load(tmp_path / name, 0.6) for name in ("plain", "overlay"))
    assert plain.target == overlay.target == plain.curves["target"] == 0.6
    assert plain.time_to_target == overlay.time_to_target == 13.0
    shown = next(row for row in compare.table([plain, overlay]) if row[0] == "time to target")
    assert shown == ["time to target", "13 s (>= 0.600)", "13 s (>= 0.600)"]


@pytest.mark.parametrize("module", [ablation, train])
def test_the_target_is_the_tasks_or_what_is_told(module, tmp_path, capsys, monkeypatch):
    told = {}
    monkeypatch.setattr(training, "run_one", lambda *args, **_: told.setdefault("target", args[4]) and ({}, {}))
    monkeypatch.setattr(training, "prepare_data", lambda *_: None)
    monkeypatch.setattr(train, "prepare", lambda _options, seeds: dict.fromkeys(seeds, tmp_path))
    arm = "off" if module is ablation else "plain"
    results = tmp_path / "results.json"

    def target(*more: str) -> float:
        told.clear()
        module.main(["--arms", arm, "--seeds", "1", "--out", str(tmp_path), "--results", str(results), *more])
        assert json.loads(results.read_text())["target"] == told["target"]
        return told["target"]

    assert target() == compare.TARGETS["small" if module is ablation else "large", "search"]
    assert target("--target", "0.7") == 0.7
    with pytest.raises(SystemExit):
        module.main(["--task", "unheard-of", "--out", str(tmp_path)])
    assert "unheard-of" in capsys.readouterr().err


def test_settings_of_robustness_have_a_target_each(tmp_path):
    options = robustness.parse(["--study", "modes", "--cores", "1", "--out", str(tmp_path)])
    assert set(robustness.targets(options).values()) == {compare.TARGETS["small", "search"]}
    options.target = 0.7
    assert set(robustness.targets(options).values()) == {0.7}


def test_the_quickstart_has_one_for_both_arms(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(quickstart.make_data, "write", lambda *_: None)
    monkeypatch.setattr(quickstart.arm, "run", lambda *_, **__: None)
    monkeypatch.setattr(quickstart.compare, "load", lambda _dir, target: seen.append(target))
    monkeypatch.setattr(quickstart, "report", lambda *_: 0)
    assert quickstart.main(["--out", str(tmp_path)]) == 0
    assert seen == [compare.TARGETS["small", "search"]] * 2


def old_record(path, **more):
    """Rewards 0.4 and 0.5 at the start, then the same: each raced to a tenth above its own."""
    curve = {"running": [], "bubble": [], "sampled": [], "trained": []}
    ends = {"plain": [0.5, 0.62, 0.62], "overlay": [0.4, 0.52, 0.62, 0.62]}
    curves = {arm: {seed: {**curve, "target": rewards[0] + 0.1,
                           "evaluations": [[10.0 * at, reward] for at, reward in enumerate(rewards)]}
                    for seed in SEEDS} for arm, rewards in ends.items()}
    measures = {arm: {seed: {"effective tokens/s": 1.0, "time to target, s": 10.0, "samples to target": 80}
                      for seed in SEEDS} for arm in ends}
    data = {"command": "c", "commit": "abc", "device": "d", "seeds": [1, 2], "notes": ["n"], "table": [["", *ends]],
            "arms": {}, "failed": [], "measures": measures, "curves": curves, **more}
    (path / "old.json").write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    record, = load.records(path)
    return record


def numbers(record, key):
    return {arm: [one.get(key) for one in seeds.values()] for arm, seeds in record.data["measures"].items()}


def test_an_old_record_is_read_with_one_target_and_says_so(tmp_path):
    record = old_record(tmp_path)
    assert numbers(record, "time to target, s") == {"plain": [10.0, 10.0], "overlay": [20.0, 20.0]}  # 0.45 + 0.1
    assert {one["target"] for seeds in record.data["curves"].values() for one in seeds.values()} == {0.55}
    assert numbers(record, "samples to target") == {"plain": [None] * 2, "overlay": [None] * 2}
    assert any("0.550" in caveat and "every arm raced to a target of its own" in caveat
               for caveat in sections.caveats(record))
    assert tables.ablation(record)[0].rows[1][-1] == "10 [10, 10]"


def test_a_record_that_names_its_target_stays_as_it_is(tmp_path):
    record = old_record(tmp_path, target=0.6)
    assert numbers(record, "time to target, s") == {"plain": [10.0] * 2, "overlay": [10.0] * 2}
    assert not any("target" in caveat for caveat in sections.caveats(record))


def test_an_old_record_without_curves_loses_what_cannot_be_compared(tmp_path):
    record = old_record(tmp_path, curves=None)
    assert numbers(record, "time to target, s") == {"plain": [None] * 2, "overlay": [None] * 2}
    assert any("left out" in caveat for caveat in sections.caveats(record))


def test_settings_of_an_old_record_have_a_target_each(tmp_path):
    record = old_record(tmp_path, cells={"one": ["plain"], "other": ["overlay"]})
    targets = {arm: {one["target"] for one in seeds.values()} for arm, seeds in record.data["curves"].items()}
    assert targets == {"plain": {0.6}, "overlay": {0.5}}


def test_an_old_quickstart_is_read_with_one_target(tmp_path):
    record = old_record(tmp_path, measures=None, difference=["x"], table=[
        ["", "plain", "overlay"], ["time to target", "10 s (>= 0.600)", "10 s (>= 0.500)"], ["bubble rate", "1", "2"]],
        curves={arm: {"target": rewards[0] + 0.1, "evaluations": [[10.0 * at, one] for at, one in enumerate(rewards)]}
                for arm, rewards in {"plain": [0.5, 0.62, 0.62], "overlay": [0.4, 0.52, 0.62, 0.62]}.items()})
    assert record.data["table"][1:] == [["time to target", "10 s (>= 0.550)", "20 s (>= 0.550)"],
                                        ["bubble rate", "1", "2"]]
    assert record.data["curves"]["plain"]["target"] == 0.55
