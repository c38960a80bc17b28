"""The command line: what it prints, what it returns, and what it becomes."""

import json
import os
import subprocess
import sys

import pytest

from esgrpo import __version__, cli, engine
from esgrpo.errors import EsgrpoError

ECHO = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"


def one_line(text: str) -> str:
    assert text.count("\n") == 1 and text.startswith("esgrpo: ") and "Traceback" not in text, text
    return text


def test_run_sets_the_environment_and_becomes_the_command(run_python, overlay):
    done = run_python("-m", "esgrpo", "run", "--", sys.executable, "-c", ECHO, "--json", "a b", path=(overlay, "/else"))
    environment, arguments = json.loads(done.stdout)
    assert arguments == ["--json", "a b"]
    assert environment["ESGRPO_ENABLE"] == "1" and environment["ESGRPO_PREFIX"] == sys.prefix
    assert environment["PYTHONPATH"] == os.pathsep.join((overlay, "/else"))  # once, in front
    bare = run_python("-c", ECHO, path=(overlay,))
    assert "ESGRPO_ENABLE" not in json.loads(bare.stdout)[0]  # negative control


def test_run_works_without_the_dashes_and_keeps_the_process(run_python, overlay):
    source = ("import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-m', 'esgrpo', 'run', sys.executable,"
              " '-c', 'import os; print(os.getpid())'], stdout=-1, text=True); print(p.pid, p.communicate()[0])")
    pid, child = run_python("-c", source, path=(overlay,)).stdout.split()
    assert pid == child


@pytest.mark.parametrize("code", [0, 1, 7])
def test_run_returns_the_exit_code(run_python, overlay, code):
    run_python("-m", "esgrpo", "run", "--", sys.executable, "-c", f"raise SystemExit({code})", path=(overlay,),
               code=code)


@pytest.mark.parametrize("arguments", [("run",), ("run", "--")])
def test_run_without_a_command(run_python, overlay, arguments):
    done = run_python("-m", "esgrpo", *arguments, path=(overlay,), code=2)
    assert "no command | wanted esgrpo run -- CMD" in one_line(done.stderr)


def test_run_with_a_command_that_does_not_exist(run_python, overlay):
    done = run_python("-m", "esgrpo", "run", "--", "no-such-program", path=(overlay,), code=2)
    assert "no-such-program" in one_line(done.stderr)


@pytest.mark.parametrize("command", ["", "a\0b"], ids=repr)
def test_run_with_a_command_that_cannot_be_one(command, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_loads_by_itself", lambda: True)
    assert cli.main(["run", "--", command]) == 2
    assert "wanted an executable on PATH | nothing was started" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("value, code", [("no-such-hook", 2), ("driver-start,no-such-hook", 2), ("driver-start", 0),
                                         ("*", 0), ("", 0)])
def test_run_with_an_unknown_slug(run_python, overlay, value, code):
    done = run_python("-m", "esgrpo", "run", "--", sys.executable, "-c", "print('ran')", path=(overlay,), code=code,
                      ESGRPO_DISABLE=value)
    assert done.stdout == ("" if code else "ran\n")
    if code:
        assert "ESGRPO_DISABLE: no-such-hook |" in one_line(done.stderr)


HISTORY = "+actor_rollout_ref.rollout.segment.history.path"


@pytest.mark.parametrize("argument, good", [
    (f"{HISTORY}=/runs/(a", False), (f"{HISTORY}=/runs/a=b", False), (f"{HISTORY}=/runs/{{a", False),
    (f'{HISTORY}="/runs/(a"', True), (f"{HISTORY}=/runs/a b", True), (f"{HISTORY}=${{oc.env:HOME}}/h.json", True),
    ("data.path=/runs/(a", True)])  # not ours: whatever reads it may have another grammar
def test_run_with_a_value_that_hydra_cannot_read(run_python, overlay, argument, good):
    pytest.importorskip("hydra")
    done = run_python("-m", "esgrpo", "run", "--", sys.executable, "-c", "print('ran')", argument, path=(overlay,),
                      code=0 if good else 2)
    assert done.stdout == ("ran\n" if good else "")
    if not good:
        assert "segment.history.path: '/runs/" in one_line(done.stderr) and "quote it" in done.stderr


SEGMENT = "actor_rollout_ref.rollout.segment"
NO_GROUP, GROUP = "rollout:\n  name: vllm\n", "rollout:\n  segment:\n    profile: null\n"


@pytest.mark.parametrize("overrides, verl, said", [
    ([f"+{SEGMENT}.profile=a,b c"], NO_GROUP, "several values"),
    ([f"+{SEGMENT}.profile=a,b c", "--multirun"], NO_GROUP, ""),
    ([f"{SEGMENT}.profile=elastic"], NO_GROUP, f"without + | wanted +{SEGMENT}.profile"),
    ([f"+{SEGMENT}.profile=elastic", f"{SEGMENT}.prune.enable=True"], NO_GROUP, "without +"),
    ([f"+{SEGMENT}.profile=elastic", f"{SEGMENT}.profile=static"], NO_GROUP, ""),
    ([f"+{SEGMENT}={{profile:elastic}}", f"{SEGMENT}.profile=static"], NO_GROUP, ""),
    ([f"++{SEGMENT}.profile=elastic"], NO_GROUP, ""),
    (["--config-name=mine", f"{SEGMENT}.profile=elastic"], NO_GROUP, ""),
    (["-cn", "mine", f"{SEGMENT}.profile=elastic"], NO_GROUP, ""),
    (["+mine@actor_rollout_ref.rollout.segment=x", f"{SEGMENT}.profile=elastic"], NO_GROUP, ""),
    ([f"{SEGMENT}.profile=elastic"], GROUP, ""),  # somebody has changed this checkout
    ([f"{SEGMENT}.profile=elastic"], None, "")])  # no verl to look at: not judged
def test_run_refuses_what_hydra_would_after_its_imports(overrides, verl, said, tmp_path, monkeypatch):
    from esgrpo.tools import command

    pytest.importorskip("hydra")
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "verl" else True)
    monkeypatch.chdir(tmp_path)
    if verl is not None:
        (tmp_path / "verl" / "trainer" / "config").mkdir(parents=True)
        (tmp_path / "verl" / "__init__.py").touch()
        (tmp_path / "verl" / "trainer" / "config" / "rollout.yaml").write_text(verl)
    line = ["other-python", "-m", "verl.trainer.main_ppo", *overrides]
    if not said:
        command.check(line)
        command.check(["bash", "run.sh", *overrides])
        return
    with pytest.raises(EsgrpoError) as error:
        command.check(line)
    assert said in one_line(f"{error.value}\n") and "nothing was started" in str(error.value)
    if "without" in said:
        command.check(["python", "-m", "mine.main", *overrides])  # negative control: another config may know the group


