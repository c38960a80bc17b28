"""What SegmentMixin overrides, calls and reads of vLLM: the sources that both scheduler hooks rely on.

A test derives this list from the mixin's own code. Dataclasses and enums are taken whole, other classes by what is
used.
"""

from __future__ import annotations

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_ASYNC = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_REQUEST = "vllm.v1.request:Request."
_POOL = "vllm.v1.core.block_pool:BlockPool."

TARGETS = (
    *[_SCHEDULER + name for name in (
        "__bases__", "__init__", "add_request", "schedule", "update_from_output", "finish_requests", "_free_request",
        "reset_prefix_cache", "set_pause_state?")],  # vLLM >= 0.18 tells the scheduler of a pause
    _ASYNC,
    *[_REQUEST + name for name in (
        "__bases__", "__init__", "append_output_token_ids", "num_output_tokens", "num_tokens",
        "get_finished_reason")],
    "vllm.v1.request:RequestStatus",
    *[_POOL + name for name in (
        "__bases__", "__init__", "get_num_free_blocks", "evict_blocks?")],  # >= 0.13; kept-requests asks for it
    "vllm.v1.core.sched.request_queue:RequestQueue.peek_request",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.__init__",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.__init__",
    *["vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager." + name for name in (
        "__init__", "cache_blocks")],
    "vllm.v1.core.kv_cache_utils:KVCacheBlock",
    "vllm.v1.core.sched.output:SchedulerOutput",
    "vllm.v1.outputs:ModelRunnerOutput",
    "vllm.v1.outputs:LogprobsLists",
    "vllm.v1.engine:EngineCoreOutput",
    "vllm.v1.engine:EngineCoreOutputs",
)
