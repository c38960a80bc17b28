"""Every series as a whole, every patch alone, every subset against the hooks, and what the headers say."""

import itertools
import re
import subprocess

import pytest

from ci.tests.contract import patch_tree
from esgrpo import engine, fingerprint

VERSIONS = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")
FIELDS = ("Slug Target Process Kind Why Invariant Applies Fixed-In Upstream-Status Remove-When Debt Conflicts Rebinds "
          "Hook Test").split()
CASES = [(version, slug) for version in VERSIONS for slug in patch_tree.series(version)]


def header(version, slug) -> dict[str, str]:
    text, _, diff = patch_tree.patch(version, slug).read_text(encoding="utf-8").partition("---\n")
    assert diff.startswith("diff --git a/verl/") and diff.endswith("\n") and "\r" not in diff
    fields = {}
    for line in text.splitlines():
        if line.startswith("  "):
            fields[list(fields)[-1]] += " " + line.strip()
        else:
            name, _, value = line.partition(": ")
            fields[name] = value
    assert list(fields) == FIELDS and all(fields.values())
    return fields


@pytest.mark.parametrize("version", VERSIONS)
def test_the_series_lists_every_patch(version):
    names = {path.stem for path in (patch_tree.PATCHES / f"v{version}").glob("*.patch")}
    assert names >= set(patch_tree.series(version))


@pytest.mark.parametrize("version, slug", CASES)
def test_the_header_says_what_the_patch_is(version, slug):
    fields = header(version, slug)
    hooks = engine.load_hooks()
    assert fields["Slug"] == slug and fields["Applies"] == f"verl =={version}"
    assert (patch_tree.PATCHES.parents[1] / fields["Test"]).is_file()
    assert fields["Hook"] == "none" or slug in hooks
    cured = {source.partition("+")[0] for release in hooks[slug].hook.releases
             for source in release.cured} if slug in hooks else set()
    assert fields["Hook"] == "none" or version in cured


@pytest.mark.parametrize("version, slug", CASES)
def test_the_target_is_there(version, slug):
    root = patch_tree.source(version)
    for target in header(version, slug)["Target"].split(", "):
        assert fingerprint.of_targets((target,), [str(root)])[0], target


@pytest.mark.parametrize("version, slug", CASES)
def test_alone_it_applies_and_goes_without_a_trace(version, slug, tmp_path):
    tree = patch_tree.tree(version, tmp_path)
    before = {path: path.read_bytes() for path in tree.rglob("*.py")}
    patch_tree.git_apply(tree, version, slug)
    changed = {str(path.relative_to(tree)) for path, text in before.items() if path.read_bytes() != text}
    assert changed == set(patch_tree.touched(version, slug))
    for name in changed:
        compile((tree / name).read_text(encoding="utf-8"), name, "exec")
    patch_tree.git_apply(tree, version, slug, "--reverse")
    assert all(path.read_bytes() == text for path, text in before.items())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_series_applies_and_goes_without_a_trace(version, tmp_path):
    tree = patch_tree.tree(version, tmp_path)
    before = {path: path.read_bytes() for path in tree.rglob("*.py")}
    for slug in patch_tree.series(version):
        patch_tree.git_apply(tree, version, slug)
    for path in before:
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    for slug in reversed(patch_tree.series(version)):
        patch_tree.git_apply(tree, version, slug, "--reverse")
    assert all(path.read_bytes() == text for path, text in before.items())


def subsets(version):
    slugs = patch_tree.series(version)
    return [subset for count in range(len(slugs) + 1) for subset in itertools.combinations(slugs, count)]


def covered(hook, version) -> bool:
    """Is this hook for this release at all?"""
    return any(source.partition("+")[0] == version for release in hook.releases
               for source in (*release.fingerprints, *release.cured))


@pytest.mark.parametrize("version", ["0.9.0", "0.9.1"])
def test_hook_and_patch_are_never_both_applied(version, tmp_path, monkeypatch):
    """In every patched checkout the hook of an applied patch is cured, and all others still know their target."""
    monkeypatch.delenv("ESGRPO_DISABLE", raising=False)
    monkeypatch.setenv("ESGRPO_FEATURES", "observe,segment,prune,yield,pois")
    monkeypatch.setattr(engine, "upstream_version", lambda upstream: version)
    tree = patch_tree.tree(version, tmp_path, whole=True)
    hooks = [record.hook for record in engine.load_hooks().values()
             if record.hook.module.startswith("verl.") and covered(record.hook, version)
             and not (record.hook.features and "cpu" in record.hook.features and len(record.hook.features) == 1)]
    assert {"abort-by-external-id", "pause-without-dropped-argument"} <= {hook.slug for hook in hooks}
    wrong = []
    for subset in subsets(version):
        for slug in subset:
            patch_tree.git_apply(tree, version, slug)
        fingerprint._tree.cache_clear()
        for hook in hooks:
            state, detail, _ = engine.check(hook, [str(tree)])
            native = "cured by verl 0.9.1 itself" if hook.slug == "abort-all-fails-loudly" else None
            wanted = ((engine.State.NOT_NEEDED, f"cured by the git patch {hook.slug}") if hook.slug in subset
                      else (engine.State.NOT_NEEDED, native) if native and version == "0.9.1"
                      else (engine.State.PENDING, f"verl {version}"))
            # the hook is for 0.9.1 only: 0.9.0 has no server that holds a request, there is only the patch
            if (hook.slug, version) == ("resume-without-sleep", "0.9.0") and hook.slug not in subset:
                wanted = (engine.State.INCOMPATIBLE, detail)
            if (state, detail) != wanted:
                wrong.append((subset, hook.slug, state.value, detail))
        for slug in reversed(subset):
            patch_tree.git_apply(tree, version, slug, "--reverse")
    assert wrong == []


def test_a_second_application_is_refused(tmp_path):
    tree = patch_tree.tree("0.9.1", tmp_path, ("abort-by-external-id",))
    done = subprocess.run(["git", "apply", "--check", str(patch_tree.patch("0.9.1", "abort-by-external-id"))],
                          cwd=tree, capture_output=True, text=True)
    assert done.returncode != 0 and re.search("patch does not apply", done.stderr)
