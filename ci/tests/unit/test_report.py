"""The report: every record named, every number with its origin, what is missing and what is simulated said."""

from __future__ import annotations

import base64
import json
import re
import sys
from types import SimpleNamespace

import pytest

from bench.common import modules, training
from esgrpo import cli
from esgrpo.tools.report import headline, load, page, policy_tables, sections, tables
from esgrpo.tools.report.chinese import in_chinese
from esgrpo.tools.report.training_figures import _reward

pytest.importorskip("matplotlib")
MEASURES = {"effective tokens/s": 100.0, "decoded tokens/s": 200.0, "time to target, s": 30.0, "bubble rate": 0.5,
            "held-out reward, last": 0.9, "length bias": 0.1}
CURVES = {"evaluations": [[0.0, 0.4], [30.0, 0.8]], "running": [[5.0, 3.0], [15.0, 2.0]], "target": 0.5,
          "bubble": [[5.0, 0.1, 0.2, 0.3, 0.0], [15.0, 0.2, 0.2, 0.3, 0.0]], "sampled": [[8, 3], [12, 2]],
          "trained": [[8, 3]]}
RUN = {
    "kind": "run", "command": "python -m bench.engine", "commit": "abc1234", "device": "NVIDIA H100", "policy": "verl",
    "scenario": "sync", "workload": "math", "seed": 1, "repeat": 0, "groups": 2, "members": 2, "cap": 64, "replicas": 2,
    "capacity": 2, "makespan_s": 20.0, "s_per_update": 10.0, "tokens_per_s": 5.0, "decoded": 100, "trained": 80,
    "waste": {"pruned": 20}, "bubble": {"rate": 0.3, "barrier": 0.1, "sync": 0.2}, "preemptions": 0,
    "completion_s": {"p50": 1.0, "p90": 2.0, "p99": 3.0}, "update_times": [10.0, 20.0]}


def ablation_record(directory, scale=2.0, seeds=(1, 2, 3)):
    """Written by the ablation itself, so that its shape cannot drift away from the report's."""
    found = {"off": {seed: {**MEASURES, "length bias": None} for seed in seeds},
             "all": {seed: {key: scale * value for key, value in MEASURES.items()} for seed in seeds},
             "C pruning": {seed: MEASURES for seed in seeds}, "keep": {seed: MEASURES for seed in seeds}}
    curves = {arm: {seed: CURVES for seed in seeds} for arm in found}
    options = SimpleNamespace(task="search", seeds=list(seeds), budget=60.0, prompts=2048,
                              cores=2, jobs=1, replicas=1, target=0.6,
                              results=directory / "ablation_search.json")
    training.report(found, curves, [], options)


def engine_record(directory, runs):
    directory.mkdir(exist_ok=True)
    (directory / "engine.json").write_text("".join(json.dumps(run) + "\n" for run in runs))


def pages(directory) -> tuple[str, str]:
    assert cli.main(["report", str(directory), "--out", str(directory / "page.html")]) == 0
    return (directory / "page.html").read_text(), (directory / "page.md").read_text()


def claims(records) -> list[list[str]]:
    return [claim.row() for claim in headline.claims_of(records)]


def test_headline_takes_ratios_within_a_seed_and_says_what_they_allow(tmp_path):
    ablation_record(tmp_path)
    record, = load.records(tmp_path)
    rows = {row[0].partition(";")[0]: row for row in claims([record])}
    assert rows["training: effective tokens/s"][3:6] == ["2 [2, 2]", "3", "better"]
    assert rows["training: time to target, s"][5] == "worse"  # twice the time
    assert record.seeds == ("1", "2", "3") and record.commit and "cores" in record.device


