"""Decoupled PPO goes back to the weights of the version and returns, also where verl's are on the host."""

from __future__ import annotations

import pytest

from ci.tests.contract import patch_tree, patched
from esgrpo.call import wrapped
from esgrpo.hooks.verl.fixes import saved_weights
from esgrpo.hooks.verl.v0_7_0 import saved_weights as of_0_7_0

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path):
    """A Linear whose weight is a DTensor, as FSDP2 has it."""
    torch = pytest.importorskip("torch")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group(backend="gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Linear(2, 1, bias=False)
    model.on_host = lambda values: torch.nn.Parameter(distribute_tensor(values, mesh, [Replicate()]))
    model.weight = model.on_host(torch.zeros(1, 2))
    yield model
    torch.distributed.destroy_process_group()


def train(model, offloaded: bool) -> None:
    """Every weight becomes 1; what was loaded to a GPU for it comes back to other memory."""
    import torch

    if offloaded:
        model.weight = model.on_host(torch.ones(1, 2))
    else:
        with torch.no_grad():
            model.weight.add_(1.0)


def go_back_and_return(hook, fsdp, model, hooked: bool, offloaded: bool) -> None:
    """By `fsdp`, the module with verl's functions."""
    save = wrapped(hook, fsdp.fsdp2_sharded_save_to_cpu) if hooked else fsdp.fsdp2_sharded_save_to_cpu
    version = save(model)
    train(model, offloaded)
    now = save(model)
    fsdp.fsdp2_sharded_load_from_cpu(model, *version)
    during = model.weight.full_tensor().tolist()
    fsdp.fsdp2_sharded_load_from_cpu(model, *now)
    after = model.weight.full_tensor().tolist()
    if hooked:
        assert (during, after) == ([[0.0, 0.0]], [[1.0, 1.0]])
    elif offloaded:  # negative control: the update is undone
        assert (during, after) == ([[0.0, 0.0]], [[0.0, 0.0]])
    else:  # and on a CPU nobody goes back
        assert (during, after) == ([[1.0, 1.0]], [[1.0, 1.0]])


@pytest.mark.hook("saved-weights-are-a-copy")
@pytest.mark.parametrize("offloaded", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
def test_going_back_to_a_version_undoes_nothing(model, hooked, offloaded):
    pytest.importorskip("verl")  # some environments of the matrix have vLLM alone; a module that verl moves is an error
    from verl.utils import fsdp_utils

    go_back_and_return(saved_weights, fsdp_utils, model, hooked, offloaded)


@pytest.mark.hook("partial-saved-weights-are-a-copy")
@pytest.mark.parametrize("offloaded", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
def test_going_back_undoes_nothing_in_the_recipe_of_0_7_0(model, hooked, offloaded):
    recipe = patched.load(patch_tree.source("0.7.0") / "recipe/fully_async_policy/fsdp2_utils.py", "fsdp2_utils", {})
    go_back_and_return(of_0_7_0, recipe, model, hooked, offloaded)
