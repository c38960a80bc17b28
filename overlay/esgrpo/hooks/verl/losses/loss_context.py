"""Hand the current micro-batch to the registered policy losses.

A registered loss gets five tensors. POIS, SAIS and DMMPTs also need the rollout log-probs, the entropy and the
correctness of each row. All of them are already where `ppo_loss` runs: the model output has the entropy, and the
micro-batch carries every tensor and non-tensor column of the trainer's batch (`rollout_log_probs`,
`token_level_scores`, `rm_scores`, `acc`), because `_update_actor` converts the whole batch. So the trainer needs no
change; one wrap around `ppo_loss` makes the micro-batch visible for the duration of the call.
"""

from __future__ import annotations

import contextlib
import contextvars
from dataclasses import dataclass

from esgrpo.engine import Hook

HOOK = Hook(
    slug="policy-loss-context",
    target="verl.workers.utils.losses:ppo_loss",
    process=("actor-worker",),
    kind="wrap",
    why="a registered policy loss sees neither entropy, nor rollout log-probs, nor which samples are correct",
    remove_when="verl passes model_output and the micro-batch to registered policy losses",
    features=("pois", "sais", "dmmpt"),
    # the way of the columns from the trainer to the loss, and the temperature and layout of the entropy
    relies_on=(
        "verl.trainer.ppo.ray_trainer:RayPPOTrainer._update_actor",
        "verl.protocol:DataProto.to_tensordict",
        "verl.workers.utils.padding:no_padding_2_padding",
        "verl.utils.tensordict_utils:get",
    ),
    # both modules bind the name at import
    rebinds=("verl.workers.engine_workers:ppo_loss", "verl.trainer.distillation.losses:ppo_loss"),
    without=(("==0.7.0", "the legacy actors, patched, hand the micro-batch to the loss"),),
)

_CURRENT: contextvars.ContextVar = contextvars.ContextVar("esgrpo_micro_batch", default=None)


@dataclass(frozen=True)
class MicroBatch:
    """What `ppo_loss` was called with. Columns are translated on demand: an unused one costs nothing."""

    model_output: dict
    data: object  # tensordict.TensorDict

    def column(self, *names: str):
        """The first of the named tensor columns as a padded [B, T] tensor, or None when the batch has none of them."""
        for name in names:
            if name in self.data:
                return self.data.select(name).to_padded_tensor()[name]
        return None

    def entropy(self):
        """Full-vocabulary entropy [B, T] at the training temperature, aligned with the response tokens, or None."""
        from verl.workers.utils.padding import no_padding_2_padding

        entropy = self.model_output.get("entropy")
        return None if entropy is None else no_padding_2_padding(entropy, self.data).detach()

    def scores(self):
        """Row scores [B] before any KL penalty, or None."""
        scores = self.column("token_level_scores", "rm_scores")
        return None if scores is None else scores.sum(dim=-1)

    def acc(self) -> list | None:
        """The reward function's `acc` of each row, or None when it reports none. verl's v1 trainers have no column of
        it: there it is where the reward loop left it."""
        values = self._objects("acc")
        if values is None:
            extra = self._objects("extra_fields") or []
            values = [((fields or {}).get("reward_extra_info") or {}).get("acc") for fields in extra]
        return values if any(value is not None for value in values) else None

    def _objects(self, name: str) -> list | None:
        from verl.utils import tensordict_utils

        value = tensordict_utils.get(self.data, name)
        if value is None:
            return None
        one_for_each = isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) > 0
        # tensordict may collapse a column of equal values into one
        return list(value) if one_for_each else [value] * len(self.data)


class LegacyMicroBatch(MicroBatch):
    """The same, handed over by a patched legacy actor: `data` maps names to padded tensors [B, T] and to columns."""

    def column(self, *names: str):
        return next((self.data[name] for name in names if name in self.data.keys()), None)

    def entropy(self):
        entropy = self.model_output.get("entropy")
        return None if entropy is None else entropy.detach()

    def acc(self) -> list | None:
        value = self.column("acc")
        return None if value is None else value.tolist()


@contextlib.contextmanager
def handed_over(data, entropy):
    """Make a legacy actor's micro-batch the current one."""
    token = _CURRENT.set(LegacyMicroBatch({"entropy": entropy}, data))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> MicroBatch | None:
    """The micro-batch of the running loss; None outside of `ppo_loss` when no actor handed one over."""
    return _CURRENT.get()


def around(call):
    token = _CURRENT.set(MicroBatch(call.arguments["model_output"], call.arguments["data"]))
    try:
        return call()
    finally:
        _CURRENT.reset(token)