def test_run_without_verl(tmp_path, monkeypatch):
    from esgrpo.tools import command

    line = ["python3", "-m", "verl.trainer.main_ppo", "a.b=1"]
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EsgrpoError) as error:
        command.check([sys.executable, *line[1:]])
    assert f"verl is neither installed in {sys.prefix}" in one_line(f"{error.value}\n")
    other = tmp_path / "python3"
    other.symlink_to(sys.executable)  # of another environment: it may have verl
    for program in (str(other), "bash", "no-such-program"):
        command.check([program, *line[1:]])
    command.check([sys.executable, "-m", "mine.main"])
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").touch()
    command.check([sys.executable, *line[1:]])  # a checkout: python -m looks where it is started


def test_status_lists_every_hook(run_python, overlay):
    rows = json.loads(run_python("-m", "esgrpo", "status", "--json", path=(overlay,)).stdout)
    assert [row["slug"] for row in rows] == list(engine.load_hooks())
    assert all(row["reason"] and row["why"] and row["remove_when"] and row["process"] for row in rows)
    table = run_python("-m", "esgrpo", "status", path=(overlay,)).stdout.splitlines()
    assert table[0].split() == ["HOOK", "STATE", "UPSTREAM", "REASON"] and len(table) == len(rows) + 1


def test_status_sees_the_features_and_the_switches(run_python, overlay):
    def states(**variables):
        found = run_python("-m", "esgrpo", "status", "--json", path=(overlay,), **variables).stdout
        return {row["slug"]: row["state"] for row in json.loads(found)}

    assert states()["segment-scheduler"] == "NOT_NEEDED"
    assert states(ESGRPO_FEATURES="observe")["segment-scheduler"] != "NOT_NEEDED"
    assert set(states(ESGRPO_DISABLE="*").values()) == {"DISABLED"}


DRIFTS = """
import sys
from esgrpo import cli, engine, recorded
hooks = recorded.of_upstream(engine.load_hooks()[sys.argv[1]].hook.upstream).hooks
hooks[sys.argv[1]] = recorded.Recorded({v: "0" * 16 for v in hooks[sys.argv[1]].fingerprints})
sys.exit(cli.main(sys.argv[2:]))
"""
SEGMENT = "+actor_rollout_ref.rollout.segment"


def lose(run_python, overlay, slug, *arguments, **options):
    pytest.importorskip("verl")
    pytest.importorskip("vllm")
    return run_python("-c", DRIFTS, slug, *arguments, path=(overlay,), **options)


