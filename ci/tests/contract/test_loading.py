"""How the overlay gets into an interpreter, and that it stays out of all others."""

import json
import os
import sys

import pytest

LOADED = "import json, sys; print(json.dumps([m for m in sys.argv[1:] if m in sys.modules]))"
MODULES = ("esgrpo", "esgrpo.boot", "esgrpo.engine", "wrapt", "site_says")


@pytest.fixture
def shadowed(tmp_path):
    """A directory with another sitecustomize, which leaves a trace."""
    directory = tmp_path / "shadowed"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text("import site_says\n"
                                                "assert __name__ == __spec__.name == 'sitecustomize'\n"
                                                "assert __file__ == __spec__.origin == __loader__.path\n")
    (directory / "site_says.py").write_text("")
    return directory


@pytest.fixture
def loaded(run_python, overlay, shadowed):
    def ask(*path, **variables):
        done = run_python("-c", LOADED, *MODULES, path=path or (overlay, shadowed), **variables)
        return set(json.loads(done.stdout)), done.stderr

    return ask


ON = {"ESGRPO_ENABLE": "1"}


@pytest.mark.parametrize("variables", [{}, {"ESGRPO_ENABLE": "0"}, {"ESGRPO_ENABLE": ""}, {"ESGRPO_ENABLE": "true"}])
def test_disabled_is_the_shadowed_sitecustomize_and_nothing_else(loaded, variables):
    assert loaded(**variables) == ({"site_says"}, "")


def test_disabled_imports_next_to_nothing(run_python, overlay):
    """importlib.util alone would make a bare start a quarter longer (bench/startup.py)."""
    script = "import sys; print(*sorted(sys.modules))"
    bare, overlaid = (set(run_python("-c", script, path=path).stdout.split()) for path in ((), (overlay,)))
    assert overlaid - bare <= {"sitecustomize", "importlib", "importlib.machinery", "importlib._bootstrap",
                               "importlib._bootstrap_external", "warnings", "_warnings"}


def test_enabled_is_both(loaded):
    assert loaded(**ON) == (set(MODULES), "")


def test_without_the_overlay_on_the_path_nothing_is_loaded(loaded, shadowed, installed):
    if installed:
        pytest.skip("the environment has the package, which loads without a path")
    assert loaded(shadowed, **ON) == ({"site_says"}, "")


def test_a_foreign_prefix_gets_no_hooks(loaded):
    assert loaded(**ON, ESGRPO_PREFIX="/another/venv") == ({"esgrpo", "esgrpo.boot", "site_says"}, "")
    assert loaded(**ON, ESGRPO_PREFIX=sys.prefix)[0] == set(MODULES)


def test_chained_files_that_chain_back_do_not_loop(loaded, overlay, shadowed, tmp_path):
    """A second checkout, a link to the first, and a tool that runs whatever stands before it."""
    (tmp_path / "link").symlink_to(overlay)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "sitecustomize.py").write_text(open(os.path.join(overlay, "sitecustomize.py"), encoding="utf-8").read())
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "sitecustomize.py").write_text("import runpy, sys; runpy.run_path(sys.path[0] + '/sitecustomize.py')\n"
                                           "import site_says\n")
    assert loaded(overlay, tmp_path / "link", copy, overlay, shadowed) == ({"site_says"}, "")
    assert loaded(overlay, tool, shadowed) == ({"site_says"}, "")


def test_hooks_are_registered(run_python, overlay):
    script = ("from esgrpo import engine; import wrapt.importer\n"
              "targets = {r.hook.module for r in engine.load_hooks().values() if r.hook.upstream != 'python'}\n"
              "print(len(targets), len(targets - set(wrapt.importer._post_import_hooks)))")
    wanted, missing = run_python("-c", script, path=(overlay,), **ON).stdout.split()
    assert int(wanted) > 5 and missing == "0"
    assert run_python("-c", script, path=(overlay,)).stdout.split() == [wanted, wanted]  # negative control


@pytest.mark.parametrize("stub", ["raise ImportError('two\\nlines')\n", "raise RuntimeError('no')\n", "def oops(:\n"])
def test_a_broken_wrapt_costs_one_line(loaded, shadowed, overlay, tmp_path, stub):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "wrapt.py").write_text(stub)
    found, errors = loaded(tmp_path / "broken", overlay, shadowed, **ON)
    assert "site_says" in found  # the program and the shadowed file go on
    assert errors.count("\n") == 1 and errors.startswith("esgrpo: boot: ") and "install wrapt" in errors
    assert loaded(tmp_path / "broken", overlay, shadowed)[1] == ""


def test_a_shadowed_file_that_raises_is_reported_as_without_us(run_python, overlay, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    for path in ((tmp_path / "bad",), (overlay, tmp_path / "bad")):
        assert "ValueError: theirs" in run_python("-c", "", path=path).stderr


RUN_SCRIPT = "from esgrpo import engine; print(engine._booted)"


def test_run_loads_the_overlay(run_python, overlay):
    assert run_python("-c", RUN_SCRIPT, path=(overlay,)).stdout == "False\n"
    done = run_python("-m", "esgrpo", "run", "--", sys.executable, "-c", RUN_SCRIPT, path=(overlay,))
    assert done.stdout == "True\n"


# A target in the standard library, so that no upstream is needed; the parent never imports it.
SPAWN = """
import multiprocessing, sys

def child(queue):
    import colorsys
    queue.put([getattr(colorsys.rgb_to_hsv, "__esgrpo__", None), multiprocessing.parent_process() is not None])

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(*queue.get(timeout=60), "colorsys" in sys.modules)
    process.join(60)
"""
HOOKED = """
import functools, types
from esgrpo import engine
hook = engine.Hook("a", "colorsys:rgb_to_hsv", ("driver",), "wrap", "why", "when", unguarded="a test")
build = lambda original: functools.wraps(original)(lambda *args: original(*args))
engine._records["a"] = engine.Record(hook, types.SimpleNamespace(build=build))
engine.boot()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_child_process_sees_the_hook(run_python, overlay, tmp_path, method):
    """vLLM starts EngineCore as a spawned interpreter: only the environment reaches it."""
    (tmp_path / "spawn.py").write_text(SPAWN)
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text(HOOKED)
    done = run_python("spawn.py", method, path=(tmp_path / "hooks", overlay))
    assert done.stdout.split() == ["a", "True", "False"]
    assert run_python("spawn.py", method, path=(overlay,)).stdout.split() == ["None", "True", "False"]


def test_a_spawned_child_of_run_is_booted(run_python, overlay, tmp_path):
    (tmp_path / "spawn.py").write_text(SPAWN.replace(
        'import colorsys\n    queue.put([getattr(colorsys.rgb_to_hsv, "__esgrpo__", None)',
        'engine = sys.modules.get("esgrpo.engine")\n    queue.put([engine and engine._booted'))
    done = run_python("-m", "esgrpo", "run", "--", sys.executable, "spawn.py", "spawn", path=(overlay,))
    assert done.stdout.split() == ["True", "True", "False"]
    assert run_python("spawn.py", "spawn", path=(overlay,)).stdout.split() == ["None", "True", "False"]
