"""Run directories in the report: curves and totals from their records, and requests as a Chrome trace."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from esgrpo import cli
from esgrpo.tools.report import runs, tables, trace
from esgrpo.tools.report.trace import Moment, Stay

NEEDED = {"M": {"name", "pid", "args"}, "X": {"name", "ts", "dur", "pid", "tid"},
          "i": {"name", "ts", "pid", "tid", "s"}, "C": {"name", "ts", "pid", "args"}}  # of the trace event format


def check_format(events: list[dict]) -> None:
    """What the trace event format asks for, and that spans of one thread never overlap."""
    spans: dict[tuple, list[tuple[float, float]]] = {}
    for event in events:
        assert NEEDED[event["ph"]] <= set(event), event
        assert isinstance(event["pid"], int) and isinstance(event.get("tid", 0), int)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0 and event.get("s", "p") in "gpt"
        if event["ph"] == "X":
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for mine in spans.values():
        mine.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in zip(mine, mine[1:], strict=False))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(spans) == named
    assert {e["pid"] for e in events} == {e["pid"] for e in events if e["name"] == "process_name"}


def response(group, member, started, ended, tokens, **changes):
    return {"time": ended, "group": group, "member": member, "outcome": "finish", "rule": "", "tokens": tokens,
            "attempts": 1, "reprefill": 0, "boundaries": 0, "spans": [[0, tokens]], "started": started, "ended": ended,
            "score": 1.0, **changes}


@pytest.fixture
def run_dir(tmp_path):
    """Two groups of two: one trained, one not yet; one response pruned."""
    rows = [response("a", 0, 100.0, 104.0, 8), response("a", 1, 100.0, 110.0, 64, outcome="prune", rule="repetition"),
            response("b", 0, 101.0, 112.0, 16), response("b", 1, 104.0, 125.0, 32)]
    window = {"capacity": 4, "steps": 1, "tokens": 60, "timeline": [], "outcomes": {}, "in_flight": 0, "kept": 0,
              "kv_ages": [], "rollouter_paused": 0.0}
    windows = [{**window, "time": 110.0, "start": 100.0, "seconds": 10.0, "used": 20.0, "sync": 4.0, "idle": 0.0,
                "tail": 16.0, "version": 0},
               {**window, "time": 130.0, "start": 110.0, "seconds": 20.0, "used": 40.0, "sync": 0.0, "idle": 40.0,
                "tail": 0.0, "version": 1}]
    records = {"responses": rows, "windows": windows, "trained": [
        {**row, "time": 115.0, "trained": True, "pruned": row["outcome"] == "prune", "gradient": True}
        for row in rows[:2]]}
    (tmp_path / "esgrpo").mkdir()
    for kind, found in records.items():
        (tmp_path / "esgrpo" / f"{kind}-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return tmp_path


def test_time_average_is_weighted_by_time():
    steps = [(0.0, 2.0), (3.0, 4.0), (12.0, 0.0), (20.0, 0.0)]
    assert runs.time_average(steps, 10.0) == [(5.0, pytest.approx(3.4)), (15.0, pytest.approx(0.8))]
    assert runs.time_average(steps[:1], 10.0) == []


def test_condensed_run(run_dir):
    found = runs.condense(run_dir)
    assert found["facts"]["responses"] == 4 and found["facts"]["pruned"] == 1
    assert found["facts"]["tokens trained"] == 8 and found["facts"]["tokens pruned"] == 64
    assert found["facts"]["bubble rate"] == pytest.approx(60 / 120)
    assert found["curves"]["evaluations"] == [[15.0, 1.0]]  # the pruned row is not trained
    assert found["curves"]["bubble"] == [[5.0, 0.0, 0.0, 0.4, 0.1], [15.0, 0.0, 0.5, 0.0, 0.0],
                                         [25.0, 0.0, 0.5, 0.0, 0.0]]
    assert found["curves"]["running"] == [[5.0, 2.0], [15.0, 2.0], [25.0, 2.0]]
    assert found["curves"]["sampled"] == [[12, 1], [16, 1], [20, 1], [24, 1]]
    assert found["curves"]["trained"] == [[12, 1]]


def event(side, version, **spent):
    return {"time": 120.0 + version, "side": side, "version": version, "start": 100.0, "seconds": sum(spent.values()),
            "spent": spent}


def test_idle_breakdown_over_versions_and_moves_of_the_controller(run_dir, monkeypatch):
    monkeypatch.setattr(runs, "VERSION_ROWS", 2)
    events = [event("train", 1, wait=6.0, train=2.0), event("train", 1, wait=0.0, train=2.0),
              event("train", 2, wait=0.0, train=10.0), event("rollout", 0, idle=5.0, busy=5.0),
              event("train", 3, wait=1.0, train=1.0), event("rollout", 2, idle=0.0, busy=4.0)]
    moves = [{"time": 121.0, "version": 2, "cause": "rates", "before": {"concurrency": 8, "staleness": 0.5},
              "after": {"concurrency": 12, "staleness": 0.5}, "trust": 1.0}]
    for kind, rows in (("events", events), ("moves", moves)):
        (run_dir / "esgrpo" / f"{kind}-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = runs.condense(run_dir)
    assert found["loop"] == [
        [0, 1, {"train: wait": 0.6, "train: train": 0.4, "rollout: idle": 0.5, "rollout: busy": 0.5}],
        [2, 3, {"train: wait": pytest.approx(1 / 12), "train: train": pytest.approx(11 / 12), "rollout: idle": 0.0,
                "rollout: busy": 1.0}]]
    time, moved = tables.overlap("x", found["loop"], found["moves"])
    assert time.rows[0] == ["versions", "train: wait", "train: train", "rollout: idle", "rollout: busy"]
    assert time.rows[1][0] == "0 … 1" and "60" in time.rows[1][1] and "50" in time.rows[1][3]
    assert moved.rows[1] == ["2", "rates", "concurrency 8 → 12"]
    assert tables.overlap("x", [], []) == []
    assert cli.main(["report", str(run_dir)]) == 0
    page = (run_dir / "report.md").read_text(encoding="utf-8")
    assert "concurrency 8 → 12" in page and "Time of trainer and rollouter by weight version" in page


def test_what_both_sides_of_the_loop_spent_their_time_on(run_dir):
    event = {"time": 120.0, "version": 1, "start": 100.0, "schema": 2}
    train = {**event, "side": "train", "seconds": 10.0, "spent": {"wait": 4.0, "train": 5.0, "other": 1.0}}
    rows = [{**train, "tokens": 30, "age": 1.0, "groups": 4, "queued_s": 2.5},
            {**train, "tokens": 10, "age": 3.0, "spent": {"wait": 0.0, "train": 10.0, "other": 0.0}},
            {**event, "side": "rollout", "seconds": 8.0, "spent": {"idle": 2.0, "busy": 6.0}, "in_flight": 4.0}]
    (run_dir / "esgrpo" / "events-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    windows = run_dir / "esgrpo" / "windows-1.jsonl"
    windows.write_text("".join(json.dumps({**json.loads(line), "surprisal": 6.0, "surprisal_tokens": 12}) + "\n"
                               for line in windows.read_text().splitlines()))
    facts = runs.condense(run_dir)["facts"]
    assert {name: facts[name] for name in facts if "share" in name} == {
        "train: wait, share of its time": 0.2, "train: train, share of its time": 0.75,
        "train: other, share of its time": 0.05, "rollout: idle, share of its time": 0.25,
        "rollout: busy, share of its time": 0.75}
    assert facts["groups in flight"] == 4.0 and facts["surprisal, nats a token"] == 0.5
    assert facts["age of trained tokens, weight versions"] == 1.5 and facts["wait in the queue, s"] == 2.5


def test_start_up_is_no_idle_time(run_dir):
    """The first response began at 100: a version that ended before it, and what another one idled before it."""
    event = {"time": 120.0, "side": "rollout", "schema": 2, "in_flight": 0.0}
    rows = [{**event, "version": -1, "start": 30.0, "seconds": 60.0, "spent": {"idle": 60.0, "busy": 0.0}},
            {**event, "version": 0, "start": 90.0, "seconds": 18.0, "spent": {"idle": 12.0, "busy": 6.0},
             "in_flight": 2.0}]
    (run_dir / "esgrpo" / "events-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = runs.condense(run_dir)
    assert found["facts"]["rollout: idle, share of its time"] == pytest.approx(2 / 8)
    assert found["facts"]["groups in flight"] == 2.0
    assert found["loop"] == [[0, 0, {"rollout: idle": pytest.approx(2 / 8), "rollout: busy": pytest.approx(6 / 8)}]]


def test_requests_of_several_replicas_add_up(run_dir):
    window = json.loads((run_dir / "esgrpo" / "windows-1.jsonl").read_text().splitlines()[0])
    (_, alone), = runs.by_version([window])
    (_, both), = runs.by_version([window, window])
    assert both["running"] == 2 * alone["running"] and both["tail"] == alone["tail"]


def test_page_of_a_run_directory(run_dir):
    pytest.importorskip("matplotlib")
    assert cli.main(["report", str(run_dir)]) == 0
    text = (run_dir / "report.md").read_text()
    assert "Totals by run" in text and "Bubble over time" in text and "Reward over wall time" in text
    assert "Not in the record: command, commit, seed, device." in text


def test_half_a_line_of_a_killed_run_is_left_out_and_said(run_dir, tmp_path_factory):
    pytest.importorskip("matplotlib")
    both = tmp_path_factory.mktemp("runs")
    shutil.copytree(run_dir, both / "whole")
    shutil.copytree(run_dir, both / "killed")
    with open(both / "killed" / "esgrpo" / "trained-1.jsonl", "a") as file:
        file.write('{"time": 12')
    assert cli.main(["report", str(both)]) == 0
    text = (both / "report.md").read_text()
    assert "|   | killed | whole |" in text and "killed: 1 rows were cut short" in text and "whole: 1" not in text
    assert trace.write(both, both / "trace.json")[0] > 0


@pytest.fixture
def beside(run_dir, tmp_path_factory):
    """A good run, and "dm", another one, which a test damages."""
    both = tmp_path_factory.mktemp("runs")
    for name in ("good", "dm"):
        shutil.copytree(run_dir, both / name)
    return both


@pytest.mark.parametrize("damage", ["empty", "lost", "hooks"])
def test_one_damaged_run_does_not_take_the_others_with_it(beside, capsys, damage):
    pytest.importorskip("matplotlib")
    responses = beside / "dm" / "esgrpo" / "responses-1.jsonl"
    if damage == "hooks":
        (beside / "dm" / "esgrpo" / "hooks.json").write_text('[{"process": "dri')
    elif damage == "empty":
        responses.write_text("")
    else:
        responses.unlink()
    assert cli.main(["report", str(beside)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("unknown shape: dm")
    text = (beside / "report.md").read_text()
    assert "|   | good |" in text
    assert ("hooks.json" if damage == "hooks" else "there are rows, but no responses") in text
    if damage != "hooks":  # which no trace reads
        assert cli.main(["report", str(beside), "--trace", str(beside / "t.trace")]) == 0
        assert capsys.readouterr().out.rstrip().endswith("unknown shape: dm")
        check_format(json.loads((beside / "t.trace").read_text())["traceEvents"])


def test_a_run_that_may_not_be_read_is_not_left_out_without_a_word(beside, capsys, monkeypatch):
    """As chmod 000 does for whoever is not root."""
    closed = str(beside / "dm" / "esgrpo")

    def refusing(call):
        def checked(path="."):
            if str(path) == closed:
                raise PermissionError(13, "Permission denied", closed)
            return call(path)
        return checked

    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != closed and real(path, mode))
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    for options in ((), ("--trace", str(beside / "t.trace"))):
        assert cli.main(["report", str(beside), *options]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and f"{closed}: Permission denied" in told


@pytest.mark.parametrize("content", [b'\xff\xfe{"a": 1}', b"[" * 100_000], ids=["no UTF-8", "brackets without end"])
def test_a_file_that_is_no_json_is_named(run_dir, capsys, content):
    pytest.importorskip("matplotlib")
    (run_dir / "bad.json").write_bytes(content)
    assert cli.main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("unknown shape: bad.json")
    assert "bad.json: no JSON: " in (run_dir / "report.md").read_text()


@pytest.mark.parametrize("options, said", [
    (["--out", "page.md"], "'page.md' | wanted FILE.html"), (["--out", ""], "'' | wanted FILE.html"),
    (["--out", "page.html", "--trace", "t.json"], "--out and --trace | wanted one of them"),
    (["--trace", ""], "'' | wanted FILE.json"), (["--trace", "."], "'.' | wanted FILE.json")])
def test_a_file_that_cannot_be_what_was_asked_for(run_dir, capsys, monkeypatch, options, said):
    monkeypatch.chdir(run_dir)
    before = sorted(run_dir.rglob("*"))
    assert cli.main(["report", str(run_dir), *options]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and said in told and sorted(run_dir.rglob("*")) == before


def test_trace_of_a_run_directory(run_dir):
    file = run_dir / "trace.json"
    assert cli.main(["report", str(run_dir), "--trace", str(file)]) == 0
    events = json.loads(file.read_text())["traceEvents"]
    check_format(events)
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 4 and {event["cat"] for event in spans} == {"finish", "prune"}
    assert [event["name"] for event in events if event["ph"] == "i"] == [
        "weight sync after version 0", "weight sync after version 1", "prune a/1"]


@pytest.mark.parametrize("option", ["--out", "--trace"])
def test_a_place_that_cannot_be_written_is_one_line_and_leaves_nothing(run_dir, tmp_path, option, capsys):
    place = tmp_path / "places"
    (place / "folder").mkdir(parents=True)
    (place / "file").touch()
    for unfit in (place / "file" / "page.html", place / "folder"):
        assert cli.main(["report", str(run_dir), option, str(unfit)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and unfit.name in said and said.rstrip().endswith(option)
    assert sorted(path.name for path in place.rglob("*")) == ["file", "folder"]


def test_attempts_stand_under_their_replica(run_dir):
    file = run_dir / "esgrpo" / "responses-1.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[2]["places"] = [["", 101.0, 104.0, 4], ["1", 104.5, 111.5, 12]]  # aborted by a weight sync, then elsewhere
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    windows = run_dir / "esgrpo" / "windows-1.jsonl"
    first, second = (json.loads(line) for line in windows.read_text().splitlines())
    windows.write_text(json.dumps(first) + "\n" + json.dumps({**second, "replica": "1"}) + "\n")
    events = trace.events(*trace.of_run_directory(run_dir))
    check_format(events)
    names = {e["pid"]: e["args"]["name"].partition(": ")[2] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["replica 1", "replica not told"]
    spans = [(names[e["pid"]], e["ts"] / 1e6, e["dur"] / 1e6, e["cat"], e["args"]["tokens_so_far"]) for e in events
             if e["ph"] == "X" and e["name"] == "b/0"]
    assert spans == [("replica not told", 1.0, 3.0, "interrupted", 4), ("replica 1", 4.5, 7.0, "finish", 16)]
    assert {(names[e["pid"]], e["name"]) for e in events if e["ph"] == "i" and "sync" in e["name"]} == {
        ("replica not told", "weight sync after version 0"), ("replica 1", "weight sync after version 1")}


def test_trace_of_the_engine_benchmark(tmp_path):
    attempts = [{"replica": 0, "submit": 0.0, "first": 1.0, "done": 0, "boundaries": [[2.0, 10]], "end": 3.0,
                 "outcome": "yield", "decoded": 20},
                {"replica": 1, "submit": 3.0, "first": 3.5, "done": 20, "boundaries": [], "end": 5.0,
                 "outcome": "prune", "decoded": 4},
                {"replica": 1, "submit": 6.0, "first": None, "done": 24, "boundaries": []}]  # the run was over
    (tmp_path / "engine.traces").mkdir()
    (tmp_path / "engine.traces" / "a.json").write_text(json.dumps(
        [{"sample": 7, "group": 1, "member": 2, "tokens": 64, "attempts": attempts}]))
    (tmp_path / "engine.json").write_text(json.dumps(
        {"kind": "run", "policy": "es-grpo", "scenario": "sync", "repeat": 0, "trace": "engine.traces/a.json",
         "update_times": [5.0]}) + "\n" + json.dumps({"kind": "summary"}) + "\n")
    events = trace.events(*trace.collect(tmp_path)[:2])
    check_format(events)
    spans = [(e["ts"] / 1e6, e["dur"] / 1e6, e["args"].get("tokens_so_far")) for e in events if e["ph"] == "X"]
    assert spans == [(0.0, 1.0, 0), (1.0, 1.0, 10), (2.0, 1.0, 20), (3.0, 0.5, 20), (3.5, 1.5, 24)]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "sync es-grpo #0 replica 0", "sync es-grpo #0 replica 1"}
    assert sorted(e["name"] for e in events if e["ph"] == "i") == ["prune 1/2", "update 1", "update 1"]


def test_a_slot_is_taken_again_as_soon_as_it_is_free():
    stays = [Stay("p", "a", 0.0, 4.0, "finish"), Stay("p", "b", 1.0, 2.0, "finish"), Stay("p", "c", 2.0, 3.0, "finish"),
             Stay("q", "d", 1.0, 2.0, "finish"), Stay("p", "e", 2.5, 2.5, "finish")]
    assert trace.slots(stays) == [0, 1, 1, 0, 2]
    check_format(trace.events(stays, [Moment("p", "sync", 0.5)]))
    with pytest.raises(AssertionError):  # control: the check sees an overlap
        check_format([{**event, "tid": 1} if event["ph"] == "X" else event
                      for event in trace.events(stays, []) if event.get("args", {}).get("name") != "slot 1"])
