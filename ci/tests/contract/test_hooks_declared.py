"""What every hook file must declare, checked without applying any; and drift of the installed upstreams."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from esgrpo import engine, fingerprint
from esgrpo.algo.terms import Feature, Process
from esgrpo.errors import HookError
from esgrpo.hooks import HOOK_FILES

HOOKS = Path(importlib.import_module("esgrpo.hooks").__file__).parent
FILES = sorted(path for path in HOOKS.rglob("*.py") if path.name != "__init__.py")
UPSTREAMS = {"verl", "vllm", "vllm_ascend", "torch", "torch_npu", "ray", "transformers", "tensordict", "omegaconf",
             "hydra", "mindspeed", "megatron", "wrapt"}
DISTRIBUTION_OF = {"recipe": "verl"}  # the recipes of verl <= 0.7.0 are a package beside verl in its repository
# 0, 1 and -1 index and count; anything else is a decision, and decisions live in algo/ or in the config.
PLAIN_NUMBERS = {0, 1, -1}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def label(path: Path) -> str:
    return path.relative_to(HOOKS).with_suffix("").as_posix().replace("/", ".")


@pytest.fixture(params=HOOK_FILES)
def code(request):
    return importlib.import_module(f"esgrpo.hooks.{request.param}")


def test_every_file_with_a_hook_is_listed_once():
    declared = [label(path) for path in FILES if any(
        isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "HOOK" for node in tree(path).body)]
    assert sorted(HOOK_FILES) == sorted(declared) and len(set(HOOK_FILES)) == len(HOOK_FILES)


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
    for release in hook.releases:
        sources = [*release.fingerprints.values(), *release.cured.values()]
        assert release.fingerprints and all(re.fullmatch("[0-9a-f]{16}", f) for f in sources)
        assert release.upstream == DISTRIBUTION_OF.get(root := hook.module.partition(".")[0], root)


def test_every_word_of_the_vocabulary_is_used():
    hooks = [importlib.import_module(f"esgrpo.hooks.{name}").HOOK for name in HOOK_FILES]
    assert {word for hook in hooks for word in hook.process} == set(Process)
    assert {word for hook in hooks for word in hook.features} <= set(Feature)


@pytest.mark.parametrize("field, words", [("process", ("agent-lop-worker",)), ("features", ("observe", "sampling"))])
def test_a_word_that_nothing_ever_matches_is_refused(field, words):
    declared = {"process": ("driver",), **{field: words}}
    with pytest.raises(HookError) as refusal:
        engine.Hook("a-hook", "verl:f", kind="wrap", why="", releases=(), remove_when="", **declared)
    assert f"{field} {words[-1]!r}" in str(refusal.value) and "\n" not in str(refusal.value)


def test_tested_versions_are_inside_the_specifier(code):
    from packaging.specifiers import SpecifierSet

    for release in code.HOOK.releases:
        for version in (*release.fingerprints, *release.cured):
            assert SpecifierSet(release.spec).contains(version, prereleases=True), (release.spec, version)


def test_a_strict_run_reaches_it(code):
    """Other releases of verl lack hooks that a run needs: there, and in a trainer that is refused, none would act."""
    whole = {"0.7.0", "0.9.1"}  # of which each hook is either declared or said to have no place
    releases = [release for release in code.HOOK.releases if release.upstream == "verl"]
    assert not releases or any(whole & release.fingerprints.keys() for release in releases)


def test_the_git_patches_that_a_release_presumes_exist(code):
    for release in code.HOOK.releases:
        for version in release.fingerprints if release.patches else ():
            directory = HOOKS.parents[2] / "patches" / release.upstream / f"v{version}"
            assert [slug for slug in release.patches if not (directory / f"{slug}.patch").is_file()] == []


def test_the_file_has_what_its_kind_needs(code):
    if code.HOOK.kind == "add":
        assert callable(code.apply) and callable(code.installed) and not hasattr(code, "build")
    else:
        assert callable(code.build) and not hasattr(code, "apply")


def test_a_replacement_is_a_plain_function_that_keeps_its_original(code):
    """Ray ships functions by value and drops proxies; `carries` and upstream's own introspection need __wrapped__."""
    if code.HOOK.kind == "add":
        assert not isinstance(code.apply, type)
        return

    def original(self=None):
        """Original."""

    replacement = code.build(original)
    assert type(replacement) is type(original) and replacement.__wrapped__ is original
    assert replacement.__doc__ == "Original."


def drift(hook) -> list[str]:
    """Differences between the installed upstream and what was tested, one line each."""
    lines = []
    for upstream in {release.upstream for release in hook.releases}:
        version = engine.upstream_version(upstream)
        if version and engine.has_no_place(hook, version):  # other releases only
            continue
        known = {v: f for release in hook.releases for v, f in release.fingerprints.items()}
        cured = {f for release in hook.releases for v, f in release.cured.items() if v == version}
        if fingerprint.of_targets((hook.target,))[0] in cured:
            continue
        found, missing = fingerprint.of_targets((hook.target, *hook.relies_on))
        if found != known.get(version):
            lines.append(f"{hook.slug}: {upstream} {version}: found {found or missing}, tested {known}")
    return lines


def test_the_installed_upstream_is_the_tested_one(code):
    pytest.importorskip("verl")
    pytest.importorskip("vllm")
    assert drift(code.HOOK) == []


def test_drift_is_noticed():
    """Negative control of the test above, on a real declaration."""
    import dataclasses

    hook = importlib.import_module("esgrpo.hooks.verl.driver_start").HOOK
    release = dataclasses.replace(hook.releases[0], fingerprints={"0.9.1": "0" * 16})
    assert drift(dataclasses.replace(hook, releases=(release,)))
    assert drift(dataclasses.replace(hook, target=hook.target + "_gone"))
    cured = dataclasses.replace(release, cured={"0.9.0": fingerprint.of_targets((hook.target,))[0]})
    assert drift(dataclasses.replace(hook, releases=(cured,)))  # cured in another release only


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
