"""Each hook in turn is drifted, absent or switched off, and verl's own mains start: refused in one line, or not needed.

The mains run to the point where they would start Ray. A hook is drifted in the registry, as if its source had another
fingerprint; what was applied is reverted, so that the run has to do without.
"""

from __future__ import annotations

import json

import pytest

from ci.tests.contract.test_driver_start import BASE, ENVIRONMENT, LOSS, SEGMENT
from esgrpo import engine, releases

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

EVERYTHING = [*BASE, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
              "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", f"{LOSS}=pois",
              "actor_rollout_ref.rollout.n=4", "trainer.v1.trainer_mode=separate_async",
              "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward",
              *[f"{SEGMENT}.{setting}" for setting in ("profile=elastic", "segment_length=64", "boundary=yield",
                                                       "prune.resolved.enable=True",
                                                       "prune.treatment=doubly_robust",
                                                       "dmmpt.enable=True", "routing.tail_share=0.5",
                                                       "overlap.enable=True")]]
# slug -> why no strict run on this stack asks for it
NOT_ASKED = {
    "add-hccl-collective-group": "its users switch it on",
}
ON = {"observe", "segment", "prune", "yield", "pois", "dmmpt", "history", "routing", "sampler", "weighted",
      "keep", "tails", "token_outputs", "null_groups", "overlap", "cpu"}
FEATURES = {"fully-async": ON, "v1": ON | {"v1"}}
MODES = ("drifted", "absent", "lenient", "disabled")

SCRIPT = """
import dataclasses, functools, io, json, os, pickle, sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
import ray, verl
import verl.utils.device as device
import verl.trainer.main_ppo as v1
import verl.experimental.fully_async_policy.fully_async_main as fully_async
from esgrpo import engine, fingerprint, guard, recorded, releases

# nothing on disk changes here
releases.installed = functools.cache(releases.installed)
fingerprint.of_targets = functools.cache(fingerprint.of_targets)
OmegaConf.load = functools.cache(OmegaConf.load)

class Started(BaseException):
    pass

def init(*args, **kwargs):
    raise Started

ray.init, ray.is_initialized = init, lambda: False
VARIABLES = ("ESGRPO_SEGMENT", "ESGRPO_FEATURES", "ESGRPO_FACTS", "ESGRPO_RUN_DIR", "ESGRPO_RUN_ID", "ESGRPO_DISABLE")

def composed(module, name, overrides):
    with initialize_config_dir(os.path.join(os.path.dirname(module.__file__), "config"), version_base=None):
        return pickle.dumps(compose(name, overrides=overrides))

overrides, asked = json.load(sys.stdin)
mains = {"fully-async": (fully_async, composed(fully_async, "fully_async_ppo_trainer", overrides)),
         "v1": (v1, composed(v1, "ppo_trainer", overrides))}

def start(kind):
    for variable in VARIABLES[:-1]:
        os.environ.pop(variable, None)
    guard._said.clear()
    module, config = mains[kind]
    for main in (fully_async, v1):
        main.auto_set_device = device.auto_set_device if CALLED else lambda config: None
    sys.stderr = said = io.StringIO()
    try:
        module.main.__wrapped__(pickle.loads(config))
        end = "returned"
    except Started:
        end = "started"
    except SystemExit as error:
        end = str(error)
    except Exception as error:
        end = f"traceback: {type(error).__name__}: {error}"
    finally:
        sys.stderr = sys.__stderr__
    return {"end": end, "said": said.getvalue()}

def lose(record, mode):
    if mode == "absent":
        record.hook = dataclasses.replace(record.hook, target=record.hook.target + "_gone")
    elif mode != "disabled" and not record.hook.unguarded:
        hooks = recorded.of_upstream(record.hook.upstream).hooks
        hooks[slug] = recorded.Recorded({version: "0" * 16 for version in hooks[slug].fingerprints})

CALLED = True
answers = {"whole": {kind: start(kind) for kind in mains}}
for slug, record in engine.load_hooks().items():
    whole, sources = record.hook, recorded.of_hook(record.hook)
    for mode in MODES:
        os.environ["ESGRPO_STRICT"] = "0" if mode == "lenient" else "1"
        os.environ.pop("ESGRPO_DISABLE", None)
        if mode == "disabled":
            os.environ["ESGRPO_DISABLE"] = slug
        if whole.kind != "add":
            engine.revert(slug)
        before = record.state, record.detail
        lose(record, mode)
        record.state, record.detail, _ = engine.check(record.hook)
        if record.state is engine.State.NOT_NEEDED:  # by the features of the start before: a target not imported waits
            record.state = engine.State.PENDING
        answers[f"{slug} {mode}"] = {"state": record.state.value, "detail": record.detail,
                                     **{kind: start(kind) for kind in asked[slug]}}
        record.hook, (record.state, record.detail) = whole, before
        if not whole.unguarded:
            recorded.of_upstream(whole.upstream).hooks[slug] = sources
        os.environ.pop("ESGRPO_DISABLE", None)
        engine.refresh()
    os.environ["ESGRPO_STRICT"] = "1"
CALLED = False
answers["call deleted"] = {kind: start(kind) for kind in mains}
os.environ["ESGRPO_STRICT"] = "0"
answers["call deleted, lenient"] = {kind: start(kind) for kind in mains}
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(forked_python, tmp_path_factory) -> dict:
    done = forked_python("-c", SCRIPT.replace("MODES:", f"{MODES}:"),
                         given=json.dumps([EVERYTHING, {slug: starts_for(slug) for slug in engine.load_hooks()}]),
                         timeout=560, cwd=tmp_path_factory.mktemp("lost"), **ENVIRONMENT)
    line = next((x for x in done.stdout.splitlines() if x.startswith("ANSWERS")), None)
    assert line, done.stderr[-3000:]
    return json.loads(line.removeprefix("ANSWERS"))


def hook_of(slug: str):
    return engine.load_hooks()[slug].hook


def asked_by(slug: str) -> list[str]:
    """The mains that have a process which needs this hook."""
    from esgrpo import guard

    processes = {"fully-async": guard.FULLY_ASYNC, "v1": guard.V1}
    hook = hook_of(slug)
    return [kind for kind in processes if not processes[kind].isdisjoint(hook.process)
            and (not hook.features or not FEATURES[kind].isdisjoint(hook.features)) and not engine.has_no_place(
                hook, releases.installed(hook.upstream) or "0")]


def starts_for(slug: str) -> list[str]:
    """One main is enough for a hook: v1's where only that asks for it."""
    return (asked_by(slug) or ["fully-async"])[:1]


