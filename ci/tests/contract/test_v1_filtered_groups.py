"""Dynamic sampling of verl's v1 trainers under pruning, on verl's real replay buffer with and without the hook."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

import torch  # noqa: E402

from ci.tests.contract.v1_scenes import put  # noqa: E402
from esgrpo import config  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl import owned  # noqa: E402
from esgrpo.hooks.verl.metrics import decision_counts  # noqa: E402
from esgrpo.hooks.verl.v1.prompts import filtered_groups  # noqa: E402

pytestmark = pytest.mark.slow
PRUNE = {"treatment": "masked", "repetition": {"enable": True}, "resolved": {"enable": True}, "audit": {"enable": True}}
DONE, CUT = {"outcome": "finish"}, {"outcome": "prune", "rule": "resolved"}
LOOP = {"outcome": "prune", "rule": "repetition"}


@pytest.fixture
def written(monkeypatch):
    from esgrpo import records

    rows: dict[str, list] = {}
    monkeypatch.setattr(records, "write", lambda row: rows.setdefault(row.kind, []).append(row))
    return rows


@pytest.fixture
def buffer_of(queue, monkeypatch):
    monkeypatch.setenv(config.ENV_SEGMENT, config.to_json(config.parse({"enable": True, "prune": PRUNE})))

    def made(hooked: bool, metric: str | None = "acc", mode: str = "separate_async"):
        from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

        refills = []
        kind = ReplayBuffer if mode == "sync" else ReplayBufferAsync
        buffer = kind(mode, {}, 8, "drop", {}, poll_interval=0.0, refill_fn=refills.append,
                      filter_groups_metric=metric, max_inflight_gen_batches=1, train_batch_size=1, gen_batch_size=1)
        buffer.refills = refills
        if hooked:
            hook = wrapped(filtered_groups, kind._dapo_filtered_keys)
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


@pytest.mark.hook("v1-filter-trained-rows")
def test_groups_that_pruning_left_without_gradient_are_replaced(queue, buffer_of):
    groups(queue)
    assert evicted(buffer_of(hooked=False)) == {"equal"}  # verl counts what was cut off as wrong answers
    assert evicted(buffer_of(hooked=True)) == {"equal", "right", "loop"}
    assert evicted(buffer_of(hooked=True, metric="reward")) == {"equal", "right", "loop"}


def test_a_group_is_judged_once_and_stays_judged(queue, buffer_of, monkeypatch):
    groups(queue)
    buffer, judged = buffer_of(hooked=True), []
    judge = filtered_groups._judge
    monkeypatch.setattr(filtered_groups, "_judge", lambda *args: judged.append(args[2]) or judge(*args))
    first = evicted(buffer)
    assert evicted(buffer) == first and len(judged) == 1
    _, counts = buffer._dapo_filtered_keys("train")
    assert counts == {1.0: 2, 0.0: 1}
    buffer._evict_terminal_groups(1, "train", buffer._terminal_eviction_reasons(1, "train"))
    finish(queue, "right", (1.0, True, DONE), (0.0, False, DONE))  # the same uid again would be looked at anew
    assert evicted(buffer) == set() and judged[1:] == [{"right"}]


def test_nothing_is_touched_without_pruning_or_filter(queue, buffer_of, monkeypatch):
    groups(queue)
    masks = {key: row["response_mask"].clone() for key, row in queue.rows.items()}
    evicted(buffer_of(hooked=True))
    assert all(torch.equal(mask, queue.rows[key]["response_mask"]) for key, mask in masks.items())
    monkeypatch.setenv(config.ENV_SEGMENT, config.to_json(config.parse({"enable": True, "prune": {
        "repetition": {"enable": True}}})))
    assert evicted(buffer_of(hooked=True, metric=None)) == set()


def test_without_the_filter_what_the_resolved_rule_ended_is_replaced(queue, buffer_of, written):
    """As in a fully-async run: "equal" and "loop" have no gradient either, but no rule foresaw it."""
    groups(queue)
    plain, buffer = buffer_of(hooked=False, metric=None), buffer_of(hooked=True, metric=None)
    assert plain.wait_for_sampleable(2, "train", 1) == (
        {"right", "measured", "mixed", "loop", "whole", "equal"}, {}) and plain.refills == []
    sampleable, metrics = buffer.wait_for_sampleable(2, "train", 1)
    assert sampleable == {"measured", "mixed", "loop", "whole", "equal"} and buffer.refills == [1]
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert [(row["group"], len(row["rows"])) for row in written["replaced"]] == [("right", 3)]
    finish(queue, "right", (1.0, True, DONE), (0.0, False, DONE))  # the same uid again is looked at anew
    assert "right" in buffer.wait_for_sampleable(2, "train", 1)[0]
    assert buffer.refills == [1] and len(written["replaced"]) == 1


def test_a_replaced_group_is_counted_once(queue, buffer_of, written, monkeypatch):
    monkeypatch.setattr(decision_counts, "counts", Counter())
    groups(queue)
    buffer = buffer_of(hooked=True, metric=None)
    assert buffer.get_sampleable_count(2, "train") == 5 and evicted(buffer) == {"right"}  # judged, and judged again
    noted = vars(owned.of(buffer, owned.Pruned))
    assert (noted["replaced"], noted["tokens"], len(noted["rows"])) == (1, 2 + 3, 3)  # less the pruned row
    assert len(written["replaced"]) == 1 and decision_counts.counts == {"replaced/groups": 1}


def test_what_the_filter_evicts_because_of_pruning_is_counted_once(queue, buffer_of, monkeypatch):
    monkeypatch.setattr(decision_counts, "counts", Counter())
    groups(queue)
    buffer = buffer_of(hooked=True)
    assert evicted(buffer) == evicted(buffer) == {"equal", "right", "loop"}
    assert decision_counts.counts == {"replaced/groups": 2}  # "equal" is verl's own


def test_its_end_is_recorded_once(queue, buffer_of, written, monkeypatch):
    """As replaced, not as evicted, too: the books would have two ends of one prompt."""
    from esgrpo.hooks.verl.v1.prompts import failed_groups

    groups(queue)
    for metric, ends in (None, {"replaced": ["right"]}), ("acc", {"evicted": ["equal", "loop", "right"]}):
        buffer = buffer_of(hooked=True, metric=metric)
        evict = wrapped(failed_groups, type(buffer)._evict_terminal_groups)
        monkeypatch.setattr(buffer, "_evict_terminal_groups", evict.__get__(buffer))
        monkeypatch.setattr(buffer, "_clear_groups", lambda *args: None)  # there are the same groups for the next one
        buffer._sync_metadata_from_transfer_queue()
        buffer._evict_terminal_groups(2, "train", buffer._terminal_eviction_reasons(2, "train"))
        assert {kind: sorted(row["group"] for row in rows) for kind, rows in written.items()} == ends
        written.clear()


def test_under_sync_nothing_is_replaced_without_the_filter(queue, buffer_of):
    """verl's loop refills there for its own filter only: a group that were evicted would be waited for without end."""
    groups(queue)
    assert evicted(buffer_of(hooked=True, metric=None, mode="sync")) == set()
    assert evicted(buffer_of(hooked=True, mode="sync")) == {"equal", "right", "loop"}
