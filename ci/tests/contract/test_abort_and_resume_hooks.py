"""The hooks that do what the patches of verl 0.9 do, and the patched modules, as verl really imports them."""

import json

import pytest

from ci.tests.contract import patch_tree

pytest.importorskip("verl")
pytest.importorskip("vllm")

pytestmark = pytest.mark.slow
CHILD = "ci/tests/contract/real_classes.py"
FEATURES = "observe,segment"


@pytest.fixture(scope="module")
def child(root, forked_python, tmp_path_factory):
    from importlib import metadata

    from esgrpo import releases

    named = tmp_path_factory.mktemp("named")  # verl asks for the distribution "vllm", which the CPU wheel is not
    if "vllm" not in {found.metadata["Name"] for found in metadata.distributions()}:
        (named / "vllm.dist-info").mkdir()
        (named / "vllm.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {releases.installed('vllm')}+cpu\n")

    def run(*arguments, path=(), **variables):
        done = forked_python(root / CHILD, *arguments, path=(*path, root, named), **variables)
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def hooked(child, overlay):
    return child("hooked", path=(overlay,), ESGRPO_ENABLE="1", ESGRPO_FEATURES=FEATURES)


def good(seen) -> None:
    """What hooks and patches promise alike."""
    assert seen["one"] == {"aborted": True, "reached": ["mine-1a2b"], "resets": 0, "left": ["other-1a2b"]}
    assert seen["vllm"] == {"aborted": True, "reached": ["mine-1a2b"], "ended": {"mine": "abort", "other": None}}
    assert seen["one_reset"]["resets"] == 1
    assert seen["gone"]["aborted"] is seen["headless"]["aborted"] is False and seen["gone"]["reached"] == []
    for pause in seen["all"].values():
        assert pause == {"raised": "", "error": "", "count": 2, "paused": [["abort", True]] * 2}
    assert seen["broken"]["raised"] == "ValueError: engine is dead"
    assert seen["waits"][:3] == [0, 0.01, 0] and seen["steady"] == [1] * 6
    assert seen["response"]["tokens"] == [1] * 4 + [3] * 3 + [4] * 3 and seen["response"]["stop"] == "length"
    assert len(seen["limited"]["tokens"]) == 6 and seen["limited"]["untouched"]
    assert seen["ended"]["stop"] == "aborted" and len(seen["ended"]["tokens"]) == 4


def test_the_hooks_are_in_place(hooked):
    assert {slug: state for slug, (state, _) in hooked["states"].items()} == {
        "pause-without-dropped-argument": "APPLIED",
        "abort-by-external-id": "APPLIED", "resume-without-sleep": "APPLIED"}


@pytest.mark.hook("abort-by-external-id", "pause-without-dropped-argument", "resume-without-sleep")
def test_the_hooks_hold_what_they_promise(hooked):
    good(hooked["seen"])


def test_plain_verl_does_not(hooked):
    """Negative control: the same classes after the hooks were taken away."""
    plain = hooked["plain"]
    assert plain["one"]["aborted"] is False and plain["one"]["reached"] == []
    assert plain["vllm"] == {"aborted": False, "reached": [], "ended": {"mine": None, "other": None}}
    assert "unexpected keyword argument 'wait_for_inflight_requests'" in plain["all"]["0.32"]["raised"]
    assert set(plain["waits"]) == {1}


def test_a_resumed_response_is_otherwise_that_of_plain_verl(hooked):
    for name in ("response", "limited", "ended"):
        assert hooked["seen"][name] == hooked["plain"][name]


@pytest.mark.parametrize("version", ["0.9.0", "0.9.1"])
def test_the_patched_modules_import_and_hold_the_same(child, version, tmp_path):
    tree = patch_tree.tree(version, tmp_path, patch_tree.series(version), whole=True)
    found = child(path=(tree,))
    assert found["seen"]["verl"].startswith(str(tree))
    good(found["seen"])


def test_a_patched_checkout_gets_no_hook(child, overlay, tmp_path):
    tree = patch_tree.tree("0.9.1", tmp_path, patch_tree.series("0.9.1"), whole=True)
    found = child("hooked", path=(overlay, tree), ESGRPO_ENABLE="1", ESGRPO_FEATURES=FEATURES)
    states = found["states"]
    for slug in patch_tree.series("0.9.1"):
        assert states.pop(slug) == ["NOT_NEEDED", f"cured by the git patch {slug}"]
    assert states == {}
    good(found["seen"])


def test_the_hooks_of_an_unpatched_090(child, overlay, tmp_path):
    """Two hooks know 0.9.0 too; the third says that it does not, since 0.9.0's server holds nobody."""
    tree = patch_tree.tree("0.9.0", tmp_path, whole=True)
    (tree / "verl-0.9.0.dist-info").mkdir()
    (tree / "verl-0.9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.9.0\n")
    found = child("hooked", path=(overlay, tree), ESGRPO_ENABLE="1", ESGRPO_FEATURES=FEATURES)
    seen, plain, states = found["seen"], found["plain"], found["states"]
    assert [states.pop(slug)[0] for slug in patch_tree.series("0.9.0")[1:3]] == ["APPLIED"] * 2
    assert states.pop("resume-without-sleep")[0] == "INCOMPATIBLE" and set(seen["waits"]) == {1}
    assert plain["broken"]["raised"] == "" and plain["broken"]["error"] == "engine is dead"  # cured by a patch alone
    assert [seen["all"][name]["paused"] for name in seen["all"]] == [[["abort", True]] * 2] * 3
    assert plain["all"]["0.32"]["paused"] == [] and plain["all"]["0.32"]["raised"] == ""  # syncs all the same
    assert seen["one"]["reached"] == ["mine-1a2b"] and plain["one"]["reached"] == []
