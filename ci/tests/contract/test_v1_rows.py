"""Rows of verl's v1 trainers: what a response lived through, masks, and records; each beside verl without the hook."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

import torch  # noqa: E402

from ci.tests.contract.v1_scenes import batch_of, put  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl import owned  # noqa: E402
from esgrpo.hooks.verl.groups import rollout_driver  # noqa: E402
from esgrpo.hooks.verl.metrics import trained_rows  # noqa: E402
from esgrpo.hooks.verl.v1.rows import masked_rows, response_rows  # noqa: E402
from esgrpo.hooks.verl.v1.rows import trained_rows as v1_trained_rows

pytestmark = pytest.mark.slow
PRUNING = json.dumps({"enable": True, "segment_length": 2,
                      "prune": {"treatment": "masked", "repetition": {"enable": True}}})


def postprocess(queue, hooked: bool) -> dict:
    """One response through verl's own postprocessing; returns its tag and row."""
    import ray.actor  # noqa: F401
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    async def nothing(*_args, **_kwargs):
        return None

    async def score(outputs, kwargs):
        outputs[-1].reward_score = 1.0
        outputs[-1].extra_fields["reward_extra_info"] = {"acc": True}

    original = AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess
    function = wrapped(response_rows, original) if hooked else original
    worker = SimpleNamespace(
        _compute_score=score, _compute_teacher_logprobs=nothing, _compute_multi_modal_inputs=lambda *_: {},
        _compute_position_ids=lambda ids, *_: torch.arange(ids.shape[1]).unsqueeze(0))
    output = AgentLoopOutput(prompt_ids=[1, 2], response_ids=[3, 4, 5], response_mask=[1, 1, 1], num_turns=2,
                             metrics=AgentLoopMetrics(), extra_fields={"min_global_steps": 7, "max_global_steps": 7})
    seat = rollout_driver.join(rollout_driver.Driver(0, 8), "u", 1)
    seat.response.spans, seat.response.tokens = [[5, 2], [7, 1]], 3

    async def scene():
        token = rollout_driver.current.set(seat)
        try:
            await function(worker, output, False, uid="u", session_id=0, global_steps=6, raw_prompt=[])
        finally:
            rollout_driver.current.reset(token)

    asyncio.run(scene())
    return {"tag": queue.tags["u_0_0"], "fields": queue.rows["u_0_0"]["extra_fields"],
            "reward": seat.driver.rewards.get(("u", 0))}


@pytest.mark.hook("v1-response-rows")
def test_a_row_carries_what_the_response_lived_through(queue):
    seen = postprocess(queue, hooked=True)
    assert seen["fields"]["esgrpo"]["spans"] == [[5, 2], [7, 1]] and seen["reward"] == (1.0, True)
    assert (seen["tag"]["min_global_steps"], seen["tag"]["max_global_steps"]) == (5, 7)


def test_without_the_hook_it_looks_entirely_fresh(queue):
    seen = postprocess(queue, hooked=False)
    assert "esgrpo" not in seen["fields"] and seen["tag"]["min_global_steps"] == 7


def sampled(queue):
    put(queue, "a_0_0", 3)
    put(queue, "a_1_0", 2, outcome="prune", rule="repetition")
    put(queue, "b_0_0", 2, outcome="prune", rule="repetition")  # pruned whole: left alone
    put(queue, "pad_0_0", 1, padding=True, outcome="prune")
    return batch_of(queue, *queue.rows)


@pytest.mark.hook("v1-pruned-rows")
def test_pruned_rows_are_masked_before_verl_reads_the_batch(queue, monkeypatch):
    batch, seen = sampled(queue), []

    def original(self, batch, metrics, logging_prefix="global_seqlen", keep_minibatch=False):
        seen.append({key: int(row["response_mask"].sum()) for key, row in queue.rows.items()})
        return batch

    for settings in (PRUNING, "{}"):  # the second one is the control: nothing is pruned, nothing is touched
        for row in queue.rows.values():
            row["response_mask"] = torch.ones_like(row["response_mask"])
        monkeypatch.setenv("ESGRPO_SEGMENT", settings)
        assert wrapped(masked_rows, original)(SimpleNamespace(), batch, metrics={}) is batch
    assert seen == [{"a_0_0": 3, "a_1_0": 0, "b_0_0": 2, "pad_0_0": 1},
                    {"a_0_0": 3, "a_1_0": 2, "b_0_0": 2, "pad_0_0": 1}]


def test_masking_writes_both_masks_and_says_which(queue):
    assert masked_rows.mask(sampled(queue)) == ["a_1_0"]
    assert int(queue.rows["a_1_0"]["loss_mask"].sum()) == 0 and int(queue.rows["a_0_0"]["loss_mask"].sum()) == 3


