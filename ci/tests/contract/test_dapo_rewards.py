"""Audited pruning with verl's DAPO reward manager: rewards carry an overlong penalty, correctness is in acc."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

from esgrpo import config
from esgrpo.call import Call

pytest.importorskip("verl")

SIZE, BUDGET, BUFFER, FACTOR = 6, 100, 50, 1.0
CERTAIN = {"known": True, "low": 5.0, "alpha": 5000.0, "beta": 0.1, "tokens": 50, "high": 90, "length_class": "body"}
PRUNE = {"treatment": "masked", "resolved": {"enable": True, "null_prob": 0.5},
         "audit": {"enable": True, "exempt_prob": 0.1, "max_fraction": 0.75, "min_candidates": 1, "window": 50,
                   "max_false_rate": 1.0}}


@pytest.fixture
def manager():
    from omegaconf import OmegaConf
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    buffer = {"enable": True, "len": BUFFER, "penalty_factor": FACTOR, "log": True}
    settings = OmegaConf.create({"reward": {"reward_kwargs": {"overlong_buffer_cfg": buffer, "max_resp_len": BUDGET}}})
    made = object.__new__(DAPORewardManager)
    made.init_class = lambda *_: None
    DAPORewardManager.__init__(made, settings, SimpleNamespace(decode=lambda ids, **_: "4"),
                               lambda **_: {"score": 1.0, "acc": True})
    return made


def scored(manager, tokens: int) -> dict:
    from verl import DataProto

    response = torch.zeros(1, BUDGET, dtype=torch.long)
    attention = torch.zeros(1, BUDGET, dtype=torch.long)
    attention[:, :tokens] = 1
    data = DataProto.from_dict(tensors={"responses": response, "attention_mask": attention},
                               non_tensors={"data_source": ["t"], "reward_model": [{"ground_truth": "4"}]})
    return manager.loop.run_until_complete(manager.run_single(data))


def group(worker, results, forecast=CERTAIN):
    """One group through the real worker hook: members end in order of length, the rest hear verdicts."""
    from esgrpo.hooks.verl.groups import followed_members, rollout_driver

    release = {tokens: asyncio.Event() for tokens, _ in results}

    async def loop(worker_, tokens, result):
        seat = rollout_driver.current.get()
        seat.placed(0, worker_.server)
        worker_.running[seat.number] = tokens
        while not release[tokens].is_set() and not seat.response.doomed:
            await asyncio.sleep(0)
        worker_.running.pop(seat.number)
        seat.response.tokens, seat.response.spans = tokens, [[0, tokens]]
        return SimpleNamespace(reward_score=result["reward_score"],
                               extra_fields={"reward_extra_info": result["reward_extra_info"]})

    async def all_of_them():
        calls = [Call(loop, (worker, *item), {}) for item in results]
        tasks = [asyncio.ensure_future(followed_members.run_member(call, worker.name, forecast)) for call in calls]
        for tokens, _ in sorted(results, key=lambda item: item[0]):
            release[tokens].set()
            for _ in range(30):
                await asyncio.sleep(0)
        return [row.extra_fields["esgrpo"] for row in await asyncio.gather(*tasks)]

    return asyncio.run(all_of_them())


def worker():
    async def progress(_group):
        return {number: 1 for number in made.running}

    async def finish(_group, numbers, _rule):
        return len(numbers)

    server = SimpleNamespace(esgrpo_progress=SimpleNamespace(remote=progress),
                             esgrpo_finish_group=SimpleNamespace(remote=finish))
    made = SimpleNamespace(rollout_config=SimpleNamespace(n=SIZE, response_length=BUDGET), running={}, name="g",
                           llm_client=None,
                           server=server)
    return made


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv(config.ENV_SEGMENT, config.to_json(config.parse({"enable": True, "prune": PRUNE})))
    monkeypatch.delenv("ESGRPO_RUN_DIR", raising=False)


def test_the_penalty_makes_rewards_of_correct_samples_differ(manager):
    """What the test rests on: acc stays true while the reward falls below the success threshold."""
    short, long = scored(manager, 40), scored(manager, 90)
    assert short["reward_score"] == 1.0 and float(long["reward_score"]) == pytest.approx(0.2)
    assert short["reward_extra_info"]["acc"] is long["reward_extra_info"]["acc"] is True


def test_an_overlong_response_is_recorded_with_its_penalty(manager, monkeypatch, tmp_path):
    """verl leaves a tensor as its score, under which the whole group used to fail; a short one's is a float."""
    from esgrpo.hooks.verl.groups import rollout_driver
    from esgrpo.records import read

    scores = {tokens: scored(manager, tokens)["reward_score"] for tokens in (40, 90)}
    with pytest.raises(TypeError):  # the control: what a record makes of it
        json.dumps(scores)
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    group(worker(), [(tokens, scored(manager, tokens)) for tokens in (10, 20, 30, 40, 50, 90)], forecast=None)
    found = {row["tokens"]: row["score"] for row in read(str(tmp_path), "responses")}
    assert found[90] == pytest.approx(0.2) and found[40] == 1.0 and len(found) == SIZE
    v1 = SimpleNamespace(reward_score=scores[90], extra_fields={})
    assert type(rollout_driver.reward_of(v1)[0]) is float
    assert rollout_driver.reward_of(SimpleNamespace(reward_score=None, extra_fields={})) == (None, None)


