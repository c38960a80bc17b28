"""Carry-over, checkpoint and restart of verl's v1 trainers, on its real replay buffer and the trainer's own methods."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

import torch  # noqa: E402

from ci.tests.contract.v1_scenes import Trainer  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl import owned  # noqa: E402
from esgrpo.hooks.verl.v1.prompts import (  # noqa: E402
    carried_checkpoint,
    carried_groups,
    drawn_prompts,
    failed_groups,
    reissued_groups,
)
from esgrpo.records import read  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def evictions(monkeypatch):
    """The hook that remembers what verl's buffer evicts, as it is in place in a run."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    evict = ReplayBuffer._evict_terminal_groups
    monkeypatch.setattr(ReplayBuffer, "_evict_terminal_groups", wrapped(failed_groups, evict))


@pytest.mark.hook("v1-carry-over")
def test_carried_groups_come_first_and_stale_ones_are_dropped(queue, tmp_path):
    trainer = Trainer(queue, tmp_path)
    first = trainer.submit(3)
    trainer.complete(first[0])
    assert trainer.step(1) == {"trained": 1, "trained_carried": 0, "carried": 2, "unfinished": 2, "dropped": 0,
                               "filtered": 0, "failed": 0, "empty": 0, "gone": 0, "early": 0, "overdue": 0,
                               "age_max": 1, "carried_age_max": 1, "partial": 0}
    trainer.complete(*trainer.submit(1), first[1])
    seen = trainer.step(1)
    assert seen["trained_carried"] == 1 and seen["age_max"] == 2 and seen["carried"] == 2
    trainer.complete(first[2])
    seen = trainer.step(1)
    assert seen["dropped"] == 1 and seen["trained"] == 1 and seen["age_max"] == 2  # two versions old, two are allowed


def test_batches_of_a_version_add_up(queue, tmp_path):
    """verl's own aggregation logs the mean of what each batch gives to its metrics."""
    trainer = Trainer(queue, tmp_path)
    names = trainer.submit(5)
    trainer.complete(*names[:2])
    trainer.step(1)  # one complete group and three others are carried into the next version
    trainer.complete(names[2], *trainer.submit(1))
    for _ in range(3):
        metrics = {}
        batch = wrapped(carried_groups, Trainer._step_once)(trainer, metrics, {}, sample_batch_size=1)
        queue.kv_clear(batch.keys, "train")
        assert not any(name.startswith("esgrpo/carry") for name in metrics)
    seen = carried_groups.take_metrics(trainer)
    assert {name: seen[f"esgrpo/carry/{name}"] for name in ("trained", "trained_carried", "carried", "age_max")} == {
        "trained": 3, "trained_carried": 2, "carried": 2, "age_max": 2}
    assert carried_groups.take_metrics(trainer) == {}


