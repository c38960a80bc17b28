"""verl v0.7.0 under MindSpeed: flash attention is on for actor, ref and critic unless the user set it."""

import pytest

from ci.tests.contract import patched

SLUG = "default-flash-attention-under-mindspeed"
FILE = "verl/workers/megatron_workers.py"
OTHER = {"attention_backend": "flash"}


class Reached(Exception):
    """The constructor went past the part that is tested."""


@pytest.fixture(params=[True, False], ids=["patched", "pristine"])
def is_patched(request):
    return request.param


@pytest.fixture
def repatched(is_patched, tmp_path):
    """Builds a worker as verl does; returns the configs that MindSpeed's repatch was called with."""
    root = patched.tree("verl", "v0.7.0", [SLUG] if is_patched else [], tmp_path, also=(FILE,))

    def build(worker, *arguments, with_mindspeed=True):
        calls = []

        class Worker:
            rank = 0

            def __init__(self):
                pass

        def stop(*_args, **_kwargs):
            raise Reached

        import torch

        stand_ins = {name: patched.Upstream() for name in (
            "codetiming", "psutil", "verl", "verl.models.mcore", "verl.utils", "verl.utils.flops_counter",
            "verl.utils.checkpoint.megatron_checkpoint_manager", "verl.utils.fs", "verl.utils.memory_utils",
            "verl.utils.megatron.router_replay_patch", "verl.utils.megatron_utils", "verl.utils.model",
            "verl.utils.ray_utils", "verl.utils.torch_functional", "verl.workers.actor.megatron_actor",
            "verl.workers.config", "verl.workers.critic.megatron_critic", "verl.workers.rollout",
            "verl.workers.reward_model.megatron.reward_model", "verl.utils.profiler.performance", "verl.utils.device",
            "megatron.core")}
        stand_ins |= {
            "torch": patched.Proxy(torch, distributed=patched.Upstream(is_initialized=lambda: False)),
            "verl.workers.engine.mindspeed.transformer_impl": patched.Upstream(
                repatch=(lambda config: calls.append(dict(config))) if with_mindspeed else None),
            "verl.single_controller.base": patched.Upstream(Worker=Worker),
            "verl.single_controller.base.decorator": patched.Upstream(
                register=patched.identity_decorator, Dispatch=patched.Upstream(),
                make_nd_compute_dataproto_dispatch_fn=lambda **_kwargs: None),
            "verl.utils.config": patched.Upstream(omega_conf_to_dataclass=lambda *_a, **_k: None),
            "verl.utils.distributed": patched.Upstream(set_numa_affinity=stop),
            "verl.utils.profiler": patched.Upstream(
                DistProfilerExtension=type("DistProfilerExtension", (), {"__init__": lambda *_a: None}),
                DistProfiler=type("DistProfiler", (), {"__init__": lambda *_a, **_k: None,
                                                       "annotate": staticmethod(patched.identity_decorator)}),
                GPUMemoryLogger=patched.identity_decorator)}
        module = patched.load(root / FILE, "megatron_workers", stand_ins)
        with pytest.raises(Reached):
            getattr(module, worker)(*arguments)
        return calls

    return build


def config(actor=None, ref=None):
    """actor_rollout_ref as composed: ref's overrides are the actor's, by interpolation, unless the user sets them."""
    from omegaconf import OmegaConf

    root = OmegaConf.create({"actor_rollout_ref": {
        "actor": {"megatron": {"override_transformer_config": actor or {}}},
        "ref": {"megatron": {"override_transformer_config": ref if ref is not None else (
            "${oc.select:actor_rollout_ref.actor.megatron.override_transformer_config,{}}")}}}})
    return root.actor_rollout_ref


ON, OFF = {"use_flash_attn": True}, {"use_flash_attn": False}


@pytest.mark.parametrize("role", ["actor", "ref", "actor_rollout_ref", "rollout"])
@pytest.mark.parametrize("own, expected", [({}, ON), (OTHER, {**OTHER, **ON}), (ON, ON), (OFF, OFF)])
def test_actor_and_ref(repatched, is_patched, role, own, expected):
    arguments = config(own)
    assert repatched("ActorRolloutRefWorker", arguments, role) == [expected if is_patched else own]
    assert arguments.actor.megatron.override_transformer_config == own  # the config itself is not changed


@pytest.mark.parametrize("actor, ref, expected", [(OFF, ON, ON), (ON, OFF, OFF), ({}, OFF, OFF), (OFF, {}, ON)])
def test_ref_has_its_own_setting(repatched, is_patched, actor, ref, expected):
    assert repatched("ActorRolloutRefWorker", config(actor, ref), "ref") == [expected if is_patched else actor]
    assert repatched("ActorRolloutRefWorker", config(actor, ref), "actor") == [
        {**ON, **actor} if is_patched else actor]


class Critic(patched.Upstream):
    """McoreCriticConfig: a dataclass with `get`."""

    def get(self, name, default=None):
        return getattr(self, name) if name in vars(self) else default


@pytest.mark.parametrize("own, expected", [({}, ON), (OTHER, {**OTHER, **ON}), (OFF, OFF)])
def test_critic(repatched, is_patched, own, expected):
    critic = Critic(megatron=Critic(override_transformer_config=own))
    assert repatched("CriticWorker", critic) == ([expected] if is_patched else [])
    assert critic.megatron.override_transformer_config == own


def test_without_mindspeed_nothing_is_called(repatched):
    assert repatched("ActorRolloutRefWorker", config(), "actor", with_mindspeed=False) == []
    critic = Critic(megatron=Critic(override_transformer_config={}))
    assert repatched("CriticWorker", critic, with_mindspeed=False) == []


# name of a real config of the release: directory that has it; the first is used by users of the recipe
TREES = {"fully_async_ppo_megatron_trainer": "recipe/fully_async_policy/config",
         "ppo_megatron_trainer": "verl/trainer/config"}
KEY = "+actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn"


@pytest.fixture(params=TREES)
def composed(request, monkeypatch):
    """Composes the real config as the launcher does, from the root of the checkout."""
    hydra = pytest.importorskip("hydra")
    source = patched.pristine("verl", "v0.7.0")
    monkeypatch.chdir(source)  # the recipe's search path is relative

    def compose(*overrides):
        with hydra.initialize_config_dir(version_base=None, config_dir=str(source / TREES[request.param])):
            return hydra.compose(request.param, overrides=list(overrides))

    return compose


@pytest.mark.parametrize("overrides, actor, ref", [
    ((), {}, {}), ((f"{KEY}=False",), OFF, OFF), ((f"{KEY}=True",), ON, ON)])
def test_the_real_config_tree(composed, repatched, is_patched, overrides, actor, ref):
    """Where the user says nothing all three get flash attention; ref takes the actor's setting, a critic its own."""
    config = composed(*overrides)
    base = dict(composed().actor_rollout_ref.actor.megatron.override_transformer_config)
    assert "use_flash_attn" not in base  # or else there was nothing to default
    for role, own in (("actor", actor), ("ref", ref)):
        upstream = {**base, **actor}  # upstream gives MindSpeed the actor's, also for ref
        assert repatched("ActorRolloutRefWorker", config.actor_rollout_ref, role) == [
            {**ON, **base, **own} if is_patched else upstream]
    assert repatched("CriticWorker", config.critic) == ([{**ON, **dict(
        config.critic.megatron.override_transformer_config)}] if is_patched else [])
