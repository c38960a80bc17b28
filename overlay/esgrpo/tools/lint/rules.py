"""Settings that contradict each other. Each rule reads the composed config of a release and yields (severity, key,
what is wrong, what to do). A value that only the environment knows silences the rules that need it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from esgrpo.tools.lint.expansion import is_unknown

ERROR, WARNING, NOTE = "error", "warning", "note"
ACTOR, ROLLOUT, ASYNC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "async_training"
Found = tuple[str, str, str, str]
PLACEHOLDER = "esgrpo_unknown"  # stands in the composed config for what only the environment knows


@dataclass(frozen=True)
class Config:
    """The composed config with dotted access; `given` are the keys that the script sets."""

    values: dict
    given: frozenset[str]
    module: str
    version: str
    device: str  # cuda, npu, cpu; "" when not said
    flash_default: bool  # MindSpeed gets use_flash_attn without being told

    def get(self, key: str, default=None):
        """None for what is missing or not known."""
        node = self.values
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        unknown = isinstance(node, str) and (PLACEHOLDER in node or node.startswith("${") or is_unknown(node))
        return None if unknown else node

    def number(self, key: str):
        value = self.get(key)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def numbers(self, *keys: str):
        """All of them, or None when one is not known."""
        found = [self.number(key) for key in keys]
        return None if None in found else found

    def is_known(self, key: str) -> bool:
        return PLACEHOLDER not in str(self.values_at(key))

    def values_at(self, key: str):
        node = self.values
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    @property
    def fully_async(self) -> bool:
        return isinstance(self.get(ASYNC), dict)

    @property
    def one_step_off(self) -> bool:
        return "one_step_off" in self.module

    @property
    def v1(self) -> bool:
        """verl's v1 trainers, which main_ppo starts since 0.9."""
        return bool(self.get("trainer.use_v1", False)) and self.module.endswith("trainer.main_ppo")

    @property
    def megatron(self) -> bool:
        return self.get(f"{ACTOR}.strategy") == "megatron"


def fully_async_contract(c: Config) -> Iterator[Found]:
    """Assertions of FullyAsyncRollouter.__init__, _validate_config and _init_async_rollout_manager."""
    if not c.fully_async:
        return
    wanted = {"data.train_batch_size": 0, "data.gen_batch_size": 1, "actor_rollout_ref.hybrid_engine": False,
              f"{ROLLOUT}.mode": "async", f"{ROLLOUT}.calculate_log_probs": True}
    for key, value in wanted.items():
        found = c.get(key)
        if found is not None and found != value:
            yield ERROR, key, f"{found}, but the fully-async rollouter asserts {value}", f"set {key}={value}"
    staleness, steps = c.number(f"{ASYNC}.staleness_threshold"), c.number(f"{ASYNC}.trigger_parameter_sync_step")
    if staleness is not None and staleness < 0:
        yield ERROR, f"{ASYNC}.staleness_threshold", f"{staleness}, but it must not be negative", "set it to 0 or more"
    if steps is not None and steps < 1:
        yield ERROR, f"{ASYNC}.trigger_parameter_sync_step", f"{steps}, but it must be at least 1", "set it to 1"
    if staleness == 0 and c.get(f"{ASYNC}.partial_rollout"):
        yield (WARNING, f"{ASYNC}.partial_rollout", "True never takes effect with staleness_threshold=0: the rollouter "
               "ends every sample before a weight sync, so there is nothing to interrupt",
               "set staleness_threshold above 0, or partial_rollout=False")