@pytest.mark.parametrize("slug", ["segment-scheduler", "driver-start", "v1-carry-over"])
def test_status_shows_a_drift_whatever_is_on(run_python, overlay, slug):
    """A feature that is off hides nothing; what belongs to another platform is not asked for."""
    done = lose(run_python, overlay, slug, "status", "--json", code=1)
    rows = {row["slug"]: row for row in json.loads(done.stdout)}
    assert rows[slug]["state"] == "DRIFTED" and rows["add-hccl-collective-group"]["state"] == "NOT_NEEDED"
    assert [row["slug"] for row in rows.values() if row["state"] == "DRIFTED"] == [slug]
    lose(run_python, overlay, slug, "status", code=0, ESGRPO_DISABLE=slug)


RUN = ("run", "--", sys.executable, "-c", "print('ran')")


@pytest.mark.parametrize("slug", ["driver-start", "segment-scheduler", "worker-handshake", "segment-config-key"])
def test_run_refuses_a_segment_that_a_lost_hook_could_not_serve(run_python, overlay, slug):
    on = (*RUN, f"{SEGMENT}.enable=True", "fully_async_main")
    refused = lose(run_python, overlay, slug, *on, code=2)
    assert refused.stdout == "" and f"esgrpo: {slug}: DRIFTED" in one_line(refused.stderr)
    assert lose(run_python, overlay, slug, *RUN, f"{SEGMENT}.enable=False").stdout == "ran\n"
    assert lose(run_python, overlay, slug, *RUN).stdout == "ran\n"
    assert lose(run_python, overlay, slug, *on, ESGRPO_DISABLE=slug).stdout == "ran\n"
    lenient = lose(run_python, overlay, slug, *on, ESGRPO_STRICT="0")
    assert lenient.stdout == "ran\n" and f"esgrpo: {slug}: DRIFTED" in one_line(lenient.stderr)


def test_run_asks_for_the_hooks_of_its_main_only(run_python, overlay):
    on = (*RUN, f"{SEGMENT}.enable=True")
    assert lose(run_python, overlay, "v1-carry-over", *on, "fully_async_main").stdout == "ran\n"
    assert lose(run_python, overlay, "v1-carry-over", *on, "verl.trainer.main_ppo", code=2).stdout == ""
    assert lose(run_python, overlay, "worker-handshake", *on, "my_main.py").stdout == "ran\n"  # its driver looks again


def test_a_driver_whose_start_is_lost_ends_at_the_import():
    """The command line names segment.*: nothing of verl runs on."""
    from esgrpo import guard

    assert guard.segment_of([f"{SEGMENT}.enable=True", f"++{SEGMENT[1:]}.prune.audit.enable=false", "a.b=1",
                             f"{SEGMENT}.segment_length=64", f"{SEGMENT}.boundary='yield'", f"~{SEGMENT[1:]}.x"]) == {
        "enable": True, "prune": {"audit": {"enable": False}}, "segment_length": 64, "boundary": "yield"}
    record = engine.Record(engine.load_hooks()["driver-start"].hook, None, engine.State.DRIFTED, "why")
    before, sys.argv = sys.argv, ["main.py", f"{SEGMENT}.enable=True"]
    try:
        with pytest.raises(SystemExit) as refused:
            guard.check_import(record)
        assert str(refused.value).startswith("esgrpo: driver-start: DRIFTED: why | wanted APPLIED in the driver | ")
        sys.argv = ["main.py", f"{SEGMENT}.enable=False"]
        guard.check_import(record)  # negative control
        record.state, sys.argv = engine.State.DISABLED, ["main.py", f"{SEGMENT}.enable=True"]
        guard.check_import(record)
    finally:
        sys.argv = before


def report(*states):
    return {"process": "driver", "host": "h", "pid": 1, "hooks": [
        {"slug": f"hook-{i}", "state": state, "detail": "because", "needed": True} for i, state in enumerate(states)]}


@pytest.mark.parametrize("states, code", [(("APPLIED", "NOT_NEEDED"), 0), (("APPLIED", "FAILED"), 1),
                                          (("DISABLED",), 0), (("PENDING",), 1)])
