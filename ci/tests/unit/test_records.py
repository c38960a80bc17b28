"""Telemetry never stops or holds up training: disks that are full, read-only, slow or gone; killed, forked writers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
import time

import pytest

from esgrpo import records
from esgrpo.algo.rows import KINDS, SCHEMA, Batch, LoopEvent, Trained

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
        records.write(Batch(step=number, groups=[]))
    records.write(Trained(group="g", member=0, restart=1))  # made in an earlier start
    rows = records.read(str(run_dir), "batch")
    assert [row.step for row in rows] == list(range(100))
    assert {key: rows[0][key] for key in ("run", "restart", "node", "pid")} == {
        "run": "abc", "restart": 2, "node": records.NODE, "pid": os.getpid()}
    assert records.read(str(run_dir), "trained")[0]["restart"] == 1
    assert {path.name for path in (run_dir / "esgrpo").iterdir()} == {
        file_of(run_dir, kind).name for kind in ("batch", "trained")}


def test_a_write_opens_no_file_in_the_calling_thread(run_dir, monkeypatch):
    """What an event loop would wait for."""
    callers, open_ = set(), os.open

    def noted(*arguments, **named):
        callers.add(threading.current_thread().name)
        return open_(*arguments, **named)

    monkeypatch.setattr(os, "open", noted)
    records.write(Batch(step=1, groups=[]))
    records.save(str(run_dir / "state.json"), lambda: {"of": threading.current_thread().name})
    assert records.flush() and callers == {"esgrpo-records"}
    assert json.loads((run_dir / "state.json").read_text()) == {"of": "esgrpo-records"}


def test_without_a_run_directory_nothing_is_written(run_dir, monkeypatch):
    monkeypatch.delenv("ESGRPO_RUN_DIR")
    records.write(Batch(step=0, groups=[]))
    assert records.flush() and not list(run_dir.iterdir()) and records.dropped() == 0


def test_a_directory_that_cannot_be_made_costs_rows_and_one_line(run_dir, capsys):
    (run_dir / "esgrpo").write_text("a file where the directory should be")
    for number in range(10):
        records.write(Batch(step=number, groups=[]))
        assert records.flush()
    records.save(str(run_dir / "esgrpo" / "state.json"), dict)
    assert records.flush() and records.dropped() == 10
    assert str(run_dir) in one_line(capsys)


def test_what_was_dropped_is_written_down_when_there_is_room_again(run_dir, capsys):
    folder = run_dir / "esgrpo"
    folder.write_text("")
    records.save(str(folder / "state.json"), lambda: {"kept": "until it can be written"})
    for _ in range(3):
        records.write(Batch(step=0, groups=[]))
    assert records.flush()
    folder.unlink()
    records.write(Batch(step=1, groups=[]))
    assert records.flush()
    assert [row["rows"] for row in records.read(str(run_dir), "dropped")] == [3]
    assert [row.step for row in records.read(str(run_dir), "batch")] == [1]
    assert json.loads((folder / "state.json").read_text()) == {"kept": "until it can be written"}
    records.write(Batch(step=2, groups=[]))
    assert [row["rows"] for row in records.read(str(run_dir), "dropped")] == [3]  # told once
    one_line(capsys)


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from esgrpo import records
from esgrpo.algo.rows import Batch
for number in range(400):
    records.write(Batch(step=number, groups=["x" * 100]))
    if number % 20 == 19:
        assert records.flush()
print(records.dropped())
"""


def test_a_full_disk_cuts_no_row(run_python, overlay, tmp_path):
    done = run_python("-c", FULL_DISK, path=[overlay], ESGRPO_RUN_DIR=str(tmp_path))
    rows, torn = records.read_counted(str(tmp_path), "batch")
    assert rows and torn == 0 and int(done.stdout) == 400 - len(rows)
    assert done.stderr.count("\n") == 1 and "File too large" in done.stderr


