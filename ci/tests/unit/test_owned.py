"""What hooks keep on upstream's objects: one attribute with typed parts, and no other."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from esgrpo.hooks.verl import owned

HOOKS = Path(owned.__file__).resolve().parents[1]
PREFIX = "esgrpo_"
BY_NAME = ("getattr", "setattr", "hasattr", "setdefault", "pop", "get")  # of an object, or of its __dict__
ALLOWED = {
    ("vllm/first_and_last_output.py", "esgrpo_told"): "a flag on vLLM's request, looked at for every token",
    ("verl/fixes/weight_socket.py", "esgrpo_socket"): "a mark on our own function, by which it is known again",
    ("verl/groups/followed_members.py", "esgrpo_forecast"): "a column of verl's batch; verl hands it on by its name",
    ("verl/run/reports.py", "esgrpo_engine_reports"): "a method that server-control adds: Ray calls methods by name",
    ("verl/metrics/routing_metrics.py", "esgrpo_take_metrics"): "a method of our own TailRouter",
}


def attributes(source: str) -> set[str]:
    """Names of ours that are set on an object, or looked up on one by name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(node.attr)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            found |= {each.value for each in node.args if name in BY_NAME and isinstance(each, ast.Constant)}
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
            found.add(node.left.value)
    return {name for name in found if isinstance(name, str) and name.startswith(PREFIX)}


@pytest.mark.parametrize("line, expected", [
    ("trainer.esgrpo_drawn = 1", {"esgrpo_drawn"}), ("buffer.esgrpo_count += 1", {"esgrpo_count"}),
    ("vars(server).setdefault('esgrpo_text', {})", {"esgrpo_text"}), ("getattr(worker, 'esgrpo_driver')",
                                                                     {"esgrpo_driver"}),
    ("'esgrpo_text' in server.__dict__", {"esgrpo_text"}), ("owned.of(trainer, owned.Drawn).draws += 1", set())])
def test_the_search_finds_what_it_looks_for(line, expected):
    assert attributes(line) == expected


def test_hooks_set_no_attribute_on_an_upstream_object_but_the_one():
    found = {(str(path.relative_to(HOOKS)), name) for path in HOOKS.rglob("*.py")
             for name in attributes(path.read_text())}
    assert found == ALLOWED.keys()


def test_parts_of_one_owner_are_made_once_and_apart():
    one, other = SimpleNamespace(), SimpleNamespace()
    owned.of(one, owned.Drawn).draws = 3
    owned.of(one, owned.Server).windows.append({})
    assert owned.of(one, owned.Drawn).draws == 3 and owned.of(other, owned.Drawn).draws == 0
    assert vars(one).keys() == {"esgrpo"}
    assert owned.take(one, owned.Server).windows == [{}] and owned.of(one, owned.Server).windows == []


def test_every_part_says_what_it_is_and_begins_by_itself():
    parts = [part for part in vars(owned).values() if getattr(part, "__module__", "") == owned.__name__
             and dataclasses.is_dataclass(part)]
    assert parts and all(part.__doc__ and not part.__doc__.startswith(part.__name__ + "(") for part in parts)
    for part in parts:
        part()  # nothing has to be said to begin