def test_a_group_that_vanishes_is_counted_and_named_once(queue, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    trainer = Trainer(queue, tmp_path)
    names = trainer.submit(3)
    trainer.complete(names[0])
    trainer.step(1)
    del queue.tags[names[1]]
    trainer.complete(names[2], *trainer.submit(1))
    assert [trainer.step(1)["gone"] for _ in range(2)] == [1, 0]
    assert [row["odd"] for row in read(str(tmp_path), "carry")] == [{}, {"gone": [names[1]]}, {}]
    said = capfd.readouterr().err
    assert said.count("esgrpo: carry-over") == 1 and names[1] in said and "esgrpo/carry/gone" in said


@pytest.mark.parametrize(("trainer_mode", "status"), [
    ("sync", "failure"),  # every session raised: verl pads what is missing downstream
    ("sync", "finished"), ("colocate_async", "finished"), ("separate_async", "finished"),  # "Empty output for prompt"
])
def test_a_group_without_rows_does_not_stop_the_run(queue, tmp_path, monkeypatch, capfd, trainer_mode, status):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    trainer = Trainer(queue, tmp_path, threshold=None, trainer_mode=trainer_mode)
    seen, without = [], []
    for _ in range(2):
        names = trainer.submit(2)
        drawn_prompts.record(trainer, {"uid": names, "raw_prompt": names})
        without.append((names[1], "empty"))
        trainer.complete(names[0])
        trainer.end_without_rows(names[1], status=status)
        seen.append(trainer.step(2))
    assert [(step["trained"], step["empty"], step["gone"], step["carried"]) for step in seen] == [(1, 1, 0, 0)] * 2
    assert "g1) ended without a row" in capfd.readouterr().err
    assert [(row["group"], row["reason"]) for row in read(str(tmp_path), "evicted")] == without  # no surplus


def test_a_group_that_fails_in_an_asynchronous_mode_is_counted(queue, tmp_path):
    trainer = Trainer(queue, tmp_path)
    names = trainer.submit(2)
    trainer.complete(names[0])
    trainer.step(1)
    trainer.end_without_rows(names[1], status="failure")
    trainer.complete(*trainer.submit(1))
    seen = trainer.step(1)
    assert (seen["failed"], seen["empty"], seen["gone"]) == (1, 0, 0)


@pytest.mark.parametrize("why", ["failed", "filtered"])
def test_what_prepare_step_evicts_does_not_stop_the_run(queue, tmp_path, why):
    """verl's own `_wait_for_sampleable_and_switch`: its metrics go to the step, not to `_step_once`."""
    from contextlib import nullcontext

    from verl.trainer.ppo.v1 import trainer_separate_async

    filters = {"filter_groups_metric": "reward"} if why == "filtered" else {}
    trainer = Trainer(queue, tmp_path, threshold=None, trainer_mode="separate_async", **filters)
    names = trainer.submit(2)

    def complete(name: str, *scores: float) -> None:
        trainer.complete(name)
        for member, score in enumerate(scores):
            queue.rows[f"{name}_{member}_0"] = {"rm_scores": torch.tensor([score])}

    complete(names[0], 0.0, 1.0)
    trainer.step(1)
    if why == "failed":
        trainer.end_without_rows(names[1], status="failure")
    else:
        complete(names[1], 1.0, 1.0)
    complete(trainer.submit(1)[0], 0.0, 1.0)
    trainer.current_mode, trainer._step_threshold = trainer_separate_async.HybridEngineMode.ROLLOUT, 1
    trainer.timing_raw, trainer._timed_switch_to_trainer = {}, nullcontext
    prepared = trainer_separate_async.PPOTrainerSeparateAsync._wait_for_sampleable_and_switch(trainer)
    assert sum(prepared[name] for name in prepared if name.endswith("evicted_samples")) == 1
    seen = trainer.step(1)
    assert (seen[why], seen["gone"], seen["trained"]) == (1, 0, 1)


def test_a_group_that_is_trained_twice_stops_the_run(queue, tmp_path):
    from esgrpo.errors import EsgrpoError

    trainer = Trainer(queue, tmp_path)
    name = trainer.submit(1)[0]
    trainer.complete(name)
    trainer.step(1)
    queue.tags[name] = {"is_prompt": True, "status": "running", "global_steps": trainer.global_steps}
    trainer.complete(name)
    with pytest.raises(EsgrpoError, match=f"carry-over.*{name} was trained twice"):
        trainer.step(1)


def checkpoint(trainer, monkeypatch, hooked: bool) -> bool:
    """verl's own _save_checkpoint; True when the pool lay on disk before the checkpoint was marked as the latest."""
    import transfer_queue
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    folder = Path(carried_groups.folder(trainer, trainer.global_steps))
    seen = []

    def save_queue(path, metadata=None):
        seen.append((folder / carried_groups.STATE_FILE).exists())

    monkeypatch.setattr(transfer_queue, "save_checkpoint", save_queue, raising=False)
    settings = trainer.config.trainer
    settings.default_hdfs_dir, settings.get = None, lambda _name, default=None: default
    trainer.config.actor_rollout_ref.actor = {}
    trainer.use_critic, trainer.train_dataloader = False, SimpleNamespace(state_dict=dict)
    trainer.actor_rollout_wg = SimpleNamespace(save_checkpoint=lambda *_args, **_kwargs: None)
    trainer.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)
    original = PPOTrainer._save_checkpoint
    (wrapped(carried_checkpoint, original) if hooked else original)(trainer)
    assert (folder.parent / "latest_checkpointed_iteration.txt").read_text() == str(trainer.global_steps)
    return seen == [True]


def restart(queue, tmp_path, monkeypatch, lose: bool, hooked: bool = True):
    """A checkpoint after one step, and a second trainer that goes on from it; verl re-issues what was unfinished."""
    trainer = Trainer(queue, tmp_path, mode="auto")
    names = trainer.submit(3)
    trainer.complete(names[0])
    metrics = {}
    batch = wrapped(carried_groups, Trainer._step_once)(trainer, metrics, {}, sample_batch_size=1)
    assert checkpoint(trainer, monkeypatch, hooked) is hooked
    queue.kv_clear(batch.keys, "train")
    again = Trainer(queue, tmp_path, mode="auto")
    again.global_steps, again.number = 2, 10
    for name in names[1:]:
        queue.tags[name]["global_steps"] = 2  # what _reissue_inflight_prompts does
    if lose:
        del queue.tags[names[1]]
    again.complete(names[2])
    return again.step(1)


@pytest.mark.hook("v1-carry-checkpoint")
def test_nothing_is_lost_at_checkpoint_and_restart(queue, tmp_path, monkeypatch):
    assert restart(queue, tmp_path, monkeypatch, lose=False)["trained_carried"] == 1


