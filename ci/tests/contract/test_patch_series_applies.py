"""Every series applies in order, every patch of it alone, back again, and the outcome compiles."""

import subprocess
import sys

import pytest

from ci.tests.contract import patched

SERIES = sorted((path.parent.parent.name, path.parent.name) for path in patched.PATCHES.glob("*/*/series"))


def files(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def reverse(upstream, tag, slugs, root):
    for slug in reversed(slugs):
        subprocess.run(["git", "apply", "--reverse", patched.patch_file(upstream, tag, slug)], cwd=root, check=True)


@pytest.mark.parametrize("upstream, tag", SERIES)
def test_in_order_and_back(tmp_path, upstream, tag):
    slugs = patched.series(upstream, tag)
    names = tuple({name for slug in slugs for name in patched.touched(patched.patch_file(upstream, tag, slug))})
    before = files(patched.tree(upstream, tag, [], tmp_path / "pristine", also=names))
    root = patched.tree(upstream, tag, slugs, tmp_path / "patched")
    assert {name for name in names if files(root).get(name) != before.get(name)} == set(names)
    subprocess.run([sys.executable, "-m", "compileall", "-q", root / "."], check=True)
    for cache in root.rglob("__pycache__"):
        for compiled in cache.iterdir():
            compiled.unlink()
    reverse(upstream, tag, slugs, root)
    assert files(root) == before


@pytest.mark.parametrize("upstream, tag, slug", [(*where, slug) for where in SERIES for slug in patched.series(*where)])
def test_alone(tmp_path, upstream, tag, slug):
    names = tuple(patched.touched(patched.patch_file(upstream, tag, slug)))
    before = files(patched.tree(upstream, tag, [], tmp_path / "pristine", also=names))
    root = patched.tree(upstream, tag, [slug], tmp_path / "patched")
    assert files(root) != before
    reverse(upstream, tag, [slug], root)
    assert files(root) == before


def test_every_patch_is_in_its_series():
    for upstream, tag in SERIES:
        listed = patched.series(upstream, tag)
        assert sorted(listed) == sorted(path.stem for path in (patched.PATCHES / upstream / tag).glob("*.patch"))