def test_what_the_sampler_selects_is_said_beside_effective_tokens(tmp_path):
    """Negative control: the arms of a record in which nobody or everybody chooses prompts."""
    ablation_record(tmp_path)
    record, = load.records(tmp_path)
    record.data["measures"]["all without sampler"] = {
        seed: {key: 1.5 * value for key, value in MEASURES.items()} for seed in ("1", "2", "3")}
    record.data["arms"] = modules.ARMS
    rows = {row[0]: row for row in claims([record])}
    assert rows["training: effective tokens/s; prompts chosen by the sampler"][3] == "2 [2, 2]"
    assert rows["training: effective tokens/s; sampler off"][3] == "1.5 [1.5, 1.5]"
    assert rows["training: decoded tokens/s; of all prompts alike"][3] == "2 [2, 2]"
    head, *arms = tables.ablation(record)[0].rows
    assert head[1] == "prompts" and {row[0]: row[1] for row in arms} == {
        "off": "as they come", "all": "sampler", "C pruning": "as they come", "keep": "as they come",
        "all without sampler": "as they come"}
    record.data["arms"] = {**modules.ARMS, "all": modules.ARMS["keep"]}
    names = [row[0] for row in claims([record])]
    assert "training: effective tokens/s" in names and not [name for name in names if ";" in name]
    assert tables.ablation(record)[0].rows[0][1] == "seeds"


@pytest.mark.parametrize("ratios, less, said", [
    ([0.9, 0.95, 0.9997], True, "undecided: the range holds 1"),
    ([1.1, 1.2, 1.3], False, "better"), ([1.1, 1.2, 1.3], True, "worse"), ([0.8, 0.9, 0.7], False, "worse"),
    ([0.9, 1.2, 1.3], False, "undecided: the range holds 1"), ([1.0, 1.2, 1.3], False, "undecided: the range holds 1"),
    ([9.0, 9.0], False, "none: fewer than 3 pairs"), ([], False, "none: fewer than 3 pairs")])
def test_verdict(ratios, less, said):
    assert headline.verdict(ratios, less) == said


@pytest.mark.parametrize("updates, said", [(1, True), (8, False)])
def test_a_run_too_short_for_what_it_carries_over_says_so(tmp_path, updates, said):
    engine_record(tmp_path, [{**RUN, "policy": "april", "updates": updates, "waste": {"left_over": 20}}])
    assert ("what april carried over never ended" in pages(tmp_path)[1]) == said


def test_a_target_that_an_arm_never_reaches_decides_nothing():
    assert headline.verdict([2.0, 2.0, 2.0], of=4) == "none: no ratio in 1 of 4 pairs"
    assert headline.verdict([2.0, 2.0, 2.0], of=3) == "better"


def test_page_asks_the_network_for_nothing_and_is_the_same_twice(tmp_path, capsys):
    ablation_record(tmp_path)
    page, text = pages(tmp_path)
    assert pages(tmp_path) == (page, text)
    assert "<script" not in page and not re.search(r"(src|href)=\"(?!data:|#)", page) and "@import" not in page
    pictures = [base64.b64decode(found).decode() for found in re.findall(r"svg\+xml;base64,([^\"]+)", page)]
    assert len(pictures) == 6 and all("<svg" in picture for picture in pictures)
    assert not any(re.search(r"href=\"(?!#)", picture) for picture in pictures)
    shown = re.findall(r"<b>(?:<span.*?>Figure</span>.*?</span>) (\d). (?:<span lang=\"en\">)?(.*?)[<.]", page)
    assert [title.partition(",")[0].partition(":")[0] for _, title in shown] == [
        "Reward over wall time",  # on the first screen, and once more among its own
        "Ablation", "Reward over wall time", "Bubble over time", "Response lengths", "Length bias"]
    assert [int(number) for number, _ in shown] == [1, 2, 3, 4, 5, 6]
    assert "ablation_search.json" in text and "| off | as they come | 3 |" in text


def test_every_number_has_its_origin_or_the_page_says_not_recorded(tmp_path):
    (tmp_path / "old.json").write_text(json.dumps({"measures": {"off": {"1": MEASURES}, "all": {"1": MEASURES}}}))
    record, = load.records(tmp_path)
    assert record.provenance() == {"command": "not recorded", "commit": "not recorded", "seed": "1",
                                   "device": "not recorded", "spread": "median [lowest, highest] over seeds"}
    page, _ = pages(tmp_path)
    assert "Not in the record: command, commit, device." in page and "Fewer than 3 seeds" in page


def test_the_page_of_this_repository_understands_its_records_and_shows_them_as_they_are(root, tmp_path):
    kept = root / "bench" / "results"
    assert cli.main(["report", str(kept), "--out", str(tmp_path / "report.html")]) == 0
    for name in ("report.html", "report.md"):  # pictures aside: every matplotlib draws them a little differently
        ours, now = (re.sub(r"base64,[^\"]*", "", (folder / name).read_text()) for folder in (kept, tmp_path))
        assert ours == now, "stale: run esgrpo report bench/results"
        assert "Not understood" not in now


