"""What every hook file must declare, checked without applying any; and drift of the installed upstreams."""

import ast
import importlib
import itertools
import re
from pathlib import Path

import pytest

from ci import record_hooks
from esgrpo import engine, fingerprint, hooks, recorded, releases
from esgrpo.algo.terms import Feature, Process
from esgrpo.call import wrapped
from esgrpo.errors import HookError
from esgrpo.tools import drift as drift_of

HOOKS = Path(importlib.import_module("esgrpo.hooks").__file__).parent
FILES = sorted(path for path in HOOKS.rglob("*.py") if path.name != "__init__.py")
UPSTREAMS = {"verl", "vllm", "vllm_ascend", "torch", "torch_npu", "ray", "transformers", "tensordict", "omegaconf",
             "hydra", "mindspeed", "megatron", "wrapt"}
HOOK_FILES = hooks.files()
UPSTREAM_FILES = sorted(path.stem for path in recorded.DIRECTORY.glob("*.toml"))
# 0, 1 and -1 index and count; anything else is a decision, and decisions live in algo/ or in the config.
PLAIN_NUMBERS = {0, 1, -1}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def label(path: Path) -> str:
    return path.relative_to(HOOKS).with_suffix("").as_posix().replace("/", ".")


@pytest.fixture(params=HOOK_FILES)
def code(request):
    return importlib.import_module(f"esgrpo.hooks.{request.param}")


def test_every_file_with_a_hook_is_found():
    """By its text at the start of a process; here by its syntax."""
    declared = [label(path) for path in FILES if any(
        isinstance(node, (ast.Assign, ast.AnnAssign)) and "HOOK" in ast.unparse(node).split("=")[0]
        for node in tree(path).body)]
    assert HOOK_FILES == sorted(declared) and len(declared) > 1


def test_hooks_on_the_same_target_say_which_one_wraps_the_other():
    """Not the names of their files decide, unless no release has a place for both."""
    def inner(hook):
        return {slug for name in hook.after for slug in (name, *inner(loaded[name]))}

    def together(one, other):
        versions = {v.partition("+")[0] for hook in (one, other) for v in recorded.of_hook(hook).fingerprints}
        return any(not engine.has_no_place(one, v) and not engine.has_no_place(other, v) for v in versions)

    loaded = {slug: record.hook for slug, record in engine.load_hooks().items()}
    pairs = [(one, other) for one, other in itertools.combinations(loaded.values(), 2)
             if one.target == other.target and together(one, other)]
    assert len(pairs) > 1
    assert [(a.slug, b.slug) for a, b in pairs if a.slug not in inner(b) and b.slug not in inner(a)] == []
    order = list(loaded)
    assert all(order.index(slug) < order.index(hook.slug) for hook in loaded.values() for slug in inner(hook))
    assert all(loaded[slug].target == hook.target for hook in loaded.values() for slug in hook.after)


def test_slugs_are_unique():
    slugs = [importlib.import_module(f"esgrpo.hooks.{name}").HOOK.slug for name in HOOK_FILES]
    assert len(set(slugs)) == len(slugs)


def test_the_declaration_is_complete(code):
    hook = code.HOOK
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)+", hook.slug), hook.slug
    assert hook.kind in ("wrap", "replace", "add")
    assert hook.process and len(set(hook.process)) == len(hook.process)
    assert len(hook.why) > 20 and len(hook.remove_when) > 5 and code.__doc__
    for target in (hook.target, *hook.relies_on, *hook.rebinds):
        assert re.fullmatch(r"[\w.]+:[\w.]+\??", target), target
    assert not hook.target.endswith("?")
    known = recorded.of_hook(hook)
    assert bool(known.fingerprints) != bool(hook.unguarded), "python -m ci.record_hooks has not been run"
    assert all(re.fullmatch("[0-9a-f]{16}", f) for f in (*known.fingerprints.values(), *known.cured.values()))


def test_every_word_of_the_vocabulary_is_used():
    hooks = [importlib.import_module(f"esgrpo.hooks.{name}").HOOK for name in HOOK_FILES]
    assert {word for hook in hooks for word in hook.process} == set(Process)
    assert {word for hook in hooks for word in hook.features} <= set(Feature)


