"""Dynamic sampling of verl's v1 trainers under pruning, on verl's real replay buffer with and without the hook."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

import torch  # noqa: E402

from ci.tests.contract.v1_scenes import put  # noqa: E402
from esgrpo import config  # noqa: E402
from esgrpo.hooks.verl import v1_filtered_groups  # noqa: E402

pytestmark = pytest.mark.slow
PRUNE = {"repetition": {"enable": True}, "resolved": {"enable": True}, "audit": {"enable": True}}
DONE, CUT = {"outcome": "finish"}, {"outcome": "prune", "rule": "resolved"}
LOOP = {"outcome": "prune", "rule": "repetition"}


@pytest.fixture
def buffer_of(queue, monkeypatch):
    monkeypatch.setenv(config.ENV_SEGMENT, config.to_json(config.parse({"enable": True, "prune": PRUNE})))

    def made(hooked: bool, metric: str = "acc"):
        from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

        buffer = ReplayBufferAsync("separate_async", {}, 8, "drop", {}, poll_interval=0.0,
                                   refill_fn=lambda _count: None, filter_groups_metric=metric)
        if hooked:
            hook = v1_filtered_groups.build(ReplayBufferAsync._dapo_filtered_keys)
            monkeypatch.setattr(buffer, "_dapo_filtered_keys", hook.__get__(buffer))
        return buffer

    return made


def finish(queue, uid: str, *members: tuple[float, bool, dict]) -> None:
    """A finished group; members as (reward, correct, what became of it)."""
    queue.tags[uid] = {"is_prompt": True, "status": "finished", "global_steps": 1}
    for number, (score, correct, summary) in enumerate(members):
        key = f"{uid}_{number}_0"
        put(queue, key, 2 + number, **{name: summary[name] for name in ("outcome", "rule") if name in summary})
        queue.rows[key]["rm_scores"][-1] = score
        fields = queue.rows[key]["extra_fields"]
        fields["reward_extra_info"] = {"acc": correct}
        fields["esgrpo"] |= {"keep_probability": summary.get("pi", 1.0), "pivot": summary.get("pivot")}


def groups(queue) -> None:
    tossed = {**CUT, "pi": 0.5, "pivot": 1.0}
    finish(queue, "right", (1.0, True, DONE), (1.0, True, DONE), (0.0, False, tossed))
    finish(queue, "measured", (1.0, True, DONE), (1.0, True, DONE), (0.0, False, {**tossed, "pivot": 0.5}))
    finish(queue, "mixed", (1.0, True, DONE), (0.0, False, DONE), (0.0, False, tossed))
    finish(queue, "loop", (1.0, True, DONE), (1.0, True, DONE), (0.0, False, LOOP))
    finish(queue, "whole", (1.0, True, DONE), (0.0, False, DONE))
    finish(queue, "equal", (0.0, False, DONE), (0.0, False, DONE))


def evicted(buffer) -> set[str]:
    buffer._sync_metadata_from_transfer_queue()
    return buffer._dapo_filtered_keys("train")[0]


def test_groups_that_pruning_left_without_gradient_are_replaced(queue, buffer_of):
    groups(queue)
    assert evicted(buffer_of(hooked=False)) == {"equal"}  # verl counts what was cut off as wrong answers
    assert evicted(buffer_of(hooked=True)) == {"equal", "right", "loop"}
    assert evicted(buffer_of(hooked=True, metric="reward")) == {"equal", "right", "loop"}


def test_a_group_is_judged_once_and_stays_judged(queue, buffer_of, monkeypatch):
    groups(queue)
    buffer, judged = buffer_of(hooked=True), []
    judge = v1_filtered_groups._judge
    monkeypatch.setattr(v1_filtered_groups, "_judge", lambda *args: judged.append(args[2]) or judge(*args))
    first = evicted(buffer)
    assert evicted(buffer) == first and len(judged) == 1
    _, counts = buffer._dapo_filtered_keys("train")
    assert counts == {1.0: 2, 0.0: 1}
    buffer._evict_terminal_groups(1, "train", buffer._terminal_eviction_reasons(1, "train"))
    finish(queue, "right", (1.0, True, DONE), (0.0, False, DONE))  # the same uid again would be looked at anew
    assert evicted(buffer) == set() and judged[1:] == [{"right"}]


def test_nothing_is_touched_without_pruning_or_filter(queue, buffer_of):
    groups(queue)
    masks = {key: row["response_mask"].clone() for key, row in queue.rows.items()}
    evicted(buffer_of(hooked=True))
    assert all(torch.equal(mask, queue.rows[key]["response_mask"]) for key, mask in masks.items())
    assert evicted(buffer_of(hooked=True, metric=None)) == set()
