"""The gate of learned verdicts, played again over the rows of a run."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from bench import gate as bench
from esgrpo.algo.verdict_gate import FIRST, SCALES, Gate, Outcome, Settings
from esgrpo.tools.report import load, replay_tables


def outcomes_of(count: int = 1500) -> list[Outcome]:
    """The score knows what is wrong, but in the first half, where a fifth of what is right is a candidate."""
    rng, found = random.Random(1), []
    for number in range(count):
        correct = rng.random() < 0.5
        candidate = not correct or (number < count // 2 and rng.random() < 0.2)
        found.append(Outcome(rng.randrange(100, 1000), correct, 1.0, 0.01 if candidate else 0.9, 1.0, 0.2))
    return found


@pytest.fixture
def run(tmp_path):
    """Rows of two writers, in the order in which the responses ended; the groups close in another one."""
    folder = tmp_path / "esgrpo"
    folder.mkdir()
    rows = [{"group": str(number // 4), "member": number % 4, "ended": number + 40.0 * (number // 4 % 2),
             "tokens": outcome.tokens, "correct": outcome.correct, "for_gate": outcome.predicted()}
            for number, outcome in enumerate(outcomes_of())]
    rows.append({"group": "0", "member": 9, "ended": 5.0, "tokens": 7, "correct": False, "for_gate": None})  # was cut
    rows.append({"group": "old", "member": 0, "ended": 5.0, "tokens": 7, "correct": True})  # no verdicts then
    for writer in range(2):
        lines = [json.dumps(row) for row in rows[writer::2]]
        (folder / f"trained-{writer}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_run_is_told_again_as_its_gate_heard_it(run):
    """Whole groups, in the order in which they closed: the odd ones ten groups later than they began."""
    known = outcomes_of()
    groups = [known[at:at + 4] for at in range(0, len(known), 4)]
    order = sorted(range(len(groups)), key=lambda group: 4 * group + 3 + 40 * (group % 2))
    assert bench.heard(run) == [outcome for group in order for outcome in groups[group]]


def test_the_gate_played_is_the_products_and_a_shorter_memory_forgets_sooner(run):
    heard = bench.heard(run)
    gate = Gate(Settings())
    for outcome in heard:
        gate.learn(outcome)
    played, shorter = bench.play(heard, Settings(), bench.LOST_WINDOW), bench.play(heard, Settings(), 200)
    assert played["now"] == gate.says() and played["asked"] == shorter["asked"] == 1500 // bench.SYNC
    assert played["now"].startswith("correct responses lost") and shorter["now"] == "open below 0.2"
    assert played["open"] == {} and sum(played["shut"].values()) == pytest.approx(1.0)
    assert sum(shorter["open"].values()) + sum(shorter["shut"].values()) == pytest.approx(1.0)


def test_stretches_count_right_candidates(run):
    first, *_, last = bench.stretches(bench.heard(run), Settings().cut_below)
    assert first["of them correct"] > 30 and last["of them correct"] == 0 == last["of the longest tenth of the correct"]
    assert all(0.4 < part["reward"] < 0.6 for part in (first, last))


def test_the_command_says_when_the_gate_was_shut_and_why(run, capsys):
    assert bench.main([str(run), "--window", "200"]) == 0
    said = capsys.readouterr().out
    assert "window of 1,500 correct responses, of 23 questions: open never; shut " in said
    assert "window of 200 correct responses, of 23 questions: open below 0.2 " in said
    assert bench.main([str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["responses"] == 1500 and [gate["window"] for gate in found["gates"]] == [1500]


@pytest.fixture
def synced(run):
    """`run`, and what two workers wrote of its gate: one of them two syncs in one row, and one row without a sync."""
    heard = bench.heard(run)

    def row(opened: int, shut: int, responses: int) -> dict:
        gate = Gate(Settings())
        for outcome in heard[:responses]:
            gate.learn(outcome)
        at = gate.opens_at()
        verdict = {"responses": responses, "open": at is not None, "scale": SCALES[FIRST if at is None else at],
                   "shut": gate.says() if at is None else ""}
        return {"counts": {"verdicts/gate_open": opened, "verdicts/gate_shut": shut}, "audit": {"verdict": verdict}}

    first = [row(0, 1, 100), row(0, 1, 100), row(0, 3, 700)]
    wrong = row(1, 0, 1400)
    wrong["audit"]["verdict"] |= {"open": True, "scale": 2.0, "shut": ""}
    for worker, rows in enumerate((first, [{"counts": {}, "audit": {}}, wrong])):
        (run / "esgrpo" / f"decisions-{worker}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return run


def test_the_runs_own_gate_stands_beside_the_one_played(synced):
    syncs = bench.synced(synced, Settings())
    assert [(one.times, one.responses, one.limit) for one in syncs] == [(1, 100, None), (2, 700, None), (1, 1400, 0.2)]
    own = bench.beside(syncs, bench.heard(synced), Settings())
    assert own == {"syncs": 4, "open": {"0.2": 1}, "shut": {"false cuts": 2, "too few outcomes": 1},
                   "agree": 3, "same_limit": 3, "unheard": 0}
    short = bench.beside(syncs, bench.heard(synced)[:1000], Settings())
    assert short["unheard"] == 1 and short["syncs"] == 4


def test_several_runs_are_one_record_that_the_report_reads(synced, tmp_path, capsys):
    other = tmp_path / "more" / "other"
    shutil.copytree(synced / "esgrpo", other / "esgrpo")
    (other / "arm.json").write_text(json.dumps({"overrides": ["data.seed=7", "trainer.device=cpu"]}))
    (other / "esgrpo" / "decisions-0.jsonl").unlink()
    (other / "esgrpo" / "decisions-1.jsonl").unlink()
    path = tmp_path / "records" / "gate.json"
    assert bench.main([str(synced), str(other), "--window", "200", "--results", str(path), "--note", "of a test"]) == 0
    said = capsys.readouterr().out
    assert said.count("window of 200") == 2 and said.count("the run's own gate: open at 1 of 4 weight syncs") == 1
    record, = load.records(path.parent)
    assert record.kind == "gates" and record.seeds == ("7",) and record.notes == (bench.NOT_KEPT, "of a test")
    assert load.NOT_RECORDED not in record.provenance().values()
    table, beside = replay_tables.gates(record)
    assert [row[:4] for row in table.rows[1:]] == [
        [synced.name, "the run's own, at weight syncs", "4", "25.00%"],
        [synced.name, "played, of 1,500 correct responses", "23", "0.00%"],
        [synced.name, "played, of 200 correct responses", "23", table.rows[3][3]],
        ["other", "played, of 1,500 correct responses", "23", "0.00%"],
        ["other", "played, of 200 correct responses", "23", table.rows[3][3]]]
    assert beside.rows[1:] == [[synced.name, "1,500", "4", "3", "3"]]
    with pytest.raises(SystemExit):
        bench.main([str(synced), "--note", "for no record"])
    with pytest.raises(SystemExit):
        bench.main([str(synced), str(synced)])


def test_a_run_without_verdicts_is_one_line(tmp_path, capsys):
    assert bench.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
