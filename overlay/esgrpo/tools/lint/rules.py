"""Settings that contradict each other. Each rule reads the composed config of a release and yields (severity, key,
what is wrong, what to do). A value that only the environment knows silences the rules that need it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from esgrpo import compat
from esgrpo.tools import language
from esgrpo.tools.lint.expansion import is_unknown

ERROR, WARNING, NOTE = "error", "warning", "note"
ACTOR, ROLLOUT, ASYNC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "async_training"
Found = tuple[str, str, str, str]
FILE = Path(__file__).with_name("findings.toml")
HCCL_PATCH = "sync-weights-over-stateless-group"
PATCHES = (HCCL_PATCH,)  # git patches that a rule asks for
PLACEHOLDER = "esgrpo_unknown"  # stands in the composed config for what only the environment knows


_findings = functools.cache(lambda: compat.toml(FILE))


def said(name: str, /, **values) -> tuple[str, str]:
    """(problem, what to do) of a finding in the language that is spoken. Raises KeyError for a name it has not."""
    table = _findings()[name]
    return language.of(table, "problem").format(**values), language.of(table, "todo").format(**values)


def phrase(name: str, /, **values) -> str:
    """A part of a sentence."""
    return said(name, **values)[0]


def found(severity: str, key: str, name: str, /, **values) -> Found:
    return severity, key, *said(name, **values)


@dataclass(frozen=True)
class Config:
    """The composed config with dotted access; `given` are the keys that the script sets."""

    values: dict
    given: frozenset[str]
    module: str
    version: str
    device: str  # cuda, npu, cpu; "" when not said
    flash_default: bool  # MindSpeed gets use_flash_attn without being told
    validates: bool = True  # the main has verl look at its batch sizes before anything starts
    patches: frozenset[str] = frozenset()  # of PATCHES, those that the source has

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
        """A single key in async_training, as recipe/partial_rollout adds one, makes no fully-async run."""
        return isinstance(self.get(ASYNC), dict) and "staleness_threshold" in self.get(ASYNC)

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
        given = c.get(key)
        if given is not None and given != value:
            yield found(ERROR, key, "contract", found=given, key=key, value=value)
    staleness, steps = c.number(f"{ASYNC}.staleness_threshold"), c.number(f"{ASYNC}.trigger_parameter_sync_step")
    if staleness is not None and staleness < 0:
        yield found(ERROR, f"{ASYNC}.staleness_threshold", "negative_staleness", found=staleness)
    if steps is not None and steps < 1:
        yield found(ERROR, f"{ASYNC}.trigger_parameter_sync_step", "no_sync_step", found=steps)
    if staleness == 0 and c.get(f"{ASYNC}.partial_rollout"):
        yield found(WARNING, f"{ASYNC}.partial_rollout", "partial_without_staleness")


def separate_async_contract(c: Config) -> Iterator[Found]:
    """Assertions of PPOTrainerSeparateAsync.__init__."""
    if not (c.v1 and c.get("trainer.v1.trainer_mode") == "separate_async"):
        return
    sizes = c.numbers("data.train_batch_size", "trainer.v1.separate_async.parameter_sync_step",
                      f"{ACTOR}.ppo_mini_batch_size")
    if sizes and sizes[0] != sizes[1] * sizes[2]:
        batch, steps, mini = sizes
        yield found(ERROR, "data.train_batch_size", "separate_batch", batch=batch, steps=steps, mini=mini,
                    product=steps * mini)
    for name in ("nnodes", "n_gpus_per_node"):
        if c.number(f"{ROLLOUT}.{name}") == 0:
            yield found(ERROR, f"{ROLLOUT}.{name}", "separate_replicas", key=f"{ROLLOUT}.{name}")
    if c.get(f"{ROLLOUT}.checkpoint_engine.backend") == "naive":
        yield found(ERROR, f"{ROLLOUT}.checkpoint_engine.backend", "separate_backend")


def syncs(c: Config) -> Iterator[Found]:
    """Sync settings that never take effect."""
    sizes = c.numbers(f"{ACTOR}.ppo_mini_batch_size", f"{ASYNC}.require_batches",
                      f"{ASYNC}.trigger_parameter_sync_step", "rollout.total_rollout_steps")
    if c.fully_async and sizes:
        mini, batches, steps, total = sizes
        if mini * batches * steps > total:
            yield found(WARNING, f"{ASYNC}.trigger_parameter_sync_step", "never_syncs", mini=mini, batches=batches,
                        steps=steps, product=mini * batches * steps, total=total)
    if c.get(f"{ASYNC}.checkpoint_engine.enable") is False:
        for name in ("device_buffer_size_M", "overlap_broadcast_and_consume"):
            if f"{ASYNC}.checkpoint_engine.{name}" in c.given:
                yield found(WARNING, f"{ASYNC}.checkpoint_engine.{name}", "engine_off")
    if c.get(f"{ASYNC}.use_dynamic_resource_scheduling") is False:
        for key in sorted(k for k in c.given if k.startswith(f"{ASYNC}.dynamic_schedule_")):
            yield found(WARNING, key, "scheduling_off")
    mode = c.get("trainer.v1.trainer_mode")
    for key in sorted(k for k in c.given if k.startswith(("trainer.v1.colocate_async.", "trainer.v1.separate_async."))):
        if not c.v1 or (mode and key.split(".")[2] != mode):
            yield found(WARNING, key, "other_trainer_mode", v1=c.get("trainer.use_v1"), mode=mode,
                        wanted=key.split(".")[2])


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
        stops = c.get(f"{ACTOR}.use_dynamic_bsz") is False and c.validates
        yield found(ERROR if stops else WARNING, f"{ACTOR}.ppo_mini_batch_size", "mini_batch_above_batch", mini=mini,
                    train=train)
    if not world or not together:
        return
    devices = world[0] * world[1]
    if devices % together:
        yield found(ERROR, "trainer.n_gpus_per_node", "model_copies", devices=devices, together=together)
        return
    ranks = devices // together
    if mini and n and (mini * n) % ranks:
        yield found(ERROR if mini * n < ranks else WARNING, f"{ACTOR}.ppo_mini_batch_size", "rows_per_rank", mini=mini,
                    n=n, rows=mini * n, ranks=ranks)


def replicas(c: Config) -> Iterator[Found]:
    """Accelerators of one inference replica against those that rollout has: world_size // rollout_world_size."""
    if c.get(f"{ROLLOUT}.name") not in ("vllm", "sglang"):
        return
    names = [name for name in ("tensor_model", "data", "pipeline_model")
             if (c.number(f"{ROLLOUT}.{name}_parallel_size") or 1) > 1]
    if not all(c.is_known(f"{ROLLOUT}.{name}_parallel_size") for name in ("tensor_model", "data", "pipeline_model")):
        return
    size = 1
    for name in names:
        size *= c.number(f"{ROLLOUT}.{name}_parallel_size")
    separate = c.v1 and c.get("trainer.v1.trainer_mode") == "separate_async"
    place = ROLLOUT if separate else "rollout" if c.fully_async or c.one_step_off else "trainer"
    world = c.numbers(f"{place}.nnodes", f"{place}.n_gpus_per_node")
    if not world or world[0] * world[1] < 1 or c.get(f"{ROLLOUT}.disaggregation.enabled"):
        return
    devices = world[0] * world[1]
    values = {"size": size, "devices": devices, "source": f"{place}.nnodes x n_gpus_per_node",
              "parts": " x ".join(f"{name}_parallel_size={c.number(f'{ROLLOUT}.{name}_parallel_size')}"
                                  for name in names)}
    if size > devices:
        yield found(ERROR, f"{ROLLOUT}.tensor_model_parallel_size", "replica_above_devices", **values)
    elif devices % size:
        yield found(WARNING, f"{ROLLOUT}.tensor_model_parallel_size", "replica_leaves_devices", rest=devices % size,
                    **values)