def test_correct_samples_agree_in_spite_of_the_penalty(manager):
    """90 tokens: reward 0.2 is below the threshold, and still correct. By score alone the group would not agree."""
    made = worker()
    lengths = [10, 85, 90, 95, 97, 99]
    for number in range(6):
        made.name = f"g{number}"
        rows = group(made, [(tokens, scored(manager, tokens)) for tokens in lengths])
    candidates = [row for row in rows if row["candidate"]]
    assert candidates and any(row["outcome"] == "prune" and row["rule"] == "resolved" for row in rows)
    pivot, = {row["pivot"] for row in candidates}
    assert pivot == pytest.approx((1.0 + 0.3) / 2)  # 85 tokens: 1 - 35 / 50

    by_score = worker()
    rows = group(by_score, [(tokens, {**scored(manager, tokens), "reward_extra_info": {}}) for tokens in lengths])
    assert not any(row["candidate"] for row in rows)  # negative control


def test_a_pruned_group_with_unequal_rewards_is_trained_and_unbiased_weights_reach_it(manager):
    from esgrpo.algo.treatment import is_resolved_null
    from esgrpo.hooks.verl.losses.weighted_rows import tossed_of
    from esgrpo.losses import grpo_segment_advantage

    made = worker()
    for number in range(6):
        made.name = f"g{number}"
        rows = group(made, [(tokens, scored(manager, tokens)) for tokens in (10, 85, 90, 95, 97, 99)])
    kept = [row["outcome"] != "prune" for row in rows]
    assert not all(kept) and not is_resolved_null(rows, kept)
    mask = torch.tensor([[int(item)] for item in kept])
    rewards = torch.tensor([[row["score"]] for row in rows])
    advantages = grpo_segment_advantage(rewards, mask, ["g"] * SIZE, norm_by_std=False,
                                        tossed=tossed_of({"esgrpo": rows}))
    assert advantages[0] > 0 and not advantages[~mask.bool()].any()


def test_without_the_penalty_the_group_is_null(manager):
    from esgrpo.algo.treatment import is_resolved_null

    made = worker()
    for number in range(6):
        made.name = f"g{number}"
        rows = group(made, [(tokens, scored(manager, tokens)) for tokens in (10, 12, 14, 16, 18, 20)])
    assert any(row["outcome"] == "prune" for row in rows)
    assert is_resolved_null(rows, [row["outcome"] != "prune" for row in rows])


def test_a_row_that_has_left_is_no_candidate_and_one_without_output_still_counts(manager):
    """verl's v1 writes the row before the worker hook returns: reward and acc are left with the member."""
    from esgrpo.algo import rollout
    from esgrpo.hooks.verl.groups import rollout_driver

    async def scene():
        driver = rollout_driver.Driver(0, BUDGET)
        seats = [rollout_driver.join(driver, "v1", SIZE, forecast=CERTAIN) for _ in range(4)]
        for seat in seats:
            seat.on(rollout.Placed, replica=0)
            seat.response.tokens = 20
        for seat in seats[:2]:
            seat.on(rollout.Sealed, now=0.0)
            seat.on(rollout.MemberEnded, now=0.0, score=1.0, acc=True)
        sealed, open_ = seats[2], seats[3]
        sealed.on(rollout.Sealed, now=0.0)
        driver.on(rollout.Progress("v1", {2: 20, 3: 20}))
        return sealed.response.decision, open_.response.decision, driver.runs.rules.pruner.groups["v1"].finished[0]

    decided_late, decided, finished = asyncio.run(scene())
    assert decided_late is None and decided is not None
    assert finished.correct
