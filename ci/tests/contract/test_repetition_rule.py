"""`repeats` against vLLM's own rule: a span that repeats a pattern of p tokens is that pattern span / p times."""

from __future__ import annotations

import random

import pytest

from esgrpo.algo.loops import repeats

utils = pytest.importorskip("vllm.v1.core.sched.utils")
parameters = pytest.importorskip("vllm.sampling_params")
if not hasattr(utils, "check_sequence_repetition"):
    pytest.skip("this vLLM has no repetition rule", allow_module_level=True)

SPAN, LONGEST = 12, 4  # a multiple of every pattern size: vLLM counts whole patterns


def vllm_repeats(tokens, span: int, longest: int) -> bool:
    return any(utils.check_sequence_repetition(tokens, parameters.RepetitionDetectionParams(
        max_pattern_size=size, min_pattern_size=size, min_count=span // size)) for size in range(1, longest + 1))


@pytest.mark.parametrize("seed", range(4))
def test_same_answer_as_vllm(seed):
    rng, answers = random.Random(seed), set()
    for _ in range(3000):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(20))]
        pattern = [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        tokens += (pattern * rng.randint(1, 14))[rng.randrange(3):]
        theirs = vllm_repeats(tokens, SPAN, LONGEST)
        assert repeats(tokens, SPAN, LONGEST) == theirs, tokens
        answers.add(theirs)
    assert answers == {True, False}


def test_every_short_sequence_over_two_tokens():
    for length in range(SPAN + 2):
        for bits in range(2 ** length):
            tokens = [bits >> i & 1 for i in range(length)]
            assert repeats(tokens, SPAN, LONGEST) == vllm_repeats(tokens, SPAN, LONGEST), tokens
