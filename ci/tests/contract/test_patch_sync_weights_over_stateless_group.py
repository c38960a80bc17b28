"""verl v0.7.0 on NPU: weights reach the rollout through a stateless group; elsewhere through ray, as before.

Three ranks, two of them trainers, run upstream's own sync in three threads. Only the communicator is a stand-in: it has
the interface of vllm-ascend's PyHcclCommunicator.
"""

import threading
import uuid
from types import SimpleNamespace

import pytest

from ci.tests.contract import patched

torch = pytest.importorskip("torch")
pytest.importorskip("zmq")
pytest.importorskip("pydantic")

SLUG = "sync-weights-over-stateless-group"
RECIPE = "recipe/fully_async_policy"
WORKERS = ("fsdp_workers", "megatron_worker")
FILES = tuple(f"{RECIPE}/{name}.py" for name in (*WORKERS, "checkpoint_engine", "param_sync"))
STATELESS = "recipe/one_step_off_policy/distributed_util.py"
GROUP = "actor_rollout"
ADDRESS = ("10.0.0.1", "29511")
TRAINERS, WORLD = 2, 3
WEIGHTS = {f"layer.{i}": torch.arange(6, dtype=dtype).reshape(2, 3) + i
           for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.float32, torch.float16))}
TIMEOUT_SECONDS = 20
NO_HCCL = "ray.util.collective has no HCCL"


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """The recipe, patched (True) and as upstream released it (False)."""
    return {is_patched: patched.tree("verl", "v0.7.0", [SLUG] if is_patched else [], tmp_path_factory.mktemp("recipe"),
                                     also=(*FILES, STATELESS)) for is_patched in (True, False)}


class Wire:
    """What connects the ranks: a rendezvous by address, and a meeting of all ranks per call."""

    def __init__(self):
        self.meeting, self.slot, self.calls, self.joined = threading.Barrier(WORLD), {}, [], {}

    def create(self, host, port, rank, world_size):
        assert self.joined.setdefault("address", (host, port)) == (host, port) and rank not in self.joined
        self.joined[rank] = world_size
        return SimpleNamespace(rank=rank, world_size=world_size)

    def meet(self):
        self.meeting.wait(TIMEOUT_SECONDS)


def communicator(wire, disabled=False):
    class PyHcclCommunicator:
        def __init__(self, group, device):
            self.rank, self.device, self.disabled = group.rank, device, disabled

        def broadcast(self, tensor, src, stream=None):
            assert tensor.device == self.device and stream is not None
            if self.rank == src:
                wire.slot["tensor"] = tensor.clone()
                wire.calls.append((src, tensor.numel()))
            wire.meet()
            tensor.copy_(wire.slot["tensor"])
            wire.meet()

        def all_reduce(self, in_tensor, op=None, stream=None):
            wire.meet()
            return in_tensor.clone()

    return PyHcclCommunicator


class RayCollective:
    """ray.util.collective on an NPU host: nothing works."""

    def __getattr__(self, name):
        def refuse(*_args, **_kwargs):
            raise RuntimeError(f"{NO_HCCL}: {name}")

        return refuse