def test_a_group_that_did_not_come_back_is_noticed(queue, tmp_path, monkeypatch):
    assert restart(queue, tmp_path, monkeypatch, lose=True)["gone"] == 1


@pytest.mark.parametrize("saved, news", [(True, 1), (False, 2)])  # the second one is the control
def test_after_a_restart_the_history_hears_of_what_is_new(queue, tmp_path, monkeypatch, saved, news):
    trainer = Trainer(queue, tmp_path, mode="auto")
    names = trainer.submit(3)
    trainer.complete(*names[:2])
    batch = wrapped(carried_groups, Trainer._step_once)(trainer, {}, {}, sample_batch_size=1)
    queue.kv_clear(batch.keys, "train")
    owned.of(trainer.replay_buffer, owned.Groups).observed = frozenset(names[:2])
    checkpoint(trainer, monkeypatch, saved)
    trainer.complete(names[2])
    again = Trainer(queue, tmp_path, mode="auto")
    again.global_steps = 2
    wrapped(reissued_groups, lambda self, partition_id="train": 0)(again)
    again.replay_buffer._sync_metadata_from_transfer_queue()
    known = owned.of(again.replay_buffer, owned.Groups).observed  # what prompt_outcomes leaves out
    unheard = set(again.replay_buffer.finished_keys["train"]) - known
    assert names[2] in unheard and len(unheard) == news  # of the two before one was trained, one waited


def test_without_the_hook_on_the_checkpoint_nobody_notices(queue, tmp_path, monkeypatch):
    assert restart(queue, tmp_path, monkeypatch, lose=True, hooked=False)["gone"] == 0


def reissue(queue, tmp_path, monkeypatch, hooked: bool) -> dict:
    """verl's own _reissue_inflight_prompts: one group complete, one with one member of two ended, one not begun."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    trainer, sent = Trainer(queue, tmp_path), []
    names = trainer.submit(3)
    trainer.complete(names[0])
    for index in range(2):  # two outputs of one session are one response
        queue.tags[f"{names[1]}_0_{index}"] = {"status": "success", "response_len": 7}
    for name in names:
        queue.rows[name] = {"input_ids": torch.ones(2, dtype=torch.int64)}
    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=sent.append)
    original = PPOTrainer._reissue_inflight_prompts
    assert (wrapped(reissued_groups, original) if hooked else original)(trainer) == len(names) - 1 == len(sent[0])
    assert set(queue.tags) == {*names, f"{names[0]}_0_0", f"{names[0]}_1_0"}  # verl has thrown the ended member away
    for name in names[1:]:
        trainer.complete(name)
    metrics = {}
    for _ in range(2):
        batch = wrapped(carried_groups, Trainer._step_once)(trainer, metrics, {}, sample_batch_size=1)
        queue.kv_clear(batch.keys, "train")
        yield {name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith("esgrpo/restart/")}
        metrics.clear()


@pytest.mark.hook("v1-reissued-groups")
def test_what_a_restart_generates_again_is_said_and_counted_once(queue, tmp_path, monkeypatch, capfd):
    lost = {"groups": 2, "finished": 1, "tokens": 14, "running": 3}
    assert list(reissue(queue, tmp_path, monkeypatch, hooked=True)) == [lost, {}]
    said = capfd.readouterr().err
    assert "2 prompt groups" in said and "1 responses that had ended (14 tokens)" in said
    assert [{name: row[name] for name in lost} for row in read(str(tmp_path), "restart")] == [lost]


def test_without_the_hook_the_restart_is_silent(queue, tmp_path, monkeypatch, capfd):
    assert list(reissue(queue, tmp_path, monkeypatch, hooked=False)) == [{}, {}]
    assert "esgrpo" not in capfd.readouterr().err and read(str(tmp_path), "restart") == []


def test_a_group_starts_as_a_whole_because_its_short_members_would_be_left():
    """Keep what has ended and draw the rest again: a third shorter than the truth, verl's way loses half of that."""
    rng = random.Random(1)
    limit, groups = 200, 5000  # tokens made before the restart

    def draw() -> int:
        return rng.choice([100, 100, 100, 400])

    full = [[draw() for _ in range(4)] for _ in range(groups)]
    kept = [[tokens if tokens <= limit else draw() for tokens in group] for group in full]
    whole = [group if max(group) <= limit else [draw() for _ in group] for group in full]
    true, short, verls = (statistics.fmean(map(statistics.fmean, made)) for made in (full, kept, whole))
    assert short < 0.75 * true < verls < true


def test_a_sampler_of_the_users_own_keeps_its_own_rules(queue, tmp_path):
    trainer = Trainer(queue, tmp_path)
    trainer.replay_buffer = SimpleNamespace()
    assert carried_groups.pool_of(trainer) is None