@pytest.mark.parametrize("content, said", [
    ('{"strange": [1], "other": {}}', "strange: list"), ("{", "no JSON"), ("[1, 2]", "a JSON list"), ("", "no JSON"),
    ('{"measures": {"off": 3}}', "measures: dict"), ('{"runs": [{"policy": "verl"}]}', "taken for"),
    ('{"points": [{"batch": 1}], "capacity": 1}', "KeyError")])
def test_a_record_of_an_unknown_shape_is_named_not_skipped(tmp_path, content, said, capsys):
    (tmp_path / "new.json").write_text(content)
    page, text = pages(tmp_path)
    assert "unknown shape: new.json" in capsys.readouterr().out
    for out in (page, text):
        assert "Not understood" in out and "new.json" in out
        assert said in out


def test_an_unknown_part_of_a_known_file_is_named(tmp_path):
    parts = {"first": {"measures": {"off": {"1": MEASURES}}}, "second": {"what": "nobody knows"}}
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    _, text = pages(tmp_path)
    assert "### parts.json#first" in text and "- parts.json#second: " in text


def test_what_was_not_run_is_listed(tmp_path):
    ablation_record(tmp_path)
    _, text = pages(tmp_path)
    missing = text.partition("## Not run")[2].partition("## Sources")[0]
    assert "bench.engine" in missing and "Training on GPUs" in missing and "Predicted against measured" in missing
    assert "Ablation of the modules" not in missing and "Reward over wall time" not in missing


def test_policies_are_compared_pair_by_pair_on_the_same_work_only(tmp_path):
    runs = []
    for repeat in range(3):
        noise = 1 + repeat  # the machine gets slower; pairs of a repeat do not care
        times = {"verl": 20.0, "seer": 12.0, "oracle": 8.0, "es-grpo": 10.0}
        runs += [{**RUN, "repeat": repeat, "policy": policy, "s_per_update": noise * time,
                  "makespan_s": 2 * noise * time} for policy, time in times.items()]
        runs.append({**RUN, "repeat": repeat, "policy": "verl", "cap": 128, "s_per_update": 1.0})
    engine_record(tmp_path, runs)
    record, = load.records(tmp_path)
    first, second = policy_tables.policies(record)
    rows = {row[0]: dict(zip(first.rows[0], row, strict=True)) for row in first.rows[1:]}
    assert list(rows) == ["oracle", "es-grpo", "seer", "verl"]  # fastest first; an oracle is no rival
    assert rows["es-grpo"]["speed-up over verl"] == "2 [2, 2]"
    assert rows["es-grpo"]["over best rival (seer)"] == "1.2 [1.2, 1.2]"
    assert rows["es-grpo"]["bubble rate"] == "0.3 [0.3, 0.3]"  # the sum of causes, without their total
    assert "cap 128" in second.title and len(second.rows) == 2
    found = [row for row in claims([record]) if row[0].startswith("makespan")]
    assert [(row[2].split(":")[0], row[3], row[5]) for row in found] == [
        ("verl", "2 [2, 2] times as fast", "better"), ("seer", "1.2 [1.2, 1.2] times as fast", "better")]
    assert [row[2].partition(" s;")[2] for row in found] == [
        " stale: not recorded; its own carry-over (colocate_async) not played",
        " stale: not recorded (rivals played: seer)"]


def test_what_stands_beside_a_ratio_is_of_the_runs_that_it_is_made_of(tmp_path):
    runs = (("es-grpo", 1, 10.0), ("es-grpo", 2, 30.0), ("es-grpo", 3, 40.0), ("verl", 1, 20.0))
    engine_record(tmp_path, [{**RUN, "policy": policy, "seed": seed, "s_per_update": seconds, "makespan_s": 2 * seconds}
                             for policy, seed, seconds in runs])
    record, = load.records(tmp_path)
    time, tokens = claims([record])
    assert time[1].startswith("es-grpo: 10 s;") and time[2].startswith("verl: 20 s;") and time[3] == "2 times as fast"
    assert tokens[1].startswith("es-grpo: 4;") and tokens[2].startswith("verl: 2;") and tokens[4] == "1"


