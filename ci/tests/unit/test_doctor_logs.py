"""`esgrpo doctor --log`: the right first answer for each known failure, none for runs that went well."""

import io
import json
import re
import traceback
from pathlib import Path

import pytest

from esgrpo import cli, engine, records
from esgrpo.algo.rows import Evicted
from esgrpo.errors import EsgrpoError
from esgrpo.hooks.verl import state_files
from esgrpo.tools import patchset
from esgrpo.tools.doctor import logs

LOGS = Path(__file__).with_name("logs")
FAILED = {path.stem: path for path in sorted((LOGS / "failed").glob("*.txt"))}  # tracebacks of a user's diary, whole
CLEAN = sorted((LOGS / "clean").glob("*.txt"))  # of real runs of this project, thinned out
STOPPED = ("fully-async-overlay", "fully-async-plain")  # of these, by a benchmark that had seen enough of them
FAULTS = {path.stem: path for path in sorted((LOGS / "faults").glob("*.txt"))}  # of real runs, the middle left out
SIGNATURES = {signature.slug: signature for signature in logs.signatures()}


def first(text: str) -> str:
    return next((match.signature.slug for match in logs.read(text.splitlines()).matches), "")


@pytest.mark.parametrize("name", FAILED)
def test_the_tracebacks_of_the_diary(name):
    answer = logs.read(FAILED[name].read_text().splitlines())
    assert answer.state == "known" and answer.matches[0].signature.slug == name.removesuffix("-one-step")
    assert all(match.signature.weight == "echo" for match in answer.matches[1:])
    assert answer.matches[0].signature.cured_by


@pytest.mark.parametrize("name", FAULTS)
def test_runs_in_which_something_was_killed(name):
    """The overlay's own line about it is not taken for a reason of the overlay to stop."""
    answer = logs.read(FAULTS[name].read_text().splitlines())
    assert answer.state == "known" and answer.matches[0].signature.slug == name
    # the engine's log is of a time when that line did not name what died
    assert name == "engine-died" or "overlay-stopped" not in [match.signature.slug for match in answer.matches]


def traceback_of(call) -> list[str]:
    with pytest.raises(OSError) as caught:
        call()
    return "".join(traceback.format_exception(caught.value)).splitlines()


def full_disk():
    with open("/dev/full", "w", buffering=1) as file:
        file.write("a checkpoint\n")


def set_aside(tmp_path, capsys) -> str:
    (tmp_path / "history.json").write_text("{")
    assert state_files.restored("prompt-history", str(tmp_path / "history.json"), dict) is None
    return capsys.readouterr().err.strip()


def test_a_history_that_was_set_aside_is_no_failure(tmp_path, capsys):
    line = set_aside(tmp_path, capsys)
    assert first(line) == "state-set-aside" and logs.read([line]).state == "unfinished"
    answer = logs.read([line, *traceback_of(full_disk)])  # what it was blamed for
    assert (answer.state, answer.matches[0].signature.slug) == ("known", "disk-full")


def test_a_disk_that_costs_records_only_is_no_failure(tmp_path, capsys, monkeypatch):
    (tmp_path / "esgrpo").write_text("a file where the directory should be")
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(records, "_writer", records.Writer())
    records.write(Evicted(group="a"))
    records.flush()
    line = capsys.readouterr().err.strip()
    assert line.startswith("esgrpo: ") and first(line) == "records-dropped"
    assert logs.read([line]).state == "unfinished"


@pytest.mark.parametrize("found, slug", [
    ("[Errno 30] Read-only file system: '/runs/a'", "read-only-directory"),
    ("[Errno 28] No space left on device", "disk-full")])
def test_a_disk_of_a_checkpoint_ends_the_run(found, slug):
    assert first(f"(WorkerDict pid=7) OSError: {found}") == slug
    line = f"esgrpo: records: {found} | wanted a run directory | rows are dropped | make room"
    assert first(line) == "records-dropped"


def test_a_sigterm_that_waits_for_its_checkpoint_is_no_end():
    line = "esgrpo: SIGTERM: a checkpoint is saved when the running step has ended, in 600 s at most"
    answer = logs.read([line])
    assert (answer.state, answer.matches) == ("unfinished", [])


