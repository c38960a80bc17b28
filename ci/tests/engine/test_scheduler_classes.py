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


KEEPS = {"enable": True, "sync": {"requests": "keep"}}


def make_until(player, key, tokens):
    while len(player.tokens[key]) < tokens:
        player.step()


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_stop_string_is_an_end_of_which_the_book_is_kept(new, ends_first):
    """The front end finds it in a token of which the engine's next one may be the last: it has ended the request by
    itself then, and vLLM drops what it says of it."""
    from vllm.v1.request import RequestStatus

    player = new(KEEPS)
    player.scheduler.segment_set_version(3)
    player.add("r", group="g", member=0, attempt=7, stop=("END",), eos_at=60 if ends_first else None, max_tokens=100)
    make_until(player, "r", 30)
    player.drain()
    player.scheduler.segment_set_version(4)
    make_until(player, "r", 60)
    if ends_first:
        player.step()
    player.scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    player.run()
    assert player.scheduler.segment_take_book("g", 0, 6) is None  # another attempt's
    (first, early), (second, late) = player.scheduler.segment_take_book("g", 0, 7)["spans"]
    assert (first, second) == (3, 4) and early >= 30 and early + late >= 60
    window = player.scheduler.segment_set_version(5)
    assert window["outcomes"] == {"finish": 1} and window["away"] == 0.0  # nobody was aborted, nobody is away


def test_what_a_pause_aborts_is_aborted_and_each_request_of_a_member_has_its_book(new):
    from vllm.v1.request import RequestStatus

    player = new(KEEPS)
    player.scheduler.segment_set_version(3)
    player.add("first", group="g", member=0, attempt=1, stop=("END",), max_tokens=400)
    make_until(player, "first", 50)
    player.drain()
    player.scheduler.segment_set_version(4)
    player.add("second", group="g", member=0, attempt=2, max_tokens=400)
    make_until(player, "second", 20)
    for waiting in range(3):
        player.add(f"waits {waiting}", group="h", member=waiting, attempt=3, max_tokens=400)
    player.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    books = [player.scheduler.segment_take_book("g", 0, attempt) for attempt in (1, 2)]
    assert [[version for version, _ in book["spans"]] for book in books] == [[3, 4], [4]]
    assert not player.scheduler.segment_books  # of those without a token nobody would ask
    assert player.scheduler.segment_set_version(5)["outcomes"] == {"abort": 5}
