"""The hooks on verl's v1 trainers, on the classes of the installed verl; each beside verl without the hook."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

import torch  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402

from ci.tests.contract.queue_stub import Queue  # noqa: E402
from esgrpo import config, engine  # noqa: E402
from esgrpo.hooks.verl import (  # noqa: E402
    attempts,
    reports,
    v1_advantage,
    v1_carry_checkpoint,
    v1_carry_over,
    v1_failure,
    v1_masked_rows,
    v1_response_rows,
    v1_standalone_start,
    v1_trained_rows,
    v1_weights,
    weighted_rows,
)

pytestmark = pytest.mark.slow
PRUNING = json.dumps({"enable": True, "segment_length": 2, "prune": {"repetition": {"enable": True}}})


@pytest.fixture
def queue(monkeypatch):
    return Queue(monkeypatch)


def summary(group: str, member: int, outcome: str = "finish", rule: str = "", tokens: int = 3) -> dict:
    return {"group": group, "member": member, "outcome": outcome, "rule": rule, "tokens": tokens, "attempts": 1,
            "reprefill": 0, "boundaries": 0, "spans": [[0, tokens]], "started": 1.0, "ended": 2.0}


def put(queue, key: str, tokens: int, padding: bool = False, **fields) -> None:
    ones = torch.ones(tokens, dtype=torch.int64)
    group, member, _ = key.rsplit("_", 2)
    queue.rows[key] = {"response_mask": ones, "loss_mask": ones.clone(), "advantages": torch.ones(tokens),
                       "rm_scores": torch.zeros(tokens), "extra_fields": {
                           "reward_extra_info": {"acc": True}, "esgrpo": summary(group, int(member), tokens=tokens,
                                                                                 **fields)}}
    queue.tags[key] = {"is_padding": padding}


def batch_of(queue, *keys):
    return KVBatchMeta(keys=list(keys), tags=[queue.tags[key] for key in keys], partition_id="train")


# rows in the TransferQueue


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
    function = v1_response_rows.build(original) if hooked else original
    worker = SimpleNamespace(
        _compute_score=score, _compute_teacher_logprobs=nothing, _compute_multi_modal_inputs=lambda *_: {},
        _compute_position_ids=lambda ids, *_: torch.arange(ids.shape[1]).unsqueeze(0))
    output = AgentLoopOutput(prompt_ids=[1, 2], response_ids=[3, 4, 5], response_mask=[1, 1, 1], num_turns=2,
                             metrics=AgentLoopMetrics(), extra_fields={"min_global_steps": 7, "max_global_steps": 7})
    member = attempts.Member("u", 0)
    member.spans, member.tokens = [[5, 2], [7, 1]], 3

    async def scene():
        token = attempts.current.set(member)
        try:
            await function(worker, output, False, uid="u", session_id=0, global_steps=6, raw_prompt=[])
        finally:
            attempts.current.reset(token)

    asyncio.run(scene())
    return {"tag": queue.tags["u_0_0"], "fields": queue.rows["u_0_0"]["extra_fields"], "score": member.score}


def test_a_row_carries_what_the_response_lived_through(queue):
    seen = postprocess(queue, hooked=True)
    assert seen["fields"]["esgrpo"]["spans"] == [[5, 2], [7, 1]] and seen["score"] == 1.0
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


def test_pruned_rows_are_masked_before_verl_reads_the_batch(queue, monkeypatch):
    batch, seen = sampled(queue), []

    def original(self, batch, metrics, logging_prefix="global_seqlen", keep_minibatch=False):
        seen.append({key: int(row["response_mask"].sum()) for key, row in queue.rows.items()})
        return batch

    for settings in (PRUNING, "{}"):  # the second one is the control: nothing is pruned, nothing is touched
        for row in queue.rows.values():
            row["response_mask"] = torch.ones_like(row["response_mask"])
        monkeypatch.setenv("ESGRPO_SEGMENT", settings)
        assert v1_masked_rows.build(original)(SimpleNamespace(), batch, metrics={}) is batch
    assert seen == [{"a_0_0": 3, "a_1_0": 0, "b_0_0": 2, "pad_0_0": 1},
                    {"a_0_0": 3, "a_1_0": 2, "b_0_0": 2, "pad_0_0": 1}]


def test_masking_writes_both_masks_and_says_which(queue):
    assert v1_masked_rows.mask(sampled(queue)) == ["a_1_0"]
    assert int(queue.rows["a_1_0"]["loss_mask"].sum()) == 0 and int(queue.rows["a_0_0"]["loss_mask"].sum()) == 3


def test_trained_rows_leave_out_padding_and_all_outputs_but_the_last(queue, monkeypatch, tmp_path):
    monkeypatch.setenv("ESGRPO_RUN_DIR", str(tmp_path))
    batch = sampled(queue)
    put(queue, "c_0_0", 2)
    put(queue, "c_0_1", 4)
    batch = batch_of(queue, *queue.rows)
    monkeypatch.setattr(v1_trained_rows, "windows", lambda trainer: {"esgrpo/bubble_rate": 0.5})
    metrics = {}

    def original(self, batch, metrics, timing_raw, global_steps, epoch):
        metrics["verls/own"] = 1

    trainer = SimpleNamespace(global_steps=3)
    v1_trained_rows.build(original)(trainer, batch, metrics, {}, global_steps=3, epoch=0)
    from esgrpo.hooks.verl.records import read

    rows = read(str(tmp_path), "trained")
    assert [(row["group"], row["tokens"], row["step"]) for row in rows] == [("a", 3, 3), ("a", 2, 3), ("b", 2, 3),
                                                                          ("c", 4, 3)]
    assert all(row["correct"] for row in rows)  # acc decides, the scores are zero
    assert metrics["verls/own"] == 1 and metrics["esgrpo/bubble_rate"] == 0.5 and "esgrpo/prune/rate" in metrics


# advantages of agent loops with several outputs


def advantages(hooked: bool, keys, rewards):
    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories as original

    from esgrpo.hooks.verl import grpo_segment

    core_algos.ADV_ESTIMATOR_REGISTRY.setdefault("grpo_segment", grpo_segment.grpo_segment)
    data = DataProto.from_dict(
        tensors={"response_mask": torch.ones(len(keys), 2), "token_level_rewards": torch.tensor(rewards),
                 "token_level_scores": torch.tensor(rewards)},
        non_tensors={"uid": np.array([key.split("_")[0] for key in keys], dtype=object)})
    function = v1_advantage.build(original) if hooked else original
    result = function(data, batch_keys=keys, adv_estimator="grpo_segment" if hooked is not None else "grpo",
                      num_repeat=2, config={})
    return result.batch["advantages"][:, 0].tolist()


KEYS = ["u_0_0", "u_0_1", "u_0_2", "u_1_0"]  # the first session gave three outputs
REWARDS = [[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]


def test_a_session_counts_once_in_its_group():
    assert advantages(True, KEYS, REWARDS) == pytest.approx(advantages(None, KEYS, REWARDS))  # verl's own for grpo
    one_each = advantages(False, [KEYS[2], KEYS[3]], [REWARDS[2], REWARDS[3]])
    assert advantages(True, KEYS, REWARDS) == pytest.approx([one_each[0]] * 3 + [one_each[1]])


def test_without_the_hook_it_counts_three_times():
    assert advantages(False, KEYS, REWARDS)[3] != pytest.approx(advantages(True, KEYS, REWARDS)[3])


# weights of audited pruning


def weighted(queue, monkeypatch, hooked: bool):
    """verl's own _compute_advantage over two kept rows, the second one an exempted candidate with pi 0.5."""
    from verl.trainer.ppo import core_algos, ray_trainer
    from verl.trainer.ppo.v1 import trainer_base, utils

    from esgrpo.hooks.verl import grpo_segment

    core_algos.ADV_ESTIMATOR_REGISTRY.setdefault("grpo_segment", grpo_segment.grpo_segment)
    for session, (score, keep) in enumerate([(1.0, 1.0), (0.0, 0.5), (0.0, 1.0)]):
        key = f"u_{session}_0"
        put(queue, key, 2 + session)  # of different lengths, or the queue would stack instead of nesting
        queue.rows[key]["extra_fields"]["esgrpo"] |= {"keep_probability": keep, "pivot": 0.0 if keep < 1 else None}
        queue.rows[key] |= {"uid": "u", "rm_scores": torch.tensor([0.0] * (1 + session) + [score])}
    trainer = SimpleNamespace(config=SimpleNamespace(
        algorithm=SimpleNamespace(use_kl_in_reward=False, gamma=1.0, lam=1.0, adv_estimator="grpo_segment",
                                  get=lambda name, default=None: {"norm_adv_by_std_in_grpo": False}.get(name, default)),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=3))))
    original = trainer_base.PPOTrainer._compute_advantage
    if hooked:
        monkeypatch.setattr(utils, "compute_advantage", weighted_rows.build(ray_trainer.compute_advantage))
        monkeypatch.setattr(trainer_base, "compute_advantage_for_multi_trajectories",
                            v1_advantage.build(utils.compute_advantage_for_multi_trajectories))
        original = v1_weights.build(original)
    keys = [f"u_{session}_0" for session in range(3)]
    original(trainer, batch_of(queue, *keys), {})
    return [float(queue.rows[key]["advantages"][0]) for key in keys]


