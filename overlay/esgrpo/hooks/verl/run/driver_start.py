"""The first thing that verl's mains do with the composed config: validate `segment` and prepare every process."""

from __future__ import annotations

import json
import math
import os
import sys
import sysconfig

from esgrpo.engine import Hook
from esgrpo.errors import ConfigError, EsgrpoError, HookError, say
from esgrpo.hooks.verl.run.trainers import is_fully_async, is_recipe, is_separate, is_v1, of_fully_async

HOOK = Hook(
    slug="driver-start",
    target="verl.utils.device:auto_set_device",
    process=("driver",),
    kind="wrap",
    why="the only function that fully_async_main and main_ppo both call with the composed config before ray.init; "
        "plugins are loaded earlier, without the config",
    remove_when="verl calls a plugin with the composed config before ray.init",
    without=(("==0.7.0", "the recipe fully_async_policy has hooks of its own (partial-*)"),),
)

HANDSHAKES = ("worker-handshake", "partial-handshake")  # the second one is that of verl 0.7.0
V1_HANDSHAKE = "v1-handshake"


def around(call):
    result = call()
    try:
        prepare(call.arguments["config"])
    except EsgrpoError as error:
        sys.exit(str(error))  # one line and exit code 1, no traceback
    return result


def prepare(config) -> None:
    """Validate, hand the settings on in the environment, and apply what waited for the features."""
    from esgrpo import compat, engine, guard, records
    from esgrpo import config as settings
    from esgrpo.algo.rows import Decisions
    from esgrpo.hooks.verl.run.config_rules import features_of

    rollout = config.actor_rollout_ref.rollout
    raw = rollout.get("segment")
    segment = settings.parse(_plain(raw), config.data.max_response_length)
    for line in (*settings.idle(segment, config.data.max_response_length), *_unwritable_history(segment)):
        say(f"esgrpo: {line}")
    features, v1 = features_of(config, segment), is_v1(config)
    segment = _adjust(config, segment, features)
    features &= features_of(config, segment)  # a rule may have taken a switch back
    os.environ[settings.ENV_SEGMENT] = settings.to_json(segment)
    os.environ[settings.ENV_FEATURES] = ",".join(sorted(features))
    os.environ[settings.ENV_FACTS] = json.dumps(_facts(config, segment))
    run_dir = os.environ.setdefault("ESGRPO_RUN_DIR", os.path.abspath(config.trainer.default_local_dir))
    goes_on = config.trainer.get("resume_mode", "auto") != "disable"
    os.environ.update(records.begun(run_dir, goes_on) if features else records.named(records.new_run(), 0))
    if features:
        records.write(Decisions(process="driver", settings=json.loads(settings.to_json(segment)),
                                facts=settings.facts()))
    _reach_every_worker(config)
    engine.refresh()
    rows = engine.states("driver")
    missing = engine.not_in_place(rows)
    if features and not missing:  # before Ray starts; the handshake looks again, on every node
        missing = engine.lost_elsewhere(rows, guard.V1 if v1 else guard.FULLY_ASYNC)
    if missing:
        row = missing[0]
        error = engine.HookError(row["slug"], f"{row['state']} in the driver: {row['detail']}", "APPLIED",
                                 "strict mode stops here", f"ESGRPO_DISABLE={row['slug']} or ESGRPO_STRICT=0 goes on")
        if engine.strict():
            raise error
        say(error)
    states = {row["state"] for row in rows if row["slug"] in ((V1_HANDSHAKE,) if v1 else HANDSHAKES)}
    state = ", ".join(sorted(states))
    if features and not states & {engine.State.APPLIED.value, engine.State.DISABLED.value} and engine.strict():
        raise engine.HookError("worker-handshake", f"{state}: this main is neither verl's fully-async one nor that of "
                               "its v1 trainers", "python -m verl.experimental.fully_async_policy.fully_async_main or "
                               "python -m verl.trainer.main_ppo with trainer.use_v1=True",
                               "nothing would confirm the hooks of the workers, the run does not start",
                               "use that main, drop segment.* and the loss, or set ESGRPO_STRICT=0")
    say(engine.boot_line() + f"; features: {', '.join(sorted(features)) or 'none'}; "
        + compat.verdict(compat.installed(), compat.load()))