@pytest.mark.parametrize("slug", SIGNATURES)
def test_every_excerpt_is_recognised(slug):
    answer = logs.read(SIGNATURES[slug].excerpt.splitlines())
    assert answer.matches[0].signature.slug == slug
    assert (answer.state == "known") == (SIGNATURES[slug].weight not in ("echo", "notice"))
    assert (answer.state == "unknown") == (SIGNATURES[slug].weight == "echo")
    assert "{" not in answer.matches[0].filled(SIGNATURES[slug].cause)


@pytest.mark.parametrize("slug", SIGNATURES)
def test_it_is_this_signature_that_recognises_it(slug, monkeypatch):
    """Negative control: without the entry the excerpt has another answer."""
    monkeypatch.setattr(logs, "signatures", lambda: [s for key, s in SIGNATURES.items() if key != slug])
    assert first(SIGNATURES[slug].excerpt) != slug


@pytest.mark.parametrize("path", CLEAN, ids=lambda path: path.stem)
def test_runs_that_went_well_are_clean(path):
    text = path.read_text()
    answer = logs.read(text.splitlines())
    assert answer.state == ("unfinished" if path.stem in STOPPED else "clean") and not answer.innermost
    assert all(match.signature.weight == "notice" for match in answer.matches)
    # negative control: the same run with a failure in its middle
    lines = text.splitlines()
    lines.insert(len(lines) // 2, "(WorkerDict pid=7, ip=10.0.0.1) RuntimeError: NCCL is not available.")
    assert first("\n".join(lines)) == "nccl-not-available"


def test_there_are_ten_clean_logs_and_they_look_like_failures():
    assert len(CLEAN) == 10
    for look in ("ModuleNotFoundError", "cannot open shared object file", "SIGTERM", "'truncation': 'error'"):
        assert any(look in path.read_text() for path in CLEAN), look


def test_every_signature_is_complete():
    slugs = [signature.slug for signature in logs.signatures()]
    assert len(set(slugs)) == len(slugs)
    for signature in logs.signatures():
        assert signature.weight in logs.WEIGHTS and signature.evidence and signature.zh and signature.fix
        for text in (signature.cause, signature.fix, signature.zh):
            assert "\n" not in text and text == text.strip()


def test_what_cures_is_there(root):
    """cured_by names patches and hooks that this repository has."""
    patches = {(*s.name.replace(" v", " ").split(), slug)
               for s in patchset.load_all(root / "patches") for slug in s.slugs}
    for signature in logs.signatures():
        for cure in signature.cured_by:
            patch, hook = re.fullmatch(r"patch (\S+) of (\S+) (\S+)", cure), re.fullmatch(r"hook (\S+)", cure)
            assert patch or hook, cure
            if patch:
                assert (patch.group(2), patch.group(3), patch.group(1)) in patches, cure
            else:
                assert hook.group(1) in engine.load_hooks(), cure


OOM = "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)"
TIMEOUT = "EI0006: [PID: 4] Getting socket times out. Reason: Remote Rank did not send the data in time."
DIED = "(raylet) Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file."


@pytest.mark.parametrize("lines", [[OOM, TIMEOUT, DIED], [DIED, TIMEOUT, OOM], [TIMEOUT, OOM, DIED]])
def test_a_root_beats_its_effects_in_any_order(lines):
    answer = logs.read(lines)
    assert [m.signature.slug for m in answer.matches][0] == "device-out-of-memory" and len(answer.matches) == 3
    assert "2.00 GiB" in answer.matches[0].text


NO_THREAD = "RuntimeError: can't start new thread"
SCORER = "ray.exceptions.RayTaskError(RuntimeError): ray::RewardLoopWorker.compute_score() (pid=18492, ip=192.0.2.2)"
COMPILER = "raise BackendCompilerFailed("
NO_PROCESS = "BlockingIOError: [Errno 11] Resource temporarily unavailable"


@pytest.mark.parametrize("effect, cause, also", [
    (SCORER, NO_THREAD, "also (root): reward-raises (line 1): the reward function raises: RuntimeError"),
    (COMPILER, NO_PROCESS, "also (effect): triton-compile (line 1): ")])
def test_what_could_not_start_a_thread_is_not_what_failed(effect, cause, also):
    """Both of runs beside eleven others on one machine."""
    said = logs.render(logs.read([effect, "Traceback (most recent call last):", cause]))
    assert said.startswith("no-more-threads (line 3, 1x)") and also in said


def test_an_effect_shows_the_exception_that_nobody_knows():
    text = ["Traceback (most recent call last):", "  File 'x'", "KeyError: 'reward'", TIMEOUT]
    lines = logs.render(logs.read(text)).splitlines()
    assert lines[0].startswith("hccl-connect-timeout (line 4, 1x)")
    assert "innermost: KeyError: 'reward' (line 3)" in lines


REMOTE = """\
(Rollouter pid=1) Traceback (most recent call last):
(Rollouter pid=1)   File "a.py", line 1, in run
(Rollouter pid=1)     ray.get(x)
(Rollouter pid=1) ray.exceptions.RayTaskError(ValueError): ray::Worker.score() (pid=2, ip=10.0.0.1, actor_id=3)
(Rollouter pid=1)   File "b.py", line 2, in score
(Rollouter pid=1) KeyError: 'verdict'
(Rollouter pid=1)
(Rollouter pid=1) The above exception was the direct cause of the following exception:
(Rollouter pid=1)
(Rollouter pid=1) ray::Worker.score() (pid=2, ip=10.0.0.1, actor_id=3)
(Rollouter pid=1)   File "b.py", line 4, in score
(Rollouter pid=1) ValueError: no answer
"""


ECHO = f"also (echo): command-failed (line 4): {SIGNATURES['command-failed'].cause}"


def test_unknown_names_the_innermost_exception():
    answer = logs.read(REMOTE.splitlines())
    assert (answer.state, answer.innermost, answer.line) == ("unknown", "KeyError: 'verdict'", 6)
    driver = "Traceback (most recent call last):\n  File 'main.py'\nlookup.Missing: config\n"
    assert logs.read((driver + REMOTE).splitlines()).innermost == "lookup.Missing: config"  # it ended the run
    assert logs.render(answer).splitlines() == ["unknown: no signature knows this failure",
                                                "innermost: KeyError: 'verdict' (line 6)", ECHO, "read: 12 lines"]


def test_two_processes_between_one_another():
    other = "(Trainer pid=9) Traceback (most recent call last):\n(Trainer pid=9)   File 'c.py'\n"
    lines = REMOTE.splitlines()
    mixed = [line for pair in zip(lines, other.splitlines() + ["(Trainer pid=9) step 3"] * 9, strict=False)
             for line in pair] + lines[11:]
    assert logs.read(mixed).innermost == "KeyError: 'verdict'"


@pytest.mark.parametrize("text, innermost", [
    ("Exception ignored in: <function A.__del__>\nTraceback (most recent call last):\n  File 'a'\nOSError: closed", ""),
    ("train.sh: line 88:  4711 Trace/breakpoint trap (core dumped)",
     "train.sh: line 88:  4711 Trace/breakpoint trap (core dumped)"),
    ("ERROR: Could not install packages due to an OSError", "ERROR: Could not install packages due to an OSError"),
    ("ValueError: of a traceback that was not copied", "ValueError: of a traceback that was not copied"),
    ("see ValueError: this is prose", ""),
    ("", "")])
def test_other_ends(text, innermost):
    assert logs.read(text.splitlines()).innermost == innermost


def test_the_command(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.log"
    path.write_bytes(b"\xff\x1b[36m(W pid=1)\x1b[0m ok\n" + FAILED["npu-of-process-not-found"].read_bytes())
    assert cli.main(["doctor", "--log", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == ["cause", "fix", "cured by", "seen in", "read"]
    assert "patch derive-npu-uuid-from-visible-devices of verl 0.7.0" in lines[3]
    assert cli.main(["doctor", "--json", "--log", str(path)]) == 1
    assert json.loads(capsys.readouterr().out)["matches"][0]["slug"] == "npu-of-process-not-found"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Training Progress: 100%|##| 2/2\n")))
    assert cli.main(["doctor", "--log", "-"]) == 0 and capsys.readouterr().out.startswith("clean")
    assert cli.main(["doctor", "--log", str(tmp_path / "missing")]) == 2
    assert "missing: No such file" in capsys.readouterr().err


def test_a_wrong_entry_is_named(tmp_path, monkeypatch):
    file = tmp_path / "signatures.toml"
    file.write_text('[[signature]]\nslug = "x"\npatterns = ["("]\n')
    monkeypatch.setattr(logs, "FILE", file)
    with pytest.raises(EsgrpoError, match="signatures.toml x"):
        logs.signatures.__wrapped__()