def test_keep_probabilities_reach_the_estimator(queue, monkeypatch):
    """A_i = R_i - 1/(n-1) sum of w_j R_j over the others, times w_i (n-1)/n; only the first has a reward."""
    assert weighted(queue, monkeypatch, True) == pytest.approx([2 / 3, -2 / 3, -1 / 3])


def test_without_the_hooks_every_row_weighs_one(queue, monkeypatch):
    assert weighted(queue, monkeypatch, False) == pytest.approx([2 / 3, -1 / 3, -1 / 3])


# start without hybrid replicas


def start(monkeypatch, hooked: bool):
    from verl.trainer.ppo.v1 import trainer_base, trainer_separate_async

    class Manager:
        rollout_replicas, server_addresses = [], []

        @classmethod
        def create(cls, **_):
            return cls()

        def get_replicas(self):
            return []

    monkeypatch.setattr(trainer_base.PPOTrainer, "_setup", lambda self: None)
    monkeypatch.setattr(trainer_separate_async, "LLMServerManager", Manager)
    monkeypatch.setattr(trainer_separate_async, "CheckpointEngineManager", lambda **_: None)
    monkeypatch.setattr(trainer_separate_async, "omega_conf_to_dataclass", lambda value: value)
    trainer = object.__new__(trainer_separate_async.PPOTrainerSeparateAsync)
    rollout = SimpleNamespace(prometheus=SimpleNamespace(enable=False), checkpoint_engine=None)
    trainer.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    trainer._enable_hybrid_replicas, trainer.llm_server_manager, trainer.actor_rollout_wg = False, Manager(), None
    original = trainer_separate_async.PPOTrainerSeparateAsync._setup
    (v1_standalone_start.build(original) if hooked else original)(trainer)
    return trainer


