"""Treatments of cut responses: unbiased over the coins where they say so, bounded, and books that balance."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esgrpo.algo.accounting import token_balance
from esgrpo.losses import Tossed, grpo_segment_advantage

torch.set_num_threads(1)
REWARDS = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0])
TOKENS = 6


@st.composite
def groups(draw, most=5):
    """Members with rewards, lengths, and some that are candidates at a length, each with its own keep probability."""
    size = draw(st.integers(2, most))
    member = st.fixed_dictionaries({"reward": REWARDS, "length": st.integers(1, TOKENS), "candidate": st.booleans(),
                                    "pi": st.sampled_from([0.1, 0.25, 0.5]), "predicted": REWARDS,
                                    "at": st.integers(1, TOKENS)})
    members = [draw(member) for _ in range(size)]
    for one in members:
        one["candidate"] = one["candidate"] and one["at"] < one["length"]
    return members, draw(REWARDS)


def advantages(treatment, members, spared, pivot, late=0):
    """[n, T] under one fall of the coins; a cut row comes `late` tokens further than its decision."""
    cut = [one["candidate"] and not kept for one, kept in zip(members, spared, strict=True)]
    made = [min(one["length"], one["at"] + late) if gone else one["length"]
            for one, gone in zip(members, cut, strict=True)]
    mask = torch.tensor([[at < count for at in range(TOKENS)] for count in made]).long()
    if treatment == "masked":
        mask[torch.tensor(cut)] = 0
    rewards = torch.zeros(len(members), TOKENS, dtype=torch.float64)
    rewards[:, 0] = torch.tensor([-9.0 if gone else one["reward"] for one, gone in zip(members, cut, strict=True)])
    weighed, predicted = treatment in ("masked", "doubly_robust"), treatment in ("value", "doubly_robust")
    tossed = Tossed([one["pi"] if one["candidate"] and weighed else 1.0 for one in members],
                    [pivot if one["candidate"] and treatment == "masked" else None for one in members],
                    [one["predicted"] if one["candidate"] and predicted else None for one in members], cut,
                    [one["at"] if one["candidate"] else None for one in members])
    return grpo_segment_advantage(rewards, mask, ["g"] * len(members), norm_by_std=False, tossed=tossed)


def falls(members):
    """Every fall of the coins with its probability."""
    numbers = [number for number, one in enumerate(members) if one["candidate"]]
    for fall in itertools.product([True, False], repeat=len(numbers)):
        spared, chance = [True] * len(members), 1.0
        for number, kept in zip(numbers, fall, strict=True):
            spared[number] = kept
            chance *= members[number]["pi"] if kept else 1 - members[number]["pi"]
        yield chance, spared


def complete(members):
    mask = torch.tensor([[at < one["length"] for at in range(TOKENS)] for one in members])
    rewards = torch.tensor([one["reward"] for one in members], dtype=torch.float64)
    return (rewards - rewards.mean())[:, None] * mask


@pytest.mark.parametrize("treatment", ["masked", "doubly_robust"])
@given(groups(), st.integers(0, 3))
def test_every_token_gets_the_advantage_of_the_complete_group_on_average(treatment, group, late):
    """Exactly, over all falls of the coins, for any prediction: whatever a token's gradient is, no bias is left."""
    members, pivot = group
    mean = sum(chance * advantages(treatment, members, spared, pivot, late) for chance, spared in falls(members))
    assert torch.allclose(mean, complete(members), atol=1e-9)


@given(groups())
def test_value_is_right_up_to_the_decision_where_the_prediction_is(group):
    """It loses the tail alone: where rewards are what was predicted, the tokens before it have the right advantage."""
    members, pivot = group
    members = [{**one, "predicted": one["reward"]} for one in members]
    whole = complete(members)
    for _, spared in falls(members):
        found = advantages("value", members, spared, pivot)
        for number, one in enumerate(members):
            end = one["length"] if spared[number] else one["at"]
            assert torch.allclose(found[number, :end], whole[number, :end], atol=1e-12)
            assert not found[number, end:].any()


@pytest.mark.parametrize("treatment", ["masked", "doubly_robust", "value"])
@given(groups())
def test_advantages_are_bounded_by_the_weights(treatment, group):
    members, pivot = group
    weight = max([1 / one["pi"] for one in members if one["candidate"]], default=1.0)
    largest = max(abs(value) for one in members for value in (one["reward"], one["predicted"], pivot))
    for _, spared in falls(members):
        found = advantages(treatment, members, spared, pivot)
        assert torch.isfinite(found).all()
        assert found.abs().max() <= 2 * largest * weight * (1 + weight) + 1e-9


@given(groups())
def test_without_a_candidate_every_treatment_is_the_mean_baseline(group):
    members, pivot = group
    members = [{**one, "candidate": False} for one in members]
    for treatment in ("masked", "doubly_robust", "value"):
        found = advantages(treatment, members, [True] * len(members), pivot)
        assert torch.allclose(found, complete(members), atol=1e-12)


@given(groups(), st.sampled_from(["failed", "value", "doubly_robust", "masked"]))
def test_the_books_balance_under_every_treatment(group, treatment):
    """A token is trained, wasted by a cut or by a group without gradient: one of them, whatever becomes of the cut."""
    members, pivot = group
    for _, spared in falls(members):
        cut = [one["candidate"] and not kept for one, kept in zip(members, spared, strict=True)]
        found = advantages(treatment, members, spared, pivot)
        rows = [{"tokens": one["at"] if gone else one["length"], "reprefill": 0, "trained": True,
                 "pruned": gone and treatment == "masked", "gradient": bool(found[number].any())}
                for number, (one, gone) in enumerate(zip(members, cut, strict=True))]
        balance = token_balance(rows)
        assert balance["spent"] == sum(row["tokens"] for row in rows)
        assert balance["pruned"] == sum(row["tokens"] for row, gone in zip(rows, cut, strict=True)
                                        if gone and treatment == "masked")
