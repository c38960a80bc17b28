"""Utility methods on vLLM's EngineCore: the way into the scheduler from the server process."""

from __future__ import annotations

from esgrpo.engine import Hook

HOOK = Hook(
    slug="engine-core-utilities",
    target="vllm.v1.engine.core:EngineCore",
    process=("engine-core",),
    kind="add",
    why="call_utility_async runs any method of EngineCore between two steps, but EngineCore has none that finishes "
        "requests by group, sets a weight version or reports the hooks",
    remove_when="vLLM offers a registry for utility methods",
    features=("observe", "cpu"),
    relies_on=("vllm.v1.engine.core:EngineCoreProc._handle_client_request",),
)


def esgrpo_report(self):
    from esgrpo import engine

    return engine.report("engine-core", self)


def _ask_scheduler(self, method, without, *args):
    """The scheduler's answer, or `without` where the user goes on without the hook that gives it one."""
    from esgrpo import guard

    asked = getattr(self.scheduler, method, None)
    if asked is None:
        guard.say_once("esgrpo: segment-scheduler is not in place in this engine: no boundary, no pruning, no window "
                       "and no versions of single tokens here")
        return without
    return asked(*args)


def esgrpo_set_version(self, version):
    return _ask_scheduler(self, "segment_set_version", None, version)


def esgrpo_finish(self, group, members, rule):
    return _ask_scheduler(self, "segment_finish", 0, group, members, rule)


def esgrpo_progress(self, group):
    return _ask_scheduler(self, "segment_progress", {}, group)


def esgrpo_take_book(self, group, member, attempt):
    return _ask_scheduler(self, "segment_take_book", None, group, member, attempt)


def esgrpo_set_segment_length(self, group, length, tail=False):
    return _ask_scheduler(self, "segment_set_length", 0, group, length, tail)


def esgrpo_hand_back(self, count):
    return _ask_scheduler(self, "segment_hand_back", (0, []), count)


def esgrpo_take_looks(self, groups):
    return _ask_scheduler(self, "segment_take_looks", {}, groups)


UTILITIES = (esgrpo_report, esgrpo_set_version, esgrpo_finish, esgrpo_progress, esgrpo_take_book,
             esgrpo_set_segment_length, esgrpo_hand_back, esgrpo_take_looks)


def apply(module) -> None:
    for function in UTILITIES:
        setattr(module.EngineCore, function.__name__, function)


def installed(module) -> bool:
    return all(getattr(module.EngineCore, function.__name__, None) is function for function in UTILITIES)