def test_separate_async_starts_without_hybrid_replicas(monkeypatch, caplog):
    with caplog.at_level("INFO"):
        assert start(monkeypatch, hooked=True).current_mode.value == "trainer"
    assert "standalone replicas only" in caplog.text


def test_without_the_hook_it_does_not(monkeypatch):
    with pytest.raises(TypeError, match="flush"):
        start(monkeypatch, hooked=False)


# carry-over


class Trainer:
    """A trainer with verl's real asynchronous replay buffer; prompts come and go in the stub queue."""

    global_steps, trainer_mode = 1, "colocate_async"

    def __init__(self, queue, directory, threshold=2, strategy="drop", mode="disable"):
        from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

        self.queue, self.number = queue, 0
        self.replay_buffer = ReplayBufferAsync("colocate_async", {}, threshold, strategy, {}, poll_interval=0.0,
                                               refill_fn=self.submit)
        self.config = SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=2)),
            trainer=SimpleNamespace(default_local_dir=str(directory), resume_mode=mode, resume_from_path=None))

    def submit(self, count: int) -> list[str]:
        names = [f"g{self.number + i}" for i in range(count)]
        self.number += count
        for name in names:
            self.queue.tags[name] = {"is_prompt": True, "status": "running", "global_steps": self.global_steps}
        return names

    def complete(self, *names: str) -> None:
        for name in names:
            self.queue.tags[name]["status"] = "finished"
            for member in range(2):
                self.queue.tags[f"{name}_{member}_0"] = {"status": "success"}

    def _step_once(self, metrics, timing_raw, sample_batch_size):
        batch, found = self.replay_buffer.sample(self.global_steps, "train", sample_batch_size)
        metrics.update(found)
        return batch

    def step(self, count: int) -> dict:
        metrics = {}
        batch = v1_carry_over.build(Trainer._step_once)(self, metrics, {}, sample_batch_size=count)
        self.queue.kv_clear(batch.keys, "train")
        self.global_steps += 1
        return {name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith("esgrpo/carry")}


def test_carried_groups_come_first_and_stale_ones_are_dropped(queue, tmp_path):
    trainer = Trainer(queue, tmp_path)
    first = trainer.submit(3)
    trainer.complete(first[0])
    assert trainer.step(1) == {"trained": 1, "trained_carried": 0, "carried": 2, "unfinished": 2, "dropped": 0,
                               "excused": 0, "age_max": 1, "carried_age_max": 1, "partial": 0}
    trainer.complete(*trainer.submit(1), first[1])
    seen = trainer.step(1)
    assert seen["trained_carried"] == 1 and seen["age_max"] == 2 and seen["carried"] == 2
    trainer.complete(first[2])
    seen = trainer.step(1)
    assert seen["dropped"] == 1 and seen["trained"] == 1 and seen["age_max"] == 2  # two versions old, two are allowed


