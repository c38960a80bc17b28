"""vLLM's scheduler classes without an engine: config, requests and model output by hand, for every supported release.

Nothing is loaded and nothing compiled is needed. Signatures differ between releases: arguments are passed by name, and
only those that the release has.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

PROMPT = 16
VOCABULARY = 32_000


def call_with_known(function, **arguments):
    """`function` with those of `arguments` that its signature has."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in known})


def make_config(asynchronous: bool = False, max_num_seqs: int = 1024, max_model_len: int = 4096,
                max_num_batched_tokens: int | None = None):
    """A real VllmConfig of a tiny Qwen2; the model's config.json is all that vLLM reads."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.model_executor.models import registry

    # vLLM looks at the model's class in a process of its own, which imports everything once more: for CUDA's sake
    here = mock.patch.object(registry, "_run_in_subprocess", lambda function: function())
    with here, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": VOCABULARY,
            "max_position_embeddings": max_model_len, "tie_word_embeddings": True, "torch_dtype": "float32"}))
        model = ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32",
                            max_model_len=max_model_len, enforce_eager=True)
        config = VllmConfig(
            model_config=model, cache_config=CacheConfig(block_size=PROMPT, enable_prefix_caching=False),
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_model_len=max_model_len, is_encoder_decoder=False,
                enable_chunked_prefill=True,
                max_num_batched_tokens=max_num_batched_tokens or max_num_seqs * max_model_len))
    config.scheduler_config.async_scheduling = asynchronous  # the CPU platform sets False; the classes do not care
    return config


def upstream_class(asynchronous: bool) -> type:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return AsyncScheduler if asynchronous else Scheduler


def make_scheduler(config, num_blocks: int, cls: type):
    """A scheduler of class `cls`, built like in EngineCore."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    size = config.cache_config.block_size
    config.cache_config.num_gpu_blocks = num_blocks
    spec = call_with_known(FullAttentionSpec, block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32,
                           use_mla=False)
    arguments = {"vllm_config": config, "log_stats": False,
                 "structured_output_manager": StructuredOutputManager(config),
                 "kv_cache_config": KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])}
    if hasattr(config.scheduler_config, "get_scheduler_cls"):  # since 0.12, which is also when block_size came
        arguments["block_size"] = size
    return cls(**arguments)


def block_hasher(config):
    """What fills a request's block hashes, by which the prefix cache finds its blocks; None without that cache."""
    from vllm.v1.core import kv_cache_utils

    if not config.cache_config.enable_prefix_caching:
        return None
    try:
        from vllm.utils.hashing import sha256
    except ImportError:
        from vllm.utils import sha256
    kv_cache_utils.init_none_hash(sha256)
    return kv_cache_utils.get_request_block_hasher(config.cache_config.block_size, sha256)


def make_request(key: str, done_before: int = 0, max_tokens: int = 1 << 20, history=(),
                 group: str = "g", member: int = 0, prompt: list[int] | None = None,
                 prompt_tokens: int = PROMPT, hasher=None, **more):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    parameters = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, logprobs=0,
        extra_args={"segment": {"group": group, "member": member, "done_before": done_before, **more}})
    request = call_with_known(Request, request_id=key, prompt_token_ids=prompt or [1] * prompt_tokens,
                              pooling_params=None, sampling_params=parameters, eos_token_id=None, block_hasher=hasher)
    if history:  # like a response that was preempted before
        request.append_output_token_ids(list(history))
    return request


def model_output(order: list[str], tokens: np.ndarray, logprobs: np.ndarray, silent=frozenset()):
    """What the model runner hands over, in batch order: one log-prob for every request, and one token.

    Requests in `silent` are between two prefill chunks: their row holds nothing.
    """
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    lists = LogprobsLists(tokens[:, None], logprobs[:, None], np.zeros(len(order), dtype=np.int64))
    if not hasattr(lists, "slice_request"):  # before 0.12 they were plain lists
        lists = LogprobsLists(*(column.tolist() for column in lists))
    return call_with_known(
        ModelRunnerOutput, req_ids=list(order), req_id_to_index={key: i for i, key in enumerate(order)},
        sampled_token_ids=[[] if key in silent else [token]
                           for key, token in zip(order, tokens.tolist(), strict=True)],
        logprobs=lists, prompt_logprobs_dict={}, pooler_output=[])


def drafted_output(order: list[str], tokens: list[list[int]], logprobs: list[list[float]]):
    """`model_output` under speculative decoding: several tokens for a request, each with a row; no token: silent.

    Rows follow vLLM's expanded layout: a silent request has a row, too, which holds nothing.
    """
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    rows = [values or [0.0] for values in logprobs]
    starts = np.cumsum([0, *map(len, rows)]).tolist()
    ids = np.asarray([token for made, values in zip(tokens, rows, strict=True)
                      for token in (made or [0] * len(values))])
    lists = call_with_known(
        LogprobsLists, logprob_token_ids=ids[:, None], logprobs=np.concatenate(rows).astype(np.float32)[:, None],
        sampled_token_ranks=np.zeros(len(ids), dtype=np.int64), cu_num_generated_tokens=starts)
    return call_with_known(
        ModelRunnerOutput, req_ids=list(order), req_id_to_index={key: i for i, key in enumerate(order)},
        sampled_token_ids=[list(made) for made in tokens], logprobs=lists, prompt_logprobs_dict={}, pooler_output=[])
