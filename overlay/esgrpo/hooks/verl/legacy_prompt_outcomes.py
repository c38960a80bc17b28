"""Groups of the legacy synchronous trainer reach the prompt history once they have their rewards."""

from __future__ import annotations

import functools

from esgrpo.engine import Hook, Release

_TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"

HOOK = Hook(
    slug="legacy-prompt-outcomes",
    target=f"{_TRAINER}._update_actor",
    process=("legacy-trainer",),
    kind="wrap",
    why="the first method of fit() that sees a batch with prompts, responses and rewards",
    releases=(Release("verl", ">=0.9,<0.10", {"0.9.1": "04009986c8a40b03"}),),
    remove_when="verl drops the legacy trainer",
    features=("history",),
    relies_on=(f"{_TRAINER}.fit", "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess"),
    without=(("==0.7.0", "only the recipe fully_async_policy is supported, which submits prompts one by one"),),
)


def build(original):
    @functools.wraps(original)
    def _update_actor(self, *args, **kwargs):
        import inspect

        from esgrpo.hooks.verl.legacy_prompt_outcomes import observe_batch

        batch = inspect.signature(original).bind(self, *args, **kwargs).arguments["batch"]
        if getattr(self, "esgrpo_forecasts", False):
            observe_batch(self, batch, self.global_steps)
        return original(self, *args, **kwargs)

    return _update_actor


def observe_batch(owner, batch, version) -> None:
    """Every group of a rewarded batch, by uid. Rows of padding do not occur: verl pads after this."""
    from esgrpo.hooks.verl import prompt_rows

    columns, tensors = batch.non_tensor_batch, batch.batch
    scores = tensors["token_level_scores"].sum(dim=-1).tolist()
    width = tensors["responses"].shape[-1]
    tokens = tensors["attention_mask"][:, -width:].sum(dim=-1).tolist()
    acc, summaries = columns.get("acc"), columns.get("esgrpo")
    groups: dict = {}
    for row, uid in enumerate(columns["uid"]):
        groups.setdefault(uid, []).append(row)
    for members in groups.values():
        found = [{"tokens": int(tokens[row]), "score": scores[row], "acc": None if acc is None else acc[row],
                  "summary": None if summaries is None else summaries[row]} for row in members]
        prompt_rows.observe(owner, columns["raw_prompt"][members[0]], found, version)