def test_a_disk_that_takes_half_a_row_is_cut_back(run_dir, monkeypatch, capsys):
    records.write(Batch(step=0, groups=[]))
    assert records.flush()
    real, room = os.write, [30]

    def write(file, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = real(file, data[:room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write)
    records.write(Batch(step=1, groups=[]))
    records.flush()
    monkeypatch.setattr(os, "write", real)
    records.write(Batch(step=2, groups=[]))
    rows, torn = records.read_counted(str(run_dir), "batch")
    assert ([row.step for row in rows], torn, records.dropped()) == ([0, 2], 0, 1)
    assert "No space left" in one_line(capsys)


def test_a_disk_that_hangs_holds_up_nobody_and_no_more_than_the_limit(run_dir, monkeypatch, capsys):
    """A FIFO without a reader: its open() never returns."""
    limit = records.CHUNK_BYTES + 100_000
    writer = records.Writer(limit, PERIOD)
    monkeypatch.setattr(records, "_writer", writer)
    fifo = file_of(run_dir, "batch")
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    rows, held = 2000, []
    for number in range(rows):  # 2000 * 1.2 kB; the test would never get past the first ones if anybody waited
        records.write(Batch(step=number, groups=["x" * 1000]))
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
    assert [json.loads(line)["step"] for line in got] == list(range(rows - records.dropped()))  # the later ones went
    assert writer._held == 0


def test_nobody_waits_again_for_a_disk_that_hangs(run_dir, monkeypatch):
    fifo = file_of(run_dir, "batch")
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    monkeypatch.setattr(records, "WAIT_S", 0.02)
    records.write(Batch(step=0, groups=[]))
    assert not records.flush(0.1)
    waits = []
    monkeypatch.setattr(records._writer._change, "wait_for", lambda *given: waits.append(given))
    assert not records.flush(3600) and not waits


def test_an_exit_is_not_held_up_and_loses_nothing_it_can_write(run_python, overlay, tmp_path):
    script = ("from esgrpo import records\nfrom esgrpo.algo.rows import Batch\n"
              "for n in range(50): records.write(Batch(step=n, groups=[]))")
    run_python("-c", script, path=[overlay], ESGRPO_RUN_DIR=str(tmp_path))
    assert [row.step for row in records.read(str(tmp_path), "batch")] == list(range(50))
    hangs = ("import os\nfrom esgrpo import records\nfrom esgrpo.algo.rows import Batch\nrecords.EXIT_S = 0.1\n"
             "path = records._path(os.environ['ESGRPO_RUN_DIR'] + '/esgrpo', 'batch')\nos.mkfifo(path)\n"
             "records.write(Batch(step=0, groups=[]))")
    run_python("-c", hangs, path=[overlay], timeout=60, ESGRPO_RUN_DIR=str(tmp_path))


def test_a_fork_writes_its_own_rows_and_not_those_of_its_parent(run_dir):
    records.write(Batch(step=0, groups=["parent"]))
    child = os.fork()
    if not child:
        records.write(Batch(step=0, groups=["child"]))
        records.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    rows = records.read(str(run_dir), "batch")
    assert sorted((*row.groups, row.pid) for row in rows) == [("child", child), ("parent", os.getpid())]


def test_rows_that_are_no_json_are_counted(run_dir, capsys):
    import numpy as np

    records.write(Batch(step=0, groups=[{("a", 1): 2}]))
    records.write(Batch(step=np.int64(3), groups=[np.arange(2), object]))
    (row,) = records.read(str(run_dir), "batch")
    assert (row.step, row.groups[0]) == (3, [0, 1]) and records.dropped() == 1
    one_line(capsys)


def test_the_newest_state_of_a_file_is_written_and_at_intervals(run_dir, monkeypatch):
    file, written, whole = str(run_dir / "state.json"), [], records.write_whole

    def noted(path, content, *more):
        if str(path) == file:  # the writer may still have a state of another test
            written.append(content)
        whole(path, content, *more)

    monkeypatch.setattr(records, "write_whole", noted)
    records.save(file, lambda: 0)
    assert records.flush()
    for number in range(1, 50):
        records.save(file, lambda number=number: number)
    deadline = time.monotonic() + 10
    records.write(Batch(step=0, groups=[]))
    while not file_of(run_dir, "batch").exists() and time.monotonic() < deadline:
        time.sleep(PERIOD)  # rows are written meanwhile
    assert written == [0] and records.flush() and written == [0, 49]


def test_a_state_that_cannot_be_made_costs_a_line(run_dir, capsys):
    records.save(str(run_dir / "state.json"), lambda: {}["missing"])
    records.write(Batch(step=0, groups=[]))
    assert records.flush() and "KeyError" in one_line(capsys)
    assert len(records.read(str(run_dir), "batch")) == 1 and records.dropped() == 0


def test_torn_rows_are_skipped_and_counted(run_dir):
    folder = run_dir / "esgrpo"
    folder.mkdir()
    first, whole = (json.dumps({"time": 1.0 + step, "step": step, "groups": []}) for step in range(2))
    (folder / "batch-17.jsonl").write_text("\n".join((first, whole, whole[:9])))
    (folder / "batch-node-18.jsonl").write_bytes(b'[1]\n"text"\n\xff\xfe\n{"step": 7}\n')
    rows, torn = records.read_counted(str(run_dir), "batch")
    assert [row.step for row in rows] == [0, 1] and torn == 5
    assert records.read_counted(str(run_dir), "windows") == ([], 0)


@pytest.mark.parametrize("damage", [{"counts": {"sampler/takes": "12"}}, {"counts": {"sampler/takes": None}},
                                    {"counts": {"sampler/takes": 1.5}}, {"time": math.nan}, {"time": math.inf}])
def test_a_row_with_a_damaged_number_is_torn(run_dir, damage):
    folder = run_dir / "esgrpo"
    folder.mkdir()
    row = {"time": 1.0, "process": "rollouter", "counts": {"sampler/takes": 12}}
    (folder / "decisions-17.jsonl").write_text("\n".join(json.dumps(one) for one in (row, {**row, **damage})))
    rows, torn = records.read_counted(str(run_dir), "decisions")
    assert [one.counts for one in rows] == [{"sampler/takes": 12}] and torn == 1


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_start_has_not_the_hooks_of_the_one_before(run_dir, goes_on):
    """It may die before its own processes have answered."""
    records.begun(str(run_dir), goes_on)
    hooks = run_dir / records.FOLDER / records.HOOKS
    hooks.write_text("[]")
    records.begun(str(run_dir), goes_on)
    assert not hooks.exists() and (run_dir / records.FOLDER / records.RUN_FILE).exists()


def test_events_keep_their_newest_rows_and_as_many_before(run_dir, monkeypatch):
    monkeypatch.setattr(records, "ROTATED_BYTES", {"events": 1000})
    for version in range(40):
        records.write(LoopEvent(side="train", version=version, start=0.0, seconds=1.0, spent={"train": 1.0}))
        records.write(Batch(step=version, groups=[]))
        assert records.flush()
    kept = [row.version for row in records.read(str(run_dir), "events")]
    assert 2 <= len(kept) < 20 and kept == list(range(40 - len(kept), 40))
    assert len(records.read(str(run_dir), "batch")) == 40
    files = sorted(path.name for path in (run_dir / "esgrpo").glob("events-*"))
    assert len(files) == 2 and sum((run_dir / "esgrpo" / name).stat().st_size for name in files) < 3000


def test_a_row_after_a_torn_one_is_whole(run_dir):
    """A process with the name of one that was killed in the middle of a row."""
    file = file_of(run_dir, "batch")
    file.parent.mkdir()
    file.write_text('{"time": 1.0, "st')
    records.write(Batch(step=1, groups=[]))
    rows, torn = records.read_counted(str(run_dir), "batch")
    assert [row.step for row in rows] == [1] and torn == 1


def test_a_killed_process_leaves_what_was_written_before(run_python, overlay, tmp_path):
    script = ("import os, signal\nfrom esgrpo import records\nfrom esgrpo.algo.rows import Batch\n"
              "records.write(Batch(step=0, groups=[]))\n"
              "assert records.flush()\nos.kill(os.getpid(), signal.SIGKILL)")
    run_python("-c", script, path=[overlay], code=-signal.SIGKILL, ESGRPO_RUN_DIR=str(tmp_path))
    assert records.read_counted(str(tmp_path), "batch")[1] == 0
    assert len(records.read(str(tmp_path), "batch")) == 1




def test_a_line_of_every_kind_reads_back_as_it_was_written(run_dir):
    """Each with the least that it must say; the schema is in the line."""
    values = {"str": "x", "int": 3, "float": 0.5, "list": [1], "dict": {"a": 1}}
    for kind, cls in KINDS.items():
        needed = {each.name: values[each.type] for each in dataclasses.fields(cls)
                  if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING}
        records.write(cls(**needed))
        (found,) = records.read(str(run_dir), kind)
        assert type(found) is cls and found.schema == SCHEMA and found.pid == os.getpid() and found.time > 0
        assert {name: found[name] for name in needed} == needed and {**found}.keys() == set(found)


def test_rows_of_older_and_newer_releases_are_read_and_what_is_no_row_is_counted(run_dir):
    folder = run_dir / "esgrpo"
    folder.mkdir()
    member = {"time": 1.0, "group": "g", "member": 0}
    older = {"time": 2.0, "sample_id": "s", "rows": [{**member, "tokens": 4}]}  # before groups were named in it
    (folder / "replaced-1.jsonl").write_text(json.dumps(older))
    newer = {**member, "schema": SCHEMA + 1, "tokens": 4, "unheard_of": 1}
    wrong = [{**member, "tokens": "4"}, {**member, "member": None}, {**member, "time": "1"}, {"time": 1.0},
             {**member, "restart": None}]
    (folder / "responses-1.jsonl").write_text("\n".join(map(json.dumps, (member, newer, *wrong))))
    (replaced,) = records.read(str(run_dir), "replaced")
    assert (replaced.group, replaced.schema, replaced.run, replaced.restart) == ("g", 1, "", 0)
    rows, torn = records.read_counted(str(run_dir), "responses")
    assert torn == len(wrong) and [(row.schema, row.tokens) for row in rows] == [(1, 0), (SCHEMA + 1, 4)]
    with pytest.raises(KeyError):
        rows[0]["unheard_of"]


def test_what_another_process_told_wrongly_is_lost_and_counted(run_dir, capsys):
    records.write_told(Trained, {"group": "g", "member": 0, "not_a_field": 1})
    records.write_told(Trained, {"group": "g"})
    assert len(records.read(str(run_dir), "trained")) == 1 and records.dropped() == 1
    assert "member" in one_line(capsys)