def trained(queue, monkeypatch, tmp_path, hooked: bool, change=lambda queue: None):
    """verl's own _compute_metrics on a sampled batch; returns (records of trained rows, metrics)."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from esgrpo.records import read

    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(v1_trained_rows, "windows", lambda trainer: {"esgrpo/bubble_rate": 0.5})
    monkeypatch.setattr(trained_rows, "update", {})
    trained_rows.begin(["a", "b", "c"], step=3)  # as v1-carry-over does when the batch is drawn
    sampled(queue)
    put(queue, "c_0_0", 2)
    put(queue, "c_0_1", 4)
    change(queue)
    for number, (key, row) in enumerate(queue.rows.items()):
        row["response_mask"] = row["response_mask"].bool()
        prompt = torch.ones(2 + number % 2, dtype=torch.int64)  # of different lengths, or the queue would stack them
        row.update(prompts=prompt, responses=torch.ones_like(row["loss_mask"]), returns=row["advantages"], num_turns=2,
                   token_level_rewards=row["rm_scores"])
        queue.tags[key].update(min_global_steps=1, max_global_steps=2)
    rollout = SimpleNamespace(get=lambda _name, default=None: default)
    trainer = SimpleNamespace(
        global_steps=3, use_critic=False, _get_n_gpus_for_throughput=lambda: 1,
        _rollout_moe_lb_metrics_accumulator=None, replay_buffer=SimpleNamespace(esgrpo={
            owned.Pruned: owned.Pruned(groups=2, replaced=2, tokens=9)}),
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout, model=SimpleNamespace())))
    original, metrics = PPOTrainer._compute_metrics, {}
    timing = {"step": 8.0, "gen": 4.0, "update_actor": 2.0, "update_weights": 1.0}
    (wrapped(v1_trained_rows, original) if hooked else original)(trainer, batch_of(queue, *queue.rows), metrics, timing,
                                                              global_steps=3, epoch=0)
    return read(str(tmp_path), "trained"), metrics


@pytest.mark.hook("v1-trained-rows")
def test_trained_rows_leave_out_padding_and_all_outputs_but_the_last(queue, monkeypatch, tmp_path):
    rows, metrics = trained(queue, monkeypatch, tmp_path, hooked=True)
    assert [(row["group"], row["tokens"], row["step"]) for row in rows] == [("a", 3, 3), ("a", 2, 3), ("b", 2, 3),
                                                                          ("c", 4, 3)]
    assert all(row["correct"] for row in rows)  # acc decides, the scores are zero
    assert metrics["training/global_step"] == 3 and metrics["esgrpo/bubble_rate"] == 0.5
    assert "esgrpo/prune/rate" in metrics


def test_a_step_is_accounted_for(queue, monkeypatch, tmp_path):
    """By verl's own timers; what they leave out is "other", and all of it the time since the step before."""
    from esgrpo.records import read

    _, metrics = trained(queue, monkeypatch, tmp_path, hooked=True)
    event, = read(str(tmp_path), "events")
    assert (event["side"], event["version"], event["groups"], event["tokens"]) == ("train", 3, 3, 11)
    assert event["spent"] == pytest.approx({"wait": 4.0, "sync": 1.0, "train": 2.0, "checkpoint": 0.0,
                                            "validation": 0.0, "other": 1.0})
    assert sum(event["spent"].values()) == pytest.approx(event["seconds"]) and event["age"] == 2.0
    assert metrics["esgrpo/overlap/trainer/wait"] == pytest.approx(0.5) and metrics["esgrpo/overlap/age"] == 2.0
    assert event["no_devices"] or event["devices"]


def test_audited_pruning_is_reported_with_its_length_bias(queue, monkeypatch, tmp_path):
    """The long one of three was exempted with probability 1/4: it stands for three that would have been pruned."""
    audited = {"enable": True, "prune": {"finish_group_after": 2, "treatment": "masked", "audit": {"enable": True}}}
    monkeypatch.setenv("ESGRPO_SEGMENT", json.dumps(audited))
    plain = {"candidate": False, "exempted": False, "keep_probability": 1.0, "candidate_rule": "",
             "tokens_at_decision": None}
    exempted = {"candidate": True, "exempted": True, "keep_probability": 0.25, "candidate_rule": "enough",
                "tokens_at_decision": 3, "audit": {"false_rate": 0.5, "false_rate_bound": 0.9, "outcomes": 2}}

    def summaries(queue):
        for row in queue.rows.values():
            row["extra_fields"]["esgrpo"] |= plain
        queue.rows["c_0_1"]["extra_fields"]["esgrpo"] |= exempted

    _, metrics = trained(queue, monkeypatch, tmp_path, hooked=True, change=summaries)
    assert metrics["esgrpo/prune/false_rate"] == 0.5 and metrics["esgrpo/prune/tokens_saved"] == 3 * (4 - 3)
    assert metrics["esgrpo/prune/replaced_groups"] == 2 and metrics["esgrpo/waste/zero_variance_replaced"] == 9
    # trained: one long row of two; in complete groups four of five
    assert metrics["esgrpo/length_bias/enough"] == pytest.approx(4 / 5 - 1 / 2)


def test_rows_that_were_made_without_the_overlay_stop_nothing(queue, monkeypatch, tmp_path):
    """The queue of a checkpoint of plain verl comes back with them."""
    def strip(queue):
        for row in queue.rows.values():
            del row["extra_fields"]["esgrpo"]

    rows, metrics = trained(queue, monkeypatch, tmp_path, hooked=True, change=strip)
    assert rows == [] and metrics["esgrpo/bubble_rate"] == 0.5 and "esgrpo/prune_rate" not in metrics


def test_without_the_hook_nothing_of_this_is_said(queue, monkeypatch, tmp_path):
    rows, metrics = trained(queue, monkeypatch, tmp_path, hooked=False)
    assert rows == [] and metrics["training/global_step"] == 3
    assert not [name for name in metrics if name.startswith("esgrpo/")]