def test_a_ratio_stands_beside_its_staleness_and_decisions_and_the_baseline_is_verls_own_carry_over(tmp_path):
    fresh = {"mean": 0.0, "share": 0.0}
    none = {"versions_old": {**fresh, "max": 0, "rows": fresh, "tokens": fresh}, "decisions": {"keep": 0, "routing": 0}}
    aged = {"versions_old": {"mean": 0.6, "share": 0.5, "max": 3, "rows": {"mean": 0.5, "share": 0.39},
                             "tokens": {"mean": 0.7, "share": 0.6}}, "decisions": {"keep": 812, "routing": 0}}
    times = {"verl": (25.0, none), "colocate_async": (11.0, aged), "es-grpo": (10.0, aged)}
    runs = [{**RUN, **more, "policy": policy, "s_per_update": seconds} for policy, (seconds, more) in times.items()]
    engine_record(tmp_path, runs)
    record, = load.records(tmp_path)
    rows = {row[0]: dict(zip(policy_tables.policies(record)[0].rows[0], row, strict=True))
            for row in policy_tables.policies(record)[0].rows[1:]}
    assert rows["es-grpo"]["speed-up over colocate_async"] == "1.1"
    assert rows["es-grpo"]["stale"] == "39% of rows, 60% of tokens, 0.5 versions"
    assert rows["es-grpo"]["decisions"] == "keep 812" and rows["verl"]["decisions"] == "none"
    assert rows["verl"]["stale"] == "0% of rows, 0% of tokens, 0 versions"
    found = [row for row in claims([record]) if row[0].startswith("makespan")]
    assert [row[2].partition(":")[0] for row in found] == ["colocate_async"]
    assert "stale: 39% of rows" in found[0][1] and "decided: keep 812" in found[0][1]
    assert "stale: 39% of rows" in found[0][2] and "was not played" not in pages(tmp_path)[1]
    engine_record(tmp_path, [run for run in runs if run["policy"] != "colocate_async"])
    assert "verl's own carry-over under a barrier (colocate_async) was not played" in pages(tmp_path)[1]


def test_what_the_simulator_prints_is_shown_with_its_staleness(tmp_path, capsys):
    from bench.sim.__main__ import main

    assert main(["--groups", "4", "--members", "4", "--cap", "128", "--scale", "0.02", "--replicas", "2", "--policy",
                 "colocate_async,es-grpo,tailsieve", "--json"]) == 0
    (tmp_path / "sim.json").write_text(capsys.readouterr().out)
    record, = load.records(tmp_path)
    assert record.kind == "simulation" and not sections.build([record]).unknown
    shown, = policy_tables.policies(record)
    assert shown.rows[0][3] == "speed-up over colocate_async" and len(shown.rows) == 4
    assert any("not at its paper's size: 1 of 2 replicas" in caveat for caveat in sections.caveats(record))


def test_policies_of_older_records_are_told_by_what_they_were(tmp_path):
    engine_record(tmp_path, [{**RUN, "policy": name} for name in ("verl", "static", "tailsieve")])
    text = pages(tmp_path)[1]
    assert "1 of 2 replicas is its tail pool, 1 of 8 in the paper" in text and "UloRL's segments, by its former" in text


def test_the_arm_static_is_not_taken_for_ulorls_carry_over(tmp_path):
    ablation_record(tmp_path)
    path = tmp_path / "ablation_search.json"
    path.write_text(path.read_text().replace('"keep"', '"static"'))
    assert any("not UloRL's carry-over" in caveat for caveat in sections.caveats(load.records(tmp_path)[0]))


def test_tokens_that_do_not_reconcile_are_shouted(tmp_path):
    engine_record(tmp_path, [RUN, {**RUN, "policy": "es-grpo", "decoded": 101}])
    page, text = pages(tmp_path)
    assert "1 runs do not reconcile" in page and "| NO |" in text
    engine_record(tmp_path, [RUN])  # control
    assert "do not reconcile" not in pages(tmp_path)[0]


