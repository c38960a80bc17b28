"""A failed abort raises; plain verl hands out a result and syncs weights into running requests."""

import logging

from packaging import version as packaging_version

from ci.tests.contract import patch_scenarios as scenarios
from ci.tests.contract import patch_tree

SLUG = "abort-all-fails-loudly"
VERSIONS = ("0.7.1", "0.8.0", "0.9.0")


def server_class(version, directory, slugs):
    import inspect

    tree = patch_tree.tree(version, directory, slugs)
    names = {"logger": logging.getLogger("verl"), "version": packaging_version, "inspect": inspect,
             "_VLLM_VERSION": packaging_version.parse("0.12.0")}
    return patch_tree.lifted(tree / patch_tree.SERVER, "vLLMHttpServer", ("abort_all_requests",), object, names)


plain, patched = patch_tree.fixtures(SLUG, VERSIONS, server_class)


def test_plain_verl_swallows_the_failure(plain):
    seen = scenarios.abort_all(plain, broken=True)
    assert (seen["raised"], seen["error"], seen["count"]) == ("", "engine is dead", 0)


def test_the_failure_is_raised(patched):
    assert scenarios.abort_all(patched, broken=True)["raised"] == "ValueError: engine is dead"


def test_a_healthy_abort_is_as_before(patched):
    assert scenarios.abort_all(patched) == {"raised": "", "error": "", "count": 2, "paused": [["abort", True]]}


def test_a_headless_node_succeeds(patched, plain):
    assert scenarios.abort_all(patched, node_rank=1)["count"] == 0
    assert "has no attribute 'engine'" in scenarios.abort_all(plain, node_rank=1)["error"]
