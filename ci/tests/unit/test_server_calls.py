"""No wait of ours for a server is without an end, and advice that is late costs nothing but the advice."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from esgrpo import engine
from esgrpo.errors import EsgrpoError
from esgrpo.hooks.verl import owned
from esgrpo.hooks.verl.server import calls_with_deadline, control_methods
from esgrpo.hooks.verl.sync import weight_version

HOOKS = Path(calls_with_deadline.__file__).parents[1]
NOT_OURS = {"calls_with_deadline.py"}  # where the deadline is


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(calls_with_deadline, "ANSWER_DEADLINE_S", 0.01)
    monkeypatch.setattr(calls_with_deadline, "said", set())


async def answer(value):
    return value


async def never():
    await asyncio.Event().wait()


def test_answers_come_in_order():
    assert asyncio.run(calls_with_deadline.answers([answer(1), answer(2)], "progress")) == [1, 2]


def test_what_the_run_needs_is_an_error_in_one_line():
    with pytest.raises(EsgrpoError) as caught:
        asyncio.run(calls_with_deadline.answers([answer(1), never()], "require_abort"))
    assert str(caught.value).count(" | ") == 3 and "require_abort" in str(caught.value)


def test_late_advice_is_said_once_and_is_nothing(capfd):
    for _ in range(2):
        late = calls_with_deadline.answers_if_any([never()], "progress", "segments keep their length")
        assert asyncio.run(late) == []
    said = capfd.readouterr().err
    assert said.count("no answer to progress") == 1 and "segments keep their length" in said


def test_advice_that_ray_cannot_bring_is_said_and_is_nothing(monkeypatch, capfd):
    """A checkpoint asks a queue for gigabytes: where Ray has no room for them, they are generated again."""
    exceptions = pytest.importorskip("ray").exceptions

    def full(*_, **__):
        raise exceptions.OutOfDiskError("no space left")

    async def broken(error):
        raise error

    full_disk = exceptions.OutOfDiskError("no space left")
    monkeypatch.setattr("ray.get", full)
    assert asyncio.run(calls_with_deadline.answers_if_any([broken(full_disk)], "held", "generated again")) == []
    assert calls_with_deadline.fetched_if_any([None], "take_windows", "lacks this version") == []
    said = capfd.readouterr().err.splitlines()
    assert [line.split(" | ")[0].split(": ")[1] for line in said] == ["held", "take_windows"]
    assert all("no space left" in line for line in said)
    with pytest.raises(KeyError):  # an error of ours is no answer that is missing
        asyncio.run(calls_with_deadline.answers_if_any([broken(KeyError("ours"))], "held", "generated again"))


def server_with(cores: int):
    """A server whose engine never answers."""
    client = SimpleNamespace(call_utility_async=lambda *args: never(), core_engines=list(range(cores)),
                             _call_utility_async=lambda *args, engine: never())
    return SimpleNamespace(node_rank=0, global_steps=7, rollout_mode=SimpleNamespace(name="STANDALONE"),
                           engine=SimpleNamespace(engine_core=client))


@pytest.mark.parametrize("cores", [1, 2])
def test_a_silent_engine_holds_up_no_call_and_no_weight_sync(monkeypatch, capfd, cores):
    monkeypatch.setattr(engine, "out_of_action", lambda slug: "")
    server = server_with(cores)

    async def within(call):
        return await asyncio.wait_for(call, 5)

    with pytest.raises(EsgrpoError, match="no answer to esgrpo_progress"):
        asyncio.run(within(control_methods.engine_call(server, "esgrpo_progress", "g")))

    async def original():
        return "verl's"

    for _ in range(2):
        call = type("Call", (), {"owner": server, "__call__": lambda self: original()})()
        assert asyncio.run(within(weight_version.around(call))) == "verl's"
    assert owned.of(server, owned.Server).windows == []
    said = capfd.readouterr().err
    assert said.count("no answer to esgrpo_set_version") == 1 and "a window of it is not recorded" in said


def test_there_is_one_deadline():
    """No other name for how long an answer may take."""
    found = [(path.name, target.id) for path in HOOKS.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Assign) for target in node.targets
             if isinstance(target, ast.Name) and target.id.startswith("ANSWER_")]
    assert found == [("calls_with_deadline.py", "ANSWER_DEADLINE_S")]


def calls(tree: ast.AST, name: str):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute) and node.func.attr == name]


@pytest.mark.parametrize("path", sorted(HOOKS.rglob("*.py")), ids=lambda path: path.stem)
def test_every_wait_for_an_actor_has_a_deadline(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    gets = [node for node in calls(tree, "get") if ast.unparse(node.func) == "ray.get"]
    assert all(any(word.arg == "timeout" for word in node.keywords) for node in gets), "ray.get without a timeout"
    waits = [node for node in ast.walk(tree) if isinstance(node, ast.Await) and calls(node, "remote")]
    bare = [node for node in waits if not (isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
                                           and node.value.func.id in ("answers", "answers_if_any"))]
    queue = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and "kv_" in node.attr
             and ast.unparse(node.value).rpartition(".")[2] in ("transfer_queue", "tq")]
    assert not queue or "no deadline of ours" in path.read_text(encoding="utf-8"), "nothing says why it may wait"
    assert path.name in NOT_OURS or not bare, f"lines {[node.lineno for node in bare]} wait without a deadline"
