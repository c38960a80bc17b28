"""Refuses a run whose config has `segment` where nothing has acted on it: plain verl would train without a word.

The hook that validates the config and hands it on is one changed line of upstream away from being lost. So whoever else
sees the key asks here: `esgrpo run` and the import of that hook's target (command line), the driver before Ray starts,
and every RolloutConfig in any process. Imports no upstream.
"""

from __future__ import annotations

import os
import sys

from esgrpo import config as settings
from esgrpo import engine
from esgrpo.errors import ConfigError, HookError, say

STARTS = ("driver-start", "partial-driver-start")  # the second one is that of verl 0.7.0
# what hooks may need in a run of this kind of main
_WORKERS = frozenset({"driver", "actor-worker", "rollout-worker", "agent-loop-worker", "reward-loop-worker",
                      "vllm-server", "engine-core"})
FULLY_ASYNC = _WORKERS | {"task-runner", "rollouter", "trainer"}
V1 = _WORKERS | {"v1-task-runner"}
MAINS = {"fully_async_main": FULLY_ASYNC, "main_ppo": V1}  # how a command line names its main
_WORDS = {"true": True, "false": False, "null": None}

_said: set[str] = set()


def say_once(line: str) -> None:
    """Once per process."""
    if line not in _said:
        _said.add(line)
        say(line)


def segment_of(arguments) -> dict:
    """The `segment` mapping that Hydra overrides on a command line add up to; empty when none does."""
    found: dict = {}
    for argument in arguments:
        name, equals, value = argument.lstrip("+").partition("=")
        path = name.removeprefix(settings.PREFIX + ".").split(".")
        if not equals or path == name.split("."):
            continue
        place = found
        for key in path[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):  # a key and keys below it: no config, and the driver says so
                return found
        place[path[-1]] = _value(value.strip().strip("\"'"))
    return found


def _value(text: str):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return _WORDS.get(text.lower(), text)


def wanted(segment) -> frozenset[str]:
    """Features that a plain `segment` mapping switches on. Raises ConfigError for one that cannot work."""
    return settings.features(settings.parse(segment), "")


def processes_of(arguments) -> frozenset[str]:
    """The kinds of processes of the main that a command line names; what all mains have when it names none."""
    words = {part for argument in arguments for part in os.path.basename(argument).split(".")}
    named = [processes for main, processes in MAINS.items() if main in words]
    return named[0] if named else FULLY_ASYNC & V1


def check_command(arguments) -> None:
    """Before a command starts: every hook that its `segment` overrides need fits the sources here, or HookError."""
    try:
        features = wanted(segment_of(arguments))
    except ConfigError:  # the driver refuses that, and knows the whole config
        return
    if not features:
        return
    processes = processes_of(arguments)
    features |= {"v1"} if processes is V1 else set()
    for record in engine.load_hooks().values():
        hook = record.hook
        if processes.isdisjoint(hook.process):
            continue
        state, detail, _ = engine.check(hook, features=features | engine.active_features())
        if state not in engine.ACCEPTED | {engine.State.PENDING}:
            _refuse(HookError(hook.slug, f"{state.value}: {detail}", "the tested source",
                              "segment.* needs this hook, nothing was started",
                              f"ESGRPO_DISABLE={hook.slug} or ESGRPO_STRICT=0 goes on"))


def check_import(record) -> None:
    """The hook that reads the config cannot act in this process, whose command line asks for `segment`: it ends."""
    if record.hook.slug not in STARTS or record.state is engine.State.DISABLED or not engine.strict():
        return
    try:
        features = wanted(segment_of(sys.argv))
    except ConfigError:
        features = frozenset({"segment"})
    if features:
        sys.exit(str(_unread(record.hook.slug, f"{record.state.value}: {record.detail}")))


def check_config(config) -> None:
    """For whoever has verl's whole config: as check_segment."""
    from omegaconf import OmegaConf

    if settings.ENV_SEGMENT in os.environ:
        return
    raw = OmegaConf.select(config, settings.PREFIX)
    check_segment(OmegaConf.to_container(raw, resolve=True) if OmegaConf.is_config(raw) else raw)


def check_segment(raw) -> None:
    """Raises HookError when this `segment` (a plain mapping or None) wants features and no driver has handed it on."""
    if raw is None or settings.ENV_SEGMENT in os.environ or not wanted(raw):
        return
    slug, state, detail = _start()
    if state is engine.State.DISABLED:
        say_once(f"esgrpo: {slug} DISABLED ({detail}): segment.* is not read, plain verl trains")
        return
    found = f"{state.value}: {detail}" if state not in engine.FINE | {engine.State.PENDING} else (
        f"{state.value}, but no settings have reached {os.path.basename(sys.argv[0]) or 'this process'}: its target "
        "was not called, or runtime_env lost ESGRPO_SEGMENT")
    _refuse(_unread(slug, found))


def _start():
    """(slug, state, detail) of the hook that reads the config in the installed verl."""
    rows = []
    for slug in STARTS:
        record = engine.load_hooks()[slug]
        state, detail = record.state, record.detail
        if state in (engine.State.PENDING, engine.State.NOT_NEEDED):
            state, detail, _ = engine.check(record.hook)
        rows.append((slug, state, detail))
    return next((row for row in rows if row[1] is not engine.State.NOT_NEEDED), rows[0])


def _unread(slug: str, found: str) -> HookError:
    return HookError(slug, found, "APPLIED in the driver",
                     "segment.* would not be read and plain verl would train, the run does not start",
                     f"ESGRPO_DISABLE={slug} or ESGRPO_STRICT=0 goes on with plain verl")


def _refuse(error: HookError) -> None:
    if engine.strict():
        raise error
    say_once(str(error))
