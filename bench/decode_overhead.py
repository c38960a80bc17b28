"""Decode throughput of vLLM's EngineCore with segments enabled and no decision taken, against the same core without.

    VERL_PLATFORM=cpu ESGRPO_ENABLE=1 PYTHONPATH=overlay python -m bench.decode_overhead [--windows 100]

One EngineCore in this process, driven by step(): no front-end and no second process, whose time would hide the
scheduler's. Two engine processes would differ by more than the effect (memory layout, neighbours on the machine), so an
arm is a swap of the scheduler object's class between two windows, while nothing runs. A round runs one window of every
arm in random order; ratios are taken within a round, and `plain_again` is the A/A control. On a busy machine these are
noisy, so the mixin's own CPU time is clocked too: it runs in the core's only thread, hence `1 - own / all` is the ratio
that it allows. Nobody is pruned: tokens are sampled at temperature 1 from a model with dummy weights. The smaller the
model, the larger the scheduler's share.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.common import console
from bench.common.scripted_scheduler import upstream_class
from bench.common.swapped_classes import bootstrap, environment, plain_class, timed_class

RESULT = Path(__file__).parent / "results" / "decode_overhead.json"
VOCABULARY = 512
PROMPT = 16
ARMS = {
    "plain": None,
    "plain_again": None,
    # Boundaries and looks come more often than by default (1024 and 128), because the responses of a window are short.
    "segments": {"enable": True, "segment_length": 12},
    "segments_and_repetition": {"enable": True, "segment_length": 12,
                                "prune": {"repetition": {"enable": True, "check_interval": 12}}},
}


def arm_classes() -> dict[bool, type]:
    """The scheduler class without and with the mixin, each with a clock inside and outside of it."""
    from esgrpo.hooks.vllm.segment_mixin import mixed_with

    base = timed_class(upstream_class(False))
    return {mixed: timed_class(cls, "total_ns") for mixed, cls in ((False, plain_class(base)),
                                                                   (True, mixed_with(base)))}


def build_core(requests: int, tokens: int, hidden: int, layers: int, cls: type):
    """A real EngineCore of a dummy-weight Qwen2 on the CPU, with a scheduler of class `cls`."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the CPU platform wants the multi-process executor
    from vllm.config.scheduler import SchedulerConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
            "intermediate_size": 2 * hidden, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": layers, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
            "tie_word_embeddings": True, "torch_dtype": "float32"}))
        config = EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True,
            max_model_len=-(-(PROMPT + tokens) // 128) * 128, max_num_seqs=requests, seed=0,
            max_num_batched_tokens=max(2048, requests * PROMPT), kv_cache_memory_bytes=1 << 28,
            enable_prefix_caching=False, distributed_executor_backend="uni", disable_log_stats=True,
            logprobs_mode="processed_logprobs").create_engine_config()
        original = SchedulerConfig.get_scheduler_cls
        SchedulerConfig.get_scheduler_cls = lambda self: cls
        try:
            return EngineCore(config, Executor.get_class(config), log_stats=False)
        finally:
            SchedulerConfig.get_scheduler_cls = original


def enter(core, classes: dict[bool, type], segment: dict | None) -> None:
    """Swap the arm while nothing runs."""
    from esgrpo import config

    scheduler = core.scheduler
    if scheduler.requests:
        raise RuntimeError(f"{len(scheduler.requests)} requests are left of the window before")
    scheduler.__class__ = classes[segment is not None]
    if segment is not None:
        scheduler._segment_start(config.parse(segment))


