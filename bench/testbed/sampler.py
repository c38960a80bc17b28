"""Batched sampling from the testbed's model with a key-value cache, on the device the model is on."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_tokens: int,
    generator: torch.Generator,
    pad: int,
    temperature: float = 1.0,
    batch: int = 500,
    log_probs: list[list[float]] | None = None,
) -> list[list[int]]:
    """One response per prompt (token ids, with the end token if it came), in the order of the prompts.

    `log_probs`, if given, gets the log-probs of the sampled tokens (nats), one list per response, appended.
    Prompts of unlike lengths are padded on the left. Finished rows leave the batch, so a few long ones stay cheap.
    """
    responses = []
    for start in range(0, len(prompts), batch):
        responses += _sample_batch(model, prompts[start : start + batch], max_tokens, generator, pad, temperature,
                                   log_probs)
    return responses


def _sample_batch(model, prompts, max_tokens, generator, pad, temperature, log_probs) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    padded = bool((mask == 0).any())
    rows = torch.arange(len(prompts), device=model.device)  # which prompt each row of the shrinking batch belongs to
    responses: list[list[int]] = [[] for _ in prompts]
    values: list[list[float]] = [[] for _ in prompts]
    eos = model.generation_config.eos_token_id
    cache = DynamicCache(config=model.config)
    for _ in range(max_tokens):
        out = model(
            input_ids=ids,
            attention_mask=mask if padded else None,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        probs = torch.softmax(out.logits[:, -1].float() / temperature, dim=-1)
        token = torch.multinomial(probs, 1, generator=generator)
        for row, value in zip(rows.tolist(), token[:, 0].tolist(), strict=True):
            responses[row].append(value)
        if log_probs is not None:
            for row, value in zip(rows.tolist(), probs.gather(1, token)[:, 0].log().tolist(), strict=True):
                values[row].append(value)
        alive = token[:, 0] != eos
        if not alive.any():
            break
        if not alive.all():
            rows, token, mask, position = rows[alive], token[alive], mask[alive], position[alive]
            cache.batch_select_indices(alive.nonzero()[:, 0])
        ids = token
        position = position[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    if log_probs is not None:
        log_probs += values
    return responses
