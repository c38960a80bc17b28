"""What died, from real errors of Ray; and what there is to resume from."""

import json

import pytest

from esgrpo.algo.endings import advice, of_error

exceptions = pytest.importorskip("ray.exceptions")


DETAIL = "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some more."


def dead_actor(kind, name="", pid=4242, detail=DETAIL):
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    context = ActorDiedErrorContext(
        class_name=kind, actor_id=bytes(16), pid=pid, name=name, ray_namespace="n", node_ip_address="10.0.0.1",
        error_message=f"The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR {detail}")
    return exceptions.ActorDiedError(context)


def traceback_of(error):
    return f"Traceback (most recent call last):\n  File \"x.py\", line 3, in f\n{type(error).__name__}: {error}"


def nested(cause, *frames):
    """RayTaskErrors around `cause`, the innermost first, as Ray nests them: of an inner one only the text is left."""
    error = cause
    for function, pid in frames:
        error = exceptions.RayTaskError(function.partition(".")[2], traceback_of(error), cause, f"ray::{function}", pid,
                                        "10.0.0.1", actor_repr="<an actor>", actor_id="ab12").as_instanceof_cause()
    return error


def ending(error, names=None):
    return of_error(type(error).__name__, str(error), names)


@pytest.mark.parametrize(("kind", "name", "words"), [
    ("FullyAsyncRollouter", "", "the rollouter (node 10.0.0.1, pid 4242) died"),
    ("FullyAsyncTrainer", "", "the trainer (node 10.0.0.1, pid 4242) died"),
    ("AgentLoopWorkerTQ", "agent_loop_worker_3_ab", "the agent-loop worker (node 10.0.0.1, pid 4242, "
                                                    "agent_loop_worker_3_ab) died"),
    ("vLLMHttpServer", "vllm_server_5_0", "the vLLM server (replica 5, node 10.0.0.1, pid 4242, vllm_server_5_0) died"),
    ("SomebodysActor", "", "the SomebodysActor (node 10.0.0.1, pid 4242) died")])
def test_a_dead_actor_is_named(kind, name, words):
    for error in (dead_actor(kind, name), nested(dead_actor(kind, name), ("FullyAsyncTaskRunner.run", 5))):
        said = str(ending(error))
        assert said.startswith(words) and said.endswith("connection error code 2"), said


@pytest.mark.parametrize("detail, words", [
    ("It was killed by `ray.kill`. More.", "was killed by `ray.kill`"),
    ("The node was out of memory. More.", "out of memory"),
    ("Nobody knows.", "")])
def test_why_an_actor_died_where_ray_gives_no_exit_detail(detail, words):
    assert str(ending(dead_actor("FullyAsyncTrainer", detail=detail))).partition(" died")[2].removeprefix(": ") == words


def test_a_dead_engine_is_that_of_its_replica():
    class EngineDeadError(Exception):
        """As vLLM's, by name."""

    error = nested(EngineDeadError("EngineCore encountered an issue. See stack trace (above)."),
                   ("vLLMHttpServer.generate", 31), ("AgentLoopWorker.generate_sequences", 32), ("R.fit", 33))
    assert str(ending(error, {("10.0.0.1", "31"): "vllm_server_2_0", ("10.0.0.1", "32"): "agent_loop_worker_0"})) == (
        "the engine (EngineCore) of the vLLM server (replica 2, node 10.0.0.1, pid 31, vllm_server_2_0) died")
    assert str(ending(error)) == "the engine (EngineCore) of the vLLM server (node 10.0.0.1, pid 31) died"


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"),
    RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/3")])
def test_a_full_disk_is_told_with_the_worker_that_met_it(error):
    full = nested(error, ("WorkerDict.actor_save_checkpoint", 77), ("FullyAsyncTrainer.fit", 78),
                  ("FullyAsyncTaskRunner.run", 79))
    assert str(ending(full)) == (f"{type(error).__name__}: {error} (the disk is full or cannot be written) in the "
                                 "actor worker (node 10.0.0.1, pid 77)")


def test_an_error_of_the_driver_itself():
    assert str(ending(ValueError("no such model\nmore"))) == "ValueError: no such model in the driver"
    assert str(ending(KeyError())) == "KeyError: without a message in the driver"
    assert str(ending(exceptions.LocalRayletDiedError())).startswith("the cluster node died: LocalRayletDiedError")


def test_advice_names_the_checkpoint_or_says_that_there_is_none():
    assert advice("/c/global_step_3", "/c", "n1", "auto", 2) == (
        "resume: the same command goes on from /c/global_step_3")
    assert "trainer.resume_from_path=/c/global_step_3" in advice("/c/global_step_3", "/c", "n1", "disable", 2)
    none = advice(None, "/c", "n1", "auto", -1)
    assert none.startswith("nothing to resume from: /c holds no checkpoint on n1") and "trainer.save_freq=N" in none
    assert "trainer.save_freq=1 had not come round" in advice(None, "/c", "n1", "auto", 1)


def test_the_latest_whole_checkpoint(tmp_path):
    from esgrpo.hooks.verl.run.resume_point import latest

    assert latest(str(tmp_path)) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert latest(str(tmp_path)) is None  # verl keeps the newest ones only; this one is gone
    (tmp_path / "global_step_3").mkdir()
    (tmp_path / "global_step_4").mkdir()  # being written when the run ended
    assert latest(str(tmp_path)) == str(tmp_path / "global_step_3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    assert latest(str(tmp_path)) is None


def test_names_of_the_handshake(tmp_path, monkeypatch):
    from esgrpo.hooks.verl.run.reports import actor_names

    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    assert actor_names() == {}
    (tmp_path / "esgrpo").mkdir()
    (tmp_path / "esgrpo" / "hooks.json").write_text(json.dumps([
        {"pid": 31, "ip": "10.0.0.1", "actor": "vllm_server_2_0"}, {"pid": 32, "process": "engine-core"}]))
    assert actor_names() == {("10.0.0.1", "31"): "vllm_server_2_0"}