def test_simulated_numbers_are_labelled_wherever_they_stand(tmp_path):
    own = {key: RUN[key] for key in ("makespan_s", "decoded", "trained", "waste", "bubble", "completion_s")}
    setting = {key: RUN[key] for key in ("workload", "scenario", "groups", "members", "cap", "replicas", "seed")}
    (tmp_path / "sim.json").write_text(json.dumps({"simulated": True, "device": "simulated: H100", "setting": setting,
                                                   "policies": {"verl": own, "es-grpo": own}}))
    engine_record(tmp_path, [RUN, {**RUN, "policy": "es-grpo"}])
    page, text = pages(tmp_path)
    kinds = {row[-1]: row[6] for row in claims(load.records(tmp_path))}
    assert kinds == {"engine.json": "measured", "sim.json": "simulated"}
    assert "### sim.json (simulated)" in text and "### engine.json\n" in text
    assert 'sim.json<span class="badge simulated">' in page


def test_predicted_stands_beside_measured(tmp_path):
    runs = [{"workload": "math", "policy": "verl", "cap": 64, "scenario": "sync", "measured_s": 10.0,
             "predicted_s": predicted} for predicted in (10.5, 12.0)]
    (tmp_path / "validation.json").write_text(json.dumps({"simulated": True, "tau": {}, "runs": runs}))
    page, text = pages(tmp_path)
    assert "| math, cap 64, scenario sync | verl | 0 | 10 | 10.5 | +5.0% |" in text and "+20.0%" in text
    assert "1 of 2 lie within the grey band of 10%" in text and ">Predicted (simulated) against" in page


def test_study_ranks_modules_and_says_where_there_is_no_gain(tmp_path):
    def arm(mean, policy="es-grpo", **setting):
        gain = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
        return {"policy": policy, "setting": setting, "updates": gain, "used": gain,
                "gradient": {name: value + 1 for name, value in gain.items()}, "bubble": {"bubble_rate": 0.5},
                "p99_s": 9.0}

    module = {"name": "routing", "without": arm(1.2), "alone": arm(1.1), "brings": 0.1, "brings_updates": 0.05,
              "rank": "High"}
    (tmp_path / "study.json").write_text(json.dumps({
        "simulated": True, "device": "simulated: H100", "command": "python -m bench.sim.study", "commit": "abc",
        "seeds": [1, 2, 3], "base": {}, "ranks": {"High": 0.1, "of": "updates/s"},
        "modules": {"async": {"whole": arm(1.3), "none": arm(1.0), "A": module, "changes": [arm(1.3)]}},
        "sweeps": {"cap": [arm(1.4, cap=4096), arm(0.9, cap=16384)]}, "steady": {"async": [arm(1.1, "seer")]},
        "where_it_does_not_help": [{"setting": {"cap": 16384}, "updates": arm(0.9)["updates"]}]}))
    record, = load.records(tmp_path)
    assert record.kind == "study" and record.simulated
    page, text = pages(tmp_path)
    assert "| async | A routing | High | +0.100 | +0.050 | 2.3 [2.2, 2.4] | 2.2 [2.1, 2.3] | 2.1 [2, 2.2] |" in text
    assert "**Steady: async**" in text
    assert "| seer | base | verl | 1.1 [1, 1.2] | 1.1 [1, 1.2] | 2.1 [2, 2.2] |" in text
    assert "| cap 16384 | 0.9 [0.8, 1] |" in text and "rank High | simulated" in text
    assert "What each module brings" in page and "Scaling" in page and "Scaling" not in text.partition("## Not run")[2]


def test_two_seeds_are_drawn_with_their_last_evaluations():
    from matplotlib.figure import Figure

    from esgrpo.tools.report.training_figures import _reward_line

    seeds = [{"evaluations": [[0.0, 0.4], [last, 0.6]], "target": 0.5} for last in (100.0, 120.0, 140.0)]
    for count, drawn in ((1, 2), (2, 2), (3, 1)):  # one with its target, two as they are, three as their median
        axis = Figure().subplots()
        _reward_line(axis, "plain", seeds[:count], "black")
        assert len(axis.lines) == drawn
        if count == 2:
            assert [list(line.get_xdata()) for line in axis.lines] == [[0.0, 100.0], [0.0, 120.0]]


