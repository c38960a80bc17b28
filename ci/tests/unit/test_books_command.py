"""The identity of a run over its starts, and `esgrpo status RUN_DIR --books`."""

from __future__ import annotations

import json
import os

import pytest

from esgrpo import cli, records
from esgrpo.algo import rows


@pytest.fixture
def run_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(records, "_writer", records.Writer(period=0.01))
    for name in (records.ENV_RUN_ID, records.ENV_RESTART):
        monkeypatch.setenv(name, "")
    return tmp_path


def start(run_dir, goes_on: bool = True) -> tuple[str, int]:
    os.environ.update(records.begun(str(run_dir), goes_on))
    return os.environ[records.ENV_RUN_ID], int(os.environ[records.ENV_RESTART])


def test_a_run_keeps_its_id_and_counts_its_starts(run_dir):
    run, first = start(run_dir)
    assert (run, first) == (run, 0) and [start(run_dir) for _ in range(2)] == [(run, 1), (run, 2)]
    other, again = start(run_dir, goes_on=False)
    assert other != run and again == 0 and start(run_dir) == (other, 1)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"run": "a"}', '{"run": "a", "restart": "x"}'])
def test_a_damaged_identity_begins_another_run(run_dir, damage):
    run, _ = start(run_dir)
    (run_dir / "esgrpo" / records.RUN_FILE).write_text(damage)
    other, number = start(run_dir)
    assert other not in (run, "a") and number == 0 and start(run_dir) == (other, 1)


def test_a_directory_that_cannot_be_written_to_does_not_stop_a_start(run_dir, capsys):
    (run_dir / "esgrpo").write_text("a file where the directory should be")
    assert start(run_dir)[0] != start(run_dir)[0]
    assert capsys.readouterr().err.count("\n") == 1


def test_a_response_says_its_run_and_its_prompt(run_dir, monkeypatch):
    """The key of a group's prompt is that of the history, and is computed once a group."""
    from esgrpo.algo import history, rollout
    from esgrpo.hooks.verl.groups import rollout_driver

    start(run_dir)
    monkeypatch.delenv("ESGRPO_SEGMENT", raising=False)
    seen, key, raw = [], history.prompt_key, [{"role": "user", "content": "1 + 1"}]
    monkeypatch.setattr(history, "prompt_key", lambda raw: (seen.append(raw), key(raw))[1])
    driver = rollout_driver.Driver(0, 8)
    seats = [rollout_driver.join(driver, group, 2, prompt=driver.prompt(group, raw)) for group in ("a", "a", "b")]
    assert len(seen) == 2 and driver.prompt("c", None) is None
    found = rollout_driver.row_of(seats[1].on(rollout.MemberEnded, now=0.0), driver)
    assert {name: found[name] for name in ("run", "restart", "prompt", "group", "member")} == {
        "run": os.environ[records.ENV_RUN_ID], "restart": 0, "prompt": key(raw), "group": "a", "member": 1}


def test_a_file_that_verl_is_to_read_and_cannot_be_written_is_one_line(run_dir, monkeypatch):
    omegaconf = pytest.importorskip("omegaconf")
    from esgrpo.errors import EsgrpoError
    from esgrpo.hooks.verl.run import config_rules, driver_start

    (run_dir / "esgrpo").write_text("a file where the directory should be")
    monkeypatch.setattr(config_rules, "check_model_path", lambda path: None)
    monkeypatch.setattr(config_rules, "fill", lambda plan, *rest: plan.files.update(
        {str(run_dir / "esgrpo" / "router.yaml"): "seed: 0"}))
    config = omegaconf.OmegaConf.create({"actor_rollout_ref": {"model": {"path": "."}},
                                         "trainer": {"default_local_dir": str(run_dir)}})
    with pytest.raises(EsgrpoError, match="the run does not start"):
        driver_start._adjust(config, None, {"routing"})


def test_at_the_end_of_a_run_its_actors_write_what_they_hold(run_dir, monkeypatch):
    from types import SimpleNamespace

    ray = pytest.importorskip("ray")
    from esgrpo.hooks.verl.run import reports

    waited = []
    monkeypatch.setattr(ray, "wait", lambda pending, num_returns, timeout: waited.append((num_returns, timeout > 0)))
    records.write(rows.Trained(group="g", member=1))
    actor = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda function: function(None)))
    reports.flush_records(SimpleNamespace(components={"rollouter": actor, "trainer": actor}))
    (file,) = (run_dir / "esgrpo").glob("trained-*.jsonl")
    assert json.loads(file.read_text())["member"] == 1 and waited == [(2, True)]


def two_starts(run_dir, reissued: bool) -> None:
    """The same id of a group in both starts, as verl gives it: four responses, of which a restart threw two away."""
    start(run_dir)
    records.write(rows.Start(resumed_step=0, drawn=0, prompts_per_epoch=1))
    for number in range(2):
        if number:
            start(run_dir)
            records.write(rows.Start(resumed_step=int(reissued), drawn=int(reissued), prompts_per_epoch=1))
        if number and reissued:
            records.write(rows.Reissued(group="uid_1", draw=1, was="uid_1"))
        else:
            records.write(rows.Submitted(group="uid_1", prompt="k", draw=1))
        for member in range(2):
            records.write(rows.Response(group="uid_1", member=member, started=0.0, ended=1.0, outcome="finish",
                                        tokens=5, reprefill=0))
            records.write(rows.Trained(group="uid_1", member=member, step=1 + reissued, pruned=False, gradient=True,
                                      tokens=5, reprefill=0))
        records.write(rows.Batch(step=1 + reissued, groups=["uid_1"]))
    assert records.flush()