@pytest.mark.parametrize("field, words", [("process", ("agent-lop-worker",)), ("features", ("observe", "sampling"))])
def test_a_word_that_nothing_ever_matches_is_refused(field, words):
    declared = {"process": ("driver",), **{field: words}}
    with pytest.raises(HookError) as refusal:
        engine.Hook("a-hook", "verl:f", kind="wrap", why="", remove_when="", **declared)
    assert f"{field} {words[-1]!r}" in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_fingerprints_are_those_of_hooks():
    """No entry of a hook that is gone, and a file as the command writes it."""
    for upstream in UPSTREAM_FILES:
        of = recorded.of_upstream(upstream)
        assert set(of.hooks) == {hook.slug for hook in drift_of.guarded_hooks(upstream)}
        assert recorded.path_of(upstream).read_text(encoding="utf-8") == record_hooks.text_of(of)


def test_without_its_file_no_hook_of_an_upstream_acts(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "DIRECTORY", tmp_path)
    recorded.of_upstream.cache_clear()
    with pytest.raises(HookError, match="verl.toml: FileNotFoundError.*no hook of it acts"):
        recorded.of_hook(engine.load_hooks()["driver-start"].hook)
    monkeypatch.undo()
    assert recorded.of_hook(engine.load_hooks()["driver-start"].hook).fingerprints


def test_a_strict_run_reaches_it(code):
    """Other releases of verl lack hooks that a run needs: there, and in a trainer that is refused, none would act."""
    whole = {"0.7.0", "0.9.1"}  # of which each hook is either declared or said to have no place
    assert code.HOOK.upstream != "verl" or whole & recorded.of_hook(code.HOOK).fingerprints.keys()


def test_the_git_patches_that_a_release_presumes_exist(code):
    for specifier, slugs in code.HOOK.patches:
        having = [version for version in recorded.of_hook(code.HOOK).fingerprints
                  if engine.presumed_patches(code.HOOK, version) == list(slugs)]
        assert having, specifier
        for version in having:
            directory = HOOKS.parents[2] / "patches" / code.HOOK.upstream / f"v{version}"
            assert [slug for slug in slugs if not (directory / f"{slug}.patch").is_file()] == []


def test_the_file_has_what_its_kind_needs(code):
    if code.HOOK.kind == "add":
        assert callable(code.apply) and callable(code.installed) and not (
            {"build", "around"} & vars(code).keys())
    else:
        made = {"build", "around"} & vars(code).keys()
        assert len(made) == 1 and callable(getattr(code, *made)) and not hasattr(code, "apply")
        reasoned = re.search(r"^def build\(original\):  # \w+", Path(code.__file__).read_text(), re.M)
        assert made == {"around"} or reasoned, "why around(call) will not do stands behind build"


def test_a_replacement_is_a_plain_function_that_keeps_its_original(code):
    """Ray ships functions by value and drops proxies; `carries` and upstream's own introspection need __wrapped__."""
    if code.HOOK.kind == "add":
        assert not isinstance(code.apply, type)
        return

    def original(self=None):
        """Original."""

    replacement = wrapped(code, original)
    assert type(replacement) is type(original) and replacement.__wrapped__ is original
    assert replacement.__doc__ == "Original."


def drift(hook, known: recorded.Recorded) -> list[str]:
    """Differences between the installed upstream and what was tested, one line each."""
    version = releases.installed(hook.upstream)
    if hook.unguarded or not version or engine.has_no_place(hook, version):
        return []
    cured = {f for v, f in known.cured.items() if v == version}
    if fingerprint.of_targets((hook.target,))[0] in cured:
        return []
    found, missing = fingerprint.of_targets((hook.target, *hook.relies_on))
    tested = known.fingerprints.get(version)
    return [] if found is not None and found == tested else [f"{hook.slug}: found {found or missing}, tested {tested}"]


def test_the_installed_upstream_is_the_tested_one(code):
    pytest.importorskip("verl")
    pytest.importorskip("vllm")
    assert drift(code.HOOK, recorded.of_hook(code.HOOK)) == []


