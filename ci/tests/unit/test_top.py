"""`esgrpo top`: follows what a run writes, draws it at any width, and says in one line what is odd."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from esgrpo import cli, records
from esgrpo.algo import rows
from esgrpo.tools import language, top
from esgrpo.tools.top import follow, state

rich = pytest.importorskip("rich")
START = 1_700_000_000.0
SETTINGS = {"enable": True, "history": {"enable": True}, "routing": {"enable": True}}
PATIENCE_S = 20
FACTS = {"trainer": "fully_async", "replicas": 2, "response_length": 64}


def put(run_dir, row: rows.Row, pid: int, run: str = "one", at: float = START, restart: int = 0) -> None:
    folder = run_dir / records.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"time": at, "run": run, "restart": restart, "node": records.NODE, "pid": pid, **row.row()})
    with open(folder / f"{row.kind}-{records.NODE}-{pid}.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")


def window(version: int, replica: str, tokens: int = 500, **more) -> rows.EngineWindow:
    return rows.EngineWindow(version=version, start=START, seconds=10.0, capacity=8, used=40.0, sync=8.0, idle=16.0,
                             tail=16.0, tokens=tokens, replica=replica, outcomes={"abort": 3}, kept=2, surprisal=50.0,
                             surprisal_tokens=100, **more)


def rollout(version: int, idle: float = 2.5) -> rows.LoopEvent:
    return rows.LoopEvent(side="rollout", version=version, start=START, seconds=10.0,
                          spent={"idle": idle, "busy": 10.0 - idle}, groups=6, in_flight=3.0, limit=8, queue=5,
                          queue_limit=20)


def train(version: int, loss: float) -> rows.LoopEvent:
    return rows.LoopEvent(side="train", version=version, start=START, seconds=10.0, groups=4, tokens=900, age=1.5,
                          spent={"wait": 6.0, "sync": 1.0, "train": 2.5, "checkpoint": 0.3, "validation": 0.2,
                                 "other": 0.0}, queued_s=7.5, loss=loss)


@pytest.fixture
def run(tmp_path):
    """A run of two replicas that is in its fourth weight version; its writer is this process."""
    pid, run_dir = os.getpid(), tmp_path / "run"
    put(run_dir, rows.Decisions(process="driver", settings=SETTINGS, facts=FACTS), pid)
    put(run_dir, rows.Start(resumed_step=0), pid, at=START + 1)
    for version in range(3):
        at = START + 10 * version
        for replica in ("0", "1"):
            put(run_dir, window(version, replica), pid, at=at + 2)
        put(run_dir, rollout(version), pid, at=at + 2)
        put(run_dir, train(version + 1, 0.5 - version / 10), pid, at=at + 3)
    put(run_dir, rows.Decisions(process="rollouter", counts={"routing/inversions": 7}), pid, at=START + 30)
    put(run_dir, rows.Move(version=3, cause="rates", before={"concurrency": 8, "staleness": 1.0},
                           after={"concurrency": 12, "staleness": 1.0}, also={"max_queue_size": [8, 16]}), pid,
        at=START + 31)
    put(run_dir, rows.Response(group="g", member=0, tokens=33), pid, at=START + 32)
    return run_dir


def shown(run_dir, capsys, monkeypatch, columns: int = 100, *more: str) -> tuple[int, str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    code = cli.main(["top", str(run_dir), "--once", *more])
    told = capsys.readouterr()
    assert told.err == ""
    return code, told.out


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("spoken", language.LANGUAGES)
def test_a_frame_fits_and_has_every_part(run, capsys, monkeypatch, columns, spoken):
    from rich.cells import cell_len

    code, text = shown(run, capsys, monkeypatch, columns, "--lang", spoken)
    assert code == 0 and max(map(cell_len, text.splitlines())) <= columns
    for wanted in ("fully_async", "5 / 20", "3 / 8", "4.0/8", "50", "2/3", "20%/20%/10%", "60%", "25%", "100",
                   "concurrency 8 → 12", "max_queue_size 8 → 16", "loss\u00a00.3", "routing"):
        assert wanted in text, wanted
    assert "staleness" not in text, "what did not move is no move"
    assert ("trainer" in text) == (spoken == "en") and ("训练端" in text) == (spoken == "zh")


def test_shares_of_the_newest_version_and_of_the_recent_ones(run):
    put(run, rollout(3, idle=10.0), os.getpid(), at=START + 40)
    loop = state.Loop()
    loop.take(follow.Follower(str(run), state.FOLLOWED).poll())
    assert loop.spent("rollout", False) == {"idle": 1.0, "busy": 0.0}
    assert loop.spent("rollout", True)["idle"] == pytest.approx((3 * 2.5 + 10) / 40)
    assert loop.version == 4 and loop.rates() == [100.0] * 3 and (loop.ended, loop.ended_tokens) == (1, 33)


def test_every_row_is_read_once_through_rotation_and_torn_lines(run):
    follower = follow.Follower(str(run), ["events"])
    path = next((run / records.FOLDER).glob("events-*"))
    assert len(follower.poll()) == 6 and follower.poll() == []
    put(run, rollout(3), os.getpid())
    path.rename(path.with_suffix(".before.jsonl"))  # as the writer does it, right after a row
    put(run, rollout(4), os.getpid())
    with open(path, "a", encoding="utf-8") as file:
        file.write("[" * 9000 + "\nno row\n" + '{"time": 1.0')
    assert [row.version for row in follower.poll()] == [3, 4]
    assert follower.broken == 2 and follower.poll() == []
    with open(path, "a", encoding="utf-8") as file:
        file.write(', "side": "train", "version": 5, "start": 1.0, "seconds": 1.0, "spent": {}}\n')
    assert [row.version for row in follower.poll()] == [5] and follower.broken == 2


def test_of_a_large_file_only_the_end_is_read(run, monkeypatch):
    path = next((run / records.FOLDER).glob("events-*"))
    last = path.read_text().splitlines()[-1]
    monkeypatch.setattr(follow, "TAIL_BYTES", len(last) + 20)
    follower = follow.Follower(str(run), ["events"])
    assert [row.row() for row in follower.poll()] == [rows.LoopEvent.of(json.loads(last)).row()]
    assert follower.broken == 0


def test_a_row_with_odd_contents_costs_one_line(run, capsys, monkeypatch):
    put(run, rows.LoopEvent(side="train", version=9, start=START, seconds=1.0, spent={"wait": "long"}), os.getpid())
    put(run, window(9, "0", devices={"a": 3}), os.getpid())
    put(run, rows.Move(version=1, cause="\x1b[31mred", before={}, after={"a": [1]}), os.getpid())
    code, text = shown(run, capsys, monkeypatch)
    assert code == 0 and "2 lines are no rows" in text and "\x1b" not in text and "red: a None → [1]" in text


def test_why_there_is_no_utilisation_is_said_once_and_as_it_is_now(run, capsys, monkeypatch):
    for replica in ("0", "1"):
        put(run, window(3, replica, no_devices="not sampled yet"), os.getpid(), at=START + 40)
    assert shown(run, capsys, monkeypatch)[1].count("not sampled yet") == 1
    put(run, window(4, "0", no_devices="no accelerator"), os.getpid(), at=START + 50)
    put(run, window(4, "1", devices={"n:0": [0.5, 0.25]}), os.getpid(), at=START + 50)
    text = shown(run, capsys, monkeypatch)[1]
    assert text.count("no accelerator") == 1 and "not sampled" not in text and "50%/25%" in text


def test_a_new_run_in_the_directory_replaces_the_old_one_and_its_stragglers(run):
    put(run, rows.Start(resumed_step=0), 7, run="two", at=START + 50)
    put(run, rollout(9), os.getpid(), run="one", at=START + 60)
    loop = state.Loop()
    loop.take(follow.Follower(str(run), state.FOLLOWED).poll())
    assert loop.run == "two" and loop.version is None


@pytest.mark.parametrize("made", ["directory", "folder"])
def test_a_run_that_has_not_begun(tmp_path, capsys, monkeypatch, made):
    """One frame waits for nothing, and says so; a terminal is waited in."""
    run_dir = tmp_path / "run"
    (run_dir / ("esgrpo" if made == "folder" else "")).mkdir(parents=True)
    code, text = shown(run_dir, capsys, monkeypatch)
    words = " ".join(text.split())
    assert code == 1 and len(text.splitlines()) <= 2 and "has not begun" in words and "waiting" not in words
    frames = []
    monkeypatch.setattr(top.time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
    monkeypatch.setattr("rich.live.Live.update", lambda _self, frame, **_: frames.append(frame))
    follower, loop = top._read(str(run_dir))
    top._live(str(run_dir), follower, loop, rich.console.Console(file=io.StringIO()), 0.0)
    assert "waiting for the run to begin" in str(frames[0].renderables[0])


def refused(arguments, capsys) -> str:
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and told.err.count(" | ") == 3, told.err
    return told.err


@pytest.mark.parametrize("once", [(), ("--once",)])
def test_a_directory_that_is_not_there_is_not_waited_for(tmp_path, capsys, once):
    assert "nothere does not exist" in refused(["top", str(tmp_path / "nothere"), *once], capsys)


def test_of_a_directory_of_runs_the_one_that_is_alive(tmp_path, capsys, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (tmp_path / "data").mkdir()
    put(tmp_path / "plain", rows.Start(resumed_step=0), child.pid)
    assert shown(tmp_path, capsys, monkeypatch)[1].startswith("plain ")
    put(tmp_path / "overlay", rows.Start(resumed_step=0), child.pid)
    said = refused(["top", str(tmp_path), "--once"], capsys)
    assert "2 runs" in said and "overlay, plain" in said and f"esgrpo top {tmp_path / 'plain'}" in said
    put(tmp_path / "overlay", rows.Start(resumed_step=0), os.getpid())
    assert shown(tmp_path, capsys, monkeypatch)[1].startswith("overlay ")


def test_accelerators_of_the_trainer_are_those_that_no_replica_has(run, capsys, monkeypatch):
    put(run, window(3, "0", devices={"n:0": [0.5, 0.25]}), os.getpid(), at=START + 40)
    event = rows.LoopEvent(side="train", version=4, start=START, seconds=1.0, spent={"train": 1.0},
                           devices={"n:0": [0.5, 0.25], "n:1": [0.875, 0.625]})
    put(run, event, os.getpid(), at=START + 41)
    (line,) = [line for line in shown(run, capsys, monkeypatch)[1].splitlines() if "trainer busy/memory" in line]
    assert "88%/62%" in line and "50%" not in line


def test_a_run_without_a_weight_version_and_one_that_ended(tmp_path, capsys, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    put(tmp_path, rows.Start(resumed_step=0), child.pid)
    _, text = shown(tmp_path, capsys, monkeypatch)
    assert "the first weight version has not ended" in text and "ended: none of its processes" in text
    assert "Loop" not in text, "a title over nothing"
    put(tmp_path, rows.Submitted(group="g"), os.getpid())  # not followed
    put(tmp_path, rows.Response(group="g", member=0), os.getpid())
    assert "newest row" in (text := shown(tmp_path, capsys, monkeypatch)[1]) and "ended:" not in text


def test_what_cannot_be_shown_is_said_in_one_line(tmp_path, capsys, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    assert cli.main(["top", str(file)]) == 2
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["top", str(tmp_path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert all(line.count(" | ") == 3 and line.startswith("esgrpo: top: ") for line in (first, second))
    assert f"{file} is a file" in first and "pip install 'esgrpo[top]'" in second


def _takes_interrupts():
    """A shell starts what it puts into the background with SIGINT ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_restart_goes_back_to_an_earlier_version(run):
    """Events of the same version of both starts would add up."""
    loop = state.Loop()
    loop.take(follow.Follower(str(run), state.FOLLOWED).poll())
    assert loop.versions("train") == 3
    loop.take([dataclasses.replace(train(2, 0.4), time=START + 90, run=loop.run, restart=loop.restart + 1)])
    assert loop.versions("train") == len(loop.of_version("train")) == 1 and loop.newest("rollout") is None