@pytest.mark.parametrize("below", ["", "esgrpo"])
def test_status_of_a_run(tmp_path, capsys, states, code, below):
    (tmp_path / below).mkdir(exist_ok=True)
    (tmp_path / below / "hooks.json").write_text(json.dumps([report(*states)]))
    assert cli.main(["status", str(tmp_path)]) == code
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["", "what modules decided: not recorded"]
    shown = [state for state in states if state != "NOT_NEEDED"]
    assert [line.split()[1] for line in said if line.startswith("hook-")] == sorted(shown, key=lambda s: s == "APPLIED")
    assert cli.main(["status", str(tmp_path), "--all"]) == code
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[3:5] for line in said[1:-2]] == [[f"hook-{i}", state] for i, state in enumerate(states)]
    assert cli.main(["status", str(tmp_path), "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"processes": [report(*states)], "modules": []}


def test_status_of_a_run_folds_its_processes_and_shows_first_what_is_not_in_place():
    from esgrpo.tools import hook_states

    reports = [{**report("APPLIED", "NOT_NEEDED", state, "NOT_NEEDED"), "process": process, "pid": pid}
               for process, pid, state in (("trainer", 1, "APPLIED"), ("engine-core", 2, "APPLIED"),
                                           ("engine-core", 3, "DRIFTED"), ("engine-core", 4, "DRIFTED"))]
    rows, needless = hook_states.folded(reports)
    assert needless == 2 and rows == [["HOOK", "STATE", "PROCESSES", "REASON"],
                                      ["hook-2", "DRIFTED", "engine-core h:3", "because"],
                                      ["hook-2", "DRIFTED", "engine-core h:4", "because"],
                                      ["hook-0", "APPLIED", "all 4", "because"],
                                      ["hook-2", "APPLIED", "trainer, engine-core", "because"]]
    assert hook_states.by_process(reports)[1:] == [["trainer", "1", "2", "2", ""],
                                                   ["engine-core", "3", "4", "6", "DRIFTED 2"]]
    listed = [(row[4], row[0]) for row in hook_states.everywhere(reports)[1:]]
    assert sorted(listed) == sorted((hook["state"], each["process"]) for each in reports for hook in each["hooks"])


def test_all_is_for_a_run(capsys):
    assert cli.main(["status", "--all"]) == 2
    assert "no RUN_DIR" in one_line(capsys.readouterr().err)


def test_status_of_several_runs_ends_with_what_each_decided(tmp_path, capsys):
    for name in ("overlay", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hooks.json").write_text(json.dumps([report("APPLIED")]))
    assert cli.main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    decided = [line for name in ("overlay", "plain") for line in (
        "", str(tmp_path / name), "what modules decided: not recorded")]
    assert said[-6:] == decided and sum("hook-0" in line for line in said[:-6]) == 2


@pytest.mark.parametrize("content", [None, "", "{", "\x00", "[]", "{}", '{"processes": 3}', '[{"a": 1}]', "[" * 100_000,
                                     json.dumps([report("APPLIED"), report("MENDED")])])
def test_status_of_something_else(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "hooks.json").write_text(content)
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "hooks.json" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("books", [(), ("--books",)])
def test_status_of_a_directory_that_is_not_there(tmp_path, capsys, books):
    assert cli.main(["status", str(tmp_path / "nothere"), *books]) == 2
    said = one_line(capsys.readouterr().err)
    assert said.count("nothere") == 1 and "nothere does not exist |" in said and "Errno" not in said
    assert cli.main(["status", str(tmp_path), *books]) == 2  # negative control
    assert os.path.join(str(tmp_path), "esgrpo") in one_line(capsys.readouterr().err) or not books


@pytest.mark.parametrize("hooks", [1, 5000])  # fits into the buffer and breaks at exit, or breaks while printing
def test_status_into_a_closed_pipe(tmp_path, overlay, clean_environment, hooks):
    (tmp_path / "hooks.json").write_text(json.dumps([report(*["APPLIED"] * hooks)]))
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**clean_environment, "PYTHONPATH": overlay, "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-m", "esgrpo", "status", str(tmp_path)], stdout=writer, text=True,
                          stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_one_line(overlay, clean_environment):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "esgrpo", "explain", "count/staleness_samples"], stdout=full,
                              stderr=subprocess.PIPE, text=True, env={**clean_environment, "PYTHONPATH": overlay})
    assert done.returncode == 2 and "No space left" in one_line(done.stderr)


@pytest.mark.parametrize("command", [["status"], ["doctor"], ["explain"], ["lint", "a.sh"], ["report", "a"]])
def test_an_interrupt_is_one_line(command, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, command[0], interrupted)
    assert cli.main(command) == 130
    assert f"esgrpo: {command[0]}: interrupted |" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("command, code", [(["explain", "count/staleness_samples"], 0), (["explain", "nosuch"], 2),
                                           (["explain", "--log", "-"], 2)])
def test_closed_standard_streams(command, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(command) == code
    assert one_line(capsys.readouterr().err) if code else True


def test_without_a_subcommand(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2 and "no name | wanted" in one_line(capsys.readouterr().err)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"esgrpo {__version__}\n"


def test_a_pending_row_says_what_it_waits_for():
    """The module that is not imported yet, and whether its source was tested."""
    pending = [row for row in cli._static_states() if row["state"] == "PENDING"]
    assert pending
    for row in pending:
        assert row["reason"].startswith(f"{row['target'].partition(':')[0]} is not imported yet; ")
        assert len(row["reason"].partition("; ")[2]) > len(row["version"]) + 1
