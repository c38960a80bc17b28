"""What the patches' headers say is true, and no hook acts on a source that its patch has cured.

That each series applies, reverses and compiles is shown by the matrix, on every pinned release.
"""

import itertools
from pathlib import Path

import pytest

from ci.tests.contract import patch_tree, patched
from esgrpo import engine, fingerprint, recorded, releases
from esgrpo.tools import apply, patchset

ROOT = Path(__file__).resolve().parents[3]
SETS = patchset.load_all(ROOT / "patches")
PATCHES = [(patches, patch) for patches in SETS for patch in patches.patches]
NAMES = [f"{patches.directory.name}-{patch.slug}" for patches, patch in PATCHES]


@pytest.mark.parametrize("patches, patch", PATCHES, ids=NAMES)
def test_test_hook_and_release_of_a_header_exist(patches, patch):
    upstream, version = patches.directory.parent.name, patches.directory.name.removeprefix("v")
    assert patch.header["Applies"] == f"{upstream} =={version}"
    assert (ROOT / patch.header["Test"]).is_file()
    if patch.header["Hook"] != "none":
        hook = engine.load_hooks()[patch.header["Hook"]].hook
        cured = {source.partition("+")[0] for source in recorded.of_hook(hook).cured}
        assert hook.slug == patch.slug and (version in cured or upstream == "ray")


@pytest.mark.parametrize("patches, patch", PATCHES, ids=NAMES)
def test_the_target_is_there(patches, patch):
    upstream = patches.directory.parent.name
    root = patched.pristine(upstream, patches.directory.name)
    targets = patch.header["Target"].split(", ")
    assert any(fingerprint.of_targets((target,), [str(root)])[0] for target in targets), targets


def subsets(version):
    slugs = patch_tree.series(version)
    return [subset for count in range(len(slugs) + 1) for subset in itertools.combinations(slugs, count)]


def covered(hook, version) -> bool:
    """Is this hook for this release at all?"""
    known = recorded.of_hook(hook)
    return any(source.partition("+")[0] == version for source in (*known.fingerprints, *known.cured))


@pytest.mark.parametrize("version", ["0.9.0", "0.9.1"])
def test_hook_and_patch_are_never_both_applied(version, tmp_path, monkeypatch):
    """In every patched checkout the hook of an applied patch is cured, and all others still know their target."""
    monkeypatch.delenv("ESGRPO_DISABLE", raising=False)
    names = {name for record in engine.load_hooks().values() for name in record.hook.features} - {"cpu", "npu"}
    monkeypatch.setenv("ESGRPO_FEATURES", ",".join(names))
    monkeypatch.setattr(releases, "installed", lambda upstream: version)
    tree = patch_tree.tree(version, tmp_path, whole=True)
    hooks = [record.hook for record in engine.load_hooks().values()
             if record.hook.module.startswith("verl.") and covered(record.hook, version)
             and not (record.hook.features and "cpu" in record.hook.features and len(record.hook.features) == 1)]
    assert {"abort-by-external-id", "pause-without-dropped-argument"} <= {hook.slug for hook in hooks}
    patches = next(p for p in SETS if p.directory.name == f"v{version}")

    def change(root, slugs, reverse):
        apply.change(patchset.survey(patches, root), root, list(slugs), reverse=reverse, check=False)

    wrong = []
    for subset in subsets(version):
        change(tree, subset, reverse=False)
        fingerprint._tree.cache_clear()
        for hook in hooks:
            state, detail, _ = engine.check(hook, [str(tree)])
            wanted = ((engine.State.NOT_NEEDED, f"cured by the git patch {hook.slug}") if hook.slug in subset
                      else (engine.State.PENDING, f"verl {version}"))
            # the hook is for 0.9.1 only: 0.9.0 has no server that holds a request, there is only the patch
            if (hook.slug, version) == ("resume-without-sleep", "0.9.0") and hook.slug not in subset:
                wanted = (engine.State.INCOMPATIBLE, detail)
            if (state, detail) != wanted:
                wrong.append((subset, hook.slug, state.value, detail))
        change(tree, subset, reverse=True)
    assert wrong == []
