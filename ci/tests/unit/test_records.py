"""Telemetry never stops or holds up training: disks that are full, read-only, slow or gone; killed, forked writers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from esgrpo import records

PERIOD = 0.01


@pytest.fixture
def run_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(records, "_writer", records.Writer(period=PERIOD))
    return tmp_path


def one_line(capsys) -> str:
    said = capsys.readouterr().err
    assert said.startswith("esgrpo: records: ") and said.count(" | ") == 3 and said.count("\n") == 1, said
    return said


def file_of(run_dir, kind: str):
    return run_dir / "esgrpo" / f"{kind}-{records.NODE}-{os.getpid()}.jsonl"


def test_rows_say_whose_they_are_and_come_back_in_order(run_dir, monkeypatch):
    monkeypatch.setenv("ESGRPO_RUN_ID", "abc")
    monkeypatch.setenv("ESGRPO_RESTART", "2")
    for number in range(100):
        records.write("responses", {"number": number})
    records.write("trained", {"restart": 1, "number": 0})  # made in an earlier start
    rows = records.read(str(run_dir), "responses")
    assert [row["number"] for row in rows] == list(range(100))
    assert {key: rows[0][key] for key in ("run", "restart", "node", "pid")} == {
        "run": "abc", "restart": 2, "node": records.NODE, "pid": os.getpid()}
    assert records.read(str(run_dir), "trained")[0]["restart"] == 1
    assert {path.name for path in (run_dir / "esgrpo").iterdir()} == {
        file_of(run_dir, kind).name for kind in ("responses", "trained")}


def test_a_write_opens_no_file_in_the_calling_thread(run_dir, monkeypatch):
    """What an event loop would wait for."""
    callers, open_ = set(), os.open

    def noted(*arguments, **named):
        callers.add(threading.current_thread().name)
        return open_(*arguments, **named)

    monkeypatch.setattr(os, "open", noted)
    records.write("responses", {"number": 1})
    records.save(str(run_dir / "state.json"), lambda: {"of": threading.current_thread().name})
    assert records.flush() and callers == {"esgrpo-records"}
    assert json.loads((run_dir / "state.json").read_text()) == {"of": "esgrpo-records"}


def test_without_a_run_directory_nothing_is_written(run_dir, monkeypatch):
    monkeypatch.delenv("ESGRPO_RUN_DIR")
    records.write("responses", {})
    assert records.flush() and not list(run_dir.iterdir()) and records.dropped() == 0


def test_a_directory_that_cannot_be_made_costs_rows_and_one_line(run_dir, capsys):
    (run_dir / "esgrpo").write_text("a file where the directory should be")
    for number in range(10):
        records.write("responses", {"number": number})
        assert records.flush()
    records.save(str(run_dir / "esgrpo" / "state.json"), dict)
    assert records.flush() and records.dropped() == 10
    assert str(run_dir) in one_line(capsys)


def test_what_was_dropped_is_written_down_when_there_is_room_again(run_dir, capsys):
    folder = run_dir / "esgrpo"
    folder.write_text("")
    records.save(str(folder / "state.json"), lambda: {"kept": "until it can be written"})
    for _ in range(3):
        records.write("responses", {})
    assert records.flush()
    folder.unlink()
    records.write("responses", {"number": 1})
    assert records.flush()
    assert [row["rows"] for row in records.read(str(run_dir), "dropped")] == [3]
    assert [row["number"] for row in records.read(str(run_dir), "responses")] == [1]
    assert json.loads((folder / "state.json").read_text()) == {"kept": "until it can be written"}
    records.write("responses", {"number": 2})
    assert [row["rows"] for row in records.read(str(run_dir), "dropped")] == [3]  # told once
    one_line(capsys)


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from esgrpo import records
for number in range(400):
    records.write("responses", {"number": number, "text": "x" * 100})
    if number % 20 == 19:
        assert records.flush()
print(records.dropped())
"""


def test_a_full_disk_cuts_no_row(run_python, overlay, tmp_path):
    done = run_python("-c", FULL_DISK, path=[overlay], ESGRPO_RUN_DIR=str(tmp_path))
    rows, torn = records.read_counted(str(tmp_path), "responses")
    assert rows and torn == 0 and int(done.stdout) == 400 - len(rows)
    assert done.stderr.count("\n") == 1 and "File too large" in done.stderr