def syncs(c: Config) -> Iterator[Found]:
    """Sync settings that never take effect."""
    sizes = c.numbers(f"{ACTOR}.ppo_mini_batch_size", f"{ASYNC}.require_batches",
                      f"{ASYNC}.trigger_parameter_sync_step", "rollout.total_rollout_steps")
    if c.fully_async and sizes:
        mini, batches, steps, total = sizes
        if mini * batches * steps > total:
            yield (WARNING, f"{ASYNC}.trigger_parameter_sync_step",
                   f"one weight sync takes {mini} x {batches} x {steps} = {mini * batches * steps} samples, but "
                   f"rollout.total_rollout_steps ends the run after {total}: no sync ever happens",
                   "raise total_rollout_steps, or lower one of the factors")
    if c.get(f"{ASYNC}.checkpoint_engine.enable") is False:
        for name in ("device_buffer_size_M", "overlap_broadcast_and_consume"):
            if f"{ASYNC}.checkpoint_engine.{name}" in c.given:
                yield (WARNING, f"{ASYNC}.checkpoint_engine.{name}",
                       "never takes effect while checkpoint_engine.enable=False", "enable the engine or drop it")
    if c.get(f"{ASYNC}.use_dynamic_resource_scheduling") is False:
        for key in sorted(k for k in c.given if k.startswith(f"{ASYNC}.dynamic_schedule_")):
            yield (WARNING, key, "never takes effect while use_dynamic_resource_scheduling=False",
                   f"set {ASYNC}.use_dynamic_resource_scheduling=True or drop it")
    mode = c.get("trainer.v1.trainer_mode")
    for key in sorted(k for k in c.given if k.startswith(("trainer.v1.colocate_async.", "trainer.v1.separate_async."))):
        if not c.v1 or (mode and key.split(".")[2] != mode):
            yield (WARNING, key, f"never takes effect with trainer.use_v1={c.get('trainer.use_v1')} and "
                   f"trainer.v1.trainer_mode={mode}", f"set trainer.v1.trainer_mode={key.split('.')[2]} or drop it")


def model_parallel(c: Config) -> int | None:
    """Accelerators that share one copy of the actor; None when not known."""
    if c.megatron:
        sizes = c.numbers(*(f"{ACTOR}.megatron.{name}_parallel_size"
                            for name in ("tensor_model", "pipeline_model", "context")))
        return sizes and sizes[0] * sizes[1] * sizes[2]
    return sequence_parallel(c)


def sequence_parallel(c: Config) -> int | None:
    """Ranks that share one row; None when not known."""
    if c.megatron:
        return c.number(f"{ACTOR}.megatron.context_parallel_size")
    keys = f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    if c.get(f"{ACTOR}.strategy") not in ("fsdp", "fsdp2") or not all(map(c.is_known, keys)):
        return None
    return max(c.number(key) or 1 for key in keys)


def batches(c: Config) -> Iterator[Found]:
    """Mini-batches against data parallelism: the batch of one update is cut into equal parts, one per rank."""
    world = c.numbers("trainer.nnodes", "trainer.n_gpus_per_node")
    together = model_parallel(c)
    mini, n = c.number(f"{ACTOR}.ppo_mini_batch_size"), c.number(f"{ROLLOUT}.n")
    train = c.number("data.train_batch_size")
    if train and mini and not c.fully_async and train < mini:
        yield (ERROR if c.get(f"{ACTOR}.use_dynamic_bsz") is False else WARNING, f"{ACTOR}.ppo_mini_batch_size",
               f"{mini} prompts, but data.train_batch_size has only {train}", "lower it to the batch or below")
    if not world or not together:
        return
    devices = world[0] * world[1]
    if devices % together:
        yield (ERROR, "trainer.n_gpus_per_node", f"{devices} accelerators cannot be divided among copies of "
               f"{together} (model, pipeline, context and sequence parallelism)",
               "change the parallel sizes or the number of accelerators")
        return
    ranks = devices // together
    if mini and n and (mini * n) % ranks:
        yield (ERROR if mini * n < ranks else WARNING, f"{ACTOR}.ppo_mini_batch_size",
               f"{mini} prompts x {n} responses = {mini * n} rows cannot be divided among {ranks} data-parallel ranks",
               f"make ppo_mini_batch_size x n a multiple of {ranks}")