def lengths(c: Config) -> Iterator[Found]:
    """Response lengths against what vLLM and the trainer can take at once."""
    share = c.number(f"{ROLLOUT}.gpu_memory_utilization")
    if c.get(f"{ROLLOUT}.name") == "vllm" and share is not None and not 0 < share <= 1:
        yield found(ERROR, f"{ROLLOUT}.gpu_memory_utilization", "memory_share", found=share)
    sizes = c.numbers("data.max_prompt_length", "data.max_response_length")
    if not sizes:
        return
    longest = sum(sizes)
    parts = {"prompt": sizes[0], "response": sizes[1], "longest": longest}
    batched = c.number(f"{ROLLOUT}.max_num_batched_tokens")
    model = c.number(f"{ROLLOUT}.max_model_len")
    if c.get(f"{ROLLOUT}.name") == "vllm" and model and model < longest:
        yield found(WARNING, f"{ROLLOUT}.max_model_len", "short_model_length", model=model, **parts)
    if c.get(f"{ROLLOUT}.name") == "vllm" and batched and batched < longest \
            and c.get(f"{ROLLOUT}.enable_chunked_prefill") is False:
        yield found(WARNING, f"{ROLLOUT}.max_num_batched_tokens", "short_batched_tokens", batched=batched, **parts)
    ranks, limit = sequence_parallel(c), c.number(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if c.get(f"{ACTOR}.use_dynamic_bsz") and limit and ranks and limit * ranks < longest:
        yield found(WARNING, f"{ACTOR}.ppo_max_token_len_per_gpu", "short_micro_batch", limit=limit, ranks=ranks,
                    longest=longest, least=-(-longest // ranks))


def losses(c: Config) -> Iterator[Found]:
    """Log-probs that the chosen loss reads, and groups that have no advantage."""
    correction = c.get("algorithm.rollout_correction") or {}
    wanting = [name for name in ("rollout_is", "rollout_rs") if correction.get(name) not in (None, "null", "None")]
    mode = c.get(f"{ACTOR}.policy_loss.loss_mode")
    if mode == "bypass_mode" or correction.get("bypass_mode") is True and not c.fully_async:
        wanting.append("bypass_mode")
    if wanting and c.get(f"{ROLLOUT}.calculate_log_probs") is False:
        stops = "bypass_mode" in wanting
        yield found(ERROR if stops else WARNING, f"{ROLLOUT}.calculate_log_probs",
                    "needs_log_probs" if stops else "skips_correction", reader=wanting[-1])
    if c.get(f"{ASYNC}.compute_prox_log_prob") and c.get(f"{ASYNC}.use_rollout_log_probs") is False:
        yield found(WARNING, f"{ASYNC}.compute_prox_log_prob", "log_probs_unread")
    n = c.number(f"{ROLLOUT}.n")
    if c.get("algorithm.adv_estimator") == "grpo" and n == 1 and not c.get("distillation.enabled"):
        yield found(WARNING, f"{ROLLOUT}.n", "group_of_one")
    if c.number(f"{ROLLOUT}.temperature") == 0 and n and n > 1:
        yield found(WARNING, f"{ROLLOUT}.temperature", "greedy_group", n=n)
    same = c.get(f"{ACTOR}.strategy"), c.get("critic.strategy")
    if c.fully_async and c.version.startswith("0.7.0") and None not in same and same[0] != same[1]:
        yield found(ERROR, "critic.strategy", "critic_strategy", critic=same[1], actor=same[0])


RATIO_LOSSES = ("vanilla", "gspo")  # they clip by the ratio alone; for cispo and clip_cov wide bounds are meant
LEAST_LOW, LEAST_HIGH, MOST_HIGH = 0.5, 1.0, 2.0  # 0.8 and 1.2 are bounds, 0.2 and 0.28 distances from 1


def clipping(c: Config) -> Iterator[Found]:
    """Clip ratios written as bounds of the ratio where verl wants distances from 1."""
    low = c.number(f"{ACTOR}.clip_ratio_low")
    high = c.number(f"{ACTOR}.clip_ratio_high")
    if None in (low, high) or c.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla") not in RATIO_LOSSES:
        return
    as_low, as_high = LEAST_LOW <= low < 1, LEAST_HIGH <= high < MOST_HIGH
    for key, wrong in (("clip_ratio_low", as_low), ("clip_ratio_high", as_high and not as_low)):
        if wrong and f"{ACTOR}.{key}" in c.given:
            yield found(WARNING, f"{ACTOR}.{key}", "clip_as_factor", lower=1 - low, upper=1 + high, low=low, high=high,
                        meant_low=1 - low if as_low else low, meant_high=high - 1 if as_high else high)


def resuming(c: Config) -> Iterator[Found]:
    """_load_checkpoint of verl's trainers: assertions on the path, which is read in one mode only."""
    mode, key = c.get("trainer.resume_mode"), "trainer.resume_from_path"
    path = c.get(key)
    if mode == "resume_path" and c.is_known(key) and not isinstance(path, str):
        yield found(ERROR, "trainer.resume_mode", "resume_without_path")
    elif mode == "resume_path" and path and "global_step_" not in path:
        yield found(ERROR, key, "resume_without_step", path=path)
    elif mode in ("auto", "disable") and key in c.given and path:
        yield found(WARNING, key, "resume_unread", mode=mode)


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
                yield found(ERROR, f"{key}.use_flash_attn", "flash_attention", key=f"{key}.use_flash_attn")
    # one_step_off_policy of that release makes its group with vllm-ascend's pyhccl, without Ray
    if c.version.startswith("0.7.0") and c.fully_async and HCCL_PATCH not in c.patches:
        yield found(NOTE, "trainer.device", "hccl_group")


def overlay_main(c: Config) -> Iterator[Found]:
    """Mains in which the overlay can confirm its hooks."""
    if c.get(f"{ROLLOUT}.segment") is None and c.get(f"{ACTOR}.policy_loss.loss_mode") not in ("pois", "sais"):
        return
    if not c.fully_async and not c.v1:
        yield found(ERROR, f"{ROLLOUT}.segment", "overlay_main", module=c.module)


RAY_SLOTS, CONTROL_SLOTS = 1000, 16  # RolloutReplica.max_concurrency: calls that a vLLM server runs at once
DEFAULT_CONCURRENT = 16  # prompts a replica, where async_training.concurrent_samples_per_replica is not set


def server_slots(c: Config) -> Iterator[Found]:
    """A response holds a slot of its server's Ray actor until it is whole; control calls need one as well."""
    if c.get(f"{ROLLOUT}.segment") and not c.version.startswith("0.7"):
        return  # started with the overlay, whose hook server-slots raises the limit from verl 0.9 on
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
        yield found(WARNING, key, "server_slots", waiting=waiting, most=most)


RULES = (fully_async_contract, separate_async_contract, syncs, batches, replicas, lengths,
         losses, clipping, resuming, npu, server_slots, overlay_main)


def check(config: Config) -> list[Found]:
    return [finding for rule in RULES for finding in rule(config)]
