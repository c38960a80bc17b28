"""bench.common.estimator_gradients: the arithmetic of its table, on made-up responses with made-up gradients."""

from __future__ import annotations

import random

import pytest
import torch

from bench.common import estimator_gradients as bench
from esgrpo.algo.terms import Treatment

torch.set_num_threads(1)
ARMS = {arm.name: arm for arm in bench.ARMS}


def group(rng: random.Random, generator: torch.Generator) -> list[bench.Answer]:
    """Long responses are wrong; gradients of pieces are independent."""
    answers = []
    for _ in range(bench.SIZE):
        count = rng.choice([20, 40, 100, 200, 512])
        values = [-0.1] * count
        answer = bench.Answer([rng.randrange(50) for _ in range(count)], values, float(count < 64), [0.0])
        for value in values:
            answer.summed.append(answer.summed[-1] + value)
        pieces = -(-count // bench.LOOK)
        steps = torch.randn(pieces, bench.PROJECTED, generator=generator)
        answer.gradients = torch.cat([torch.zeros(1, bench.PROJECTED), steps.cumsum(0)])
        answers.append(answer)
    return answers


@pytest.fixture(scope="module")
def groups():
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    return [group(rng, generator) for _ in range(12)]


def run(arm, groups, rule=bench.VERDICT, success=0.0):
    """All coins of one draw are enough where nothing depends on them."""
    own = [[{at: [] for at in range(bench.LOOK, len(answer.tokens), bench.LOOK)} for answer in one] for one in groups]
    return bench.run_arm(arm, rule, groups, lambda features: success, own, 3)


@pytest.mark.parametrize("name", sorted(ARMS))
def test_where_nobody_is_a_candidate_every_arm_is_the_full_rollout(groups, name):
    found = run(ARMS[name], groups, success=1.0)
    assert all(torch.allclose(draw, found.whole, atol=1e-5) for draw in found.draws)
    assert (found.tokens, found.cut, found.variance) == (1.0, 0.0, pytest.approx(1.0, abs=1e-4))


def test_what_is_cut_saves_tokens_and_variance_and_is_half_of_a_group_at_most(groups):
    """Here every cut is right, and the tail of a failure is noise alone."""
    failed, masked = (run(ARMS[name], groups) for name in ("failed", "masked, pi 0.1"))
    assert failed.tokens < 0.9 and 0 < failed.cut <= bench.MOST and failed.right == 0.0
    assert failed.variance < 1 < masked.variance and failed.information > 1 > masked.information


def test_a_squared_mean_has_no_bias_of_its_own():
    rows = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    assert abs(bench.squared_mean(rows)) < 1 < float(rows.mean(0).square().sum()) * 64
    assert bench.squared_mean(rows + 1) == pytest.approx(64, rel=0.05)


def test_a_projection_keeps_inner_products():
    generator = torch.Generator().manual_seed(2)
    project, one = bench.Projection(20_000), torch.randn(20_000, generator=generator)
    other = one + torch.randn(20_000, generator=generator)
    assert float(project([one[:5000], one[5000:]]) @ project([other])) == pytest.approx(float(one @ other), rel=0.1)


def test_a_loop_is_what_the_product_takes_for_one():
    rule = bench.new_pruner(bench.Arm("", Treatment.FAILED), 0).prune.repetition
    tokens = [1, 2, 3] * 100
    sure, unsure = ([0.0] + [value * at for at in range(1, 301)] for value in (-0.001, -0.5))
    assert bench.is_loop(bench.Answer(tokens, [], 0.0, sure), 256, rule)
    assert not bench.is_loop(bench.Answer(tokens, [], 0.0, sure), 192, rule)
    assert not bench.is_loop(bench.Answer(tokens, [], 0.0, unsure), 256, rule)
