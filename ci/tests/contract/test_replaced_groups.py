"""Groups without a gradient under verl's real rollouter: feed, put and counters are upstream's, Ray is a fake."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("ray")

SIZE, LIMIT, PROMPTS = 4, 6, 40


@pytest.fixture(scope="module")
def rollouter_class():
    module = pytest.importorskip("verl.experimental.fully_async_policy.fully_async_rollouter")
    return module.FullyAsyncRollouter.__ray_metadata__.modified_class


class Queue:
    """verl's client, in this process."""

    def __init__(self):
        self.samples = []

    async def put_sample(self, sample):
        self.samples.append(sample)
        return True

    async def get_statistics(self):
        return {"queue_size": len(self.samples)}

    async def get_queue_size(self):
        return len(self.samples)


def summaries(resolved: bool, differs: bool = False, rule: str = "resolved"):
    def row(member, **changes):
        return {"group": "g", "member": member, "outcome": "finish", "rule": "", "candidate_rule": "", "tokens": 10,
                "reprefill": 0,
                "candidate": False, "exempted": False, "keep_probability": 1.0, "pivot": None, "score": 1.0,
                "tokens_at_decision": None, **changes}

    if not resolved:
        return [row(member, score=float(member == 0) if differs else 1.0) for member in range(SIZE)]
    tossed = {"candidate": True, "keep_probability": 0.5, "pivot": 1.0, "candidate_rule": rule, "tokens_at_decision": 4,
              "audit": {"false_rate": 0.1, "false_rate_bound": 0.2, "outcomes": 10, "scale": 1.0}}
    return [row(0), row(1), row(2, **tossed, exempted=True) | {"score": 0.0 if differs else 1.0},
            row(3, **tossed, outcome="prune") | {"rule": rule, "score": 0.0}]


def batch_of(rows, acc=()):
    from verl import DataProto

    fields = np.empty(len(rows), dtype=object)
    fields[:] = rows
    more = {"acc": np.array(acc)} if len(acc) else {}
    mask = torch.tensor([[0 if row["outcome"] == "prune" else 1] * 3 for row in rows])
    return DataProto.from_dict(tensors={"response_mask": mask}, non_tensors={"esgrpo": fields, **more})


