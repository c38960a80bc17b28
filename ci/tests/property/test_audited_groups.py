"""Whole groups under audited pruning: the world of test_group_rollout with coins, syncs, crossings and failures."""

from __future__ import annotations

import asyncio
import statistics

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from ci.tests.property.test_group_rollout import BUDGET, LOOPS, World
from esgrpo import config
from esgrpo.hooks.verl import owned
from esgrpo.hooks.verl.groups.masked_rows import mask_pruned

AUDIT = {"enable": True, "exempt_prob": 0.5, "max_fraction": 0.75, "window": 50, "min_candidates": 1,
         "max_false_rate": 1.0}
RULES = {"enough": {"finish_group_after": 2}, "resolved": {"resolved": {"enable": True, "null_prob": 1.0}}}


def simulate(case):
    settings = config.parse(case["values"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(config.ENV_SEGMENT, config.to_json(settings))
        patch.delenv("ESGRPO_RUN_DIR", raising=False)
        world = World(case, settings)
        return world, asyncio.run(world.run())


@st.composite
def cases(draw):
    n = draw(st.integers(1, 6))
    member = st.tuples(st.integers(0, 70), st.sampled_from([2, 1000]))
    names = [f"g{i}" for i in range(draw(st.integers(1, 6)))]
    prune = {**RULES[draw(st.sampled_from(sorted(RULES)))], "treatment": "masked",
             "audit": {**AUDIT, "max_fraction": draw(st.sampled_from([0.25, 0.5, 1.0]))},
             "repetition": {"enable": draw(st.booleans()), **LOOPS}}
    return {"n": n, "seed": draw(st.integers(0, 10**6)), "replicas": draw(st.integers(1, 3)),
            "transit": draw(st.sampled_from([0, 3, 12])), "scoring": draw(st.sampled_from([0, 2, 12])),
            "groups": {name: draw(st.lists(member, min_size=n, max_size=n)) for name in names},
            "syncs": draw(st.dictionaries(st.integers(1, 60), st.booleans(), max_size=6)),
            "values": {"enable": True, "segment_length": draw(st.integers(2, 30)), "seed": draw(st.integers(0, 9)),
                       "boundary": draw(st.sampled_from(["soft", "yield"])), "prune": prune}}


@given(cases())
def test_every_row_knows_its_keep_probability_and_the_caps_hold(case):
    world, rows = simulate(case)
    fraction = case["values"]["prune"]["audit"]["max_fraction"]
    mask_pruned(rows)
    for group in case["groups"]:
        mine = [row for row in rows if row.extra_fields["esgrpo"]["group"] == group]
        tossed = [row for row in mine if row.extra_fields["esgrpo"]["keep_probability"] < 1]
        doomed = [row for row in mine if row.extra_fields["esgrpo"]["candidate"]
                  and not row.extra_fields["esgrpo"]["exempted"]]
        assert len(doomed) <= fraction * case["n"] and (not doomed or case["n"] - len(doomed) >= 2)
        assert len({row.extra_fields["esgrpo"]["pivot"] for row in tossed}) <= 1
        assert {id(row) for row in doomed} <= {id(row) for row in tossed}
        assert not any(row.response_mask.any() for row in doomed)
        for row in mine:
            check_row(row, world)


def check_row(row, world):
    summary = row.extra_fields["esgrpo"]
    response = world.responses[summary["group"], summary["member"]]
    assert summary["keep_probability"] in (AUDIT["exempt_prob"], 1.0)
    assert summary["candidate"] or summary["keep_probability"] == 1.0 and not summary["exempted"]
    if summary["candidate"] and not summary["exempted"]:
        assert (summary["outcome"], summary["rule"]) == ("prune", summary["candidate_rule"])
        event("pruned complete" if response.made == min(response.length, BUDGET) else "pruned")
    elif summary["outcome"] == "finish":
        assert response.made == min(response.length, BUDGET)
        event("exempted" if summary["exempted"] else "finished")
    else:
        assert summary["rule"] == "repetition"
    if summary["candidate"]:
        assert summary["tokens_at_decision"] <= response.made


@given(cases())
def test_nobody_is_asked_without_a_verdict_and_nothing_stays(case):
    world, rows = simulate(case)
    doomed = {(s["group"], s["member"]) for s in (row.extra_fields["esgrpo"] for row in rows)
              if s["candidate"] and not s["exempted"]}
    failed = {(group, number) for group, members in case["groups"].items() for number, (length, _) in enumerate(members)
              if length == 0}
    for replica in world.replicas:
        assert set(replica.asks) <= doomed | failed and len(set(replica.asks)) == len(replica.asks)
    runs = owned.of(world.worker, owned.Worker).driver.runs
    pruner = runs.rules.pruner
    assert pruner.groups == {} and pruner.audit._decided == {} and runs.groups == {}


def many(seed, rule="enough", **values):
    second = 12 if rule == "enough" else 11  # multiples of three are wrong: this rule waits for both signs
    lengths = [(7, 1000), (second, 1000), (22, 1000), (34, 1000), (43, 1000), (52, 1000)]
    return {"n": 6, "seed": seed, "replicas": 2, "transit": 3, "scoring": 2, "syncs": {20: False, 30: True},
            "groups": {f"g{i}": lengths for i in range(12)},
            "values": {"enable": True, "seed": seed, "segment_length": 10,
                       "prune": {**RULES[rule], "treatment": "masked", "audit": AUDIT}, **values}}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_weights_have_mean_one(rule):
    """E[kept / pi] = 1 over all rows, the long ones too: with crossings, syncs and caps."""
    weights = {length: [] for length in (34, 43, 52)}
    pruned = 0
    for seed in range(30):
        world, rows = simulate(many(seed, rule))
        mask_pruned(rows)
        for row in rows:
            summary = row.extra_fields["esgrpo"]
            length = world.responses[summary["group"], summary["member"]].length
            kept = bool(row.response_mask.any())
            pruned += not kept
            weights.get(length, []).append(kept / summary["keep_probability"])
    assert pruned > 100
    for length, sample in weights.items():
        error = statistics.stdev(sample) / len(sample) ** 0.5
        assert abs(statistics.fmean(sample) - 1) < 3 * error, length


def test_a_seed_decides_all_coins_and_another_seed_others():
    def verdicts(seed):
        _, rows = simulate({**many(1), "values": {**many(1)["values"], "seed": seed}})
        return sorted((s["group"], s["member"], s["outcome"]) for s in (row.extra_fields["esgrpo"] for row in rows))

    assert verdicts(3) == verdicts(3) != verdicts(4)


def test_without_a_group_rule_nothing_is_asked_for_progress():
    case = many(1)
    case["values"]["prune"] = {"repetition": {"enable": True, **LOOPS}}
    world, rows = simulate(case)
    assert owned.of(world.worker, owned.Worker).driver.runs.rules.pruner is None
    assert not any(replica.asks for replica in world.replicas)
    assert all(row.extra_fields["esgrpo"]["keep_probability"] == 1 for row in rows)


def test_rows_without_a_reward_are_judged_by_no_rule():
    class Unscored(World):
        async def agent_loop(self, worker, *arguments):
            row = await super().agent_loop(worker, *arguments)
            row.reward_score = None
            return row

    case = many(2)
    settings = config.parse(case["values"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(config.ENV_SEGMENT, config.to_json(settings))
        patch.delenv("ESGRPO_RUN_DIR", raising=False)
        rows = asyncio.run(Unscored(case, settings).run())
    assert not any(row.extra_fields["esgrpo"]["candidate"] for row in rows)
    assert all(torch.all(row.response_mask == 1) for row in rows)
