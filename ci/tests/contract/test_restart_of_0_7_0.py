"""Prompts in flight at a restart of v0.7.0's fully-async recipe: its own rollouter, trainer and checkpoints."""

import json
from pathlib import Path

import pytest

from ci.tests.contract import release_0_7_0

pytest.importorskip("verl")
pytest.importorskip("torchdata")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PROMPTS, STARTS = 24, 4
_answers: dict[str, tuple] = {}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return release_0_7_0.whole_tree(tmp_path_factory.mktemp("patched"), release_0_7_0.SLUGS)


@pytest.fixture
def chain(forked_python, overlay, tree, tmp_path):
    """(answer of the probe, lines of ours), with the overlay or without; one child process each, and one that loads
    what it ships."""
    def probe(*arguments, enable: str):
        done = forked_python(HERE / "restart_probe.py", *arguments, path=(tree, overlay, HERE),
                             ESGRPO_RUN_DIR=str(tmp_path), ESGRPO_FEATURES="observe", ESGRPO_ENABLE=enable,
                             ESGRPO_SEGMENT='{"enable": true}')
        return json.loads(done.stdout.splitlines()[-1]), done.stderr.splitlines()

    def run(enable: str):
        if enable not in _answers:
            answer, lines = probe(tmp_path, enable=enable)
            answer["shipped"], _ = probe("--load", tmp_path / "classes", enable="0")
            _answers[enable] = answer, [line for line in lines if line.startswith("esgrpo: ")]
        return _answers[enable]

    return run


@pytest.mark.hook("partial-prompts-in-flight", "partial-prompts-in-flight-are-saved",
                  "partial-prompts-in-flight-are-reissued", "partial-generated-prompts", "partial-taken-prompts",
                  "partial-trained-prompts", "partial-trained-prompts-before-checkpoint")
def test_each_prompt_is_trained_once(chain):
    answer, said = chain("1")
    assert answer["trained"] == {str(number): 1 for number in range(PROMPTS)}
    assert all(len(set(names)) == len(names) for names in answer["names"]), "a sample id came twice in one start"
    books = answer["books"]
    assert books["balanced"], books["problems"]
    assert books["prompts"] == {"trained": PROMPTS, "drawn": PROMPTS}
    assert len(books["starts"]) == STARTS
    assert all(start["in_flight"] == start["came_back"] > 0 == start["missing"] for start in books["starts"][1:])
    restarts = [line for line in said if line.startswith("esgrpo: restart: ")]
    assert len(restarts) == STARTS - 1
    for line, start in zip(restarts, books["starts"][1:], strict=True):  # one group waited in the queue, complete
        assert f"{start['in_flight']} prompt groups were unfinished and start anew: 2 responses that had" in line


def test_the_hooks_travel_with_the_classes(chain):
    answer, _ = chain("1")
    assert {slug for slugs in answer["shipped"].values() for slug in slugs} == {
        "partial-prompts-in-flight", "partial-prompts-in-flight-are-saved", "partial-prompts-in-flight-are-reissued",
        "partial-generated-prompts", "partial-taken-prompts", "partial-trained-prompts",
        "partial-trained-prompts-before-checkpoint"}


def test_plain_upstream_loses_them(chain):
    """Negative control. Once its data loader has been at the end it begins again, and the others are trained twice."""
    answer, said = chain("0")
    assert len(answer["trained"]) <= PROMPTS - 2 * (STARTS - 1)
    assert not said and not any(answer["shipped"].values())