def rollouter(rollouter_class, kinds, limit=LIMIT):
    """A rollouter whose prompts become groups of the given kinds, in order; the last kind is repeated."""
    made = object.__new__(rollouter_class)
    rollout = SimpleNamespace(n=SIZE, multi_turn=SimpleNamespace(enable=False))
    made.config = SimpleNamespace(trainer=SimpleNamespace(total_epochs=2), algorithm={},
                                  actor_rollout_ref=SimpleNamespace(rollout=rollout))
    made._create_continuous_iterator = lambda: (
        (0, {"raw_prompt": np.array([f"prompt {number}"], dtype=object)}) for number in range(PROMPTS))
    made.train_dataloader, made.queue = range(PROMPTS // 2), Queue()  # two epochs of them
    made.message_queue_client, made.total_rollout_steps, made.global_steps = made.queue, limit, 1
    made.pending_queue, made.active_tasks = asyncio.Queue(maxsize=1), set()
    made.staleness_samples = made.total_generated_samples = made._step_generated_samples = 0
    made.dropped_stale_samples = made.processed_sample_count = 0
    made.max_required_samples = made.required_samples = made.staleness_threshold = 0
    made.max_queue_size = made.max_concurrent_samples = 0
    made.paused = False
    made.served = []

    async def generate(batch):
        kind = dict(kinds[min(len(made.served), len(kinds) - 1)])
        made.served.append(kind)
        await asyncio.sleep(0)
        acc = kind.pop("acc", ())
        return batch_of(summaries(**kind), acc)

    made.async_rollout_manager = SimpleNamespace(generate_sequences_single=generate)
    return made


async def run(made, process):
    """verl's own feed, and a processor that takes one group after the other and counts staleness like verl's."""
    made.feed_task = asyncio.ensure_future(made._feed_samples())
    while (sample := await made.pending_queue.get()) is not None:
        made.staleness_samples += 1
        await process(made, sample)


NULL, PLAIN = {"resolved": True}, {"resolved": False}


def both(rollouter_class):
    from esgrpo.call import wrapped
    from esgrpo.hooks.verl.groups import replaced_groups

    original = rollouter_class._process_single_sample_streaming
    return original, wrapped(replaced_groups, original)


@pytest.mark.hook("resolved-groups-are-replaced")
def test_a_foreseen_group_gives_its_place_to_another_prompt(rollouter_class, tmp_path, monkeypatch):
    from esgrpo import records

    original, hooked = both(rollouter_class)
    made = rollouter(rollouter_class, [PLAIN, NULL, NULL, PLAIN])
    with monkeypatch.context() as patch:
        patch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
        asyncio.run(run(made, hooked))
        records.flush()
    assert [(row["sample_id"], len(row["rows"])) for row in records.read(str(tmp_path), "replaced")] == [
        ("sample_0_2", SIZE), ("sample_0_3", SIZE)]  # a group that is not trained is on record all the same
    assert len(made.queue.samples) == LIMIT and len(made.served) == LIMIT + 2  # as many trained groups as without
    assert made.staleness_samples == made.total_generated_samples == made._step_generated_samples == LIMIT
    assert made.total_rollout_steps == LIMIT + 2 and made.processed_sample_count == LIMIT + 2
    plain = rollouter(rollouter_class, [PLAIN, NULL, NULL, PLAIN])
    asyncio.run(run(plain, original))  # negative control: verl trains them
    assert len(plain.queue.samples) == len(plain.served) == LIMIT


@pytest.mark.parametrize("kind", [{"resolved": True, "differs": True}, {"resolved": True, "rule": "enough"}, PLAIN])
def test_other_groups_are_put(rollouter_class, kind):
    made = rollouter(rollouter_class, [kind])
    asyncio.run(run(made, both(rollouter_class)[1]))
    assert len(made.queue.samples) == len(made.served) == LIMIT


def test_when_the_feed_is_over_a_group_is_put_like_any_other(rollouter_class):
    """Only foreseen groups, more of them than prompts: whoever comes when the feed has seen its end is put."""
    made = rollouter(rollouter_class, [NULL])
    asyncio.run(asyncio.wait_for(run(made, both(rollouter_class)[1]), 20))
    replaced = made.total_rollout_steps - LIMIT
    assert made.total_rollout_steps <= PROMPTS
    assert len(made.queue.samples) == len(made.served) - replaced >= 1
    assert made.staleness_samples == len(made.queue.samples)


def test_metrics_of_a_weight_version(rollouter_class, monkeypatch):
    from esgrpo.hooks.verl.metrics import decision_counts, prune_metrics

    monkeypatch.setattr(decision_counts, "counts", Counter())
    made = rollouter(rollouter_class, [PLAIN, NULL, NULL, PLAIN])
    assert prune_metrics.take(made) == {}
    asyncio.run(run(made, both(rollouter_class)[1]))
    values = prune_metrics.take(made)
    assert values["esgrpo/prune/replaced_groups"] == decision_counts.counts["replaced/groups"] == 2
    assert values["esgrpo/waste/zero_variance_replaced"] == 2 * 3 * 10  # not the pruned rows: they count as pruned
    assert (values["esgrpo/prune/candidates"], values["esgrpo/prune/exempted"]) == (4, 2)
    assert values["esgrpo/prune/tokens_saved"] == 2 * (1 / 0.5 - 1) * (10 - 4)
    assert values["esgrpo/prune/false_rate"] == pytest.approx(0.1)
    assert values["esgrpo/prune/false_rate_bound"] == 0.2
    assert values["esgrpo/prune/variance_inflation"] > 1
    assert values["esgrpo/length_bias/resolved"] == 0.0  # all of one length
    assert prune_metrics.take(made) == {}


@pytest.fixture
def null_groups(monkeypatch):
    """Sets the mode of `segment.null_groups` for this process."""
    import json

    from esgrpo import config
    from esgrpo.hooks.verl.metrics import decision_counts

    monkeypatch.setattr(decision_counts, "counts", Counter())
    return lambda mode: monkeypatch.setenv(config.ENV_SEGMENT, json.dumps({"enable": True, "null_groups": mode}))


MIXED, ALIKE = {"resolved": False, "differs": True}, {"resolved": False}


@pytest.mark.hook("resolved-groups-are-replaced")
@pytest.mark.parametrize("mode, waiting, left_out", [
    ("replace", 0, 2), ("train", 9, 0), ("spare", 2, 0), ("spare", 3, 2)])
def test_groups_whose_rewards_are_alike_give_their_place_as_the_mode_says(rollouter_class, null_groups, mode, waiting,
                                                                          left_out):
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.metrics import decision_counts
    from esgrpo.hooks.verl.overlap import rollouter_settings

    null_groups(mode)
    original, hooked = both(rollouter_class)
    made = rollouter(rollouter_class, [MIXED, ALIKE, ALIKE, MIXED])
    made.required_samples = 3
    made.queue.get_statistics = lambda: asyncio.sleep(0, {"queue_size": waiting})
    asyncio.run(run(made, hooked))
    assert len(made.queue.samples) == LIMIT and len(made.served) == LIMIT + left_out
    assert made.staleness_samples == made.total_generated_samples == LIMIT
    assert decision_counts.counts["replaced/groups"] == left_out
    # overlap control is told: of what is left out because nobody waits for it, it is not
    owned.of(made, owned.RolloutSignals).windows = [
        {"version": 3, "tokens": 1000, "surprisal": 0.0, "surprisal_tokens": 0, "capacity": 0}]
    told = [rollouter_settings.report(made) for _ in range(2)]  # of one version, and of one without windows
    assert [one.tokens for one in told] == [1000 - left_out * SIZE * 10 * (mode == "replace"), None]
    # of what `spare` may leave out it is told the share of all that finished
    assert [one.null_share for one in told] == [2 / (LIMIT + left_out) if mode == "spare" else None, None]
    assert decision_counts.counts["replaced/null"] == (0 if mode == "train" else 2)
    plain = rollouter(rollouter_class, [MIXED, ALIKE, ALIKE, MIXED])
    asyncio.run(run(plain, original))  # negative control: verl trains them
    assert len(plain.queue.samples) == len(plain.served) == LIMIT


def test_a_reward_that_is_always_the_same_does_not_starve_the_trainer(rollouter_class, null_groups):
    from esgrpo.algo.null_groups import MOST_BATCHES

    null_groups("replace")
    made = rollouter(rollouter_class, [ALIKE])
    made.required_samples = 1
    asyncio.run(asyncio.wait_for(run(made, both(rollouter_class)[1]), 20))
    assert len(made.queue.samples) == LIMIT  # each after ten batches of one group that were left out, or at the end
    assert LIMIT + 2 * MOST_BATCHES <= len(made.served) <= PROMPTS


@pytest.mark.parametrize("acc, left_out", [((1, 1, 1, 1), True), ((1, 0, 1, 1), False)])
def test_the_metric_of_verls_group_filter_is_the_one_that_is_judged(rollouter_class, null_groups, acc, left_out):
    """The rewards differ by a penalty, or are alike where the metric is not."""
    null_groups("replace")
    kind = {"resolved": False, "differs": left_out, "acc": acc}
    made = rollouter(rollouter_class, [kind, MIXED | {"acc": (1, 0, 0, 0)}])
    made.config.algorithm = {"filter_groups": {"enable": True, "metric": "acc"}}
    asyncio.run(run(made, both(rollouter_class)[1]))
    assert len(made.served) == LIMIT + left_out


def test_a_metric_that_the_reward_function_does_not_return_ends_in_one_line(rollouter_class, null_groups):
    from esgrpo.errors import RunError

    null_groups("replace")
    made = rollouter(rollouter_class, [MIXED])
    made.config.algorithm = {"filter_groups": {"enable": True, "metric": "acc"}}
    with pytest.raises(RunError, match="no acc beside a response's reward"):
        asyncio.run(run(made, both(rollouter_class)[1]))


@pytest.mark.parametrize("feed, issued, goes_on", [
    (SimpleNamespace(done=lambda: False), LIMIT - 1, True), (SimpleNamespace(done=lambda: False), LIMIT, False),
    (SimpleNamespace(done=lambda: True), LIMIT - 1, False), (None, LIMIT - 1, False)])
def test_another_prompt_comes_only_from_a_feed_that_will_look_again(rollouter_class, feed, issued, goes_on):
    from esgrpo.hooks.verl.groups.replaced_groups import another_instead

    made = rollouter(rollouter_class, [PLAIN])
    made.feed_task, made.global_steps = feed, issued
    assert another_instead(made) == goes_on and made.total_rollout_steps == LIMIT + goes_on


@pytest.mark.parametrize("limit, replaced, said", [(PROMPTS, 0, True), (PROMPTS - 1, 0, False), (PROMPTS, 3, False)])
def test_that_no_other_prompt_is_left_is_said(rollouter_class, null_groups, monkeypatch, capsys, limit, replaced, said):
    """At the end of the data there is none either, which is no setting's fault."""
    from esgrpo import guard
    from esgrpo.hooks.verl.groups.replaced_groups import another_instead
    from esgrpo.hooks.verl.metrics import decision_counts

    monkeypatch.setattr(guard, "_said", set())
    decision_counts.add("replaced", groups=replaced)
    made = rollouter(rollouter_class, [PLAIN], limit=limit)
    made.feed_task = SimpleNamespace(done=lambda: False)
    assert another_instead(made) is (limit < PROMPTS)
    assert ("total_rollout_steps asks for all of the" in capsys.readouterr().err) is said


def test_the_signal_that_ends_the_data_is_put_by_itself(rollouter_class):
    from esgrpo.hooks.verl.groups.replaced_groups import Filter

    made = rollouter(rollouter_class, [NULL])
    assert asyncio.run(Filter(made, made.queue).put_sample(sample=None)) and made.queue.samples == [None]


def test_a_group_of_a_foreign_worker_is_left_alone(rollouter_class):
    from esgrpo.hooks.verl.groups.replaced_groups import replace

    made = rollouter(rollouter_class, [PLAIN])
    batch = batch_of(summaries(True))
    del batch.non_tensor_batch["esgrpo"]
    assert not replace(made, SimpleNamespace(full_batch=batch, sample_id="x"))


def test_two_hooks_on_the_method_compose(rollouter_class, monkeypatch):
    """Another hook on the same method, as engine.py applies them: both markers are found, both run."""
    from esgrpo import engine
    from esgrpo.call import wrapped
    from esgrpo.hooks.verl.groups import replaced_groups

    seen = []

    def outer(original):
        import functools

        @functools.wraps(original)
        async def wrapped(self, *args, **kwargs):
            seen.append("outer")
            return await original(self, *args, **kwargs)

        return wrapped

    inner = wrapped(replaced_groups, rollouter_class._process_single_sample_streaming)
    setattr(inner, engine.MARKER, "resolved-groups-are-replaced")
    both_ = outer(inner)
    setattr(both_, engine.MARKER, "another-hook")
    assert engine.carries(both_, "resolved-groups-are-replaced") and engine.carries(both_, "another-hook")
    made = rollouter(rollouter_class, [NULL, PLAIN])
    asyncio.run(run(made, both_))
    assert len(made.queue.samples) == LIMIT and len(seen) == LIMIT + 1


def waiting_rollouter(rollouter_class):
    """All prompts that a version may begin, two, have begun; the first group has no gradient. verl's processor."""
    made = rollouter(rollouter_class, [ALIKE, MIXED])
    made.max_required_samples, made.max_queue_size, made.max_concurrent_samples, made.required_samples = 2, 9, 2, 1
    made._active_count_history, made.lock = [], asyncio.Lock()
    made._resume_event, made.idle_start_time, made.running = asyncio.Event(), 0.0, True
    made._resume_event.set()
    return made


async def begun_in_a_version(made, hooked) -> int:
    """Prompts, before verl's monitor looks and before weights are synced."""
    made._process_single_sample_streaming = lambda sample: hooked(made, sample)
    made.queue.samples = [None]  # as many as the trainer takes at once
    made.feed_task = asyncio.ensure_future(made._feed_samples())
    processor = asyncio.ensure_future(made._processor_worker())
    await asyncio.sleep(0.2)
    for task in (processor, made.feed_task):
        task.cancel()
    await asyncio.gather(processor, made.feed_task, return_exceptions=True)
    return len(made.served)


@pytest.mark.hook("resolved-groups-are-replaced")
def test_the_place_is_filled_at_once_though_the_version_had_begun_all_its_prompts(rollouter_class, null_groups):
    null_groups("spare")
    original, hooked = both(rollouter_class)
    made = waiting_rollouter(rollouter_class)
    assert asyncio.run(begun_in_a_version(made, hooked)) == 3
    assert made.staleness_samples == made.max_required_samples and made.paused
    assert len(made.queue.samples) == 1 + 2 and made.total_generated_samples == 2
    plain = waiting_rollouter(rollouter_class)
    assert asyncio.run(begun_in_a_version(plain, original)) == 2  # negative control: verl trains the first one


def test_without_room_for_another_prompt_the_rollouter_stays_paused(rollouter_class):
    from esgrpo.hooks.verl.groups.replaced_groups import begin_again

    async def after(staleness: int, paused: bool = True):
        made = waiting_rollouter(rollouter_class)
        made._resume_event.clear()
        made.paused, made.staleness_samples = paused, staleness
        begin_again(made)
        return made.paused, made._resume_event.is_set()

    assert asyncio.run(after(2)) == (True, False) and asyncio.run(after(1)) == (False, True)
    assert asyncio.run(after(1, paused=False)) == (False, False)
