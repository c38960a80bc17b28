"""No wait of ours for a server is without an end, and advice that is late costs nothing but the advice."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

from esgrpo.errors import EsgrpoError
from esgrpo.hooks.verl.server import calls_with_deadline

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
