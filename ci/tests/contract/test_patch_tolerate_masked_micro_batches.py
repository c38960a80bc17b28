"""A micro-batch of pruned rows only: v0.7.0 ends the run, patched it adds nothing."""

import pytest

from ci.tests.contract.legacy_actor_answers import HERE, ROWS, answers
from ci.tests.contract.legacy_actor_answers import trees as trees_of

pytest.importorskip("verl")
pytestmark = pytest.mark.slow
ONE_MASKED = 1


@pytest.fixture
def seen(forked_python, overlay, tmp_path_factory):
    return answers(forked_python, overlay, tmp_path_factory)


def test_upstream_ends_the_run(seen):
    """Negative control."""
    assert "Expected at least one valid token" in seen["pristine"]["masked-micro-batch"]["error"]


@pytest.mark.parametrize("case", ["masked-micro-batch", "pois-masked-micro-batch"])
def test_patched_it_is_finite_and_measures_only_the_others(seen, case):
    answer = seen["patched"][case]
    assert answer["finite"] and len(answer["metrics"]["rollout_corr/kl"]) == ROWS - ONE_MASKED


def test_without_the_overlay_too(seen):
    assert seen["alone"]["masked-micro-batch"]["finite"]


AGGREGATE = """
import json, torch
import release_0_7_0
release_0_7_0.importable()
from verl.trainer.ppo.core_algos import agg_loss
values, empty = torch.ones(2, 3), torch.zeros(2, 3)
print(json.dumps([float(agg_loss(values, empty, mode)) for mode in
                  ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")]))
"""


def test_the_loss_of_an_empty_mask(forked_python, tmp_path_factory):
    tree = trees_of(tmp_path_factory)
    upstream, patched = (forked_python("-c", AGGREGATE, path=(tree[name], HERE)).stdout.splitlines()[-1]
                         for name in ("pristine", "patched"))
    assert patched == "[0.0, 0.0, 0.0, 0.0]" and upstream == "[NaN, NaN, NaN, 0.0]"
