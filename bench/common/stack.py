"""Hydra overrides with which verl 0.9.1's own entry points run the testbed, without an accelerator or on CUDA devices.

One list for the quickstart, the end-to-end tests and the benchmarks, so that they cannot drift apart. The device is
that of ESGRPO_BENCH_DEVICE: cuda takes the first two visible GPUs (one for the trainer, one for the rollout),
cuda-shared puts both on the first one (of runs side by side each has one of the visible ones), cpu (the default) needs
none. What shares a GPU shares its time: learning and tokens are as ever, tokens/s are not those of a machine that has a
GPU for each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.common import ROOT, TESTBED

VALIDATION_PROMPTS = 128  # of the testbed
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
MAIN_PPO = "verl.trainer.main_ppo"

DEVICES = ("cpu", "cuda", "cuda-shared")
SHARED_GPUS = 8  # logical ones, of which a run takes what it needs


def _device() -> str:
    named = os.environ.get("ESGRPO_BENCH_DEVICE", "cpu")
    if named not in DEVICES:
        raise SystemExit(f"bench: ESGRPO_BENCH_DEVICE is {named!r} | wanted one of {', '.join(DEVICES)} | nothing was "
                         "run | set it, or unset it for the CPU")
    return named


_NAMED = _device()
SHARED = _NAMED == "cuda-shared"
DEVICE = _NAMED.partition("-")[0]


def _one_gpu() -> dict[str, str]:
    """Ray gives every actor a GPU of its own out of this list, and all of them are the same one."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    # with a device twice in the list CUDA sees none in processes that Ray gave none: verl would call them CPUs
    return {"CUDA_VISIBLE_DEVICES": ",".join([first] * SHARED_GPUS), "VERL_PLATFORM": "nvidia"}


def gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = dict.fromkeys(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    return list(named) or [str(number) for number in range(torch.cuda.device_count())]


ENVIRONMENT = {
    # on Hopper torch 2.11 asks cuDNN for masked attention first, which may build a plan for a new padded length: of 12
    # lengths 4 took 1.2 to 2.0 s more than without it (H200), the others up to 2.5 times as long
    # two heaps of glibc a process: with one a thread SmolLM2's run takes 0.9 GB more, at the same speed (two cores)
    **({"VERL_PLATFORM": "cpu", "MALLOC_ARENA_MAX": "2"} if DEVICE == "cpu" else
       {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}),
    **(_one_gpu() if SHARED else {}),
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "1",
    "PYTHONUNBUFFERED": "1",
    "RAY_DEDUP_LOGS": "0",
    # Ray keeps a worker a core that nobody uses, of some 50 threads each on 32 cores: of twelve runs on one host these
    # were 19,860 of the 32,768 threads that it had, and none of the runs lasted
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_num_grpc_internal_threads": "2",
}

_FP32 = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
_VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"

_COMMON = [
    f"trainer.device={DEVICE}", "trainer.nnodes=1",
    # without flash attention packed rows attend under a dense mask: exact, and an update takes 4.5 s, not 2.6 (testbed)
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.strategy=fsdp2",  # FSDP1 wants the module on a GPU
    "actor_rollout_ref.actor.use_torch_compile=False", "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.free_cache_engine=False", "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16",
    "ray_kwargs.ray_init.num_cpus=64",  # logical: verl's actors ask for ten each
    "+ray_kwargs.ray_init.include_dashboard=False",
]
_OF_DEVICE = {
    "cpu": [
        f"+{_FP32}.param_dtype=fp32", f"+{_FP32}.reduce_dtype=fp32", f"+{_FP32}.buffer_dtype=fp32",
        "actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.rollout.enforce_eager=True",
        f"+{_VLLM}.distributed_executor_backend=uni", f"+{_VLLM}.kv_cache_memory_bytes=67108864",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
    ],
    "cuda": [
        "actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.rollout.enforce_eager=False",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        # without flash-attn verl loops over tokens for their log-probs: 4.9 to 58 s a step on an H200 (2.7 s, and
        # 11.6 ms a token of the mean response); its fused forward takes 512 at once
        "actor_rollout_ref.model.use_fused_kernels=True",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch",
    ],
}
# NCCL wants a GPU for each rank; verl imports the module before it looks the engine up
_SHARED_GPU = ["actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=bench.common.shared_gpu"]
_CHECKPOINT_ENGINE = "nccl" if DEVICE == "cuda" and not SHARED else "cpu_zmq"
_LOGICAL_GPUS = DEVICE == "cpu" or SHARED  # verl asks Ray for GPUs


def _machine(replicas: int, trainers: int = 1) -> list[str]:
    logical = [f"+ray_kwargs.ray_init.num_gpus={trainers + replicas}"] if _LOGICAL_GPUS else []
    return [*_COMMON, *_OF_DEVICE[DEVICE], *(_SHARED_GPU if SHARED else []), f"trainer.n_gpus_per_node={trainers}",
            *logical]


def engine_room(share: float, told: bool = SHARED) -> list[str]:
    """Of a GPU's memory, for vLLM; `told`: for its KV cache, because it would measure what trainers and other runs take
    there."""
    lines = [f"actor_rollout_ref.rollout.gpu_memory_utilization={share}"]
    if told:
        import torch

        memory = torch.cuda.get_device_properties(0).total_memory  # bytes
        lines.append(f"+{_VLLM}.kv_cache_memory_bytes={int(share * memory)}")
    return lines


def _task(model, train_file, val_file, reward_file, run_dir, prompt_length, response_length, group_size, mini_batch,
          learning_rate, max_num_seqs) -> list[str]:
    """What every trainer is told in the same words: GRPO on this data with this model."""
    rollout = "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False", "actor_rollout_ref.actor.use_kl_loss=False",
        f"data.train_files={train_file}", f"data.val_files={val_file}",
        f"data.max_prompt_length={prompt_length}", f"data.max_response_length={response_length}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={model}", f"reward.custom_reward_function.path={reward_file}",
        f"actor_rollout_ref.actor.optim.lr={learning_rate}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=16",
        f"{rollout}.max_model_len={prompt_length + response_length}", f"{rollout}.max_num_batched_tokens=1024",
        f"{rollout}.max_num_seqs={max_num_seqs}", f"{rollout}.calculate_log_probs=True", f"{rollout}.n={group_size}",
        "trainer.total_epochs=1000", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1",
        "trainer.resume_mode=disable", f"trainer.default_local_dir={run_dir}", 'trainer.logger=["console"]',
    ]


def fully_async(model: str, train_file: str, val_file: str, reward_file: str, run_dir: str, *,
                prompt_length: int = 64, response_length: int = 512, group_size: int = 8, mini_batch: int = 8,
                rollout_steps: int = 1_000_000, staleness: float = 0.5, sync_every: int = 1, concurrent: int = 8,
                learning_rate: float = 3e-4, max_num_seqs: int = 64, replicas: int = 1,
                trainers: int = 1) -> list[str]:
    """Overrides of verl's fully-async GRPO: a trainer on `trainers` GPUs, `replicas` standalone rollout replicas.

    Lengths are tokens, `mini_batch`, `concurrent` and `rollout_steps` are prompts (groups of `group_size` responses).
    """
    rollout = "actor_rollout_ref.rollout"
    return [
        *_machine(replicas, trainers), "actor_rollout_ref.hybrid_engine=False",
        f"{rollout}.checkpoint_engine.backend={_CHECKPOINT_ENGINE}",
        *_task(model, train_file, val_file, reward_file, run_dir, prompt_length, response_length, group_size,
               mini_batch, learning_rate, max_num_seqs),
        "data.train_batch_size=0", "data.gen_batch_size=1",
        "rollout.nnodes=1", f"rollout.n_gpus_per_node={replicas}", f"rollout.n={group_size}",
        f"rollout.total_rollout_steps={rollout_steps}",
        f"async_training.staleness_threshold={staleness}", f"async_training.trigger_parameter_sync_step={sync_every}",
        "async_training.require_batches=1", "async_training.partial_rollout=True",
        f"async_training.concurrent_samples_per_replica={concurrent}",
    ]


