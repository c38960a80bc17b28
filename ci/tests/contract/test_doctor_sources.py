"""`esgrpo doctor` sees in real sources which patches are in, and nothing in pristine ones."""

from dataclasses import replace

import pytest

from ci.tests.contract import patched
from esgrpo.tools.doctor import environment

CASES = {("verl", "v0.7.0"): {"sync-weights-over-stateless-group", "derive-npu-uuid-from-visible-devices",
                              "default-flash-attention-under-mindspeed"},
         ("ray", "2.51.1"): {"add-hccl-collective-group"}}


def seen(*directories):
    host = environment.this_host()
    return set(environment._patched(replace(host, path=tuple(map(str, directories)))))


@pytest.mark.parametrize("upstream, tag", CASES)
def test_patches_are_seen_by_their_traces(upstream, tag, tmp_path):
    slugs = CASES[upstream, tag]
    files = sorted({name for slug in slugs for name in patched.touched(patched.patch_file(upstream, tag, slug))})
    assert seen(patched.pristine(upstream, tag)) == set()
    assert seen(patched.tree(upstream, tag, patched.series(upstream, tag), tmp_path / "all")) == slugs
    for slug in slugs:
        assert seen(patched.tree(upstream, tag, [slug], tmp_path / slug, also=tuple(files))) == {slug}


@pytest.mark.parametrize("release", ["0.7.0", "0.8.0", "0.9.1"])
def test_the_version_of_a_checkout(release):
    source = patched.pristine("verl", release)
    host = replace(environment.this_host(), path=(str(source),), version=lambda name: None)
    assert environment.collect(host).versions["verl"].removesuffix(".dev") == release
