"""Child of test_patch_segment_keys_through_legacy_actors: one update of a tiny model by v0.7.0's FSDP actor, on a CPU.

python legacy_actor_probe.py CASE... prints one JSON object, case -> what was seen, or {"error": ...}.
"""

import hashlib
import json
import os
import sys
import tempfile

import release_0_7_0

release_0_7_0.importable()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import verl.trainer.ppo.core_algos as core_algos  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.workers.actor.dp_actor import DataParallelPPOActor  # noqa: E402
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig  # noqa: E402
from verl.workers.config.actor import PolicyLossConfig  # noqa: E402

ROWS, PROMPT, RESPONSE, VOCABULARY = 4, 3, 5, 17
DRIFT = 0.25  # nats that the stored log-probs lie above the current ones
SEEN = []


def probe(old_log_prob, log_prob, advantages, response_mask, micro_batch=None, entropy=None, **_others):
    keys = () if micro_batch is None else sorted(micro_batch.keys())
    SEEN.append({"keys": list(keys), "entropy": entropy is not None,
                 "old_is_detached_current": bool(torch.equal(old_log_prob, log_prob.detach()))})
    return -(advantages * log_prob * response_mask).mean(), {}


probe.batch_keys = ("token_level_scores", "rm_scores", "acc", "absent")


def actor(loss_mode, micro=2, use_rollout_log_probs=True, **values):
    torch.manual_seed(7)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager"))
    config = FSDPActorConfig(
        strategy="fsdp", ppo_mini_batch_size=ROWS, ppo_micro_batch_size_per_gpu=micro, use_torch_compile=False,
        rollout_n=2, policy_loss=PolicyLossConfig(loss_mode=loss_mode), optim=FSDPOptimizerConfig(lr=0.1),
        fsdp_config=FSDPEngineConfig(dtype="float32"), use_rollout_log_probs=use_rollout_log_probs, **values)
    return DataParallelPPOActor(config, model, torch.optim.SGD(model.parameters(), lr=0.1))


def batch(trainer, masked=()):
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=rng)
    mask = torch.ones(ROWS, RESPONSE, dtype=torch.long)
    mask[list(masked)] = 0
    scores = torch.zeros(ROWS, RESPONSE)
    scores[:2, -1] = 1.0  # the first two rows are correct by their score
    tensors = {"responses": ids[:, PROMPT:], "response_mask": mask, "input_ids": ids,
               "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(PROMPT + RESPONSE).repeat(ROWS, 1),
               "advantages": torch.tensor([1.0, -1.0, 0.5, 2.0])[:, None] * mask,
               "token_level_scores": scores, "rm_scores": scores}
    data = DataProto.from_dict(tensors, {"acc": np.array([False, False, True, False])},
                               meta_info={"temperature": 1.0, "micro_batch_size": ROWS, "use_dynamic_bsz": False})
    current, _ = trainer.compute_log_prob(data)
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"] = current + DRIFT
    return data


def update(loss_mode, masked=(), segment=None, **values):
    os.environ["ESGRPO_SEGMENT"] = json.dumps(segment or {})
    SEEN.clear()
    trainer = actor(loss_mode, **values)
    metrics = trainer.update_policy(batch(trainer, masked))
    weights = b"".join(p.detach().numpy().tobytes() for p in trainer.actor_module.parameters())
    return {"seen": list(SEEN), "metrics": {k: np.atleast_1d(v).tolist() for k, v in metrics.items()},
            "finite": all(bool(torch.isfinite(p).all()) for p in trainer.actor_module.parameters()),
            "weights": hashlib.sha256(weights).hexdigest()}


def reinforce(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """-A log p: has the gradient that a ratio of exactly 1 has."""
    return core_algos.agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {}


DMMPT = {"enable": True, "dmmpt": {"enable": True, "tau": 0.0, "sigma": 100.0}}
CASES = {
    "probe": lambda: update("probe", calculate_entropy=True),
    "vanilla": lambda: update("vanilla"),
    "vanilla-one-masked-row": lambda: update("vanilla", masked=(1,)),
    "masked-micro-batch": lambda: update("vanilla", masked=(1,), micro=1),
    "reinforce": lambda: update("reinforce"),
    "pois": lambda: update("pois"),
    "pois-on-policy-shortcut": lambda: update("pois", use_rollout_log_probs=False),
    "version-on-policy-shortcut": lambda: update("pois", segment={"enable": True, "pois": {"anchor": "version"}},
                                                 use_rollout_log_probs=False),
    "sais-on-policy-shortcut": lambda: update("sais", use_rollout_log_probs=False),
    "pois-masked-micro-batch": lambda: update("pois", masked=(1,), micro=1),
    "dmmpt": lambda: update("pois", segment=DMMPT, calculate_entropy=True),
}


def main():
    core_algos.register_policy_loss("probe")(probe)
    core_algos.register_policy_loss("reinforce")(reinforce)
    torch.set_num_threads(1)
    answers = {}
    with tempfile.TemporaryDirectory() as directory:
        torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(directory + "/s", 1), rank=0,
                                             world_size=1)
        for name in sys.argv[1:]:
            try:
                answers[name] = CASES[name]()
            except Exception as error:
                answers[name] = {"error": f"{type(error).__name__}: {error}"}
        torch.distributed.destroy_process_group()
    engine = sys.modules.get("esgrpo.engine")
    if engine:
        answers["row"] = next(r for r in engine.states("actor-worker") if r["slug"] == "register-policy-losses")
    print(json.dumps(answers))


main()