def test_a_group_that_vanishes_stops_the_run(queue, tmp_path):
    from esgrpo.errors import EsgrpoError

    trainer = Trainer(queue, tmp_path)
    names = trainer.submit(3)
    trainer.complete(names[0])
    trainer.step(1)
    del queue.tags[names[1]]
    trainer.complete(names[2])
    with pytest.raises(EsgrpoError, match=f"carry-over.*{names[1]}"):
        trainer.step(1)


def restart(queue, tmp_path, lose: bool):
    """A checkpoint after one step, and a second trainer that goes on from it; verl re-issues what was unfinished."""
    trainer = Trainer(queue, tmp_path, mode="auto")
    names = trainer.submit(3)
    trainer.complete(names[0])
    metrics = {}
    batch = v1_carry_over.build(Trainer._step_once)(trainer, metrics, {}, sample_batch_size=1)
    v1_carry_checkpoint.build(lambda self: None)(trainer)
    queue.kv_clear(batch.keys, "train")
    again = Trainer(queue, tmp_path, mode="auto")
    again.global_steps, again.number = 2, 10
    for name in names[1:]:
        queue.tags[name]["global_steps"] = 2  # what _reissue_inflight_prompts does
    if lose:
        del queue.tags[names[1]]
    again.complete(names[2])
    return again.step(1)


def test_nothing_is_lost_at_checkpoint_and_restart(queue, tmp_path):
    assert restart(queue, tmp_path, lose=False)["trained_carried"] == 1


def test_a_group_that_did_not_come_back_is_noticed(queue, tmp_path):
    from esgrpo.errors import EsgrpoError

    with pytest.raises(EsgrpoError, match="1 carried groups are gone"):
        restart(queue, tmp_path, lose=True)


def test_a_sampler_of_the_users_own_keeps_its_own_rules(queue, tmp_path):
    trainer = Trainer(queue, tmp_path)
    trainer.replay_buffer = SimpleNamespace()
    assert v1_carry_over.pool_of(trainer) is None


# groups that fail


def rounds(monkeypatch, queue, tmp_path, hooked: bool) -> int:
    """Lets group after group fail; returns how many verl submitted until one was fine."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    if hooked:
        monkeypatch.setattr(ReplayBuffer, "_evict_terminal_groups",
                            v1_failure.build(ReplayBuffer._evict_terminal_groups))
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


def test_a_run_in_which_every_group_fails_ends(monkeypatch, queue, tmp_path):
    from esgrpo.errors import EsgrpoError

    with pytest.raises(EsgrpoError, match="32 prompt groups failed in a row"):
        rounds(monkeypatch, queue, tmp_path, hooked=True)


def test_without_the_hook_verl_goes_on(monkeypatch, queue, tmp_path):
    assert rounds(monkeypatch, queue, tmp_path, hooked=False) > LONG


def test_a_group_that_ends_well_starts_the_count_anew():
    from esgrpo.algo.failures import FailureStreak

    streak = FailureStreak(3)
    assert not streak.observe({"a", "b"}, ())
    assert not streak.observe({"c"}, {"good"})
    assert not streak.observe({"d"}, {"good"})
    assert streak.in_a_row == 2 and streak.observe({"e"}, {"good"}) and not streak.observe((), {"good", "other"})


# handshake


def test_the_v1_task_runner_names_every_process_once():
    shared = SimpleNamespace(_actor_id="w0")
    hybrid = SimpleNamespace(servers=["s0"], workers=[shared])
    alone = SimpleNamespace(servers=["s1"], workers=[SimpleNamespace(_actor_id="w1")])
    managers = [SimpleNamespace(get_replicas=lambda r=replica: [r]) for replica in (hybrid, alone)]
    trainer = SimpleNamespace(_rollout_server_managers=lambda: managers, get_reward_handles=lambda: None,
                              actor_rollout_wg=SimpleNamespace(workers=[shared]))
    loops = SimpleNamespace(agent_loop_workers=["a0"])
    handles = reports.of_v1(SimpleNamespace(trainer=trainer, agent_loop_manager=loops))
    assert handles == {"vllm-server": ["s0", "s1"], "rollout-worker": alone.workers, "agent-loop-worker": ["a0"],
                       "reward-loop-worker": [], "actor-worker": [shared]}


def test_every_v1_hook_waits_for_the_v1_trainers_only(monkeypatch):
    monkeypatch.setenv("ESGRPO_FEATURES", "observe,segment")
    hooks = [record.hook for record in engine.load_hooks().values() if "v1" in record.hook.features]
    assert hooks and all(engine.check(hook)[0] is engine.State.NOT_NEEDED for hook in hooks)
    monkeypatch.setenv("ESGRPO_FEATURES", "observe,segment,v1")
    assert all(engine.check(hook)[0] is engine.State.PENDING for hook in hooks)
    assert config.current().prunes is False
