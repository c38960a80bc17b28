"""What the engine puts in the place of a wrapped function, and what a hook's `around(call)` sees of a call.

The closure is what Ray ships by value with a class, so it holds no hook: only the name of the hook's module, which is
looked up in the process that makes the call. State of a module is that process's own, never a copy.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from esgrpo.errors import HookError

signature = functools.cache(inspect.signature)  # reading one takes longer than all the rest of a call


class Call:
    """One call. `owner`: the object whose method it is; `arguments`: what was passed, by parameter, to read or change.

    Called itself, it calls the original, with what `arguments` says and the keyword arguments given here.
    """

    __slots__ = ("original", "made", "_args", "_kwargs", "_bound")

    def __init__(self, original: Callable, args: tuple, kwargs: dict):
        self.original, self.made, self._args, self._kwargs, self._bound = original, 0, args, kwargs, None

    def __call__(self, **changed) -> Any:
        if changed:
            self.arguments.update(changed)
        self.made += 1
        if self._bound is None:
            return self.original(*self._args, **self._kwargs)
        return self.original(*self._bound.args, **self._bound.kwargs)

    @property
    def owner(self):
        return self._args[0]  # a method's object; the only argument whose place Python itself fixes

    @property
    def arguments(self) -> dict[str, Any]:
        """Without what was left to a default. Raises TypeError for a call that the original would refuse, too."""
        if self._bound is None:
            self._bound = signature(self.original).bind(*self._args, **self._kwargs)
        return self._bound.arguments

    def argument(self, name: str):
        """An argument or its default. Raises KeyError where there is no such parameter."""
        return self.arguments[name] if name in self.arguments else signature(self.original).parameters[name].default


def wrapped(code, original: Callable) -> Callable:
    """What a hook file puts in the place of `original`: a function of the same kind, async or not, as its `around`."""
    if hasattr(code, "build"):
        return code.build(original)
    module, slug = code.__name__, code.HOOK.slug
    exactly_once = code.HOOK.kind == "wrap" and not code.HOOK.calls

    if inspect.iscoroutinefunction(code.around):  # Ray runs an actor's method as what it is declared
        @functools.wraps(original)
        async def replacement(*args, **kwargs):
            call = Call(original, args, kwargs)
            result = await importlib.import_module(module).around(call)
            return checked(slug, call, result) if exactly_once else result
    else:
        @functools.wraps(original)
        def replacement(*args, **kwargs):
            call = Call(original, args, kwargs)
            result = importlib.import_module(module).around(call)
            return checked(slug, call, result) if exactly_once else result
    return replacement


def checked(slug: str, call: Call, result):
    """Raises HookError where a hook came back without a call of the original, or after several."""
    if call.made != 1:
        raise HookError(slug, f"{call.made} calls of {call.original.__qualname__}", "one", "its result is not used",
                        "report this")
    return result