def _plain(raw):
    """The group without OmegaConf. Raises ConfigError where an interpolation in it cannot be resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from esgrpo import config as settings

    try:
        return OmegaConf.to_container(raw, resolve=True) if OmegaConf.is_config(raw) else raw
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or settings.PREFIX, str(error).splitlines()[0], "a value that can be resolved",
                          "the run does not start", "set what it refers to, or write the value itself") from None


def _unwritable_history(segment) -> list[str]:
    """A line when history.path cannot be written from here. Another node may see another file system: no refusal."""
    from esgrpo.config import PREFIX

    given = segment.history.path if segment.history.enable else ""
    file = place = os.path.abspath(os.path.expanduser(given))
    while not os.path.exists(place):
        place = os.path.dirname(place)
    problem = ("is a directory" if os.path.isdir(file) else f"{place} is a file" if place != file
               and not os.path.isdir(place) else "" if os.access(place, os.W_OK) else f"{place} is read-only")
    return [f"{PREFIX}.history.path={given}: {problem}; unless the rollouter's node sees another file there, the "
            "history is lost when the run ends"] if given and problem else []


def _facts(config, segment) -> dict:
    """Accelerators (trainer plus standalone rollout), rollout replicas, optimiser steps and prompts of a version."""
    from esgrpo.algo.null_groups import alike_is_null
    from esgrpo.hooks.verl.run.config_rules import optimizer_steps_per_version, prompts_per_version
    from esgrpo.hooks.verl.run.overlap_rules import overlap_fixed
    from esgrpo.hooks.verl.run.pruning_rules import weighs_cut_rows

    rollout = config.get("rollout")
    if is_v1(config):
        rollout = config.actor_rollout_ref.rollout if is_separate(config) else None
    standalone = rollout.nnodes * rollout.n_gpus_per_node if rollout is not None else 0
    trainer = config.trainer.nnodes * config.trainer.n_gpus_per_node
    sizes = (f"{name}_parallel_size" for name in ("tensor_model", "data", "pipeline_model"))
    replica = math.prod(config.actor_rollout_ref.rollout.get(size) or 1 for size in sizes)
    return {"devices": trainer + standalone, "replicas": (standalone or trainer) // replica,
            "optimizer_steps_per_version": optimizer_steps_per_version(config),
            "prompts_per_version": prompts_per_version(config), **_trainer(config),
            "response_length": config.data.max_response_length,
            "overlap_fixed": sorted(overlap_fixed(config, segment)),
            "weighs_cut_rows": weighs_cut_rows(config, segment),
            "alike_is_null": alike_is_null(str(config.algorithm.adv_estimator),
                                           bool(config.algorithm.get("use_kl_in_reward")))}


def _trainer(config) -> dict:
    """Which trainer this is, and how many of its batches it logs together at a weight version."""
    from esgrpo.algo import decisions

    if is_v1(config):
        return {"trainer": config.trainer.v1.trainer_mode, "batches_per_version": 1}
    trainer = decisions.RECIPE if is_recipe(config) else decisions.FULLY_ASYNC if is_fully_async(config) else ""
    return {"trainer": trainer, "batches_per_version": of_fully_async(config).get("trigger_parameter_sync_step", 1)}


def _adjust(config, segment, features):
    """Carry out what config_rules plans: settings of verl that a feature implies, and files; every change is said.

    Returns the settings of the run, with what the plan decided.
    """
    from omegaconf import OmegaConf

    from esgrpo import engine
    from esgrpo.hooks.verl.run import resume_point
    from esgrpo.hooks.verl.run.config_rules import Plan, check_model_path, fill

    check_model_path(config.actor_rollout_ref.model.path)
    resume_point.check(config)
    run_dir = os.environ.get("ESGRPO_RUN_DIR") or os.path.abspath(config.trainer.default_local_dir)
    wanted = Plan(segment)
    fill(wanted, config, features, run_dir, engine.disabled_slugs())
    for path, text in wanted.files.items():
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise EsgrpoError("run directory", str(error), "a place for a file that verl is to read",
                              "what it configures would be missing, the run does not start",
                              "set ESGRPO_RUN_DIR to a directory that every node can write to") from None
    for key, value in wanted.settings.items():
        OmegaConf.update(config, key, value, force_add=True)
    for line in wanted.lines:
        say(f"esgrpo: {line}")
    return wanted.segment


def _reach_every_worker(config) -> None:
    """Put our variables into Ray's runtime_env, which also reaches nodes that are already up."""
    from omegaconf import OmegaConf, open_dict

    from esgrpo import config as settings
    from esgrpo import records

    given = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    overlay = os.path.dirname(os.path.dirname(os.path.abspath(settings.__file__)))
    python_path = given.get("PYTHONPATH")
    places = (overlay, sysconfig.get_path("purelib"))  # an editable install has its .pth in site-packages only
    installed = any(os.path.exists(os.path.join(place, "esgrpo.pth")) for place in places)
    if (python_path is not None and not installed
            and overlay not in map(os.path.abspath, python_path.split(os.pathsep))):
        raise HookError("ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH", python_path, f"a path with {overlay}",
                        "the overlay would be lost in every Ray worker, the run does not start",
                        "append it there, or pip install esgrpo")
    names = ("ESGRPO_ENABLE", "ESGRPO_PREFIX", "ESGRPO_DISABLE", "ESGRPO_STRICT", "ESGRPO_RUN_DIR", "VERL_PLATFORM",
             records.ENV_RUN_ID, records.ENV_RESTART, settings.ENV_SEGMENT, settings.ENV_FEATURES, settings.ENV_FACTS)
    ours = {name: os.environ[name] for name in names if name in os.environ}
    with open_dict(config):
        OmegaConf.update(config, "ray_kwargs.ray_init.runtime_env.env_vars", {**ours, **dict(given)}, force_add=True)