def v1(mode: str, model: str, train_file: str, val_file: str, reward_file: str, run_dir: str, *,
       prompt_length: int = 64, response_length: int = 512, group_size: int = 8, mini_batch: int = 8,
       steps: int = 1_000_000, sync_every: int = 1, warmup: float = 1.0, off_policy: int = 8, strategy: str = "drop",
       learning_rate: float = 3e-4, max_num_seqs: int = 64, replicas: int = 1, trainers: int = 1) -> list[str]:
    """Overrides of verl's v1 trainers; `mode` is sync, colocate_async or separate_async (`replicas` standalone ones).

    Lengths are tokens, `mini_batch` is prompts (groups of `group_size` responses), `steps` and `off_policy` are weight
    versions, `sync_every` is optimiser steps per weight version, `warmup` is batches in flight before the first step.
    """
    rollout = "actor_rollout_ref.rollout"
    modes = {
        "sync": [],
        "colocate_async": [f"trainer.v1.colocate_async.num_warmup_batches={warmup}"],
        "separate_async": [
            "actor_rollout_ref.hybrid_engine=False", f"{rollout}.nnodes=1",
            f"{rollout}.n_gpus_per_node={replicas}", f"{rollout}.checkpoint_engine.backend={_CHECKPOINT_ENGINE}",
            f"trainer.v1.separate_async.num_warmup_batches={warmup}",
            f"trainer.v1.separate_async.parameter_sync_step={sync_every}"],
    }
    batch = mini_batch * (sync_every if mode == "separate_async" else 1)
    return [
        *_machine(replicas if mode == "separate_async" else 0, trainers), *modes[mode],
        "trainer.use_v1=True", f"trainer.v1.trainer_mode={mode}",
        f"trainer.v1.sampler.max_off_policy_threshold={off_policy}",
        f"trainer.v1.sampler.max_off_policy_strategy={strategy}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "algorithm.rollout_correction.bypass_mode=True",
        *_task(model, train_file, val_file, reward_file, run_dir, prompt_length, response_length, group_size,
               mini_batch, learning_rate, max_num_seqs),
        f"data.train_batch_size={batch}", f"trainer.total_training_steps={steps}",
    ]


def common_overrides(data: Path, seed: int, *, model: Path = TESTBED / "model", test_every: int = 5,
                     trainer=fully_async, reward: Path = TESTBED / "reward.py", **sizes) -> list[str]:
    """Of every arm; `sizes` are those of `trainer`, fully_async or v1."""
    return [
        *trainer(model=str(model), train_file=str(data / "train.parquet"), val_file=str(data / "val.parquet"),
                 reward_file=str(reward), run_dir="RUN_DIR", **sizes),
        f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True", "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "trainer.val_before_train=True", f"trainer.test_freq={test_every}", 'trainer.logger=["console","file"]',
    ]


def command(main: str, overrides: list[str]) -> list[str]:
    """Command line that runs a verl main under the overlay."""
    return [sys.executable, "-m", "esgrpo", "run", "--", sys.executable, "-m", main, *overrides]


def slow_engine(step_ms: float) -> dict[str, str]:
    """What a run's environment needs so that an engine's step lasts `step_ms` longer: then replicas have a speed of
    their own although they share the cores."""
    return {"PYTHONPATH": _path(ROOT / "overlay", ROOT / "bench" / "slow_engine", ROOT), "SLOW_STEP_MS": str(step_ms)}


def _path(*ours: Path | str) -> str:
    """PYTHONPATH with `ours` before what it is."""
    return os.pathsep.join([*map(str, ours), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def environment(overlay: str) -> dict[str, str]:
    """The environment of such a command; `overlay` is the directory that holds the package."""
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": _path(overlay, *([ROOT] if SHARED else []))}
