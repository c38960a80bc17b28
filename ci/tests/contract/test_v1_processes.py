"""Start and handshake of verl's v1 trainers, each beside verl without the hook."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
pytest.importorskip("transfer_queue")

from esgrpo import config, engine  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.hooks.verl.fixes import standalone_start  # noqa: E402
from esgrpo.hooks.verl.run import reports  # noqa: E402
from esgrpo.hooks.verl.v1.run import handshake as v1_handshake  # noqa: E402

pytestmark = pytest.mark.slow


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
    (wrapped(standalone_start, original) if hooked else original)(trainer)
    return trainer


@pytest.mark.hook("v1-standalone-start")
def test_separate_async_starts_without_hybrid_replicas(monkeypatch, caplog):
    with caplog.at_level("INFO"):
        assert start(monkeypatch, hooked=True).current_mode.value == "trainer"
    assert "standalone replicas only" in caplog.text


def test_without_the_hook_it_does_not(monkeypatch):
    with pytest.raises(TypeError, match="flush"):
        start(monkeypatch, hooked=False)


def handshake(monkeypatch, hooked: bool, state: str) -> list[str]:
    """verl's own init_agent_loop_manager, with an agent-loop worker whose hook is in `state`."""
    from verl.trainer import main_ppo
    from verl.trainer.ppo import v1

    made = []

    class Manager:
        agent_loop_workers = ()

        @classmethod
        def create(cls, **_):
            made.append("agent loops")
            return cls()

    row = {"slug": "group-members", "state": state, "detail": "why", "needed": True}
    answer = {"process": "agent-loop-worker", "host": "node", "pid": 1, "segment": None, "hooks": [row]}
    own = {**answer, "process": "v1-task-runner", "hooks": []}
    monkeypatch.setattr(v1, "AgentLoopManagerTQ", Manager)
    monkeypatch.setattr(reports.engine, "report", lambda *_: {**own, "overlay_version": "1"})
    monkeypatch.setattr(reports, "_ask", lambda _handles: [{**answer, "overlay_version": "1"}])
    monkeypatch.setattr(reports, "of_v1", lambda _trainer: {})
    monkeypatch.setattr(reports, "_write", lambda found: made.append(f"{len(found)} reports"))
    monkeypatch.setenv("ESGRPO_STRICT", "1")
    runner_class = main_ppo.TaskRunnerV1
    runner_class = getattr(getattr(runner_class, "__ray_metadata__", None), "modified_class", runner_class)
    runner = object.__new__(runner_class)
    nothing = SimpleNamespace(get_llm_client=str, get_teacher_client=str, get_reward_handles=str)
    rollout = SimpleNamespace(get=lambda _name, default=None: default)
    runner.trainer, runner.config = nothing, SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    original = runner_class.init_agent_loop_manager
    (wrapped(v1_handshake, original) if hooked else original)(runner)
    assert isinstance(runner.agent_loop_manager, Manager)
    return made


@pytest.mark.hook("v1-handshake")
def test_a_hook_that_is_not_in_place_stops_the_run_after_all_processes_exist(monkeypatch):
    from esgrpo.errors import HookError

    assert handshake(monkeypatch, hooked=True, state="APPLIED") == ["agent loops", "2 reports"]
    with pytest.raises(HookError, match="group-members.*FAILED in agent-loop-worker"):
        handshake(monkeypatch, hooked=True, state="FAILED")


def test_without_the_handshake_the_run_would_start(monkeypatch):
    assert handshake(monkeypatch, hooked=False, state="FAILED") == ["agent loops"]


def test_the_v1_task_runner_names_every_process_once():
    shared = SimpleNamespace(_actor_id="w0")
    hybrid = SimpleNamespace(servers=["s0"], workers=[shared])
    alone = SimpleNamespace(servers=["s1"], workers=[SimpleNamespace(_actor_id="w1")])
    managers = [SimpleNamespace(get_replicas=lambda r=replica: [r]) for replica in (hybrid, alone)]
    trainer = SimpleNamespace(_rollout_server_managers=lambda: managers, get_reward_handles=lambda: None,
                              actor_rollout_wg=SimpleNamespace(workers=[shared]))
    assert reports.of_v1(trainer) == {"vllm-server": ["s0", "s1"], "rollout-worker": alone.workers,
                                      "reward-loop-worker": [], "actor-worker": [shared]}


def test_every_v1_hook_waits_for_the_v1_trainers_only(monkeypatch):
    monkeypatch.setenv("ESGRPO_FEATURES", "observe,segment")
    hooks = [record.hook for record in engine.load_hooks().values() if "v1" in record.hook.features]
    assert hooks and all(engine.check(hook)[0] is engine.State.NOT_NEEDED for hook in hooks)
    monkeypatch.setenv("ESGRPO_FEATURES", "observe,segment,v1")
    assert all(engine.check(hook)[0] is engine.State.PENDING for hook in hooks)
    assert config.current().prunes is False
