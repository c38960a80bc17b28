"""`around(call)`: arguments by parameter, the original called once, a closure that Ray can ship."""

from __future__ import annotations

import asyncio
import inspect
import sys
from types import ModuleType

import pytest

from esgrpo.call import Call, wrapped
from esgrpo.engine import Hook
from esgrpo.errors import HookError


class Upstream:
    def add(self, one, two=2, *, three=3):
        """Sum."""
        return one + two + three

    async def later(self, one):
        return one


def hook_file(monkeypatch, around, **declared) -> ModuleType:
    code = ModuleType("a_hook_file")
    code.HOOK = Hook("a-hook", "verl:f", **{"process": ("driver",), "kind": "wrap", "why": "", "remove_when": "",
                                            **declared})
    code.around = around
    monkeypatch.setitem(sys.modules, code.__name__, code)
    return code


def hooked(monkeypatch, around, name="add", **declared):
    code = hook_file(monkeypatch, around, **declared)
    return type("Hooked", (Upstream,), {name: wrapped(code, vars(Upstream)[name])})()


@pytest.mark.parametrize("given", [((10,), {}), ((), {"one": 10}), ((10, 2), {}), ((), {"two": 2, "one": 10})])
def test_arguments_are_the_same_however_they_are_passed(monkeypatch, given):
    def around(call):
        seen.append((call.arguments["one"], call.argument("two"), call.argument("three"), call.owner))
        call.arguments["one"] += 100
        return call(three=1000)

    seen, args, kwargs = [], *given
    one = hooked(monkeypatch, around)
    assert one.add(*args, **kwargs) == 1112 and seen == [(10, 2, 3, one)]


def test_without_a_look_at_them_they_go_on_as_they_came():
    call = Call(Upstream.add, (Upstream(), 1), {"three": 4})
    assert call() == 7 and call.made == 1
    with pytest.raises(KeyError):
        call.argument("four")


def test_a_call_that_the_original_refuses_is_refused(monkeypatch):
    one = hooked(monkeypatch, lambda call: call.arguments and call())
    with pytest.raises(TypeError):
        one.add(four=4)


@pytest.mark.parametrize("around, made", [(lambda call: 5, 0), (lambda call: (call(), call()), 2)])
def test_the_original_is_called_once_or_the_header_says_why_not(monkeypatch, around, made):
    with pytest.raises(HookError) as found:
        hooked(monkeypatch, around).add(1)
    assert f"{made} calls of Upstream.add" in str(found.value) and "\n" not in str(found.value)
    hooked(monkeypatch, around, calls="as often as the test wants").add(1)
    hooked(monkeypatch, around, kind="replace").add(1)


def test_what_a_hook_refuses_before_the_call_is_what_the_caller_sees(monkeypatch):
    def around(call):
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        hooked(monkeypatch, around).add(1)


def test_a_coroutine_stays_one(monkeypatch):
    async def around(call):
        return await call() + 1

    one = hooked(monkeypatch, around, "later")
    assert inspect.iscoroutinefunction(one.later) and asyncio.run(one.later(one=1)) == 2

    async def idle(call):
        return 1

    with pytest.raises(HookError, match="0 calls"):
        asyncio.run(hooked(monkeypatch, idle, "later").later(1))


def test_the_closure_is_the_original_to_those_who_look(monkeypatch):
    function = wrapped(hook_file(monkeypatch, lambda call: call()), Upstream.add)
    assert function.__wrapped__ is Upstream.add and function.__doc__ == "Sum."
    assert inspect.signature(function) == inspect.signature(Upstream.add)


def test_shipped_by_value_it_asks_for_the_hook_where_it_arrives(monkeypatch):
    """State of the hook's module is the state of the process that calls, never a copy of the sender's."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    sent = cloudpickle.dumps(wrapped(hook_file(monkeypatch, lambda call: call()), Upstream.add))
    hook_file(monkeypatch, lambda call: call() * 100)  # as another process has it
    assert cloudpickle.loads(sent)(Upstream(), 1) == 600