def test_drift_is_noticed():
    """Negative control of the test above, on a real declaration."""
    import dataclasses

    hook = importlib.import_module("esgrpo.hooks.verl.run.driver_start").HOOK
    known = recorded.of_hook(hook)
    assert drift(hook, known) == []
    assert drift(hook, recorded.Recorded({"0.9.1": "0" * 16}))
    assert drift(dataclasses.replace(hook, target=hook.target + "_gone"), known)
    here = fingerprint.of_targets((hook.target,))[0]
    assert drift(hook, recorded.Recorded({"0.9.1": "0" * 16}, {"0.9.0": here}))  # cured in another release only
    assert drift(hook, recorded.Recorded({"0.9.1": "0" * 16}, {"0.9.1": here})) == []


def module_level_imports(module: ast.Module):
    """Roots of what is imported when the file is imported: everything outside function bodies."""
    pending = list(module.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))


def numbers(module: ast.Module):
    """Numeric literals that decide something: all but 0, 1, -1, subscripts and UPPER_CASE constants of the module."""
    constants = [node for node in module.body if isinstance(node, ast.Assign)
                 and all(isinstance(t, ast.Name) and re.fullmatch("_?[A-Z][A-Z0-9_]*", t.id) for t in node.targets)]
    subscripts = [node.slice for node in ast.walk(module) if isinstance(node, ast.Subscript)]
    allowed = {id(inner) for node in constants + subscripts for inner in ast.walk(node)}
    for node in ast.walk(module):
        value = getattr(node, "value", None)
        number = isinstance(node, ast.Constant) and isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and id(node) not in allowed and value not in PLAIN_NUMBERS:
            yield f"line {node.lineno}: {value!r}"


@pytest.mark.parametrize("path", FILES, ids=map(label, FILES))
def test_importing_a_hook_file_imports_no_upstream(path):
    assert set(module_level_imports(tree(path))) & UPSTREAMS == set()


@pytest.mark.parametrize("path", FILES, ids=map(label, FILES))
def test_hooks_decide_nothing(path):
    assert list(numbers(tree(path))) == []


def test_the_checks_above_can_fail():
    source = ("import torch.nn\nLIMIT = 7\nclass C:\n    from vllm import x\n    def f(self):\n        import verl\n"
              "        return 2 + LIMIT[3] - 1\nlimit = 5.5\nif True:\n    from os import path\n")
    assert set(module_level_imports(ast.parse(source))) == {"torch", "vllm", "os"}
    assert list(numbers(ast.parse(source))) == ["line 8: 5.5", "line 7: 2"]


def test_importing_every_hook_file_loads_no_upstream(run_python, overlay):
    script = ("import sys; from esgrpo import engine; engine.load_hooks()\n"
              f"print(sorted({UPSTREAMS!r} & set(sys.modules)))")
    assert run_python("-c", script, path=(overlay,)).stdout == "[]\n"


def slugs_of_tests(module: ast.Module) -> dict[str, list[str]]:
    """Names of the test functions by the slugs that @pytest.mark.hook(...) gives them."""
    found = {}
    for node in module.body:
        calls = [mark for mark in getattr(node, "decorator_list", ()) if isinstance(mark, ast.Call)
                 and ast.unparse(mark.func) == "pytest.mark.hook"]
        for slug in (argument.value for call in calls for argument in call.args):
            found.setdefault(slug, []).append(node.name)
    return found


def test_every_hook_has_a_test_of_its_name():
    """`pytest -k SLUG` shows what the hook does."""
    marked = [slugs_of_tests(tree(path)) for path in Path(__file__).parents[1].rglob("test_*.py")]
    slugs = {importlib.import_module(f"esgrpo.hooks.{name}").HOOK.slug for name in HOOK_FILES}
    assert set().union(*marked) == slugs
    assert all(name.startswith("test_") for tests in marked for names in tests.values() for name in names)


def test_a_hook_without_a_test_would_be_seen():
    source = '@pytest.mark.slow\n@pytest.mark.hook("a-b", "c-d")\ndef test_x(): pass\ndef test_e_f(): pass\n'
    assert slugs_of_tests(ast.parse(source)) == {"a-b": ["test_x"], "c-d": ["test_x"]}