def rounds(monkeypatch, queue, tmp_path, hooked: bool) -> int:
    """Lets group after group fail; returns how many verl submitted until one was fine."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    if not hooked:
        monkeypatch.setattr(ReplayBuffer, "_evict_terminal_groups", ReplayBuffer._evict_terminal_groups.__wrapped__)
    trainer, replaced = Trainer(queue, tmp_path, threshold=None), []

    def refill(count: int) -> None:
        for name in trainer.submit(count):
            replaced.append(name)
            if len(replaced) > LONG:
                trainer.complete(name)
            else:
                queue.tags[name]["status"] = "failure"

    trainer.replay_buffer.refill_fn = refill
    refill(1)
    trainer.step(1)
    return len(replaced)


LONG = 50  # replaced groups after which the scene ends by itself: more than the hook allows in a row


@pytest.mark.hook("v1-failure-is-loud")
def test_a_run_in_which_every_group_fails_ends(monkeypatch, queue, tmp_path):
    from esgrpo.errors import EsgrpoError

    with pytest.raises(EsgrpoError, match="32 prompt groups failed in a row"):
        rounds(monkeypatch, queue, tmp_path, hooked=True)


def test_without_the_hook_verl_goes_on(monkeypatch, queue, tmp_path):
    assert rounds(monkeypatch, queue, tmp_path, hooked=False) > LONG


def told_failed(queue, name: str, error, monkeypatch) -> None:
    """What a session says that raised, and then verl."""
    import asyncio

    import transfer_queue

    from esgrpo.hooks.verl.v1.prompts import session_errors

    async def put(key, partition_id, tag):
        queue.tags[key].update(tag)

    class Worker:
        async def _run_agent_loop(self, sampling_params, trajectory, *, agent_name, trace=True, **kwargs):
            raise error

    monkeypatch.setattr(transfer_queue, "async_kv_put", put)
    run = wrapped(session_errors, Worker._run_agent_loop)
    with pytest.raises(type(error)):
        asyncio.run(run(Worker(), {}, {"validate": False}, agent_name="a", uid=name, index=7,
                        raw_prompt=[{"role": "user", "content": name}]))
    queue.tags[name]["status"] = "failure"


def failing(monkeypatch, queue, directory, error, count: int, mode: str, segment: str):
    """`count` of five groups fail in one step of two; returns the trainer after it."""
    monkeypatch.setenv("ESGRPO_SEGMENT", segment)
    monkeypatch.setenv("ESGRPO_FACTS", '{"prompts_per_version": 8}')
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(directory))
    trainer = Trainer(queue, directory, trainer_mode=mode)
    names = trainer.submit(5)
    trainer.complete(*names[count:])
    for name in names[:count]:
        told_failed(queue, name, error, monkeypatch)
    trainer.step(2)
    return trainer


ON = '{"enable": true}'


@pytest.mark.hook("v1-session-errors")
@pytest.mark.parametrize("mode", ["colocate_async", "sync"])
def test_failed_prompts_of_a_v1_version_are_bounded_and_named(monkeypatch, queue, tmp_path, mode, capfd):
    from esgrpo.errors import RunError

    trainer = failing(monkeypatch, queue, tmp_path, ValueError("broke on purpose"), 1, mode, ON)
    row, = read(str(tmp_path), "failed")
    assert row["group"] == "g0" and row["reason"] == "ValueError: broke on purpose" and row["prompt"]
    assert owned.of(trainer.replay_buffer, owned.Failures).bound.total == 1
    assert f"failed prompt: {row['prompt']} (index 7): ValueError" in capfd.readouterr().err
    queue.tags.clear()
    with pytest.raises(RunError, match=r"ValueError: broke on purpose; 2 prompts.*max_failed_prompts=0.01"):
        failing(monkeypatch, queue, tmp_path, ValueError("broke on purpose"), 2, mode, ON)


def test_a_v1_run_without_segments_keeps_verls_own_rule(monkeypatch, queue, tmp_path):
    failing(monkeypatch, queue, tmp_path, ValueError("broke on purpose"), 3, "colocate_async", "{}")
    assert read(str(tmp_path), "failed") == []


def test_a_v1_run_whose_engine_died_ends_with_its_name(monkeypatch, queue, tmp_path):
    from esgrpo.errors import RunError

    class EngineDeadError(Exception):
        """As vLLM's, by name."""

        def __str__(self):
            return ("ray::vLLMHttpServer.generate() (pid=31, ip=10.0.0.1)\n"
                    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")

    with pytest.raises(RunError, match=r"engine \(EngineCore\) of the vLLM server \(node 10.0.0.1, pid 31\) died"):
        failing(monkeypatch, queue, tmp_path, EngineDeadError(), 1, "colocate_async", ON)