def test_a_disk_that_takes_half_a_row_is_cut_back(run_dir, monkeypatch, capsys):
    records.write("responses", {"number": 0})
    assert records.flush()
    real, room = os.write, [30]

    def write(file, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = real(file, data[:room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write)
    records.write("responses", {"number": 1})
    records.flush()
    monkeypatch.setattr(os, "write", real)
    records.write("responses", {"number": 2})
    rows, torn = records.read_counted(str(run_dir), "responses")
    assert ([row["number"] for row in rows], torn, records.dropped()) == ([0, 2], 0, 1)
    assert "No space left" in one_line(capsys)


def test_a_disk_that_hangs_holds_up_nobody_and_no_more_than_the_limit(run_dir, monkeypatch, capsys):
    """A FIFO without a reader: its open() never returns."""
    limit = records.CHUNK_BYTES + 100_000
    writer = records.Writer(limit, PERIOD)
    monkeypatch.setattr(records, "_writer", writer)
    fifo = file_of(run_dir, "responses")
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    rows, held = 2000, []
    for number in range(rows):  # 2000 * 1.2 kB; the test would never get past the first ones if anybody waited
        records.write("responses", {"number": number, "text": "x" * 1000})
        held.append(writer._held)
    assert not records.flush(0.05)
    assert 0 < max(held) <= limit - records.CHUNK_BYTES
    assert 0 < records.dropped() < rows
    assert "bytes wait for" in one_line(capsys)
    got = []
    reader = threading.Thread(target=lambda: got.extend(fifo.open()), daemon=True)  # the disk comes back
    reader.start()
    assert records.flush(30)
    reader.join(30)
    assert [json.loads(line)["number"] for line in got] == list(range(rows - records.dropped()))  # the later ones went
    assert writer._held == 0


def test_nobody_waits_again_for_a_disk_that_hangs(run_dir, monkeypatch):
    fifo = file_of(run_dir, "responses")
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    monkeypatch.setattr(records, "WAIT_S", 0.02)
    records.write("responses", {})
    assert not records.flush(0.1)
    waits = []
    monkeypatch.setattr(records._writer._change, "wait_for", lambda *given: waits.append(given))
    assert not records.flush(3600) and not waits


def test_an_exit_is_not_held_up_and_loses_nothing_it_can_write(run_python, overlay, tmp_path):
    script = "from esgrpo import records\nfor n in range(50): records.write('responses', {'n': n})"
    run_python("-c", script, path=[overlay], ESGRPO_RUN_DIR=str(tmp_path))
    assert [row["n"] for row in records.read(str(tmp_path), "responses")] == list(range(50))
    hangs = ("import os\nfrom esgrpo import records\nrecords.EXIT_S = 0.1\n"
             "path = records._path(os.environ['ESGRPO_RUN_DIR'] + '/esgrpo', 'carry')\nos.mkfifo(path)\n"
             "records.write('carry', {})")
    run_python("-c", hangs, path=[overlay], timeout=60, ESGRPO_RUN_DIR=str(tmp_path))


def test_a_fork_writes_its_own_rows_and_not_those_of_its_parent(run_dir):
    records.write("responses", {"who": "parent"})
    child = os.fork()
    if not child:
        records.write("responses", {"who": "child"})
        records.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    rows = records.read(str(run_dir), "responses")
    assert sorted((row["who"], row["pid"]) for row in rows) == [("child", child), ("parent", os.getpid())]


def test_rows_that_are_no_json_are_counted(run_dir, capsys):
    import numpy as np

    records.write("responses", {("a", 1): 2})
    records.write("responses", {"count": np.int64(3), "spans": [np.arange(2)], "what": object})
    (row,) = records.read(str(run_dir), "responses")
    assert (row["count"], row["spans"]) == (3, [[0, 1]]) and records.dropped() == 1
    one_line(capsys)


def test_the_newest_state_of_a_file_is_written_and_at_intervals(run_dir, monkeypatch):
    file, written, whole = str(run_dir / "state.json"), [], records.write_whole
    monkeypatch.setattr(records, "write_whole", lambda *given: (written.append(given[1]), whole(*given)))
    records.save(file, lambda: 0)
    assert records.flush()
    for number in range(1, 50):
        records.save(file, lambda number=number: number)
    deadline = time.monotonic() + 10
    records.write("responses", {})
    while not file_of(run_dir, "responses").exists() and time.monotonic() < deadline:
        time.sleep(PERIOD)  # rows are written meanwhile
    assert written == [0] and records.flush() and written == [0, 49]


def test_a_state_that_cannot_be_made_costs_a_line(run_dir, capsys):
    records.save(str(run_dir / "state.json"), lambda: {}["missing"])
    records.write("responses", {})
    assert records.flush() and "KeyError" in one_line(capsys)
    assert len(records.read(str(run_dir), "responses")) == 1 and records.dropped() == 0


def test_torn_rows_are_skipped_and_counted(run_dir):
    folder = run_dir / "esgrpo"
    folder.mkdir()
    whole = json.dumps({"time": 2.0, "number": 1})
    (folder / "responses-17.jsonl").write_text(json.dumps({"time": 1.0, "number": 0}) + "\n" + whole + "\n" + whole[:9])
    (folder / "responses-node-18.jsonl").write_bytes(b'[1]\n"text"\n\xff\xfe\n{"number": 7}\n')
    rows, torn = records.read_counted(str(run_dir), "responses")
    assert [row["number"] for row in rows] == [0, 1] and torn == 5
    assert records.read_counted(str(run_dir), "windows") == ([], 0)


def test_a_row_after_a_torn_one_is_whole(run_dir):
    """A process with the name of one that was killed in the middle of a row."""
    file = file_of(run_dir, "responses")
    file.parent.mkdir()
    file.write_text('{"time": 1.0, "num')
    records.write("responses", {"number": 1})
    rows, torn = records.read_counted(str(run_dir), "responses")
    assert [row["number"] for row in rows] == [1] and torn == 1


def test_a_killed_process_leaves_what_was_written_before(run_python, overlay, tmp_path):
    script = ("import os, signal\nfrom esgrpo import records\nrecords.write('responses', {'n': 0})\n"
              "assert records.flush()\nos.kill(os.getpid(), signal.SIGKILL)")
    run_python("-c", script, path=[overlay], code=-signal.SIGKILL, ESGRPO_RUN_DIR=str(tmp_path))
    assert records.read_counted(str(tmp_path), "responses")[1] == 0
    assert len(records.read(str(tmp_path), "responses")) == 1