def test_a_single_evaluation_stands_on_the_time_of_its_run():
    """Its own axis would be a few milliseconds wide."""
    from matplotlib.figure import Figure

    from esgrpo.tools.report.training_figures import comparison_panels

    one = {**CURVES, "evaluations": [[0.01, 0.4]]}
    axes = list(Figure().subplots(1, 3))
    comparison_panels(axes, {"plain": [one]})
    assert all(axis.get_xlim()[0] == 0 and 15.0 <= axis.get_xlim()[1] < 17.0 for axis in (axes[0], axes[2]))


def test_coordinates_are_short_and_texts_stay():
    from esgrpo.tools.report.plots import short_numbers

    assert (short_numbers('<path d="M 44.256863 100.000004 L -0.5 7"/><text x="1.125001">1.2345 s</text>')
            == '<path d="M 44.26 100 L -0.5 7"/><text x="1.13">1.2345 s</text>')


def test_a_measure_without_a_ratio_has_no_panel():
    from esgrpo.tools.report.training_figures import _ratios

    def record(target):
        runs = {"effective tokens/s": 2.0, "time to target, s": target}
        return SimpleNamespace(data={"measures": {"plain": {"1": runs}, "overlay": {"1": runs}}})

    wide, narrow = (_ratios(record(target)).svg.count('id="axes_') for target in (3.0, None))
    assert (wide, narrow) == (2, 1)


def test_runs_left_out_are_said(tmp_path):
    left = {"kind": "left_out", "why": "out of time",
            "runs": [[0, "math", "async", "verl"], [1, "math", "async", "seer"]]}
    engine_record(tmp_path, [RUN, left, {**left, "groups": 8, "members": 4, "cap": 512, "seed": 2},
                             {"kind": "summary", "against_verl": {}}])
    record, = load.records(tmp_path)
    said = "Left out, out of time: math async verl, math async seer #1"
    assert record.notes == (said, f"{said} (8 groups x 4, cap 512, seed 2)")


def test_a_withdrawn_run_is_said_and_counts_nowhere(tmp_path):
    engine_record(tmp_path, [RUN, {**RUN, "policy": "april", "withdrawn": "it was played in another order"}])
    record, = load.records(tmp_path)
    assert record.notes == ("Withdrawn, april: it was played in another order.",)
    assert [run["policy"] for run in record.data["runs"]] == [RUN["policy"]]


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    ablation_record(tmp_path)
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count(" | ") == 3 and error.startswith("esgrpo: report: ") and "pip install matplotlib" in error
    assert not (tmp_path / "report.html").exists()


def test_other_commands_import_nothing_of_it(run_python, overlay):
    ask = ("import sys; from esgrpo import cli; cli.parser(); "
           "print([name for name in sys.modules if 'report' in name or 'plot' in name])")
    assert run_python("-c", ask, path=(overlay,)).stdout == "[]\n"


@pytest.mark.parametrize("arguments", [(), ("--trace", "t.json")])
def test_a_directory_without_records(tmp_path, capsys, arguments):
    assert cli.main(["report", str(tmp_path), *arguments]) == 2
    assert cli.main(["report", str(tmp_path / "none"), *arguments]) == 2
    assert "nothing was written" in capsys.readouterr().err


def test_numbers_say_how_many_runs_they_rest_on():
    assert tables.spread([3000.0, None, 2000.0]) == "2,500 [2,000, 3,000] (2 of 3)"
    assert tables.percent(-1e-9) == "0.00%"


def two_files(tmp_path, **second) -> list[list[str]]:
    """Two records of one command with a seed each; returns the rows of the headline."""
    for name, seed, more in (("a", 1, {}), ("b", 2, second)):
        ours = {key: (1 + seed) * value for key, value in MEASURES.items()}
        (tmp_path / f"{name}.json").write_text(json.dumps({
            "command": f"python -m bench.train --seeds {seed} --scale large --results {name}.json", "commit": "abc",
            "device": "NVIDIA H200", "arms": {"plain": ["x=1"], "overlay": ["x=2"]},
            "measures": {"plain": {str(seed): MEASURES}, "overlay": {str(seed): ours}}, **more}))
    return sections.build(load.records(tmp_path)).headline.rows[1:]


def test_runs_of_one_command_are_pooled_over_files(tmp_path):
    rows = {row[0]: row for row in two_files(tmp_path)}
    row = rows[headline.FASTER_TRAINING]
    assert row[1].startswith("2.5 times as many [2, 3]") and row[4] == "2" and row[7] == "a.json + b.json"


