"""All attempts of a response together generate what one uninterrupted attempt may; plain verl lets it grow."""

import pytest

from ci.tests.contract import patch_scenarios as scenarios
from ci.tests.contract import patch_tree

SLUG = "resume-keeps-response-budget"
VERSIONS = {"0.7.1": "FullyAsyncLLMServerManager", "0.8.0": "FullyAsyncLLMServerClient"}
SCRIPT = (4, 3)  # tokens before the first and the second interruption
# a first turn, a later turn whose prompt already has tokens of the response part, one with nothing left
PROMPTS = {"first": 3, "later": 12, "full": 30}
BUDGETS = {"first": 10, "later": 6, "full": 1}


def client_class(version, directory, slugs):
    tree = patch_tree.tree(version, directory, slugs)
    names = {"TokenOutput": token_output, "normalize_token_ids": list,
             "asyncio": scenarios.recording_asyncio([])}
    return patch_tree.lifted(tree / patch_tree.CLIENT[version], VERSIONS[version], ("generate",), scenarios.Attempts,
                             names)


def token_output(**fields):
    from types import SimpleNamespace

    return SimpleNamespace(**{"routed_experts": None, "extra_fields": {}, **fields})


plain, patched = patch_tree.fixtures(SLUG, VERSIONS, client_class)


def test_plain_verl_lets_an_interrupted_response_grow(plain):
    seen = scenarios.resume(plain, SCRIPT)
    assert len(seen["tokens"]) > scenarios.RESPONSE_LENGTH
    assert len(scenarios.resume(plain, ())["tokens"]) == scenarios.RESPONSE_LENGTH  # uninterrupted


def test_plain_verl_overwrites_the_limit_of_its_caller(plain):
    assert scenarios.resume(plain, SCRIPT, {"max_tokens": 9})["untouched"] is False


@pytest.mark.parametrize("turn", PROMPTS)
@pytest.mark.parametrize("script", [(), SCRIPT, (10,), (0, 0, 2), (9, 1)])
def test_interruptions_do_not_change_the_length(patched, turn, script):
    seen = scenarios.resume(patched, script, prompt=[7] * PROMPTS[turn])
    assert len(seen["tokens"]) == seen["log_probs"] == BUDGETS[turn] and seen["untouched"]


@pytest.mark.parametrize("limit", ["max_tokens", "max_new_tokens"])
def test_an_explicit_limit_holds_and_stays(patched, limit):
    seen = scenarios.resume(patched, SCRIPT, {limit: 9, "temperature": 0.5})
    assert len(seen["tokens"]) == 9 and seen["untouched"] and seen["stop"] == "length"


def test_without_partial_rollout_the_abort_ends_the_response(patched):
    seen = scenarios.resume(patched, SCRIPT, partial=False)
    assert len(seen["tokens"]) == SCRIPT[0] and seen["stop"] == "aborted"
