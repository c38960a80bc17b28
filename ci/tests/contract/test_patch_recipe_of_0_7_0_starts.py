"""Two repairs without which no prompt of the fully-async recipe gets through the tag v0.7.0."""

import json
from pathlib import Path

import pytest

from ci.tests.contract import release_0_7_0

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PROMPTS, DATASET = "accept-prompts-without-token-ids", "pass-dataset-to-partial-agent-loops"


@pytest.fixture
def first_call(forked_python, overlay, tmp_path):
    def run(*slugs):
        tree = release_0_7_0.whole_tree(tmp_path / "tree", slugs)
        done = forked_python(HERE / "segment_path_probe.py", "soft", path=(tree, overlay, HERE))
        return json.loads(done.stdout.splitlines()[-1])["soft"]

    return run


def test_upstream_fails_on_the_first_prompt(first_call):
    assert first_call()["error"].startswith("AssertionError")


def test_then_on_the_first_agent_loop(first_call):
    error = first_call(PROMPTS)["error"]
    assert "dataset_cls" in error and "dataset_config" in error


def test_with_both_the_responses_come_back(first_call):
    assert [len(row["tokens"]) for row in first_call(PROMPTS, DATASET)["rows"]] == [6, 24, 24, 10]
