"""`repeats` against vLLM's own rule, whose parameters the config group copies."""

from __future__ import annotations

import random

import pytest

from esgrpo.algo.segments import repeats
from esgrpo.config import Repetition

utils = pytest.importorskip("vllm.v1.core.sched.utils")
parameters = pytest.importorskip("vllm.sampling_params")
if not hasattr(utils, "check_sequence_repetition"):
    pytest.skip("this vLLM has no repetition rule", allow_module_level=True)


def random_sequence(rng):
    """A small alphabet makes chance repetitions frequent; half of them end in a repeated, maybe cut pattern."""
    alphabet = rng.randint(1, 4)
    tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(40))]
    if rng.random() < 0.5:
        pattern = [rng.randrange(alphabet) for _ in range(rng.randint(1, 9))]
        tokens += (pattern * rng.randint(1, 8))[rng.randrange(3):]
    return tokens


def random_rule(rng):
    low, high = sorted((rng.randint(1, 9), rng.randint(1, 9)))
    return {"min_pattern_size": low, "max_pattern_size": high, "min_count": rng.randint(2, 6)}


@pytest.mark.parametrize("seed", range(8))
def test_same_answer_as_vllm(seed):
    rng = random.Random(seed)
    answers = set()
    for _ in range(4000):
        tokens, rule = random_sequence(rng), random_rule(rng)
        theirs = utils.check_sequence_repetition(tokens, parameters.RepetitionDetectionParams(**rule))
        assert repeats(tokens, Repetition(enable=True, **rule)) == theirs, (tokens, rule)
        answers.add(theirs)
    assert answers == {True, False}


def test_every_short_sequence_over_two_tokens():
    for rule in ({"min_pattern_size": low, "max_pattern_size": high, "min_count": count}
                 for low in (1, 2, 3) for high in (3, 4) for count in (2, 3, 4)):
        ours, theirs = Repetition(enable=True, **rule), parameters.RepetitionDetectionParams(**rule)
        for length in range(12):
            for bits in range(2 ** length):
                tokens = [bits >> i & 1 for i in range(length)]
                assert repeats(tokens, ours) == utils.check_sequence_repetition(tokens, theirs), (tokens, rule)


def test_defaults_of_the_config_are_accepted_by_vllm():
    default = Repetition()
    parameters.RepetitionDetectionParams(max_pattern_size=default.max_pattern_size,
                                         min_pattern_size=default.min_pattern_size, min_count=default.min_count)