def lengths(c: Config) -> Iterator[Found]:
    """Response lengths against what vLLM and the trainer can take at once."""
    sizes = c.numbers("data.max_prompt_length", "data.max_response_length")
    if not sizes:
        return
    longest = sum(sizes)
    batched = c.number(f"{ROLLOUT}.max_num_batched_tokens")
    model = c.number(f"{ROLLOUT}.max_model_len")
    if c.get(f"{ROLLOUT}.name") == "vllm" and model and model < longest:
        yield (WARNING, f"{ROLLOUT}.max_model_len", f"{model} tokens, but prompt and response may have "
               f"{sizes[0]} + {sizes[1]} = {longest}: responses end early, and never by their own choice",
               f"set it to {longest} or drop it")
    if c.get(f"{ROLLOUT}.name") == "vllm" and batched and batched < longest \
            and c.get(f"{ROLLOUT}.enable_chunked_prefill") is False:
        yield (WARNING, f"{ROLLOUT}.max_num_batched_tokens", f"{batched} tokens without chunked prefill, but prompt "
               f"and response may have {sizes[0]} + {sizes[1]} = {longest}: vLLM refuses a max_model_len above it, "
               "and an interrupted response could not be prefilled again",
               f"set enable_chunked_prefill=True, or max_num_batched_tokens={longest}")
    ranks, limit = sequence_parallel(c), c.number(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if c.get(f"{ACTOR}.use_dynamic_bsz") and limit and ranks and limit * ranks < longest:
        yield (WARNING, f"{ACTOR}.ppo_max_token_len_per_gpu",
               f"{limit} tokens x {ranks} ranks of a sequence, but one row may have {longest}: the update of the first "
               "long row fails (max_token_len must be greater than the sequence length)",
               f"set it to at least {-(-longest // ranks)}")


def losses(c: Config) -> Iterator[Found]:
    """Log-probs that the chosen loss reads, and groups that have no advantage."""
    correction = c.get("algorithm.rollout_correction") or {}
    wanting = [name for name in ("rollout_is", "rollout_rs") if correction.get(name) not in (None, "null", "None")]
    mode = c.get(f"{ACTOR}.policy_loss.loss_mode")
    if mode == "bypass_mode" or correction.get("bypass_mode") is True and not c.fully_async:
        wanting.append("bypass_mode")
    if wanting and c.get(f"{ROLLOUT}.calculate_log_probs") is False:
        yield (ERROR, f"{ROLLOUT}.calculate_log_probs", "False, but algorithm.rollout_correction."
               f"{wanting[0]} needs the log-probs of the rollout", f"set {ROLLOUT}.calculate_log_probs=True")
    if c.get(f"{ASYNC}.compute_prox_log_prob") and c.get(f"{ASYNC}.use_rollout_log_probs") is False:
        yield (WARNING, f"{ASYNC}.compute_prox_log_prob", "True with use_rollout_log_probs=False computes log-probs "
               "that nothing reads", f"set {ASYNC}.use_rollout_log_probs=True or drop it")
    distilled = c.get("distillation.enabled")
    if c.get("algorithm.adv_estimator") == "grpo" and c.number(f"{ROLLOUT}.n") == 1 and not distilled:
        yield (WARNING, f"{ROLLOUT}.n", "1 response a prompt, so GRPO has no group to compare with",
               f"set {ROLLOUT}.n to 2 or more")
    same = c.get(f"{ACTOR}.strategy"), c.get("critic.strategy")
    if c.fully_async and c.version.startswith("0.7.0") and None not in same and same[0] != same[1]:
        yield (ERROR, "critic.strategy", f"{same[1]}, but fully_async_main asserts that it is the actor's {same[0]}",
               f"set critic.strategy={same[0]}")


def npu(c: Config) -> Iterator[Found]:
    """What Ascend NPUs need beside trainer.device=npu."""
    if c.device != "npu":
        return
    if c.megatron and not c.flash_default:
        roles = {"actor_rollout_ref.actor": True,
                 "actor_rollout_ref.ref": c.get(f"{ACTOR}.use_kl_loss") or c.get("algorithm.use_kl_in_reward"),
                 "critic": c.get("algorithm.adv_estimator") == "gae"}
        for role, used in roles.items():
            key = f"{role}.megatron.override_transformer_config"
            if used and not (c.get(key) or {}).get("use_flash_attn"):
                yield (ERROR, f"{key}.use_flash_attn", "not set: MindSpeed stops with 'Please set micro_batch_size or "
                       "set use_flash_attn=True'", f"add +{key}.use_flash_attn=True, or apply the patch "
                       "default-flash-attention-under-mindspeed (./apply.sh)")
    if c.version.startswith("0.7.0") and (c.fully_async or c.one_step_off):
        yield (NOTE, "trainer.device", "npu: the weight sync of this release asks Ray for a group that it has not for "
               "HCCL", "apply the patches of verl v0.7.0 and the HCCL collective of ray (./apply.sh)")


def overlay_main(c: Config) -> Iterator[Found]:
    """Mains in which the overlay can confirm its hooks."""
    if c.get(f"{ROLLOUT}.segment") is None and c.get(f"{ACTOR}.policy_loss.loss_mode") not in ("pois", "sais"):
        return
    if not c.fully_async and not c.v1:
        yield (ERROR, f"{ROLLOUT}.segment", f"the overlay has no place in {c.module}: it knows the fully-async main "
               "and the v1 trainers, and refuses to start others", "use fully_async_main, or main_ppo with "
               "trainer.use_v1=True (verl 0.9.1), or drop segment.*")


RAY_SLOTS, CONTROL_SLOTS = 1000, 16  # RolloutReplica.max_concurrency: calls that a vLLM server runs at once
DEFAULT_CONCURRENT = 16  # prompts a replica, where async_training.concurrent_samples_per_replica is not set


def server_slots(c: Config) -> Iterator[Found]:
    """A response holds a slot of its server's Ray actor until it is whole; control calls need one as well."""
    if c.get(f"{ROLLOUT}.segment"):
        return  # started with the overlay, whose hook server-slots raises the limit
    n, most = c.number(f"{ROLLOUT}.n"), max(RAY_SLOTS, (c.number(f"{ROLLOUT}.max_num_seqs") or 0) + CONTROL_SLOTS)
    if c.fully_async:
        key = f"{ASYNC}.concurrent_samples_per_replica"
        waiting = (c.number(key) or DEFAULT_CONCURRENT) * (c.number("rollout.n") or n or 0)
    elif c.v1 and c.get("trainer.v1.trainer_mode") in ("colocate_async", "separate_async"):
        key, mode = "data.train_batch_size", c.get("trainer.v1.trainer_mode")
        place = ROLLOUT if mode == "separate_async" else "trainer"
        sizes = c.numbers(key, f"trainer.v1.{mode}.num_warmup_batches", f"{place}.nnodes", f"{place}.n_gpus_per_node",
                          f"{ROLLOUT}.tensor_model_parallel_size")
        if not sizes or not n:
            return
        batch, warmup, nodes, devices, parallel = sizes
        waiting = batch * (1 + warmup) * n / max(1, nodes * devices // parallel)
    else:
        return  # nothing is aborted or synced while responses are being generated
    if waiting > most:
        yield (WARNING, key, f"{waiting:.0f} responses are in flight on a replica and its Ray actor runs {most} calls "
               "at once: the calls of a weight sync find no slot, and the run hangs",
               "use more replicas or a smaller batch, or start with esgrpo run, which gives them room (server-slots)")


RULES = (fully_async_contract, syncs, batches, lengths, losses, npu, server_slots, overlay_main)


def check(config: Config) -> list[Found]:
    return [found for rule in RULES for found in rule(config)]
