"""Which replacements of an actor's methods survive Ray's pickling, and which vanish without an error.

This table is the contract under the engine: Ray ships a class that is decorated in its own module by value. Driver and
workers load the same sitecustomize, which installs one hook per row; each row has its own modules, so that no row
changes another. If an upstream release turns a "lost" into "kept", the engine may become simpler; a "kept" that
becomes "lost" would be a silent failure of every run.
"""

import json
import os

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.real, pytest.mark.slow]

BASE = """
class Base:
    def m(self): return "original"
"""
ACTOR = """
import ray
from base_ROW import Base

@ray.remote(num_cpus=0)
class Actor(Base):
    def own(self): return "original"
"""
ASYNC_ACTOR = ACTOR + """
    async def own_async(self): return "original"
"""
PLAIN = """
class Actor:
    def own(self): return "original"
    async def own_async(self): return "original"
"""
# One function per row, called with the module when it is imported (`when` in ROWS), in the driver and in workers.
SITECUSTOMIZE = '''
import functools, os, sys, types
import wrapt

def plain(original):
    @functools.wraps(original)
    def replacement(*args, **kwargs): return "hooked"
    return replacement

def plain_async(original):
    @functools.wraps(original)
    async def replacement(*args, **kwargs): return "hooked"
    return replacement

def proxy(wrapped, instance, args, kwargs): return "hooked"

def base_plain(module): module.Base.m = plain(module.Base.m)
def base_wrapt(module): wrapt.wrap_function_wrapper(module, "Base.m", proxy)
def base_plain_late(module): base_plain(sys.modules[module.Base.__module__])
def modified_plain(module):
    cls = module.Actor.__ray_metadata__.modified_class
    cls.own = plain(cls.own)
def modified_async(module):
    cls = module.Actor.__ray_metadata__.modified_class
    cls.own_async = plain_async(cls.own_async)
def modified_wrapt(module):
    wrapt.wrap_function_wrapper(module.Actor.__ray_metadata__.modified_class, "own", proxy)
def handle_plain(module): module.Actor.own = plain(lambda self: None)
def handle_wrapt(module): module.Actor.own = wrapt.FunctionWrapper(lambda self: None, proxy)
def subclass(module):
    import ray
    base = module.Actor.__ray_metadata__.modified_class.__ray_actor_class__
    class Actor(base):
        def own(self): return "hooked"
    module.Actor = ray.remote(num_cpus=0)(Actor)
def class_plain(module): module.Actor.own = plain(module.Actor.own)
def nothing(module): pass

ROWS = {rows}
for row, (action, module, _) in ROWS.items():
    if action.startswith("engine"):
        from esgrpo import engine
        build = plain_async if action == "engine_async" else plain
        name = "own_async" if action == "engine_async" else "own"
        hook = engine.Hook(row, module + ":Actor." + name, ("driver",), "wrap", "why", "when", unguarded="a test")
        engine._records[row] = engine.Record(hook, types.SimpleNamespace(build=build))
    else:
        wrapt.when_imported(module)(globals()[action])
from esgrpo import engine
engine.boot()
'''
DRIVER = """
import importlib, json, os, sys
import ray

NOWHERE = {"env_vars": {"PYTHONPATH": sys.argv[1]}}
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
answers = {}
for row, (_, module, method) in json.loads(sys.argv[2]).items():
    Actor = importlib.import_module("actor_" + row).Actor
    if not hasattr(Actor, "remote"):
        Actor = ray.remote(num_cpus=0)(Actor)
    actor = Actor.options(runtime_env=NOWHERE if row.endswith("_nowhere") else None).remote()
    answers[row] = ray.get(getattr(actor, method).remote(), timeout=60)
    ray.kill(actor)
    print("row", row, answers[row], file=sys.stderr, flush=True)
from esgrpo import engine
answers["ray"] = ray.__version__
answers["driver states"] = {slug: record.state.value for slug, record in engine._records.items()}
print(json.dumps(answers))
"""
RAY_PATH, RAY_VERSION = "ESGRPO_RAY_PATH", "ESGRPO_RAY_VERSION"
KEPT, LOST = "hooked", "original"
# row: (action, the module whose import triggers it, the method that is called, what the worker answers)
ROWS = {
    "untouched": ("nothing", "actor_untouched", "own", LOST),
    "base_plain": ("base_plain", "base_base_plain", "m", KEPT),
    "base_wrapt": ("base_wrapt", "base_base_wrapt", "m", LOST),
    "base_late": ("base_plain_late", "actor_base_late", "m", LOST),
    "modified_plain": ("modified_plain", "actor_modified_plain", "own", KEPT),
    "modified_async": ("modified_async", "actor_modified_async", "own_async", KEPT),
    "modified_wrapt": ("modified_wrapt", "actor_modified_wrapt", "own", LOST),
    "handle_plain": ("handle_plain", "actor_handle_plain", "own", LOST),
    "handle_wrapt": ("handle_wrapt", "actor_handle_wrapt", "own", LOST),
    "redecorated_subclass": ("subclass", "actor_redecorated_subclass", "own", KEPT),
    "by_reference": ("class_plain", "actor_by_reference", "own", KEPT),
    "by_reference_nowhere": ("class_plain", "actor_by_reference_nowhere", "own", LOST),
    "engine_value": ("engine", "actor_engine_value", "own", KEPT),
    "engine_value_async": ("engine_async", "actor_engine_value_async", "own_async", KEPT),
    "engine_reference": ("engine", "actor_engine_reference", "own", KEPT),
    "engine_reference_async": ("engine_async", "actor_engine_reference_async", "own_async", KEPT),
    # By value the method travels with the class, so it even reaches a worker without the overlay.
    "engine_value_nowhere": ("engine", "actor_engine_value_nowhere", "own", KEPT),
    "engine_reference_nowhere": ("engine", "actor_engine_reference_nowhere", "own", LOST),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory, overlay, clean_environment, ray_driver):
    """What each row's actor said; one Ray cluster for all rows."""
    directory = tmp_path_factory.mktemp("survival")
    modules, site = directory / "modules", directory / "site"
    modules.mkdir()
    site.mkdir()
    rows = {row: fields[:3] for row, fields in ROWS.items()}
    for row, (_, _, method) in rows.items():
        reference = "reference" in row
        actor = PLAIN if reference else ASYNC_ACTOR if method.endswith("async") else ACTOR
        (modules / f"base_{row}.py").write_text(BASE)
        (modules / f"actor_{row}.py").write_text(actor.replace("ROW", row))
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.replace("{rows}", repr(rows)))
    ray_path = os.environ.get(RAY_PATH, "")  # the matrix runs this on other releases, too
    path = [str(p) for p in (ray_path, site, overlay, modules) if p]
    environment = {**clean_environment, "PYTHONPATH": os.pathsep.join(path), "RAY_USAGE_STATS_ENABLED": "0"}
    nowhere = os.pathsep.join(p for p in (ray_path, str(modules)) if p)
    done = ray_driver(DRIVER, nowhere, json.dumps(rows), env=environment, cwd=directory)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_ran_on_the_release_that_was_asked_for(answers):
    import ray

    assert answers["ray"] == os.environ.get(RAY_VERSION, ray.__version__)


@pytest.mark.parametrize("row", ROWS)
def test_survival(answers, row):
    assert answers[row] == ROWS[row][3]


def test_the_engine_said_so_for_its_rows(answers):
    """The losses above are silent: only rows of the engine have a state, and each of them was applied in the driver."""
    assert answers["driver states"] == {row: "APPLIED" for row in ROWS if row.startswith("engine")}