def window(core, requests: int, tokens: int, number: int) -> dict:
    """Wall and CPU seconds of decoding `requests` responses of `tokens` tokens; the prefill step is not timed."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    for i in range(requests):
        parameters = SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0,
            extra_args={"segment": {"group": f"{number}-{i // 8}", "member": i % 8, "done_before": 0}})
        core.add_request(core.preprocess_add_request(EngineCoreRequest(
            request_id=f"{number}-{i}", prompt_token_ids=[1 + i % 97] * PROMPT, mm_features=None,
            sampling_params=parameters, pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
            data_parallel_rank=None))[0])
    core.step()
    core.scheduler.upstream_ns = core.scheduler.total_ns = 0
    made, endings, wall, cpu = 0, [], time.perf_counter(), time.process_time()
    while core.scheduler.has_unfinished_requests():
        for outputs in core.step()[0].values():
            made += sum(len(output.new_token_ids) for output in outputs.outputs)
            endings += [output.kv_transfer_params for output in outputs.outputs if output.finish_reason is not None]
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tokens": made,
               "boundaries": sum(ending["esgrpo"]["boundaries"] for ending in endings if ending),
               "own": (core.scheduler.total_ns - core.scheduler.upstream_ns) / 1e9}
    core.step()  # tells the model runner what has ended
    return seconds


def measure(requests: int, tokens: int, windows: int, hidden: int, layers: int, seed: int) -> dict:
    rng = random.Random(seed)
    classes = arm_classes()
    core = build_core(requests, tokens, hidden, layers, classes[False])
    rows = {name: [] for name in ARMS}
    outcomes = {name: {} for name in ARMS}
    try:
        for number in range(-1, windows):  # the first round warms up
            for position, name in enumerate(rng.sample(list(ARMS), len(ARMS))):
                enter(core, classes, ARMS[name])
                row = window(core, requests, tokens, number * len(ARMS) + position)
                if number >= 0:
                    rows[name].append(row)
                if ARMS[name] is not None:
                    for outcome, count in core.scheduler.segment_outcomes.items():
                        outcomes[name][outcome] = outcomes[name].get(outcome, 0) + count
    finally:
        core.shutdown()
    clock = np.median([row["own"] for row in rows["plain"]])  # the plain arm's own time is the clocks'
    arms = {}
    for name, values in rows.items():
        made = np.asarray([row["tokens"] for row in values])
        arms[name] = {"tokens": int(made.sum()), "outcomes": outcomes[name],
                      "boundaries": sum(row["boundaries"] for row in values)}
        arms[name]["throughput_ratio_own"] = bootstrap(
            [1 - (row["own"] - clock) / (row["cpu"] - clock) for row in values], seed)
        for kind in ("wall", "cpu"):
            speed = made / np.asarray([row[kind] for row in values])
            base = np.asarray([row["tokens"] / row[kind] for row in rows["plain"]])
            arms[name][f"tokens_per_{kind}_second"] = bootstrap(speed, seed)
            arms[name][f"throughput_ratio_{kind}"] = bootstrap(speed / base, seed)
    return arms


def main(argv: list[str] | None = None) -> dict:
    parser = console.command_line("bench.decode_overhead", __doc__.partition("\n")[0])
    parser.add_argument("--windows", type=console.count, default=100, help="windows of every arm")
    parser.add_argument("--requests", type=console.count, default=64)
    parser.add_argument("--tokens", type=console.count, default=32, help="tokens of a response, prefill's one included")
    parser.add_argument("--hidden", type=console.count, default=128)
    parser.add_argument("--layers", type=console.count, default=2)
    parser.add_argument("--seed", type=console.whole, default=0)
    parser.add_argument("--out", type=console.output_file, default=RESULT)
    options = parser.parse_args(argv)
    result = {**environment(options.seed), "requests": options.requests, "tokens": options.tokens,
              "windows": options.windows, "hidden": options.hidden, "layers": options.layers,
              "load_average_before": os.getloadavg()[0]}
    result["arms"] = measure(options.requests, options.tokens, options.windows, options.hidden, options.layers,
                             options.seed)
    result["load_average_after"] = os.getloadavg()[0]
    console.write(options.out, json.dumps(result, indent=1) + "\n")
    for name, row in result["arms"].items():
        ratios = ", ".join(
            f"{kind} x{ratio['median']:.4f} [{ratio['low']:.4f}, {ratio['high']:.4f}]"
            for kind in ("own", "cpu", "wall") for ratio in [row[f"throughput_ratio_{kind}"]])
        print(f"{name:24} {row['tokens_per_wall_second']['median']:6.0f} tokens/s, {ratios}")
    return result


if __name__ == "__main__":
    sys.exit(console.exit_code(main))
