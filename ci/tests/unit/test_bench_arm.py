"""An arm's end, and the CPU seconds of its processes: only its own, by the name that Ray or vLLM gives them, since it
was ready."""

import os
import subprocess
import sys
import time

import pytest

from bench.common import arm

BUSY_S = 0.3
PROGRAM = f"import time\nwhile time.process_time() < {BUSY_S}: pass\nprint(1, flush=True)\ntime.sleep(60)"


@pytest.fixture
def start():
    """start(title, marker): a process of that title, which has worked for BUSY_S when this returns."""
    children = []

    def new(title: str, marker: str):
        child = subprocess.Popen([title, "-c", PROGRAM], executable=sys.executable, stdout=subprocess.PIPE,
                                 env={**os.environ, arm.MARKER: marker})
        children.append(child)
        assert child.stdout.readline()
        return child

    yield new
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def test_an_arms_own_processes_by_the_name_of_their_actor(start):
    server, core = start("ray::vLLMHttpServer.generate", "mine"), start("VLLM::EngineCore", "mine")
    start("ray::vLLMHttpServer.generate", "other")
    start("python", "mine")  # the driver: no actor
    found = arm.cpu_seconds("mine")
    assert set(found) == {(server.pid, "vLLMHttpServer"), (core.pid, "EngineCore")}
    # the kernel counts in ticks, which may round the last one down
    assert all(seconds >= BUSY_S - 2 / os.sysconf("SC_CLK_TCK") for seconds in found.values())


def test_a_process_that_is_gone_is_left_out(start):
    child = start("ray::MessageQueue", "gone")
    child.kill()
    child.wait()
    deadline = time.monotonic() + 10
    while arm.cpu_seconds("gone") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert arm.cpu_seconds("gone") == {}


def test_what_came_before_ready_does_not_count():
    begin = {(1, "Server"): 5.0, (2, "Loop"): 1.0}
    end = {(1, "Server"): 7.5, (2, "Loop"): 1.0, (3, "Loop"): 2.0}  # a worker started later counts whole
    assert arm._cpu_by_name(begin, end) == {"Server": 2.5, "Loop": 2.0}


def test_memory_is_that_of_the_arms_own_processes(tmp_path):
    marker, megabytes = "memory-of-a-test", 50
    code = f"x = bytearray(b'1') * {megabytes << 20}; print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, arm.MARKER: marker}, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        assert arm.memory_bytes(marker) > megabytes << 20 and arm.memory_bytes("of-nobody") == 0
        child.communicate(b"\n")
    assert arm.memory_bytes(marker) == 0


@pytest.mark.parametrize("ready", [True, False])
def test_a_file_ends_a_run_whatever_is_left_of_its_budget(tmp_path, monkeypatch, ready):
    """One that is not ready yet was not measured: an error."""
    stop = tmp_path / "stop"
    monkeypatch.setattr(arm, "PROGRESS_PERIOD_S", 0.0)
    monkeypatch.setattr(arm.stack, "command", lambda main, overrides: [
        sys.executable, "-c", f"import time; print({arm.READY[0] if ready else ''!r}, flush=True); time.sleep(60)"])

    def said(text):  # the file comes once the run is known to be ready, or at once
        if not ready or "optimiser step" in text:
            stop.touch()

    def run():
        return arm.run("a", [], tmp_path / "run", tmp_path, budget_s=600.0, stop=stop, say=said)

    if ready:
        assert run().stopped_at_budget
    else:
        with pytest.raises(RuntimeError, match="a: stopped before it was ready"):
            run()


def test_what_an_earlier_run_left_in_its_folder_is_not_of_this_one(tmp_path, monkeypatch):
    """verl writes the file anew: where it was longer before, the reader stood behind its end."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 7, "data": {"critic/score/mean": 0.5}}\n' * 9)
    line = '{"step": 1, "data": {}}\\n'
    program = (f"import os; print({arm.READY[0]!r}, flush=True)\n"
               f"open(os.environ['VERL_FILE_LOGGER_PATH'], 'w').write('{line}')")
    monkeypatch.setattr(arm.stack, "command", lambda main, overrides: [sys.executable, "-c", program])
    assert [row["step"] for row in arm.run("a", [], tmp_path, tmp_path, say=lambda text: None).metrics] == [1]


@pytest.mark.parametrize("log, said", [
    (["raise BackendCompilerFailed(", "BlockingIOError: [Errno 11] Resource temporarily unavailable",
      "RuntimeError: Engine core initialization failed."],
     "no-more-threads: BlockingIOError: [Errno 11] Resource temporarily unavailable"),
    (["\x1b[36m(pid=1)\x1b[0m ValueError: of nobody's knowledge", "bye"], "(pid=1) ValueError: of nobody's knowledge"),
    (["bye"], "see "), (None, "not started")])
def test_a_run_that_failed_is_told_with_its_cause(tmp_path, log, said):
    """Not with the last line that names an error, where the cause is known."""
    path = tmp_path / "log.txt"
    if log is not None:
        path.write_text("\n".join(log))
    assert arm.error_line(path).startswith(said)
