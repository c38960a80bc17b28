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