@pytest.mark.parametrize("spare", [0, 1, -1, -10])
def test_a_frame_that_is_too_high_says_how_many_lines_are_missing(run, spare):
    from rich.console import Console

    from esgrpo.tools.top import screen

    follower, loop = top._read(str(run))
    whole = top._frame(str(run), follower, loop, 80)
    lines = len(Console(width=80, height=100).render_lines(whole))
    out = io.StringIO()
    console = Console(file=out, width=80, height=lines + spare)
    console.print(screen.fitted(console, whole))
    told = out.getvalue().splitlines()
    assert len(told) == lines + min(spare, 0)
    assert told[-1].startswith(f"... {1 - spare} more lines") if spare < 0 else "more lines" not in out.getvalue()


def test_a_dumb_terminal_gets_one_frame(run, capsys, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(top, "_live", lambda *_: pytest.fail("drawn live"))
    assert cli.main(["top", str(run)]) == 0 and "fully_async" in capsys.readouterr().out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_end_by_signal_leaves_the_terminal_as_it_was(run, overlay, how):
    """In a terminal of its own: drawn on the other screen, which is left with the cursor shown."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-m", "esgrpo", "top", str(run)], stdin=theirs, stdout=theirs,
                             stderr=theirs, env={**os.environ, "PYTHONPATH": str(overlay), "TERM": "xterm-256color",
                                                 "COLUMNS": "100", "LINES": "60"},  # room for all of it
                             preexec_fn=_takes_interrupts)
    os.close(theirs)
    told, asked, deadline = b"", False, time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and select.select([ours], [], [], PATIENCE_S)[0]:
        try:
            told += os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if b"routing" in told and not asked:
            asked = True
            child.send_signal(how)
    try:
        assert child.wait(PATIENCE_S) == 0
    finally:
        child.kill()
    os.close(ours)
    text = told.decode()
    assert "Traceback" not in text and text.count("\x1b[?1049h") == 1
    assert re.search(r"\x1b\[\?1049l.*$", text, re.S) and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
