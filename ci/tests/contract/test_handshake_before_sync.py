"""On verl's own task runner and trainers: hooks answer before the first weight sync calls into an engine.

And what is left when the user goes on without a hook that such calls need.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
pytest.importorskip("vllm")

from esgrpo import engine, guard  # noqa: E402
from esgrpo.call import wrapped  # noqa: E402
from esgrpo.errors import HookError  # noqa: E402
from esgrpo.hooks.verl.run import driver_refusal, handshake, reports  # noqa: E402, E501
from esgrpo.hooks.verl.server import control_methods  # noqa: E402, E501
from esgrpo.hooks.verl.sync import kept_requests  # noqa: E402, E501
from esgrpo.hooks.verl.v1.run import handshake_before_sync  # noqa: E402, E501
from esgrpo.hooks.vllm import engine_core  # noqa: E402

pytestmark = pytest.mark.slow
LOST = {"slug": "segment-scheduler", "state": "DRIFTED", "detail": "why", "needed": True}


def answers(monkeypatch, state: str) -> None:
    """Every process answers; the engine's scheduler hook is in this state."""
    mine = {"process": "task-runner", "host": "node", "pid": 1, "segment": "{}", "overlay_version": "1", "hooks": []}
    theirs = {**mine, "process": "engine-core", "hooks": [{**LOST, "state": state}]}
    monkeypatch.setattr(reports.engine, "report", lambda *_: mine)
    monkeypatch.setattr(reports, "_ask", lambda _handles: [theirs])
    monkeypatch.setattr(reports, "_write", lambda _found: None)
    monkeypatch.setenv("ESGRPO_STRICT", "1")


def fully_async(monkeypatch, hooked: bool) -> list[str]:
    """verl's _initialize_components with actors that only note what they are asked."""
    import verl.utils
    from verl.experimental.fully_async_policy import fully_async_main as main

    asked: list[str] = []

    def actor(name):
        made = MagicMock()
        made._fit_update_weights.remote.side_effect = lambda *_: asked.append("weight sync")
        made.__ray_call__ = SimpleNamespace(remote=lambda *_: {})
        return SimpleNamespace(remote=lambda **_: asked.append(name) or made)

    monkeypatch.setattr(main, "FullyAsyncTrainer", actor("trainer"))
    monkeypatch.setattr(main, "FullyAsyncRollouter", actor("rollouter"))
    monkeypatch.setattr(main, "MessageQueue", MagicMock())
    monkeypatch.setattr(main, "MessageQueueClient", MagicMock())
    monkeypatch.setattr(main, "create_role_worker_mapping", lambda _config: ({}, None))
    monkeypatch.setattr(main, "create_resource_pool_manager", lambda *_, **__: None)
    monkeypatch.setattr(main, "copy_to_local", lambda path, **_: path)
    monkeypatch.setattr(main, "OmegaConf", MagicMock())
    monkeypatch.setattr(main.ray, "get", lambda reference, **_: reference)
    monkeypatch.setattr(verl.utils, "hf_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr(verl.utils, "hf_processor", lambda *_, **__: None)
    plain = main.FullyAsyncTaskRunner.__ray_metadata__.modified_class
    original = plain._create_rollouter
    runner = type("Runner", (plain,), {"_create_rollouter": wrapped(handshake, original) if hooked else original})()
    try:
        runner._initialize_components(MagicMock())
    except HookError as error:
        asked.append(str(error))
    return asked


@pytest.mark.hook("worker-handshake")
def test_a_lost_scheduler_hook_is_refused_before_the_first_weight_sync(monkeypatch):
    answers(monkeypatch, "DRIFTED")
    *before, refusal = fully_async(monkeypatch, hooked=True)
    assert before == ["trainer", "rollouter"]
    assert refusal.startswith("esgrpo: segment-scheduler: DRIFTED in engine-core node:1") and "\n" not in refusal
    answers(monkeypatch, "APPLIED")
    assert fully_async(monkeypatch, hooked=True) == ["trainer", "rollouter", "weight sync"]


def test_without_the_handshake_the_weight_sync_comes(monkeypatch):
    """Negative control, on plain verl."""
    answers(monkeypatch, "DRIFTED")
    assert fully_async(monkeypatch, hooked=False) == ["trainer", "rollouter", "weight sync"]


@pytest.mark.hook("v1-handshake-before-sync")
@pytest.mark.parametrize("hooked", [True, False])
def test_v1_trainers_ask_between_their_set_up_and_their_first_sync(monkeypatch, hooked):
    from verl.trainer.ppo.v1 import trainer_sync

    order: list = []
    init = trainer_sync.PPOTrainerSync.init

    class Trainer(trainer_sync.PPOTrainerSync):
        _setup = lambda self: order.append("servers")  # noqa: E731

        def __init__(self):
            self.checkpoint_manager = SimpleNamespace(update_weights=lambda _steps: order.append("weight sync"))
            self.global_steps = 0

    monkeypatch.setattr(Trainer, "init", wrapped(handshake_before_sync, init) if hooked else init)
    monkeypatch.setattr(reports, "of_v1", lambda _trainer: {})
    answers(monkeypatch, "DRIFTED")
    trainer = Trainer()
    if hooked:
        with pytest.raises(HookError, match="segment-scheduler: DRIFTED"):
            trainer.init()
        assert order == ["servers"]
        answers(monkeypatch, "APPLIED")
        order.clear()
        trainer.init()
    else:
        trainer.init()
    assert order == ["servers", "weight sync"] and "on_init_end" not in vars(trainer)


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(guard, "_said", set())


@pytest.mark.hook("engine-core-utilities")
def test_an_engine_without_the_scheduler_hook_answers_all_calls_and_says_so_once(capsys, said):
    core = SimpleNamespace(scheduler=object())
    for _ in range(2):
        assert engine_core.esgrpo_set_version(core, 3) is None
        assert engine_core.esgrpo_finish(core, "g", None, "rule") == 0
        assert engine_core.esgrpo_progress(core, "g") == {}
        assert engine_core.esgrpo_take_book(core, "g", 0, 1) is None
        assert engine_core.esgrpo_take_looks(core, ["g"]) == {}
        assert engine_core.esgrpo_set_segment_length(core, "g", 64) == 0
    assert capsys.readouterr().err.count("segment-scheduler is not in place") == 1


@pytest.mark.hook("server-weight-version")
@pytest.mark.parametrize("mode, sync", [("STANDALONE", 5.0), ("HYBRID", 0.0)])
@pytest.mark.parametrize("state", ["DISABLED", "DRIFTED", "APPLIED"])
def test_a_weight_sync_goes_on_without_the_utilities(monkeypatch, capsys, said, state, mode, sync):
    """Under ESGRPO_DISABLE or ESGRPO_STRICT=0; where the utilities are in place they are called. A replica on the
    trainer's devices was asleep while it was paused."""
    from esgrpo.hooks.verl import owned
    from esgrpo.hooks.verl.sync import weight_version

    called = []

    async def call(name, *args):
        called.append(name)
        return {"version": 1, "sync": 5.0}

    async def original(self, steps):
        self.global_steps = steps

    record = engine.load_hooks()["engine-core-utilities"]
    monkeypatch.setattr(record, "state", engine.State[state])
    server = SimpleNamespace(node_rank=0, rollout_mode=SimpleNamespace(name=mode),
                             engine=SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=call)))
    asyncio.run(wrapped(weight_version, original)(server, 1))
    applied = state == "APPLIED"
    assert server.global_steps == 1 and called == ["esgrpo_set_version"] * applied
    closed = owned.of(server, owned.Server).windows
    assert [(window["version"], window["sync"]) for window in closed] == [(1, sync)] * applied
    assert [window["lent"] for window in closed if mode == "HYBRID"] == [5.0] * (applied and mode == "HYBRID")
    assert capsys.readouterr().err.count(f"engine-core-utilities {state}") == (not applied)


