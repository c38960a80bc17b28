"""What the mixin overrides, calls and reads of vLLM is fingerprinted: the list is derived from its own code."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from esgrpo import config, fingerprint  # noqa: E402
from esgrpo.algo import accounting, segments, terms  # noqa: E402
from esgrpo.hooks.vllm import headroom, logprob_sums, mixin_sources, segment_mixin  # noqa: E402

# what the code calls an object -> the class that is fingerprinted; several where functions use the name for several
OBJECTS = {
    "self": ["sched.scheduler:Scheduler"], "scheduler": ["sched.scheduler:Scheduler"],
    "waiting": ["request_queue:RequestQueue"], "request": ["v1.request:Request"], "pool": ["core.block_pool:BlockPool"],
    "block": ["kv_cache_utils:KVCacheBlock"], "scheduler_output": ["sched.output:SchedulerOutput"],
    "manager": ["single_type_kv_cache_manager:SingleTypeKVCacheManager", "kv_cache_manager:KVCacheManager"],
    "output": ["sched.output:SchedulerOutput", "v1.outputs:ModelRunnerOutput", "v1.engine:EngineCoreOutput"],
    "o": ["v1.engine:EngineCoreOutput"], "logprobs": ["v1.outputs:LogprobsLists"],
    "RequestStatus": ["v1.request:RequestStatus"],
    "kv_cache_manager": ["kv_cache_manager:KVCacheManager"], "coordinator": ["coordinator:KVCacheCoordinator"],
    "requests": ["v1.request:Request"], "kept": ["v1.request:Request"], "outputs": ["v1.engine:EngineCoreOutputs"],
}
# attributes that other supported releases have in the same place
ELSEWHERE = {"async_tokens_to_discard", "discard_latest_async_tokens", "num_stale_output_tokens", "drop_stale_output",
             "cu_num_generated_tokens"}
# objects that are not vLLM's: ours, the standard library's, numpy's, and plain values in vLLM's fields
OURS = (segments.SegmentBook, accounting.Occupancy, logprob_sums.LogprobSums, headroom.Headroom, config.Segment, np,
        np.ndarray, os, dict, terms.Outcome, list, str, set, deque, Counter)


def name_of(node: ast.AST) -> str:
    """The variable, attribute or subscripted container that an expression ends in."""
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def uses(tree: ast.AST):
    """(object, attribute) of everything that is read, written, called or asked for by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Call) and name_of(node.value.func) == "super":
                yield "self", node.attr
            elif name_of(node.value):
                yield name_of(node.value), node.attr
        if isinstance(node, ast.Call) and name_of(node.func) in ("getattr", "hasattr"):
            yield name_of(node.args[0]), node.args[1].value


def code() -> list[tuple[str, ast.AST]]:
    return [(module.__name__, ast.parse(Path(module.__file__).read_text())) for module in (
        segment_mixin, logprob_sums, headroom)]


def own_names() -> set[str]:
    """Methods and attributes of our classes."""
    names = set()
    for _, tree in code():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(
                node, ast.AnnAssign) else []
            for target in [part for t in targets for part in getattr(t, "elts", [t])]:
                if isinstance(target, ast.Attribute) and name_of(target.value) == "self":
                    names.add(target.attr)
    return names


def targets_of(place: str, targets) -> list[str]:
    return [target.removesuffix("?") for target in targets
            if target.partition(":")[0].endswith(place.partition(":")[0])
            and target.removesuffix("?").partition(":")[2].partition(".")[0] == place.partition(":")[2]]


def covered(place: str, attribute: str, targets) -> bool:
    """A method has its own target, or the whole class has; a field comes from __init__ or the whole class."""
    listed = {target.partition(":")[2].partition(".")[2] for target in targets_of(place, targets)}
    if attribute in listed:
        return True
    module = targets_of(place, targets)[:1]
    if not module:
        return False
    module, _, name = module[0].partition(":")
    cls = getattr(importlib.import_module(module), name.partition(".")[0])
    if "" in listed:
        fields = {field for base in cls.__mro__ for field in vars(base).get("__annotations__", {})}
        return attribute in fields | ELSEWHERE or hasattr(cls, attribute)
    if inspect.getattr_static(cls, attribute, None) is not None:
        return False  # a method or property without a target
    return "__init__" in listed and (attribute in ELSEWHERE or f"self.{attribute}" in inspect.getsource(cls.__init__))