def test_a_whole_overlay_starts(answers):
    """Negative control of all that follows."""
    assert {kind: answer["end"] for kind, answer in answers["whole"].items()} == {
        "fully-async": "started", "v1": "started"}


@pytest.mark.parametrize("mode", ["drifted", "absent"])
@pytest.mark.parametrize("slug", engine.load_hooks())
def test_a_lost_hook_is_refused_in_one_line_or_not_needed(answers, slug, mode):
    answer = answers[f"{slug} {mode}"]
    ends = {kind: answer[kind]["end"] for kind in starts_for(slug)}
    reason = engine.has_no_place(hook_of(slug), releases.installed(hook_of(slug).upstream) or "0")
    without_source = mode == "drifted" and hook_of(slug).unguarded  # presumes no source: only read back
    if reason or slug in NOT_ASKED or without_source:
        assert set(ends.values()) == {"started"}
        return
    assert asked_by(slug), "no main asks for this hook"
    for kind, end in ends.items():
        assert end.startswith(f"esgrpo: {slug}: ") and end.count(" | ") == 3 and "\n" not in end, (kind, end)
        assert f"ESGRPO_DISABLE={slug}" in end and "ESGRPO_STRICT=0" in end


@pytest.mark.parametrize("mode", ["lenient", "disabled"])
@pytest.mark.parametrize("slug", engine.load_hooks())
def test_both_ways_out_start_and_are_said(answers, slug, mode):
    answer = answers[f"{slug} {mode}"]
    for kind in starts_for(slug):
        assert answer[kind]["end"] == "started", (kind, answer[kind]["end"])
        silent = kind not in asked_by(slug) or hook_of(slug).unguarded
        assert slug in answer[kind]["said"] or silent


def test_a_main_that_no_longer_calls_the_hooked_function_is_refused(answers):
    for kind in ("fully-async", "v1"):
        end = answers["call deleted"][kind]["end"]
        assert end.startswith("esgrpo: driver-start: APPLIED, but no settings have reached") and "\n" not in end
        lenient = answers["call deleted, lenient"][kind]
        assert lenient["end"] == "started" and "plain verl would train" in lenient["said"]