@pytest.mark.parametrize("reissued", [False, True])
def test_books_that_balance(run_dir, capsys, reissued):
    two_starts(run_dir, reissued)
    assert cli.main(["status", str(run_dir), "--books", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (run,) = found["runs"]
    assert run["responses"] == {"generated": 4, "trained": 2, "rolled_back": 2} and run["prompts"]["trained"] == 1
    assert run["epochs"] == [{"epoch": 0, "prompts": 1, "trained": 1}] and found["torn_rows"] == 0
    assert cli.main(["status", str(run_dir), "--books"]) == 0
    assert "the books balance" in capsys.readouterr().out


def test_the_books_of_each_run_of_a_comparison(run_dir, capsys, monkeypatch):
    for name in ("overlay", "plain"):
        monkeypatch.setenv("ESGRPO_RUN_DIR", str(run_dir / name))
        monkeypatch.setattr(records, "_writer", records.Writer(period=0.01))
        two_starts(run_dir / name, reissued=True)
    (run_dir / "data").mkdir()
    assert cli.main(["status", str(run_dir), "--books"]) == 0
    said = capsys.readouterr().out.splitlines()
    places = [said.index(str(run_dir / name)) for name in ("overlay", "plain")]
    assert places[0] == 0 and sum("the books balance" in line for line in said) == 2
    assert cli.main(["status", str(run_dir), "--books", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["overlay", "plain"] and found["plain"]["runs"][0]["responses"]["generated"] == 4
    assert cli.main(["status", str(run_dir / "data"), "--books"]) == 2  # negative control
    assert "no rows in" in capsys.readouterr().err


def test_of_several_books_one_without_rows_is_named(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(run_dir / "good"))
    two_starts(run_dir / "good", reissued=True)
    (run_dir / "dead" / "esgrpo").mkdir(parents=True)
    (run_dir / "dead" / "esgrpo" / "hooks.json").write_text("[]")
    assert cli.main(["status", str(run_dir), "--books"]) == 1
    out, errors = capsys.readouterr()
    assert "the books balance" in out and errors.count("\n") == 1 and "no rows in" in errors and "dead" in errors
    assert cli.main(["status", str(run_dir), "--books", "--json"]) == 1
    assert list(json.loads(capsys.readouterr().out)) == ["good", "dead"]


def test_the_report_counts_what_was_trained_once(run_dir):
    """Joined by group and member alone, all four responses were trained."""
    from esgrpo.algo.accounting import token_balance
    from esgrpo.tools.report import runs

    two_starts(run_dir, reissued=True)
    rows = runs.with_fates(run_dir, 0.0, float("inf"))
    assert sorted((row["restart"], row["trained"], row["rolled_back"]) for row in rows) == [
        (0, False, True), (0, False, True), (1, True, False), (1, True, False)]
    balance = token_balance(runs.settled(rows))
    assert (balance["trained"], balance["rolled_back"], balance["spent"]) == (10, 10, 20)


@pytest.mark.parametrize("versions, stale", [((5, 3), 0), ((3, 3), 10), ((3, 5), 10)])
def test_a_group_that_waits_behind_older_weights_is_not_wasted(versions, stale):
    """The first ends first, the second is trained first: with the oldest weights first the first may still wait."""
    from esgrpo.algo.accounting import token_balance
    from esgrpo.tools.report import runs

    rows = [{"run": "r", "restart": 0, "group": name, "member": 0, "ended": ended, "tokens": 10, "trained": trained,
             "gradient": trained, "rolled_back": False, "pruned": False, "replaced": False, "reprefill": 0,
             "spans": [[version, 10]]}
            for name, ended, trained, version in (("a", 100.0, False, versions[0]), ("b", 110.0, True, versions[1]))]
    balance = token_balance(runs.settled(rows))
    assert (balance["trained"], balance["stale"]) == (10, stale)


def test_books_that_do_not_balance_are_named(run_dir, capsys):
    two_starts(run_dir, reissued=True)
    file, = (run_dir / "esgrpo").glob("reissued-*.jsonl")
    file.unlink()
    with open(next((run_dir / "esgrpo").glob("trained-*.jsonl")), "a") as stream:
        stream.write('{"time": 1')
    assert cli.main(["status", str(run_dir), "--books"]) == 1
    said = capsys.readouterr().out
    assert "DO NOT BALANCE: 1 prompts (1) in flight at a restart" in said and "process was killed: 1" in said


@pytest.mark.parametrize("arguments", [["--books"], ["nowhere", "--books"]])
def test_nothing_to_settle_is_one_line(arguments, capsys):
    assert cli.main(["status", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("esgrpo: status --books: ") and said.count("\n") == 1


def test_records_of_an_older_release(tmp_path, capsys):
    (tmp_path / "esgrpo").mkdir()
    row = {"time": 1.0, "group": "a", "member": 0, "outcome": "finish"}
    (tmp_path / "esgrpo" / "responses-7.jsonl").write_text(json.dumps(row) + "\n")
    assert cli.main(["status", str(tmp_path), "--books"]) == 0
    assert "not recorded" in capsys.readouterr().out


def test_books_need_neither_torch_nor_verl(run_python, overlay, run_dir):
    two_starts(run_dir, reissued=True)
    script = ("import sys\nsys.modules.update(dict.fromkeys(('torch', 'verl', 'vllm', 'ray', 'wrapt', 'numpy')))\n"
              f"from esgrpo import cli\nsys.exit(cli.main(['status', {str(run_dir)!r}, '--books']))")
    assert "the books balance" in run_python("-S", "-c", script, path=[overlay]).stdout
