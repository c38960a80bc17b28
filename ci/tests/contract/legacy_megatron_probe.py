"""Child of test_patch_segment_keys_through_legacy_actors: one update by v0.7.0's Megatron actor, without Megatron.

The actor's own make_minibatch_iterator, update_policy and forward_backward_batch run; the pipeline is a loop, and the
model a table of logits. Prints what a registered loss was called with, and the metrics of pois with DMMPTs.
"""

import json
import os
import sys
from types import SimpleNamespace

import release_0_7_0

release_0_7_0.importable()
release_0_7_0.without_megatron()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import verl.trainer.ppo.core_algos as core_algos  # noqa: E402
import verl.workers.actor.megatron_actor as module  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.workers.config import McoreActorConfig  # noqa: E402
from verl.workers.config.actor import PolicyLossConfig  # noqa: E402

ROWS, PROMPT, RESPONSE, VOCABULARY = 4, 3, 5, 17
DRIFT = 0.25  # nats that the stored log-probs lie above the current ones
SEEN = []
TABLE = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)))


def probe(old_log_prob, log_prob, advantages, response_mask, micro_batch=None, entropy=None, **_others):
    keys = () if micro_batch is None else sorted(micro_batch.keys())
    SEEN.append({"keys": list(keys), "entropy": None if entropy is None else list(entropy.shape)})
    return -(advantages * log_prob * response_mask).mean(), {}


probe.batch_keys = ("token_level_scores", "rm_scores", "acc", "absent")


def forward(model, input_ids, logits_processor, logits_processor_args, **_others):
    return logits_processor(TABLE[input_ids].clone(), **logits_processor_args)


def log_probs_of(logits, labels):
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


def entropy_of(logits):
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.entropy()


def pipeline(forward_step_func, data_iterator, model, num_microbatches, **_others):
    results = []
    for _ in range(num_microbatches):
        output, loss_function = forward_step_func(data_iterator, model)
        loss, result = loss_function(output)
        loss.backward()
        results.append(result)
    return results


class Never:
    """Router replay is off."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: False


def stand_ins():
    module.mpu = SimpleNamespace(
        get_pipeline_model_parallel_last_rank=lambda: 0, get_pipeline_model_parallel_group=lambda: None,
        get_pipeline_model_parallel_world_size=lambda: 1, get_virtual_pipeline_model_parallel_world_size=lambda: None)
    module.broadcast_dict_tensor = lambda *args, **kwargs: None
    module.get_forward_backward_func = lambda: pipeline
    module.make_batch_generator = lambda micro_batches, vpp_size: iter(micro_batches)
    module.unwrap_model = lambda model: model
    module.RouterReplayHelper = Never()
    module.vocab_parallel_log_probs_from_logits, module.vocab_parallel_entropy = log_probs_of, entropy_of
    module.get_device_id = lambda: "cpu"
    module.get_torch_device = lambda: SimpleNamespace(empty_cache=lambda: None)
    sys.modules["verl.models.mcore"] = SimpleNamespace(get_mcore_forward_fn=lambda config: forward,
                                                       get_mcore_forward_fused_fn=None)


def actor(loss_mode):
    trainer = object.__new__(module.MegatronPPOActor)
    trainer.config = McoreActorConfig(
        strategy="megatron", ppo_mini_batch_size=ROWS, ppo_micro_batch_size_per_gpu=2, rollout_n=2,
        calculate_entropy=True, policy_loss=PolicyLossConfig(loss_mode=loss_mode))
    trainer.actor_module = [SimpleNamespace(zero_grad_buffer=lambda: None)]
    trainer.actor_optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: (True, 0.0, 0))
    trainer.enable_routing_replay = trainer.use_fused_kernels = trainer.use_torch_profiler = False
    trainer.hf_config = trainer.tf_config = trainer.prof = None
    return trainer


def batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=generator)
    scores = torch.zeros(ROWS, RESPONSE)
    scores[:2, -1] = 1.0
    current = log_probs_of(TABLE.detach()[ids[:, PROMPT - 1:-1]], ids[:, PROMPT:])
    tensors = {"responses": ids[:, PROMPT:], "response_mask": torch.ones(ROWS, RESPONSE, dtype=torch.long),
               "input_ids": ids, "attention_mask": torch.ones_like(ids),
               "position_ids": torch.arange(PROMPT + RESPONSE).repeat(ROWS, 1),
               "advantages": torch.tensor([1.0, -1.0, 0.5, 2.0])[:, None].expand(ROWS, RESPONSE),
               "old_log_probs": current + DRIFT, "rollout_log_probs": current + DRIFT,
               "token_level_scores": scores, "rm_scores": scores}
    return DataProto.from_dict(tensors, {"acc": np.array([False, False, True, False])}, meta_info={"temperature": 1.0})


def update(loss_mode):
    SEEN.clear()
    TABLE.grad = None
    trainer = actor(loss_mode)
    metrics = trainer.update_policy(trainer.make_minibatch_iterator(batch()))
    return {"seen": list(SEEN), "metrics": {k: np.atleast_1d(v).tolist() for k, v in metrics.items()},
            "gradient_norm": TABLE.grad.double().norm().item()}


def main():
    stand_ins()
    core_algos.register_policy_loss("probe")(probe)
    os.environ["ESGRPO_SEGMENT"] = json.dumps({"enable": True, "dmmpt": {"enable": True, "tau": 0.0, "sigma": 100.0}})
    answers = {}
    for loss_mode in ("probe", "vanilla", "pois"):
        try:
            answers[loss_mode] = update(loss_mode)
        except Exception as error:
            answers[loss_mode] = {"error": f"{type(error).__name__}: {error}"}
            if os.environ.get("PROBE_TRACEBACK"):
                raise
    print(json.dumps(answers))


main()
