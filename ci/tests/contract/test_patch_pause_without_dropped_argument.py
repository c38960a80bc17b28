"""All three signatures that pause_generation has had are called with what means "abort"; plain verl knows two."""

import asyncio
import inspect
import logging
import time

import pytest

from ci.tests.contract import patch_scenarios as scenarios
from ci.tests.contract import patch_tree

SLUG = "pause-without-dropped-argument"
VERSIONS = ("0.9.0", "0.9.1")


def server_class(version, directory, slugs):
    tree = patch_tree.tree(version, directory, slugs)
    names = {"logger": logging.getLogger("verl"), "inspect": inspect, "asyncio": asyncio, "time": time,
             "_GATE_BARRIER_TIMEOUT_S": 1}
    return patch_tree.lifted(tree / patch_tree.SERVER, "vLLMHttpServer", ("abort_all_requests",), object, names)


_, patched = patch_tree.fixtures(SLUG, VERSIONS, server_class)


@pytest.mark.parametrize("version, where", [("0.9.0", "error"), ("0.9.1", "raised")])
def test_plain_verl_passes_what_vllm_dropped(version, where, tmp_path):
    plain = server_class(version, tmp_path, ())
    for signature in ("0.12", "0.18"):
        assert scenarios.abort_all(plain, signature)["paused"] == [["abort", True]]
    seen = scenarios.abort_all(plain, "0.32")
    assert "unexpected keyword argument 'wait_for_inflight_requests'" in seen[where] and seen["paused"] == []


@pytest.mark.parametrize("signature", list(scenarios.PAUSES))
def test_every_signature_is_paused(patched, signature):
    seen = scenarios.abort_all(patched, signature, times=2)
    assert seen == {"raised": "", "error": "", "count": 2, "paused": [["abort", True]] * 2}