@pytest.mark.parametrize("second", [{"device": "AMD EPYC, 2 cores"}, {"arms": {"plain": ["x=1"], "overlay": ["x=3"]}},
                                    {"command": "python -m bench.train --scale small"}])
def test_what_differs_in_more_than_seeds_is_not_pooled(tmp_path, second):
    row = two_files(tmp_path, **second)[0]
    assert row[4] == "1" and "+" not in row[7] and "(" in row[6]  # the other one stands beside it


def test_what_was_superseded_comes_last_and_claims_nothing(tmp_path):
    (tmp_path / "superseded.toml").write_text('"a.json" = {by = "b.json", why = "an old model"}')
    row = two_files(tmp_path)[0]
    assert row[4] == "1" and row[7] == "b.json" and row[6] == tables.DASH
    text = pages(tmp_path)[1]
    assert "Superseded by b.json: an old model." in text.partition("## What later records replaced")[2]


@pytest.mark.parametrize("said", [
    '"c.json" = {by = "b.json", why = "gone"}', '"a.json" = {by = "c.json", why = "gone"}',
    '"a.json" = {by = "b.json"}'])
def test_a_list_of_superseded_records_that_names_nothing_is_refused(tmp_path, said, capsys):
    two_files(tmp_path)
    (tmp_path / "superseded.toml").write_text(said)
    assert cli.main(["report", str(tmp_path)]) != 0
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_question_is_answered_by_the_best_evidence_not_by_the_best_number(tmp_path):
    """Negative control: the order of evidence turned around shows the other number."""
    rows = two_files(tmp_path, device="AMD EPYC, 2 cores")  # 2 on the GPU, 3 on a CPU
    assert rows[0][1].startswith("2 times") and rows[0][6].startswith("3 (")


def test_a_page_without_answers_has_no_empty_table(tmp_path):
    engine_record(tmp_path, [RUN])
    assert "## Headline" not in pages(tmp_path)[1] and "## Every claim" not in pages(tmp_path)[1]
    ablation_record(tmp_path)
    assert "## Headline" in pages(tmp_path)[1] and "## Every claim" in pages(tmp_path)[1]  # negative control


def test_one_of_a_thing_is_not_several(tmp_path, capsys):
    engine_record(tmp_path, [RUN])
    pages(tmp_path)
    assert ": 1 record, not run: " in capsys.readouterr().out


def test_captions_are_in_chinese_from_end_to_end(root):
    """What is left of Latin script is names and numbers, never a sentence."""
    content = sections.build(load.records(root / "bench" / "results"))
    blocks = [block for section in content.sections for block in section.blocks]
    told = {figure.caption for block in blocks for figure in block.figures}
    told |= {_reward({"a": [CURVES]}, kind).caption for kind in ("run", "comparison")}
    assert len(told) > 5
    assert [text for text in told if re.search(r"[a-z]+ [a-z]+ [a-z]+ [a-z]+", in_chinese(text))] == []


def test_the_page_says_its_own_words_in_chinese_too(tmp_path):
    ablation_record(tmp_path)
    engine_record(tmp_path, [RUN, {**RUN, "policy": "es-grpo"}, {**RUN, "policy": "april"}])
    content = sections.build(load.records(tmp_path))
    ours = [page.TITLE, page.LEAD, page.MISSING_LEAD, page.FIGURES_LEAD, *headline.QUESTIONS, *headline.ANSWER_HEAD,
            *[text for section in content.sections for text in (section.title, section.lead)],
            *[figure.title for block in (b for s in content.sections for b in s.blocks) for figure in block.figures]]
    assert [text for text in ours if in_chinese(text) == text] == []
    assert 'id="zh"' in pages(tmp_path)[0] and "奖励随墙钟时间的变化" in pages(tmp_path)[0]


@pytest.mark.parametrize(("names", "base"), [
    (["all", "plain"], "plain"), (["plain staleness=4", "plain", "plain staleness=1"], "plain"),
    (["plain loss=pois", "C verdicts loss=pois"], "plain loss=pois"),
    (["plain staleness=2", "plain staleness=2 dynamic=on"], None), (["es-grpo", "plainer"], None)])
def test_arms_are_compared_with_plain_or_with_the_only_tuned_plain_one(names, base):
    assert tables.baseline_of(names) == base