def test_requests_are_not_kept_without_the_scheduler_hook(monkeypatch):
    monkeypatch.setattr(engine.load_hooks()["segment-scheduler"], "state", engine.State.DISABLED)
    server = SimpleNamespace(engine=SimpleNamespace(pause_generation=lambda mode: None))
    assert kept_requests.reason_to_abort(server, False).startswith("segment-scheduler DISABLED")


@pytest.mark.hook("server-control")
def test_servers_without_control_methods_are_left_out(capsys, said):
    whole, bare = SimpleNamespace(esgrpo_progress="method"), SimpleNamespace()
    assert control_methods.methods([whole, bare], "esgrpo_progress") == ["method"]
    assert control_methods.methods([bare], "esgrpo_progress") == []
    assert capsys.readouterr().err.count("server-control is not in place") == 1
    assert control_methods.methods([whole], "esgrpo_progress") == ["method"]


def test_engine_reports_are_not_asked_for_where_the_user_does_without(monkeypatch):
    row = {"host": "node", "pid": 1, "segment": "{}", "overlay_version": "1", "hooks": []}
    found = [{**row, "process": "task-runner"}, {**row, "process": "vllm-server"}]
    assert "0 EngineCore reports" in str(reports.find_problem(found))
    for slug in ("engine-core-utilities", "server-control", "*"):
        assert reports.find_problem([{**found[0], "disabled": [slug]}, found[1]]) is None


def ours():
    return HookError("who", "found", "wanted", "consequence", "todo")


@pytest.mark.hook("driver-refusal-in-one-line")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_refusal_in_an_actor_is_one_line_in_the_driver(depth):
    """Ray raises an error that is a HookError, too, whose text is the actor's traceback."""
    from ray.exceptions import RayTaskError

    error = ours()
    for _ in range(depth):
        error = RayTaskError("run", f"Traceback (most recent call last):\n{error}", error).as_instanceof_cause()
    assert "\n" in str(error)  # negative control

    def run_ppo(config):
        raise error

    with pytest.raises(SystemExit) as refused:
        wrapped(driver_refusal, run_ppo)(OmegaConf.create({}))
    assert str(refused.value) == str(ours())


def test_other_errors_of_actors_stay_what_they_are():
    from ray.exceptions import RayTaskError

    def run_ppo(config):
        raise RayTaskError("run", "Traceback\nValueError", ValueError("theirs")).as_instanceof_cause()

    with pytest.raises(ValueError):
        wrapped(driver_refusal, run_ppo)(OmegaConf.create({}))