def imports(root, rank, wire, ray_collective, device="npu", disabled=False):
    """Stand-ins of one rank, with the recipe's own modules loaded from `root`."""
    cpu = torch.device("cpu")
    stream = SimpleNamespace(synchronize=lambda: None)
    accelerator = SimpleNamespace(current_device=lambda: cpu, current_stream=lambda: stream, device_count=lambda: 1,
                                  synchronize=lambda: None, empty_cache=lambda: None)
    world_rank = rank if rank < TRAINERS else rank - TRAINERS
    fake_torch = patched.Proxy(
        torch, distributed=patched.Upstream(get_rank=lambda: world_rank, get_world_size=lambda: TRAINERS),
        empty=lambda *shape, pin_memory=False, **kwargs: torch.empty(*shape, **kwargs))
    found = {name: patched.Upstream() for name in (
        "recipe.fully_async_policy.fsdp2_utils", "recipe.fully_async_policy.megatron_utils", "verl.utils.fsdp_utils",
        "verl.utils.megatron_utils", "verl.workers.fsdp_workers", "verl.workers.megatron_workers", "omegaconf",
        "torch.distributed.fsdp")}
    found |= {
        "torch": fake_torch, "ray.util.collective": patched.Upstream(collective=ray_collective),
        "verl.utils.device": patched.Upstream(
            get_device_name=lambda: device, get_torch_device=lambda: accelerator, is_npu_available=device == "npu",
            get_nccl_backend=lambda: "nccl"),
        "verl.single_controller.base.decorator": patched.Upstream(
            register=patched.identity_decorator, Dispatch=patched.Upstream()),
        "verl.utils.vllm.patch": patched.Upstream(patch_vllm_moe_model_weight_loader=lambda _model: None),
        "vllm.distributed.utils": patched.Upstream(StatelessProcessGroup=SimpleNamespace(create=wire.create)),
        "vllm_ascend.distributed.device_communicators.pyhccl": patched.Upstream(
            PyHcclCommunicator=communicator(wire, disabled))}
    found["recipe.one_step_off_policy.distributed_util"] = patched.load(root / STATELESS, "distributed_util", found)
    sync_collective = root / RECIPE / "sync_collective.py"
    if sync_collective.exists():
        found["recipe.fully_async_policy.sync_collective"] = patched.load(sync_collective, "sync_collective", found)
    engine = patched.load(root / RECIPE / "checkpoint_engine.py", "checkpoint_engine", found)
    engine._get_physical_device_id = lambda _index: f"{uuid.uuid4()}"
    found[".checkpoint_engine"] = engine
    return found


def worker(module, rank, overlap):
    """A worker of the recipe's own class, without the constructor that needs a model and a device."""
    self = module.DetachNcclSync.__new__(module.DetachNcclSync)
    self._is_actor, self._is_rollout, self._is_offload_param = rank < TRAINERS, rank >= TRAINERS, False
    self._weights_info = [(name, weight.size(), weight.dtype) for name, weight in WEIGHTS.items()]
    self.config = SimpleNamespace(hybrid_engine=False, checkpoint_engine=SimpleNamespace(
        device_buffer_size_M=0, overlap_broadcast_and_consume=overlap))
    self._get_actor_params = lambda: WEIGHTS
    self._get_actor_params_generator = lambda: iter(WEIGHTS.items())
    self.loaded = {}
    model = SimpleNamespace(load_weights=lambda pairs: self.loaded.update((n, w.clone()) for n, w in pairs))
    self.rollout = SimpleNamespace(inference_engine=SimpleNamespace(
        worker=SimpleNamespace(model_runner=SimpleNamespace(model=model))))
    return self


def sync(root, name, method, overlap=False, times=1):
    """Runs the sync on all ranks; returns what the rollout loaded each time, and the wire."""
    wire, loads, errors = Wire(), [], []

    def run(rank):
        try:
            module = patched.load(root / RECIPE / f"{name}.py", name, imports(root, rank, wire, RayCollective()))
            self = worker(module, rank, overlap)
            offset = 0 if rank < TRAINERS else TRAINERS
            if hasattr(self, "create_weight_sync_group"):
                self.create_weight_sync_group(ADDRESS[0], int(ADDRESS[1]), offset, WORLD, GROUP)
            if "checkpoint" in method:
                self.init_checkpoint_engine(offset, TRAINERS, WORLD - TRAINERS)
            for _ in range(times):
                getattr(self, method)(GROUP)
                if self._is_rollout:
                    loads.append(self.loaded)
                    self.loaded = {}
        except BaseException as error:
            errors.append(error)
            wire.meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return loads, wire


PATHS = [("sync_rollout_weights", False), ("sync_rollout_weights_by_checkpoint", False),
         ("sync_rollout_weights_by_checkpoint", True)]
IDS = ["plain", "checkpoint-engine", "checkpoint-engine-overlapped"]


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize("method, overlap", PATHS, ids=IDS)
def test_every_weight_arrives(roots, name, method, overlap):
    loads, wire = sync(roots[True], name, method, overlap, times=2)
    assert len(loads) == 2
    for loaded in loads:
        assert loaded.keys() == WEIGHTS.keys()
        assert all(torch.equal(loaded[key], weight) and loaded[key].dtype == weight.dtype
                   for key, weight in WEIGHTS.items())
    assert wire.joined == {"address": (ADDRESS[0], int(ADDRESS[1])), **dict.fromkeys(range(WORLD), WORLD)}
    assert {src for src, _ in wire.calls} == ({0, 1} if "checkpoint" in method else {0})


