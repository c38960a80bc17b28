"""One request is aborted by the id its caller knows; plain verl answers that there is no such request."""

import logging

import pytest

from ci.tests.contract import patch_scenarios as scenarios
from ci.tests.contract import patch_tree

SLUG = "abort-by-external-id"
VERSIONS = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")
NOTHING = {"aborted": False, "reached": [], "resets": 0}


def server_class(version, directory, slugs):
    tree = patch_tree.tree(version, directory, slugs)
    names = {"logger": logging.getLogger("verl"), "_RESET_PREFIX_CACHE_KWARGS": {}}
    return patch_tree.lifted(tree / patch_tree.SERVER, "vLLMHttpServer", ("abort_request", "clear_kv_cache"), object,
                             names)


plain, patched = patch_tree.fixtures(SLUG, VERSIONS, server_class)


def test_plain_verl_does_not_find_the_request(plain):
    seen = scenarios.abort_one(plain)
    assert seen == {**NOTHING, "left": ["mine-1a2b", "other-1a2b"]}


@pytest.mark.parametrize("randomised, internal", [(True, "-1a2b"), (False, "")])
def test_only_the_named_request_is_aborted(patched, randomised, internal):
    seen = scenarios.abort_one(patched, randomised)
    assert seen == {"aborted": True, "reached": ["mine" + internal], "resets": 0, "left": ["other" + internal]}


def test_the_prefix_cache_is_cleared_when_asked(patched):
    assert scenarios.abort_one(patched, reset_prefix_cache=True)["resets"] == 1


@pytest.mark.parametrize("randomised", [True, False])
def test_an_unknown_id_is_said(patched, randomised):
    assert {**scenarios.abort_one(patched, randomised, "gone"), "left": []} == {**NOTHING, "left": []}


def test_a_headless_node_has_nothing_to_abort(patched):
    assert scenarios.abort_one(patched, node_rank=1)["aborted"] is False
