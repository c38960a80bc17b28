"""Hydra's own judgement of overrides: python -m esgrpo.tools.lint.compose < request.json > answer.json

Runs in a process of its own, because Hydra is global, its relative search paths start at the working directory, and
verl's config packages are imported by name (stubs stand for them: importing verl would import torch).
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types

PACKAGES = ("verl", "verl.trainer", "verl.trainer.config")


def _stub(root: str) -> None:
    for name in PACKAGES:
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(root, *name.split("."))]
        module.__file__ = os.path.join(module.__path__[0], "__init__.py")
        module.__spec__ = importlib.machinery.ModuleSpec(name, importlib.machinery.SourceFileLoader(
            name, module.__file__), origin=module.__file__, is_package=True)
        module.__spec__.submodule_search_locations = module.__path__
        sys.modules[name] = module


def _parent(config, key: str) -> tuple[str, str, list[str], str]:
    """(deepest node of `key` that exists, first missing part, what stands beside it, `_target_` of the node)."""
    from omegaconf import DictConfig

    node, path = config, []
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            break
        path.append(part)
        node = node._get_node(part)
        if getattr(node, "_is_interpolation", lambda: False)():
            node = None
    rest = key.split(".")[len(path):]
    known = node if isinstance(node, DictConfig) and not node._is_none() else {}
    return ".".join(path), rest[0] if rest else "", sorted(map(str, known)), str(
        known._get_node("_target_") or "") if "_target_" in known else ""


def _flat(node, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [prefix]
    return [key for name, value in node.items() for key in _flat(value, f"{prefix}.{name}" if prefix else str(name))]


def compose(request: dict) -> dict:
    """{"results": one per override, "config": resolved, "keys": all dotted keys} of what `request` names."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    results: list[dict] = [{} for _ in request["overrides"]]
    with initialize_config_dir(request["config_dir"], version_base=None):
        try:
            base = hydra_compose(request["config_name"])
        except Exception as error:
            return {"broken": _said(error)}
        parser, groups, values = OverridesParser.create(), [], []
        folders = (request["config_dir"], os.path.join(request["root"], *PACKAGES[-1].split(".")))
        for index, text in enumerate(request["overrides"]):
            try:
                override = parser.parse_override(text)
            except Exception as error:
                results[index] = {"error": _said(error), "kind": "syntax"}
                continue
            group = override.package is not None or any(
                os.path.isdir(os.path.join(folder, override.key_or_group)) for folder in folders)
            (groups if group or override.key_or_group.startswith("hydra.") else values).append((index, text, override))
        config = _with_groups(hydra_compose, request["config_name"], groups, results) if groups else base
    OmegaConf.set_struct(config, True)
    keys = _flat(OmegaConf.to_container(config, resolve=False))
    for index, _, override in values:
        key = override.key_or_group
        at, missing, beside, target = _parent(config, key)
        results[index] = {"key": key, "at": at, "missing": missing, "beside": beside, "target": target}
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], config)
        except Exception as error:
            results[index] |= {"error": _said(error), "kind": "key"}
    answer = {"results": results, "keys": keys, "overlay": []}
    if request.get("segment"):
        answer["overlay"] = _overlay(config.copy())
    answer["config"] = _resolved(config)
    return answer


def _said(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _with_groups(hydra_compose, name: str, groups: list, results: list[dict]):
    """The config with every choice of a config group that Hydra accepts."""
    accepted: list[str] = []
    for index, text, _ in groups:
        results[index] = {"key": text.partition("=")[0].lstrip("+~"), "missing": "", "beside": [], "target": ""}
        try:
            hydra_compose(name, overrides=[*accepted, text])
            accepted.append(text)
        except Exception as error:
            results[index] |= {"error": _said(error), "kind": "group"}
    return hydra_compose(name, overrides=accepted)


def _resolved(config):
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(config, resolve=True)
    except Exception:
        return OmegaConf.to_container(config, resolve=False)


def _overlay(config) -> list[dict]:
    """What the overlay's driver would say of this config: changed settings, or its refusal."""
    from omegaconf import OmegaConf

    from esgrpo import config as settings
    from esgrpo.errors import EsgrpoError
    from esgrpo.hooks.verl.run import config_rules

    OmegaConf.set_struct(config, False)
    said: list[dict] = []
    try:
        raw = config.actor_rollout_ref.rollout.get("segment")
        raw = OmegaConf.to_container(raw, resolve=True) if OmegaConf.is_config(raw) else raw
        length = config.data.max_response_length
        length = length if isinstance(length, int) else None
        mistakes = settings.mistakes_of(raw)
        if mistakes:  # all of them at once, where a run stops at the first
            found = [_refusal(error) for error in mistakes]
            open_ = ", ".join(one["unchecked"] for one in found if "unchecked" in one)
            return [one for one in found if "refusal" in one] + [{"unchecked": open_}] * bool(open_)
        segment = settings.parse(raw, length)
        features = config_rules.features_of(config, segment)
        said.append({"features": sorted(features)})
        said += [{"idle": line} for line in settings.idle(segment, length)]
        plan = config_rules.Plan(segment)
        try:
            config_rules.fill(plan, config, features)
        finally:
            said += [{"line": line} for line in plan.lines]
    except EsgrpoError as error:
        said.append(_refusal(error))
    except Exception as error:  # a value that only the environment knows, where a number is needed
        said.append({"unchecked": f"{type(error).__name__}: {_said(error)}"})
    return said


def _refusal(error) -> dict:
    """A refusal; where its value is one that only the environment knows, only that it was not judged. A key that does
    not exist is wrong with any value."""
    from esgrpo import conditions, config
    from esgrpo.tools.lint.rules import PLACEHOLDER

    who, found, *rest = error.args
    exists = not who.startswith(f"{config.PREFIX}.") or any(
        f"{config.PREFIX}.{key}.".startswith(f"{who}.") for key, *_ in conditions.leaves(config.Segment))
    if exists and PLACEHOLDER in str(error):
        return {"unchecked": who}
    return {"refusal": [who, found.replace(PLACEHOLDER, "$..."), *rest]}


def main() -> None:
    request = json.load(sys.stdin)
    _stub(request["root"])
    os.chdir(request["root"])
    json.dump(compose(request), sys.stdout, default=str)


if __name__ == "__main__":
    main()