@pytest.mark.parametrize("name", WORKERS)
@pytest.mark.parametrize("method, overlap", PATHS, ids=IDS)
def test_upstream_asks_ray(roots, name, method, overlap):
    with pytest.raises(RuntimeError, match=NO_HCCL):
        sync(roots[False], name, method, overlap)


def test_a_group_that_hccl_cannot_serve_is_refused(roots):
    """PyHcclCommunicator disables itself without the library, and its broadcast then does nothing, silently."""
    found = imports(roots[True], 0, Wire(), RayCollective(), disabled=True)
    collective = found["recipe.fully_async_policy.sync_collective"].collective
    with pytest.raises(RuntimeError, match="HCCL is not available for group actor_rollout, rank 0 of 3"):
        collective.init_group(GROUP, ADDRESS[0], 1, 0, WORLD)
    with pytest.raises(RuntimeError, match="actor_rollout is not initialized"):
        collective.broadcast(torch.zeros(1), 0, GROUP)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_elsewhere_the_calls_are_those_of_ray(roots, device):
    ours = object()
    for is_patched in (True, False):
        found = imports(roots[is_patched], 0, Wire(), ours, device=device)
        assert found[".checkpoint_engine"].collective is ours
    assert imports(roots[True], 0, Wire(), ours, device)["recipe.fully_async_policy.sync_collective"].collective is ours


class Remote:
    """A worker group or an actor: records remote calls, answers with futures that ray.get opens."""

    def __init__(self, count=1):
        self.calls, self.workers = [], [SimpleNamespace(
            get_available_master_addr_port=SimpleNamespace(remote=lambda: ADDRESS)) for _ in range(count)]

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return [f"{name} done"] * len(self.workers)

        return call


def synchronizer(root, device, ray_collective):
    """Constructs the synchronizer, an actor that owns no device: get_nccl_backend says "nccl" there, also on NPU."""
    module = patched.load(root / RECIPE / "param_sync.py", "param_sync", {
        "ray": patched.Upstream(remote=lambda cls: cls, get=lambda future: future),
        "ray.util.collective": patched.Upstream(collective=ray_collective),
        "verl.utils.device": patched.Upstream(get_nccl_backend=lambda: "nccl")})
    actor, rollout = Remote(TRAINERS), Remote(WORLD - TRAINERS)
    trainer = SimpleNamespace(get_actor_wg=SimpleNamespace(remote=lambda: actor))
    rollouter = SimpleNamespace(get_rollout_wg=SimpleNamespace(remote=lambda: rollout))
    config = SimpleNamespace(trainer=SimpleNamespace(device=device), async_training=SimpleNamespace(
        checkpoint_engine=SimpleNamespace(enable=False)))
    module.ParameterSynchronizer(config, trainer, rollouter, None)
    return [[call for call in group.calls if "weight" in call[0] and "info" not in call[0]]
            for group in (actor, rollout)]


def test_the_synchronizer_makes_one_group_of_all_ranks(roots):
    with pytest.raises(RuntimeError, match=NO_HCCL):  # negative control
        synchronizer(roots[False], "npu", RayCollective())
    actor, rollout = synchronizer(roots[True], "npu", RayCollective())
    host, port = ADDRESS[0], int(ADDRESS[1])
    assert actor == [("create_weight_sync_group", (host, port, 0, WORLD, GROUP), {})]
    assert rollout == [("create_weight_sync_group", (host, port, TRAINERS, WORLD, GROUP), {})]


def test_the_synchronizer_elsewhere(roots):
    """The same call with the same arguments as before, and nothing else."""
    seen = []
    for is_patched in (True, False):
        ray_collective = Remote()
        assert synchronizer(roots[is_patched], "cuda", ray_collective) == [[], []]
        (name, args, kwargs), = ray_collective.calls
        seen.append((name, [len(args[0]), *args[1:]], kwargs))
    assert seen[0] == seen[1] == ("create_collective_group", [WORLD, WORLD, [0, 1, 2]],
                                  {"backend": "nccl", "group_name": GROUP})