def uncovered(targets) -> set[tuple[str, str]]:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    mine, found = own_names(), set()
    for source, tree in code():
        for name, attribute in uses(tree):
            in_mixin = source == segment_mixin.__name__
            if name == "self" and not in_mixin or attribute.startswith("__") and attribute != "__init__":
                continue
            places = OBJECTS.get(name, [])
            if name == "self" and attribute in mine and not hasattr(AsyncScheduler, attribute):
                continue
            if not places or attribute in [*dir(dict), *dir(list)] and name in ("outputs", "requests", "kept"):
                continue
            if not any(covered(place, attribute, targets) for place in places):
                found.add((name, attribute))
    for name in [n for n in vars(segment_mixin.SegmentMixin) if callable(getattr(segment_mixin.SegmentMixin, n))]:
        if name in vars(AsyncScheduler.__mro__[1]) and not covered(OBJECTS["self"][0], name, targets):
            found.add(("override", name))
    return found


def test_everything_that_is_used_of_vllm_is_fingerprinted():
    assert uncovered(mixin_sources.TARGETS) == set()


def test_no_object_of_vllm_is_overlooked():
    """Every attribute in the code belongs to a named object of vLLM's, or to something that is not vLLM's."""
    mine = own_names() | {name for cls in OURS for name in dir(cls)} | set(config.Segment.__dataclass_fields__)
    mine |= {name for module in (segments, accounting) for cls in vars(module).values()
             if hasattr(cls, "__dataclass_fields__") for name in cls.__dataclass_fields__}
    source = "".join(inspect.getsource(module) for module in (segments, accounting, logprob_sums, headroom))
    unknown = {(name, attribute) for _, tree in code() for name, attribute in uses(tree)
               if name not in OBJECTS and attribute not in mine and f".{attribute}" not in source}
    modules = {"dataclasses", "functools", "time", "sys", "super", "config"}
    # fields of what vLLM hands over, reached from fields that are fingerprinted
    assert {(name, attribute) for name, attribute in unknown if name not in modules} <= {
        ("vllm_config", "instance_id"), ("parameters", "extra_args"), ("parameters", "stop"),
        ("sampling_params", "extra_args")}


@pytest.mark.parametrize("target", [t for t in mixin_sources.TARGETS if not t.endswith("__bases__")])
def test_a_target_less_is_noticed(target):
    """Negative control: what only the classes' shapes and upstream's own bookkeeping need is named here."""
    rest = tuple(t for t in mixin_sources.TARGETS if t != target)
    kept_for_its_effect = ("AsyncScheduler", "append_output_token_ids", "cache_blocks")
    assert uncovered(rest) or target.endswith(kept_for_its_effect)


@pytest.mark.parametrize("change", [
    ("class Scheduler(", "class Scheduler(object, "), ("class Scheduler(", "@final\nclass Scheduler("),
    ("APPEND", "\nScheduler.schedule = lambda self: None\n"), ("APPEND", "\nScheduler = wrapped(Scheduler)\n"),
    ("APPEND", "\nsetattr(Scheduler, 'add_request', None)\n"),
    ("APPEND", "\nfrom elsewhere import Faster as Scheduler\n"),
])
def test_what_is_put_in_the_schedulers_place_is_seen(tmp_path, change):
    import shutil

    import vllm

    package = Path(vllm.__file__).parent
    module = Path("v1/core/sched/scheduler.py")
    for parent in [Path(), *reversed(module.parents)]:
        (tmp_path / "vllm" / parent).mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / parent / "__init__.py").touch()
    shutil.copy(package / module, tmp_path / "vllm" / module)
    targets = tuple(t for t in mixin_sources.TARGETS if "sched.scheduler" in t)
    before, _ = fingerprint.of_targets(targets, [str(tmp_path)])
    old, new = change
    text = (tmp_path / "vllm" / module).read_text()
    (tmp_path / "vllm" / module).write_text(text + new if old == "APPEND" else text.replace(old, new, 1))
    fingerprint._tree.cache_clear()
    assert before and fingerprint.of_targets(targets, [str(tmp_path)])[0] != before
