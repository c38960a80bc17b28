"""SegmentMixin on the installed vLLM's sync and async scheduler classes, in this process: the cases of the matrix.

The CPU platform always turns async scheduling off, so the async class is driven here: the next step is scheduled before
the output of this one is known, as EngineCore.step_with_batch_queue does.
"""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from bench.common.scripted_scheduler import make_config, upstream_class  # noqa: E402
from ci.matrix.scheduler_cases import CASES, Unsupported  # noqa: E402
from ci.matrix.scheduler_player import BLOCKS, Player  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.slow]
RUNNING = 4
LONGEST = 512


@pytest.fixture(scope="module", params=["sync", "async"])
def new(request):
    """new(segment, blocks, budget, caching) -> Player on upstream's class (segment None) or on the mixed one."""
    from esgrpo.hooks.vllm.segment_mixin import mixed_with

    asynchronous = request.param == "async"
    base = upstream_class(asynchronous)
    configs = {}

    def make(segment, blocks=BLOCKS, budget=None, caching=False):
        if budget not in configs:
            configs[budget] = make_config(asynchronous, RUNNING, LONGEST, budget)
        return Player(configs[budget], base if segment is None else mixed_with(base), segment, int(asynchronous),
                      blocks, caching)

    return make


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(new, case):
    try:
        case(new)
    except Unsupported as error:
        pytest.skip(str(error))


def test_what_may_end_at_a_stop_string_is_not_handed_back_between_its_tokens(new):
    """vLLM's front end finds one in the token after which the response would have been handed back, and both would be
    true: it would go on behind its end."""
    player = new({"enable": True, "segment_length": 16, "boundary": "yield"})
    player.add("plain", member=0, max_tokens=40)
    player.add("stops", member=1, max_tokens=40, length_class="tail", move=True, stop=("END",))
    player.run(20)
    assert player.ends["plain"][1] == "segment" and "stops" not in player.ends
    count, by_front_end = player.scheduler.segment_hand_back(1)
    assert (count, by_front_end) == (1, ["stops"])  # which knows whether it has ended
    player.run()
    assert len(player.tokens["stops"]) == 40 and player.ends["stops"][2]["boundaries"] == 2


def test_several_requests_of_one_member_are_told_their_segment_length(new):
    """An agent loop may ask for them at once."""
    player = new({"enable": True, "segment_length": 1024})
    for number in range(2):
        player.add(f"r{number}", group="a", member=0, max_tokens=50)
    player.run(6)
    assert player.scheduler.segment_set_length("a", 16, True) == 2
    player.run()
    assert player.counts() == {"r0": 50, "r1": 50} and player.ends["r0"][2]["boundaries"] == 3
